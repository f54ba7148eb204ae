"""What to compress when free slots run low: the coldest long stretch of exact KV."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from grkv_sglang.cache.span import SpanNode, path_facts
from grkv_sglang.cache.tree import SpanTree
from grkv_sglang.policy.boundaries import MessageMarkers
from grkv_sglang.policy.jobs import natural_end


@dataclass(frozen=True)
class ColdStretch:
    """Exact KV behind the last span of a path that nobody uses."""

    token_ids: array[int]
    """The path's tokens up to the stretch's end."""
    extra_key: str | None
    cache_salt: str | None
    shared: bool
    """Prompts part at its end."""
    path_tokens: array[int]
    """The whole path's, beyond the stretch's end."""


def cold_stretches(tree: SpanTree, min_tokens: int, markers: MessageMarkers | None) -> Iterator[ColdStretch]:
    """Stretches of at least `min_tokens`, the one to be evicted first coming first.

    A stretch ends where prompts part, if one of them has enough in common with the others; else where the
    path's last user message starts, or a margin before its end.
    """
    leaves = [n for n in tree.evictable_leaves if not isinstance(n, SpanNode) and not tree.is_twin(n)]
    for leaf in sorted(leaves, key=tree.eviction_strategy.get_priority):
        facts = path_facts(leaf)
        if facts.logical_tokens - facts.last_span_end < min_tokens or not tree.in_reach(leaf):
            continue
        node, depth = leaf, facts.logical_tokens
        shared = False
        while True:
            above = node.parent
            start = depth - len(node.key)
            if above.parent is None or isinstance(above, SpanNode) or len(above.children) < 2:
                break
            if start - facts.last_span_end < min_tokens:
                break
            node, depth, shared = above, start, True
        top = node
        while top.parent.parent is not None and not isinstance(top.parent, SpanNode):
            top = top.parent
        if top.lock_ref > 0:  # in use: compressing it would free nothing
            continue
        tokens = tree.path_tokens(leaf)  # and with them those of `node`, which lies on its path
        end = depth if shared else natural_end(tokens, depth, markers)
        end = end // tree.page_size * tree.page_size
        if end - facts.last_span_end < min_tokens:
            continue
        yield ColdStretch(tokens[:end], leaf.key.extra_key, leaf.key.cache_salt, shared, tokens)
