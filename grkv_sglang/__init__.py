"""SGLang plugin that compresses long prefixes once (GRKV) and serves later requests from the radix tree."""

__version__ = "0.1.0"
