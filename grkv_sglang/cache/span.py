"""A span: tokens ``[start, end)`` of one path, compressed as a unit, a tree node of its own."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode
from torch import Tensor

from grkv_sglang.attention.ragged import RaggedRegion
from grkv_sglang.attention.rows import prefix_row


@dataclass(frozen=True)
class SpanOrigin:
    """How a span was made; fixed for its life."""

    profile: str
    quality: float
    """1 minus the relative attention-output error after regression, on held-out queries; in [0, 1]. Where
    spans were merged, times the worst of theirs: an estimate of the loss against exact KV."""
    error_before: float
    """Relative attention-output error of the selection alone, on the same queries."""
    error_after: float
    forced: bool = False
    reason: str = "explicit"
    """What made it: a trigger's name."""
    generation: int = 0
    """How often its oldest KV was compressed again: 0 when made from exact KV alone."""
    shared: bool = True
    """Prompts part at its end, or a request marked it: never merged into a longer span."""
    protected: tuple[tuple[int, int], ...] = ()
    """Positions of the prompt that it keeps as they were."""
    probe_s: float = 0.0
    pass_s: float = 0.0
    select_s: float = 0.0
    regress_s: float = 0.0
    copy_s: float = 0.0
    compress_s: float = 0.0


@dataclass(frozen=True)
class SpanKey:
    """Key of a span among its parent's children: no token key of SGLang equals it."""

    span_id: int


@dataclass(frozen=True)
class DetachedKey:
    """Key of a node that is out of reach: deleted, but still read by a running request."""

    node_id: int


_TAIL_TOKENS = 8


class SpanNode(TreeNode):  # type: ignore[misc]
    """Child of the node at which the span starts, beside the exact children.

    ``len(value) == len(key)`` as for every node, so that SGLang's length arithmetic holds: the value is
    laid out like a row, sentinels first (see ``attention/rows.py``). Written once, never changed, never
    split, matched whole or not at all.
    """

    def __init__(
        self,
        parent: TreeNode,
        key: RadixKey,
        slots: Tensor,
        start_tokens: int,
        origin: SpanOrigin,
        priority: int,
        counts: Tensor | None = None,
    ) -> None:
        """`counts` [layers, Hkv] int64 on the host: how many tokens each head keeps, where that differs."""
        super().__init__(priority=priority)
        self.parent = parent
        self.key = key
        self.value = prefix_row(slots.long(), len(key))
        self.num_slots = slots.numel()
        self.counts = counts
        self.start_tokens = start_tokens
        self.origin = origin
        self.hits = 0
        self.replaces: list[SpanNode] = []
        """The spans it took in when it was made, first to last; none in general."""
        self.twin_freed = False
        self.pinned = False
        self.ttl_s: float | None = None
        self.used_at_s = 0.0
        """On the cache's clock, which all tensor-parallel ranks share."""
        self.created_at = time.time()
        self._tail = key.token_ids[len(key) - _TAIL_TOKENS :] if len(key) >= _TAIL_TOKENS else None

    @property
    def end_tokens(self) -> int:
        return self.start_tokens + len(self.key)

    @property
    def budget(self) -> float:
        """Kept slots per token."""
        return self.num_slots / len(self.key)

    @property
    def child_key(self) -> SpanKey:
        return SpanKey(self.id)

    def matches(self, key: RadixKey, offset: int) -> bool:
        """Whether `key` continues with exactly this span's tokens at `offset`, in the same namespace."""
        end = offset + len(self.key)
        if end > len(key) or self.key.extra_key != key.extra_key or self.key.cache_salt != key.cache_salt:
            return False
        # Documents behind one header start alike but seldom end alike: look at the end first.
        if self._tail is not None and key.token_ids[end - _TAIL_TOKENS : end] != self._tail:
            return False
        return bool(self.key.match_at(key, offset) == len(self.key))

    def common_tokens(self, key: RadixKey, offset: int, page_size: int) -> int:
        """How many of this span's first tokens `key` has at `offset` too, in whole pages; 0 in another
        namespace."""
        if self.key.extra_key != key.extra_key or self.key.cache_salt != key.cache_salt:
            return 0
        return int(self.key.match_at(key, offset, page_size))


@dataclass
class PathFacts:
    """What a root-to-node path holds, in tokens and slots."""

    logical_tokens: int = 0
    span_tokens: int = 0
    span_slots: int = 0
    last_span_end: int = 0
    spans: list[SpanNode] = field(default_factory=list)
    """Last to first."""
    ragged: list[tuple[int, int, Tensor]] = field(default_factory=list)
    """Of the spans with budgets per head, last to first: slots from its first one to the path's end, its own
    slots, its counts."""

    @property
    def gap(self) -> int:
        return self.span_tokens - self.span_slots

    @property
    def regions(self) -> tuple[RaggedRegion, ...]:
        """The columns of a row for this path whose slots hold other tokens for each head."""
        return self._regions(self.logical_tokens)

    @property
    def physical_regions(self) -> tuple[RaggedRegion, ...]:
        """The same among the path's slots alone, without a gap in front."""
        return self._regions(self.logical_tokens - self.gap)

    def _regions(self, end: int) -> tuple[RaggedRegion, ...]:
        return tuple(
            RaggedRegion(end - behind, size, counts) for behind, size, counts in reversed(self.ragged)
        )


def path_facts(node: TreeNode) -> PathFacts:
    """Walk from `node` up to the root."""
    facts = PathFacts()
    while node.parent is not None:
        facts.logical_tokens += len(node.key)
        if isinstance(node, SpanNode):
            facts.span_tokens += len(node.key)
            facts.span_slots += node.num_slots
            facts.last_span_end = max(facts.last_span_end, node.end_tokens)
            facts.spans.append(node)
            if node.counts is not None:
                behind = facts.logical_tokens - facts.gap
                facts.ragged.append((behind, node.num_slots, node.counts))
        node = node.parent
    return facts


def slots_of(node: TreeNode) -> int:
    """KV slots a node owns: fewer than its tokens for a span."""
    return node.num_slots if isinstance(node, SpanNode) else len(node.key)
