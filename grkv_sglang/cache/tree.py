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
from array import array
from collections.abc import Iterator, Sequence
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
from grkv_sglang.cache.span import DetachedKey, SpanNode, SpanOrigin, path_facts, slots_of
from grkv_sglang.policy.acceptance import Acceptance

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams


_TWIN, _EXACT, _SPAN, _PINNED = range(4)
"""What eviction takes first."""


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
        # What a span stands for (exact nodes, or older spans it took in): the first to go under pressure.
        self._twins: set[TreeNode] = set()
        # Nodes out of reach that a running request still reads.
        self._detached: set[TreeNode] = set()
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
            start_tokens=span.start_tokens,
            protected=span.origin.protected,
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
        siblings = child.parent.children
        token_key = key.child_key(self.page_size)
        in_reach = siblings.get(token_key)
        upper = super()._split_node(key, child, split_len)
        if child in self._detached:  # stock has just put `upper` in reach
            del siblings[DetachedKey(child.id)], siblings[token_key]
            if in_reach is not None:
                siblings[token_key] = in_reach
            siblings[DetachedKey(upper.id)] = upper
            self._detached.remove(child)
            self._detached.add(upper)
        if child in self._twins:
            self._twins.add(upper)
        return upper

    def node_at(self, node: TreeNode, position: int) -> TreeNode:
        """The node on the path to `node` that ends `position` tokens from the root, made by a split if need
        be."""
        depth = path_facts(node).logical_tokens
        if position > depth:
            raise ValueError(f"expected a position up to {depth}, got {position}")
        while node.parent is not None and depth - len(node.key) >= position:
            depth -= len(node.key)
            node = node.parent
        return (
            node
            if depth == position
            else self._split_node(node.key, node, len(node.key) - (depth - position))
        )

    def branches_above(self, node: TreeNode) -> Iterator[int]:
        """Positions on the path to `node`, in tokens from the root, where other exact prompts go other
        ways."""
        depth = path_facts(node).logical_tokens
        while node.parent is not None:
            depth -= len(node.key)
            node = node.parent
            exact = sum(1 for child in node.children.values() if not isinstance(child, SpanNode))
            starts = sum(1 for child in node.children.values() if isinstance(child, SpanNode))
            if depth and (exact > 1 or starts):
                yield depth

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
        the one place where a row's gap is set, and where its slots hold other tokens for each head."""
        facts = path_facts(req.last_node)
        self.row_gaps.set(req.kv.req_pool_idx, facts.gap, facts.regions)

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
        self,
        parent: TreeNode,
        key: RadixKey,
        slots: Tensor,
        start_tokens: int,
        origin: SpanOrigin,
        replaces: Sequence[SpanNode] = (),
        counts: Tensor | None = None,
    ) -> SpanNode:
        """Hang a finished span under `parent`; the tree takes over `slots` ([c] int64). `replaces` are older
        spans that it took in: they go first under pressure. `counts`: see `SpanNode`."""
        priority = parent.priority if parent.parent else 0
        span = SpanNode(parent, key, slots, start_tokens, origin, priority, counts)
        parent.children[span.child_key] = span
        self._spans_at.setdefault(parent.id, []).append(span)
        self.evictable_size_ += span.num_slots
        self._update_leaf_status(parent)
        self._update_leaf_status(span)
        span.replaces = list(replaces)
        self._twins.update(replaces)
        self._mark_twins(span)
        return span

    def spans(self) -> Iterator[SpanNode]:
        for spans in self._spans_at.values():
            yield from spans

    def exact_twins(self, span: SpanNode) -> list[list[TreeNode]]:
        """The exact nodes that hold the span's tokens, as chains from its start down; a chain ends early
        where the nodes end.

        They hang where the span hangs; behind a span, also behind that span's own twin; behind merged spans,
        only what follows the last of them.
        """
        chains = [self._exact_chain(span.parent, span.key, 0)]
        if isinstance(span.parent, SpanNode):
            chains += [
                self._exact_chain(chain[-1], span.key, 0)
                for chain in self.exact_twins(span.parent)
                if chain and _tokens(chain) == len(span.parent.key)
            ]
        if span.replaces:
            last = span.replaces[-1]
            chains.append(self._exact_chain(last, span.key, last.end_tokens - span.start_tokens))
        return [chain for chain in chains if chain]

    def _exact_chain(self, above: TreeNode, key: RadixKey, offset: int) -> list[TreeNode]:
        """Exact nodes below `above` that hold the tokens of `key` from `offset` on."""
        chain: list[TreeNode] = []
        node = above
        while len(key) - offset >= self.page_size:
            node = node.children.get(key.child_key_at(offset, self.page_size))
            if node is None or len(node.key) > len(key) - offset:
                break
            if node.key.match_at(key, offset, self.page_size) < len(node.key):
                break
            chain.append(node)
            offset += len(node.key)
        return chain

    def _mark_twins(self, span: SpanNode) -> None:
        for chain in self.exact_twins(span):
            self._twins.update(chain)

    def span_over(self, parent: TreeNode, key: RadixKey, acceptance: Acceptance) -> SpanNode | None:
        """The best accepted span that starts at `parent` and stands for exactly `key`."""
        found = [
            span
            for span in self._spans_at.get(parent.id, ())
            if len(span.key) == len(key) and self._accepts(acceptance, span) and span.matches(key, 0)
        ]
        return max(found, key=lambda span: span.origin.quality, default=None)

    def span_ends(self, key: RadixKey, acceptance: Acceptance) -> set[int]:
        """Where accepted spans end along `key`, in tokens from the root."""
        return {end.length for end in self._ends(key, acceptance) if isinstance(end.node, SpanNode)}

    def partings_from_spans(self, key: RadixKey, acceptance: Acceptance) -> set[int]:
        """Where `key` parts from spans that begin like it, in tokens from the root: there, too, prompts go
        other ways, although nothing exact may be left to show it."""
        partings = set()
        for end in self._ends(key, acceptance):
            if end.tokens_into_node:
                continue
            for span in self._spans_at.get(end.node.id, ()):
                common = span.common_tokens(key, end.length, self.page_size)
                if 0 < common < len(span.key):
                    partings.add(end.length + common)
        return partings

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
            self.node_at(node, span.end_tokens)
            self._mark_twins(span)

    def free_exact_twin(self, span: SpanNode) -> bool:
        """Free the full-size KV of a span's tokens.

        What requests left behind it hangs under the span from now on: it was computed on better KV than the
        span's. Returns False while a running request holds some of it: try again later. Nodes that other
        prompts share (a common header) stay.
        """
        freed = [self._free_chain(chain, span) for chain in self.exact_twins(span)]
        ends = [path_facts(chain[-1]).logical_tokens for chain in self.exact_twins(span)]
        span.twin_freed = span.end_tokens not in ends
        return all(freed)

    def _free_chain(self, chain: list[TreeNode], span: SpanNode) -> bool:
        end = chain[-1]
        if path_facts(end).logical_tokens == span.end_tokens:
            if not self.is_idle(end):
                return False
            self._move_children(end, span)
        for node in reversed(chain):
            if node.children:
                break
            if node.lock_ref > 0:
                return False
            self.drop(node)
        return True

    def _move_children(self, node: TreeNode, span: SpanNode) -> None:
        """Hang what lies behind `node` under `span`; what is there already, computed on the span, stays.

        Not behind a span of no slots (a test option): what saw its tokens is not what it would give.
        """
        for key, child in list(node.children.items()):
            if key in span.children or span.num_slots == 0:
                self.drop(child)
                continue
            del node.children[key]
            span.children[key] = child
            child.parent = span
        moved = self._spans_at.pop(node.id, None)
        if moved:
            self._spans_at.setdefault(span.id, []).extend(moved)
        self._update_leaf_status(node)
        self._update_leaf_status(span)

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

    def detach(self, node: TreeNode) -> int:
        """Put `node` and all below it out of reach: dropped now, or when no running request reads it any more
        (`drop_detached`). Returns the slots concerned."""
        slots = sum(slots_of(n) for n in _subtree(node))
        if self.is_idle(node):
            self.drop(node)
            return slots
        if node in self._detached:
            return 0
        del node.parent.children[self._child_key(node)]
        if isinstance(node, SpanNode):
            self._unlist(node)
        node.parent.children[DetachedKey(node.id)] = node
        self._detached.add(node)
        return slots

    def drop_detached(self) -> None:
        """Free what was detached and is no longer read."""
        for node in [n for n in self._detached if self.is_idle(n)]:
            self.drop(node)

    def in_reach(self, node: TreeNode) -> bool:
        """Whether `node` is in the tree and a match can end there."""
        while node.parent is not None:
            if node in self._detached or node.parent.children.get(self._child_key(node)) is not node:
                return False
            node = node.parent
        return node is self.root_node

    def _child_key(self, node: TreeNode) -> Any:
        if node in self._detached:
            return DetachedKey(node.id)
        return node.child_key if isinstance(node, SpanNode) else node.key.child_key(self.page_size)

    def is_twin(self, node: TreeNode) -> bool:
        """Whether a span stands for `node`."""
        return node in self._twins

    def path_tokens(self, node: TreeNode) -> array[int]:
        """The tokens from the root to the end of `node`."""
        parts = []
        while node.parent is not None:
            parts.append(node.key.raw_token_ids())
            node = node.parent
        tokens = array("q")
        for part in reversed(parts):
            tokens.extend(part)
        return tokens

    @property
    def empty_slots(self) -> Tensor:
        """[0] int64 on the pool's device."""
        return self._empty_device_indices

    def is_idle(self, node: TreeNode) -> bool:
        """Whether no running request holds `node` or anything below it."""
        return all(n.lock_ref == 0 for n in _subtree(node))

    # -- sizes in slots ----------------------------------------------------------------------------

    def evict(self, params: EvictParams) -> EvictResult:
        """Stock: leaves by the eviction policy. Here what a span stands for first, then exact leaves, then
        spans, then a compression in flight, then pinned spans, each group by the policy; counts slots.

        Twins and exact leaves make room for `reserve_slots` free slots beyond what was asked for.
        """
        if self.disable:
            return EvictResult()
        started = time.perf_counter()
        wanted = params.num_tokens
        reserve = max(0, self.reserve_slots() - self.token_to_kv_pool_allocator.available_size())
        evicted = self._evict_leaves(wanted + reserve, _EXACT)
        if evicted < wanted:
            evicted += self._evict_leaves(wanted - evicted, _SPAN)
        if evicted < wanted:
            evicted += self.surrender_slots()
            evicted += self._evict_leaves(wanted - evicted, _PINNED)
        self.update_eviction_metrics(evicted, started)
        return EvictResult(num_tokens_evicted=evicted)

    def evict_twins(self, num_slots: int) -> int:
        """Free up to about `num_slots` of what spans stand for; returns how many."""
        return self._evict_leaves(num_slots, _TWIN)

    def _evict_leaves(self, num_slots: int, last_group: int) -> int:
        """Evict leaves of the groups up to `last_group` until `num_slots` are free; returns how many are."""
        heap = [(self._eviction_rank(n), n) for n in self.evictable_leaves]
        heapq.heapify(heap)
        evicted = 0
        while heap and evicted < num_slots:
            (group, _), node = heapq.heappop(heap)
            if group > last_group:
                break
            parent = node.parent
            if isinstance(node, SpanNode):
                self.spans_evicted += 1
            evicted += self.drop(node)
            if not parent.children and parent.lock_ref == 0 and parent is not self.root_node:
                heapq.heappush(heap, (self._eviction_rank(parent), parent))
        return evicted

    def reserve_slots(self) -> int:
        """Slots that eviction leaves free where exact KV can make room for them."""
        return 0

    def surrender_slots(self) -> int:
        """Asked before pinned spans go: give back slots held for other work; returns how many."""
        return 0

    def _eviction_rank(self, node: TreeNode) -> tuple[int, Any]:
        if node in self._twins:
            group = _TWIN
        elif isinstance(node, SpanNode):
            group = _PINNED if node.pinned else _SPAN
        else:
            group = _EXACT
        return group, self.eviction_strategy.get_priority(node)

    def _delete_leaf(self, node: TreeNode) -> None:
        """Stock finds the child by its first tokens; a span is keyed by its id, a detached node likewise."""
        if isinstance(node, SpanNode) or node in self._detached:
            del node.parent.children[self._child_key(node)]
            self._detached.discard(node)
            self.evictable_size_ -= slots_of(node)
            self.evictable_leaves.discard(node)
            self._update_leaf_status(node.parent)
        else:
            super()._delete_leaf(node)
        self._twins.discard(node)
        if isinstance(node, SpanNode):
            self._unlist(node)

    def _unlist(self, span: SpanNode) -> None:
        """Take a span out of the table that matches look into; its twin stands for itself again."""
        siblings = self._spans_at.get(span.parent.id, [])
        if span not in siblings:
            return  # detached before
        for chain in self.exact_twins(span):
            self._twins.difference_update(chain)
        self._twins.difference_update(span.replaces)
        siblings.remove(span)
        for other in siblings:  # of another budget, perhaps for the same tokens
            self._mark_twins(other)
        if not siblings:
            del self._spans_at[span.parent.id]

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


def _tokens(nodes: list[TreeNode]) -> int:
    return sum(len(node.key) for node in nodes)


def _subtree(node: TreeNode) -> list[TreeNode]:
    """`node` and all below it, children before parents."""
    order: list[TreeNode] = []
    stack = [node]
    while stack:
        here = stack.pop()
        order.append(here)
        stack.extend(here.children.values())
    return order[::-1]
