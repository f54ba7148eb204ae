"""The radix backend ``grkv``: exact nodes and compressed spans in one tree, one slot one owner."""
