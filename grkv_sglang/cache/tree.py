"""The radix tree with two kinds of branches. All that depends on SGLang's classic tree is here.

Subclass of SGLang 0.5.23 ``srt/mem_cache/radix_cache.py: RadixCache``. Each override names what the stock
method assumes and what changes. Three rules carry the design:

- A span is a child of the node at which it starts, keyed apart from the exact children. What is computed
  on top of a span hangs under the span; what is computed on exact KV hangs under exact nodes.
- A running request inserts from its own ``req.last_node`` with its suffix only, not from the root: so the
  exact branch holds only KV computed on exact ancestors, a row is never rewritten to other bytes, and a
  request's gap never changes while it runs.
- Sizes count slots, not tokens; the two differ only for spans.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode
from torch import Tensor

from grkv_sglang.attention.rows import RowGaps, physical_slots, prefix_row
from grkv_sglang.cache.span import SpanNode, SpanOrigin, path_facts, slots_of
from grkv_sglang.policy.acceptance import Acceptance

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams


@dataclass(frozen=True)
class _End:
    """A place where a match may end: inside or at the end of `node`, `length` tokens from the root."""

    node: TreeNode
    length: int
    tokens_into_node: int
    """0: the match ends with the node."""
    span_tokens: int
    min_quality: float


class SpanTree(RadixCache):  # type: ignore[misc]
    """Radix cache whose nodes are exact or spans. Knows no policy: who may use a span is asked."""

    def __init__(self, params: CacheInitParams, row_gaps: RowGaps, default_acceptance: Acceptance) -> None:
        self.row_gaps = row_gaps
        self.default_acceptance = default_acceptance
        self.spans_evicted = 0
        self.twin_slots_freed = 0
        super().__init__(params)

    # -- lookup ------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Stock: new empty root. Here the span tables and the gaps of all rows go with it."""
        self._spans_at: dict[int, list[SpanNode]] = {}
        # Exact nodes that a span stands for: the first to go under pressure.
        self._twins: set[TreeNode] = set()
        self.row_gaps.clear()
        super().reset()

    def acceptance_for(self, req: Req | None) -> Acceptance:
        """What `req` may be served from; the server's default for callers without a request."""
        return self.default_acceptance

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Stock: longest exact match. Here the longest match over both branches that `req` accepts.

        Touches and splits only the path that wins, so that an unused exact twin grows old.
        """
        key = params.key.page_aligned(self.page_size)
        if self.disable or len(key) == 0:
            return self._empty_match_result
        end = self.find(key, self.acceptance_for(params.req))
        node = self.land(end)
        return MatchResult(
            device_prefix_len=end.length, last_device_node=node, last_host_node=node, best_match_node=node
        )

    def touch_prefix(self, key: RadixKey) -> None:
        self.match_prefix(MatchPrefixParams(key=key))

    def find(self, key: RadixKey, acceptance: Acceptance) -> _End:
        """Best place to end a match of `key`, without changing anything.

        Longest logical match first; at equal length the exact branch or the span, as the mode says; among
        spans the better quality.
        """
        return max(self._ends(key, acceptance), key=lambda end: _rank(end, acceptance))

    def covered_tokens(self, key: RadixKey, acceptance: Acceptance) -> int:
        """How far accepted spans reach along `key`, in tokens from the root; 0 without any."""
        ends = self._ends(key, acceptance)
        return max((end.length for end in ends if isinstance(end.node, SpanNode)), default=0)

    def _ends(self, key: RadixKey, acceptance: Acceptance) -> Iterator[_End]:
        """Every place where a match of `key` may end: the ends of all nodes it reaches, in both branches."""
        total = len(key)
        stack = [_End(self.root_node, 0, 0, 0, 1.0)]
        while stack:
            here = stack.pop()
            yield here
            if here.tokens_into_node:
                continue
            if total - here.length >= self.page_size:
                child = here.node.children.get(key.child_key_at(here.length, self.page_size))
                if child is not None:
                    matched = child.key.match_at(key, here.length, self.page_size)
                    inside = 0 if matched == len(child.key) else matched
                    if matched:
                        end = here.length + matched
                        stack.append(_End(child, end, inside, here.span_tokens, here.min_quality))
            for span in self._spans_at.get(here.node.id, ()):
                if self._accepts(acceptance, span) and span.matches(key, here.length):
                    tokens = len(span.key)
                    quality = min(here.min_quality, span.origin.quality)
                    stack.append(_End(span, here.length + tokens, 0, here.span_tokens + tokens, quality))

    def land(self, end: _End) -> TreeNode:
        """Make `end` a node boundary (splitting at most one exact node) and mark its path as used."""
        node = end.node
        if end.tokens_into_node:
            node = self._split_node(node.key, node, end.tokens_into_node)
        now = time.monotonic()
        step: TreeNode | None = node
        while step is not None:
            step.last_access_time = now
            step = step.parent
        return node

    def _accepts(self, acceptance: Acceptance, span: SpanNode) -> bool:
        return acceptance.accepts(
            n_tokens=len(span.key),
            n_slots=span.num_slots,
            quality=span.origin.quality,
            forced=span.origin.forced,
            page_size=self.page_size,
        )

    def _split_node(self, key: RadixKey, child: TreeNode, split_len: int) -> TreeNode:
        """Stock: the upper part becomes a new node, `child` keeps the lower end. A twin stays a twin."""
        if isinstance(child, SpanNode):
            raise RuntimeError(
                f"a span is matched whole or not at all; split of span {child.id} at {split_len}"
            )
        upper = super()._split_node(key, child, split_len)
        if child in self._twins:
            self._twins.add(upper)
        return upper

    # -- rows --------------------------------------------------------------------------------------

    def path_device_indices(self, node: TreeNode) -> Tensor:
        """Stock: the slots of the path. Here in row layout: all sentinels first, then the slots."""
        row = super().path_device_indices(node)
        slots = physical_slots(row)
        return row if slots.numel() == row.numel() else prefix_row(slots, row.numel())

    def prefix_device_indices(self, req: Req) -> Tensor:
        """Stock slices the path to ``req.prefix_len``; a row with sentinels must not be sliced."""
        row = self.path_device_indices(req.last_node)
        if row.numel() != req.prefix_len:
            raise RuntimeError(
                f"request {req.rid}: path of {row.numel()} tokens for a prefix of {req.prefix_len}"
            )
        return row

    def maybe_hand_to_session(self, req: Req) -> None:
        """Called by ``allocation.py: alloc_for_extend`` for every request right after its row is written:
        the one place where a row's gap is set."""
        self.row_gaps.set(req.kv.req_pool_idx, path_facts(req.last_node).gap)

    # -- insertion ---------------------------------------------------------------------------------

    def checkpoint(self, req: Req, *, up_to: int) -> None:
        """Stock inserts ``[0, up_to)`` from the root and re-matches. Here only the request's own suffix,
        from the node it is anchored on: an exact request never lands on a span, and what was computed on
        a span stays under it.

        Slots of the row that duplicate exact nodes inserted meanwhile by another request with the same
        anchor are freed, and the row points to the tree's copies.
        """
        if self.disable:
            return
        key = RadixKey(
            req.full_untruncated_fill_ids[:up_to], req.extra_key, cache_salt=req.cache_salt
        ).page_aligned(self.page_size)
        protected = req.kv.cache_protected_len
        if len(key) <= protected:
            return
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        slots = row[protected : len(key)].to(torch.int64, copy=True)
        priority = req.priority or 0
        suffix = key[protected:]
        counted = max(0, req.kv.cache_inserted_len - protected)
        duplicate, node = self._insert_helper(req.last_node, suffix, slots, priority, counted)
        req.kv.cache_inserted_len = max(req.kv.cache_inserted_len, len(key))

        # Stock's split_prompt: a node boundary at the prompt's end, so that eviction can drop the output
        # without the prompt.
        prompt_in_suffix = len(req.origin_input_ids) // self.page_size * self.page_size - protected
        if 0 < prompt_in_suffix < len(suffix):
            self._insert_helper(
                req.last_node, suffix[:prompt_in_suffix], slots[:prompt_in_suffix],
                min(priority + 1, torch.iinfo(torch.int64).max), prompt_in_suffix,
            )  # fmt: skip

        self.token_to_kv_pool_allocator.free_segment(
            row[protected : protected + duplicate], start_pos=protected
        )
        tree_slots = self._slots_between(req.last_node, node)
        self.req_to_token_pool.write((req.kv.req_pool_idx, slice(protected, len(key))), tree_slots)
        req.kv.cache_protected_len = len(key)
        self.unlock(req.lock)
        req.lock = self.lock(node)
        req.last_node = node

    def _slots_between(self, above: TreeNode, node: TreeNode) -> Tensor:
        values = []
        while node is not above:
            values.append(node.value)
            node = node.parent
        return torch.cat(values[::-1])

    # -- spans -------------------------------------------------------------------------------------

    def add_span(
        self, parent: TreeNode, key: RadixKey, slots: Tensor, start_tokens: int, origin: SpanOrigin
    ) -> SpanNode:
        """Hang a finished span under `parent`; the tree takes over `slots` ([c] int64)."""
        span = SpanNode(parent, key, slots, start_tokens, origin, parent.priority if parent.parent else 0)
        parent.children[span.child_key] = span
        self._spans_at.setdefault(parent.id, []).append(span)
        self.evictable_size_ += span.num_slots
        self._update_leaf_status(parent)
        self._update_leaf_status(span)
        self._twins.update(self.exact_twin(span))
        return span

    def spans(self) -> Iterator[SpanNode]:
        for spans in self._spans_at.values():
            yield from spans

    def exact_twin(self, span: SpanNode) -> list[TreeNode]:
        """The exact nodes that hold the span's tokens, from its start down; ends early where they end."""
        chain: list[TreeNode] = []
        node, offset = span.parent, 0
        while len(span.key) - offset >= self.page_size:
            node = node.children.get(span.key.child_key_at(offset, self.page_size))
            if node is None or len(node.key) > len(span.key) - offset:
                break
            if node.key.match_at(span.key, offset, self.page_size) < len(node.key):
                break
            chain.append(node)
            offset += len(node.key)
        return chain

    def mark_twins_of(self, node: TreeNode, key: RadixKey) -> None:
        """Mark what a span stands for on the exact path to `node` (whose tokens are `key`): a request asked
        for the exact KV anew. Makes the span's end a node boundary, so that it can be freed alone."""
        ends = []
        depth = path_facts(node).logical_tokens
        step = node
        while step.parent is not None:
            depth -= len(step.key)
            step = step.parent
            ends += [s for s in self._spans_at.get(step.id, ()) if s.matches(key, depth)]
        for span in ends:
            step, depth = node, path_facts(node).logical_tokens
            while depth - len(step.key) >= span.end_tokens:
                depth -= len(step.key)
                step = step.parent
            if depth > span.end_tokens:
                self._split_node(step.key, step, len(step.key) - (depth - span.end_tokens))
            self._twins.update(self.exact_twin(span))

    def free_exact_twin(self, span: SpanNode) -> bool:
        """Free the full-size KV of a span's tokens, with what unlocked exact requests left behind it.

        Returns False when a running request still holds some of it or another span is built on it: try
        again later. Nodes that other prompts share (a common header) stay.
        """
        chain = self.exact_twin(span)
        above = chain
        if chain and sum(len(n.key) for n in chain) == len(span.key):
            end, above = chain[-1], chain[:-1]
            if any(n.lock_ref > 0 or isinstance(n, SpanNode) for n in _subtree(end)):
                return False
            self.drop(end)
        for node in reversed(above):
            if node.children:
                break
            if node.lock_ref > 0:
                return False
            self.drop(node)
        self._twins.difference_update(chain)
        span.twin_freed = True
        return True

    def drop(self, node: TreeNode) -> int:
        """Delete an unlocked subtree and free its slots; returns how many."""
        freed = 0
        for item in _subtree(node):  # children before parents
            slots = physical_slots(item.value)
            if item in self._twins:
                self.twin_slots_freed += slots.numel()
            self.token_to_kv_pool_allocator.free_segment(slots, start_pos=0)
            freed += slots.numel()
            self._delete_leaf(item)
        return freed

    def is_idle(self, node: TreeNode) -> bool:
        """Whether no running request holds `node` or anything below it."""
        return all(n.lock_ref == 0 for n in _subtree(node))

    # -- sizes in slots ----------------------------------------------------------------------------

    def evict(self, params: EvictParams) -> EvictResult:
        """Stock: leaves by the eviction policy. Here exact twins of spans first, then exact leaves, then
        spans, each group by the policy; counts slots."""
        if self.disable:
            return EvictResult()
        started = time.perf_counter()
        heap = [(self._eviction_rank(n), n) for n in self.evictable_leaves]
        heapq.heapify(heap)
        evicted = 0
        while evicted < params.num_tokens and heap:
            _, node = heapq.heappop(heap)
            parent = node.parent
            if isinstance(node, SpanNode):
                self.spans_evicted += 1
            evicted += self.drop(node)
            if not parent.children and parent.lock_ref == 0:
                heapq.heappush(heap, (self._eviction_rank(parent), parent))
        self.update_eviction_metrics(evicted, started)
        return EvictResult(num_tokens_evicted=evicted)

    def _eviction_rank(self, node: TreeNode) -> tuple[int, Any]:
        group = 2 if isinstance(node, SpanNode) else 0 if node in self._twins else 1
        return group, self.eviction_strategy.get_priority(node)

    def _delete_leaf(self, node: TreeNode) -> None:
        """Stock finds the child by its first tokens; a span is keyed by its id."""
        if not isinstance(node, SpanNode):
            super()._delete_leaf(node)
            self._twins.discard(node)
            return
        self._twins.difference_update(self.exact_twin(node))
        del node.parent.children[node.child_key]
        siblings = self._spans_at[node.parent.id]
        siblings.remove(node)
        for other in siblings:  # of another budget, perhaps for the same tokens
            self._twins.update(self.exact_twin(other))
        if not siblings:
            del self._spans_at[node.parent.id]
        self.evictable_size_ -= node.num_slots
        self.evictable_leaves.discard(node)
        self._update_leaf_status(node.parent)

    def inc_lock_ref(self, node: TreeNode) -> IncLockRefResult:
        """As stock, in slots."""
        if self.disable:
            return IncLockRefResult(delta=0)
        delta = 0
        while node is not self.root_node:
            if node.lock_ref == 0:
                size = slots_of(node)
                self.evictable_size_ -= size
                self.protected_size_ += size
                delta -= size
            node.lock_ref += 1
            self._update_leaf_status(node)
            node = node.parent
        return IncLockRefResult(delta=delta)

    def dec_lock_ref(self, node: TreeNode, params: Any = None) -> DecLockRefResult:
        """As stock, in slots."""
        if self.disable:
            return DecLockRefResult(delta=0)
        delta = 0
        while node is not self.root_node:
            if node.lock_ref == 1:
                size = slots_of(node)
                self.evictable_size_ += size
                self.protected_size_ -= size
                delta += size
            node.lock_ref -= 1
            self._update_leaf_status(node)
            if node.parent is None:
                raise RuntimeError("a request holds a node of a tree that was reset")
            node = node.parent
        return DecLockRefResult(delta=delta)

    def all_values_flatten(self) -> Tensor:
        """As stock, real slots only."""
        values = [physical_slots(n.value) for n in self.nodes()]
        return torch.cat(values) if values else self._empty_device_indices

    def nodes(self) -> Iterator[TreeNode]:
        """All nodes but the root, parents before children."""
        stack = list(self.root_node.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _total_size_helper(self) -> int:
        return sum(slots_of(n) for n in self.nodes())

    def _print_helper(self, node: TreeNode, indent: int) -> None:
        """Stock asserts that children are keyed by their tokens; spans are not."""
        stack = [(node, indent)]
        while stack:
            here, depth = stack.pop()
            kind = f"span {here.num_slots} slots" if isinstance(here, SpanNode) else "exact"
            print(" " * depth, len(here.key), kind, list(here.key.token_ids[:10]), f"r={here.lock_ref}")
            stack.extend((child, depth + 2) for child in here.children.values())


def _rank(end: _End, acceptance: Acceptance) -> tuple[int, int, float]:
    compressed = 1 if end.span_tokens else 0
    preference = compressed if acceptance.mode == "prefer_compressed" else -compressed
    return end.length, preference, end.min_quality


def _subtree(node: TreeNode) -> list[TreeNode]:
    """`node` and all below it, children before parents."""
    order: list[TreeNode] = []
    stack = [node]
    while stack:
        here = stack.pop()
        order.append(here)
        stack.extend(here.children.values())
    return order[::-1]
