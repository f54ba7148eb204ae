"""A radix cache without an engine, and a model of what every KV slot holds.

Pools, allocator, requests and tree are SGLang's own and ours; only the forward pass is replaced, by a
table that says what each slot would contain. Freed slots lose their content, so a later read shows.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, evict_from_tree_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams

from grkv_sglang.attention.rows import RowGaps
from grkv_sglang.cache.compressor import CompressionError, SpanSource
from grkv_sglang.cache.grkv_cache import GrkvRadixCache
from grkv_sglang.cache.ranks import Ranks
from grkv_sglang.cache.span import DetachedKey, SpanNode, SpanOrigin, path_facts
from grkv_sglang.config import GrkvConfig
from grkv_sglang.core import SpanQuality
from grkv_sglang.policy.boundaries import MessageMarkers

Lineage = tuple[int, ...]
"""Ids of the spans that a token was computed on top of."""


class RecordingAllocator(TokenToKVPoolAllocator):  # type: ignore[misc]
    """SGLang's allocator, with a table of what its slots hold."""

    def __init__(self, num_slots: int) -> None:
        self.content: dict[int, Any] = {}
        self.held: set[int] = set()
        super().__init__(num_slots, torch.float32, "cpu", None, False)

    def clear(self) -> None:
        super().clear()
        self.content.clear()
        self.held.clear()

    def alloc(self, need_size: int) -> torch.Tensor | None:
        slots = super().alloc(need_size)
        if slots is not None:
            taken = slots.tolist()
            assert not self.held.intersection(taken), "a slot was handed out twice"
            self.held.update(taken)
        return slots

    def free(self, free_index: torch.Tensor) -> None:
        if self.free_group is None:
            for slot in free_index.tolist():
                assert slot in self.held, f"slot {slot} freed though it is free or the dummy"
                self.held.discard(slot)
                self.content.pop(slot, None)
        super().free(free_index)


class TableWork:
    """A compression in the making: chunks of passes, which write nothing, then its table entries layer by
    layer, of which the last layer counts."""

    def __init__(
        self, compressor: TableCompressor, source: SpanSource, profile: str, new_slots: torch.Tensor
    ) -> None:
        self.compressor, self.source, self.profile, self.new_slots = compressor, source, profile, new_slots
        self.layers = 0
        self.counts = compressor.counts(new_slots.numel()) if profile == "per_head" else None
        self.chunks = deque(range(compressor.num_chunks))
        self.quality = SpanQuality()

    def advance_pass(self) -> None:
        assert self.layers == 0, "a pass after the first layer"
        self.chunks.popleft()
        self.compressor.chunks_done += 1
        self.compressor.check_source(self.source)
        failure, self.compressor.fail_chunk = self.compressor.fail_chunk, None
        self._fail(failure)

    def advance(self, max_layers: int) -> None:
        assert not self.chunks, "a layer before the passes are done"
        assert 1 <= max_layers <= TableCompressor.num_layers - self.layers
        self.compressor.check_source(self.source)
        failure, self.compressor.fail_next = self.compressor.fail_next, None
        self._fail(failure)
        self.layers += max_layers
        self.compressor.write(self.source, self.new_slots, self.counts)

    @staticmethod
    def _fail(reason: str | None) -> None:
        if reason == "exception":
            raise RuntimeError("injected")
        if reason is not None:
            raise CompressionError(reason, "injected")

    def origin(self, quality: SpanQuality) -> SpanOrigin:
        assert self.layers == TableCompressor.num_layers
        return SpanOrigin(self.profile, self.compressor.quality, 0.2, 0.1)


class TableCompressor:
    """Stands in for the model: checks what it is given to compress, writes table entries, can fail."""

    num_layers = 3
    num_kv_heads = 2

    def __init__(self, allocator: RecordingAllocator) -> None:
        self.allocator = allocator
        self.fail_next: str | None = None
        self.fail_probe: str | None = None
        self.fail_chunk: str | None = None
        self.quality = 0.9
        self.packed: dict[int, tuple[Any, int]] = {}
        """Of slots whose heads hold tokens of their own: the span's counts, and which of its slots it is."""
        self.num_chunks = 0
        """Of passes, of the compressions begun from now on."""
        self.calls = self.chunks_done = 0

    def check_profile(self, name: str) -> str:
        return name

    def start(
        self, source: SpanSource, profile: str, new_slots: torch.Tensor, lora_id: str | None = None
    ) -> TableWork:
        self.calls += 1
        self.check_source(source)
        failure, self.fail_probe = self.fail_probe, None
        if failure is not None:
            raise CompressionError(failure, "injected")
        return TableWork(self, source, profile, new_slots)

    def copy(self, source: SpanSource, new_slots: torch.Tensor) -> SpanOrigin:
        self.calls += 1
        self.check_source(source)
        self.write(source, new_slots)
        return SpanOrigin("copy", 1.0, 0.0, 0.0, forced=True)

    def copy_packed(self, source: SpanSource, new_slots: torch.Tensor) -> tuple[SpanOrigin, torch.Tensor]:
        counts = torch.full((self.num_layers, self.num_kv_heads), new_slots.numel())
        origin = self.copy(source, new_slots)
        self.write(source, new_slots, counts)
        return origin, counts

    def counts(self, num_slots: int) -> torch.Tensor:
        """[layers, Hkv]: one head more and the other less, in each layer otherwise."""
        more = torch.arange(self.num_layers).clamp(max=num_slots)
        return torch.stack([num_slots + more, num_slots - more], dim=1)

    def write(self, source: SpanSource, new_slots: torch.Tensor, counts: torch.Tensor | None = None) -> None:
        for i, slot in enumerate(new_slots.tolist()):
            self.packed.pop(slot, None)
            if counts is not None:
                self.packed[slot] = counts.tolist(), i
            self.allocator.content[slot] = (
                "kept", source.start_tokens, source.end_tokens, tuple(source.token_ids), i
            )  # fmt: skip

    def check_source(self, source: SpanSource) -> None:
        """The slots hold what they are said to hold, all the while they are read."""
        assert len(source.token_ids) == source.slots.numel()
        assert len(source.merged_token_ids) == source.exact_start_tokens - source.start_tokens
        before = self.allocator.content[int(source.slots[0])][2][: source.exact_start_tokens]
        assert before[source.start_tokens :] == tuple(source.merged_token_ids)
        for i, slot in enumerate(source.slots.tolist()):
            kind, _, tokens = self.allocator.content[slot]
            assert kind == "computed"
            assert len(tokens) == source.exact_start_tokens + i + 1
            assert tokens[source.exact_start_tokens :] == tuple(source.token_ids[: i + 1])
        for slot in [*source.ancestor_slots.tolist(), *source.merged_slots.tolist()]:
            assert slot in self.allocator.content, "a slot that is read was freed"
        before = source.ancestor_slots.tolist()
        noted: list[tuple[Any, int] | None] = [None] * len(before)
        for region in source.ancestor_regions:
            for i in range(region.num_slots):
                noted[region.first_column + i] = region.counts.tolist(), i
        kinds = [self.allocator.content[slot][0] for slot in before]
        assert noted == [
            self.packed.get(slot) if kind == "kept" else None
            for slot, kind in zip(before, kinds, strict=True)
        ]
        assert not any(
            self.allocator.content[slot][0] == "kept" and slot in self.packed
            for slot in source.merged_slots.tolist()
        ), "a merge takes slots that are no candidates for every head"


class Clock(Ranks):
    """One rank, whose time is set by the test."""

    def __init__(self) -> None:
        super().__init__()
        self.time_s = 100.0

    def now_s(self) -> float:
        return self.time_s


class Harness:
    """Drives the cache as SGLang's scheduler does."""

    def __init__(
        self,
        num_slots: int = 120,
        num_rows: int = 8,
        row_tokens: int = 64,
        markers: MessageMarkers | None = None,
        **settings: Any,
    ) -> None:
        self.pool = ReqToTokenPool(num_rows, row_tokens, "cpu", False)
        self.allocator = RecordingAllocator(num_slots)
        self.compressor = TableCompressor(self.allocator)
        self.gaps = RowGaps(num_rows + 1, "cpu")
        settings = {"min_span_tokens": 4, "budget": 0.34, "triggers": "explicit,reuse", **settings}
        self.config = GrkvConfig(**settings)
        params = CacheInitParams(
            disable=False, req_to_token_pool=self.pool, token_to_kv_pool_allocator=self.allocator, page_size=1
        )
        self.clock = Clock()
        self.cache = GrkvRadixCache(
            params, self.config, self.gaps, cast(Any, self.compressor), markers=markers, ranks=self.clock
        )
        self.running: list[Req] = []
        self._ids = 0

    # -- what the scheduler does -------------------------------------------------------------------

    def try_submit(
        self,
        tokens: Sequence[int],
        options: dict[str, Any] | None = None,
        chunk: int | None = None,
        cache_salt: str | None = None,
    ) -> Req | None:
        """Match, admit and prefill a request (or its first chunk). None when the pool has no room."""
        self._ids += 1
        custom = None if options is None else {"grkv": options}
        params = SamplingParams(max_new_tokens=16, custom_params=custom)
        req = Req(f"r{self._ids}", "", array("q", tokens), params, cache_salt=cache_salt)
        return req if self.resume(req, chunk) else None

    def submit(self, tokens: Sequence[int], options: dict[str, Any] | None = None, **kwargs: Any) -> Req:
        """As `try_submit`, where there is room."""
        req = self.try_submit(tokens, options, **kwargs)
        assert req is not None
        return req

    def resume(self, req: Req, chunk: int | None = None) -> bool:
        req.init_next_round_input(self.cache)
        total = len(req.full_untruncated_fill_ids)
        req.extend_end = total if chunk is None else min(total, req.prefix_len + chunk)
        new = req.extend_end - req.prefix_len
        lock = self.cache.lock(req.last_node)
        room = self.allocator.available_size() + self.cache.evictable_size() >= new
        if not room or not self.pool.available_size():
            self.cache.unlock(lock)
            return False
        req.lock = lock
        prefix = (
            self.cache.prefix_device_indices(req) if req.prefix_len else torch.empty(0, dtype=torch.int64)
        )
        self.pool.alloc([req])
        self.pool.write((req.kv.req_pool_idx, slice(0, req.prefix_len)), prefix)
        self._extend(req)
        self.running.append(req)
        return True

    def next_chunk(self, req: Req, chunk: int) -> bool:
        """Stash what a chunked request has computed and prefill its next chunk."""
        checkpoint_kv_cache(req, self.cache)
        total = len(req.full_untruncated_fill_ids)
        end = min(total, req.prefix_len + chunk)
        if self.allocator.available_size() + self.cache.evictable_size() < end - req.prefix_len:
            return False
        req.extend_end = end
        self._extend(req)
        return True

    def abort(self, req: Req) -> None:
        """The client is gone, perhaps in the middle of the prefill."""
        self._release(req, checkpoint=False)
        self.cache.flush_pending_backups()

    def finish_prefill(self, req: Req) -> None:
        checkpoint_kv_cache(req, self.cache)
        req.output_ids.append(self._next_token(req))
        self.cache.flush_pending_backups()

    def decode(self, req: Req) -> bool:
        evict_from_tree_cache(self.cache, 1)
        slot = self.allocator.alloc(1)
        if slot is None:
            return False
        position = req.kv.kv_allocated_len
        self.pool.write((req.kv.req_pool_idx, slice(position, position + 1)), slot)
        req.refresh_fill_ids()
        self._compute(req, position, position + 1)
        req.kv.kv_allocated_len = req.kv.kv_committed_len = position + 1
        req.output_ids.append(self._next_token(req))
        self.cache.flush_pending_backups()
        return True

    def finish(self, req: Req) -> None:
        req.finished_reason = FINISH_LENGTH(1)
        self._release(req, checkpoint=True)
        self.cache.flush_pending_backups()

    def retract(self, req: Req) -> None:
        self._release(req, checkpoint=False)
        req.reset_for_retract()

    def run(self, tokens: Sequence[int], options: dict[str, Any] | None = None, **kwargs: Any) -> Req:
        """A whole request, alone."""
        req = self.submit(tokens, options, **kwargs)
        self.finish_prefill(req)
        self.finish(req)
        return req

    def work(self, steps: int = 100) -> None:
        """Turns of the scheduler without a batch until nothing waits."""
        for _ in range(steps):
            if not self.cache.on_idle(fully_idle=not self.running):
                return
        raise AssertionError("the work does not end")

    def key_of(self, tokens: Sequence[int], options: dict[str, Any] | None = None) -> MatchPrefixParams:
        """Parameters of a match on behalf of a request that is not admitted."""
        custom = None if options is None else {"grkv": options}
        req = Req("match", "", array("q", tokens), SamplingParams(custom_params=custom))
        return MatchPrefixParams(key=RadixKey(req.origin_input_ids), req=req)

    def _extend(self, req: Req) -> None:
        new = req.extend_end - req.prefix_len
        evict_from_tree_cache(self.cache, new)
        slots = self.allocator.alloc(new)
        assert slots is not None
        self.pool.write((req.kv.req_pool_idx, slice(req.prefix_len, req.extend_end)), slots)
        req.kv.kv_allocated_len = req.kv.kv_committed_len = req.extend_end
        self.cache.maybe_hand_to_session(req)
        self._compute(req, req.prefix_len, req.extend_end)

    def _release(self, req: Req, *, checkpoint: bool) -> None:
        # As mem_cache/common.py: release_kv_cache, which needs a published server context.
        owned = req.kv.kv_allocated_len
        self.allocator.free_group_begin()
        if checkpoint:
            req.refresh_fill_ids()
            self.cache.checkpoint(req, up_to=owned)
        self.cache.free_kv_row(req.kv, [(req.kv.cache_protected_len, owned)])
        self.cache.unlock(req.lock)
        req.lock = None
        self.cache.on_release(req, checkpointed=checkpoint)
        self.pool.free(req)
        req.kv.mark_kv_released()
        self.running.remove(req)
        self.allocator.free_group_end()

    @staticmethod
    def _next_token(req: Req) -> int:
        return (sum(req.full_untruncated_fill_ids) + len(req.output_ids)) % 3 + 1

    # -- the table ---------------------------------------------------------------------------------

    def _compute(self, req: Req, start: int, end: int) -> None:
        """Positions [start, end) are computed now: on what the request's row reads."""
        row = self.pool.req_to_token[req.kv.req_pool_idx].tolist()
        lineage = self.lineage(req)
        for position in range(start, end):
            tokens = tuple(req.full_untruncated_fill_ids[: position + 1])
            self.allocator.content[row[position]] = ("computed", lineage, tokens)
        self.check_row(req)

    def lineage(self, req: Req) -> Lineage:
        return tuple(sorted(span.id for span in path_facts(req.last_node).spans))

    def check_row(self, req: Req) -> None:
        """What the attention backend would read for `req` is what its tokens need, slot by slot."""
        gap = int(self.gaps.tensor[req.kv.req_pool_idx])
        length = req.kv.kv_allocated_len
        row = self.pool.req_to_token[req.kv.req_pool_idx, :length].tolist()
        assert row[:gap] == [0] * gap
        assert 0 not in row[gap:]
        tokens = tuple(req.full_untruncated_fill_ids)
        path = []
        node = req.last_node
        while node.parent is not None:
            path.append(node)
            node = node.parent
        at, depth = gap, 0
        above: list[SpanNode] = []
        regions = []
        for node in reversed(path):
            size = len(node.key)
            assert tuple(node.key.token_ids) == tokens[depth : depth + size]
            if isinstance(node, SpanNode):
                self.check_kept(row[at : at + node.num_slots], node, depth)
                if node.counts is not None:
                    regions.append((at, node.num_slots, node.counts.tolist()))
                at += node.num_slots
                above.append(node)
            else:
                self.check_computed(row[at : at + size], tokens, depth, above)
                at += size
            depth += size
        self.check_computed(row[at:], tokens, depth, above)
        assert at + length - depth == length
        noted = self.gaps.regions_of(req.kv.req_pool_idx)
        assert [(r.first_column, r.num_slots, r.counts.tolist()) for r in noted] == regions

    def check_kept(self, slots: Sequence[int], span: SpanNode, start: int) -> None:
        """The table entries of a span's slots: its range, and the tokens that were exact when it was made."""
        exact = tuple(span.key.token_ids)
        if span.replaces:
            exact = exact[span.replaces[-1].end_tokens - start :]
        expected = [("kept", start, start + len(span.key), exact, i) for i in range(span.num_slots)]
        assert [self.allocator.content.get(slot) for slot in slots] == expected

    def check_computed(
        self, slots: Sequence[int], tokens: tuple[int, ...], start: int, above: Sequence[SpanNode]
    ) -> None:
        """Exact slots of `tokens` from `start` on: computed on exact KV, or on spans that lie above (or that
        those took in)."""
        allowed: set[int] = set()
        queue = list(above)
        while queue:
            span = queue.pop()
            allowed.add(span.id)
            queue += span.replaces
        for i, slot in enumerate(slots):
            kind, lineage, computed = self.allocator.content[slot]
            assert (kind, computed) == ("computed", tokens[: start + i + 1])
            assert allowed.issuperset(lineage)

    # -- checks ------------------------------------------------------------------------------------

    def check(self) -> None:
        """Books, ownership and lineage of the whole cache."""
        cache, allocator = self.cache, self.allocator
        owned: list[int] = []
        evictable = protected = 0
        leaves = set()
        for node in cache.nodes():
            slots = [s for s in node.value.tolist() if s != 0]
            size = node.num_slots if isinstance(node, SpanNode) else len(node.key)
            assert len(slots) == size
            assert len(node.value) == len(node.key)
            owned += slots
            if node.lock_ref:
                protected += size
                assert node.parent.lock_ref >= node.lock_ref or node.parent is cache.root_node
            else:
                evictable += size
                if not node.children:
                    leaves.add(node)
            self._check_content(node)
        assert cache.evictable_leaves == leaves
        flight = cache._work._in_flight
        in_work = [] if flight is None or flight.new_slots is None else flight.new_slots.tolist()
        assert (cache.evictable_size(), cache.protected_size()) == (evictable, protected + len(in_work))
        assert cache.total_size() == len(owned)
        assert sorted(cache.all_values_flatten().tolist()) == sorted(owned)
        owned += in_work
        for req in self.running:
            row = self.pool.req_to_token[req.kv.req_pool_idx].tolist()
            owned += row[req.kv.cache_protected_len : req.kv.kv_allocated_len]
            assert path_facts(req.last_node).logical_tokens == req.kv.cache_protected_len
            self.check_row(req)
        assert len(owned) == len(set(owned)), "a slot has two owners"
        assert set(owned) == allocator.held, "a slot has no owner"
        assert allocator.available_size() + len(owned) == allocator.size
        nodes = set(cache.nodes())
        assert cache._twins <= nodes
        assert cache._detached <= nodes
        assert {span for span in nodes if isinstance(span, SpanNode)} >= set(cache.spans())
        assert int(self.gaps.tensor[0]) == 0

    def _check_content(self, node: Any) -> None:
        """The exact branch holds only what was computed on exact ancestors; under a span, on that span."""
        path, spans = [], []
        step = node
        while step.parent is not None:
            path.append(step)
            step = step.parent
        tokens: tuple[int, ...] = ()
        for item in reversed(path[1:]):
            tokens += tuple(item.key.token_ids)
            if isinstance(item, SpanNode):
                spans.append(item)
        slots = [s for s in node.value.tolist() if s != 0]
        if isinstance(node, SpanNode):
            assert node.start_tokens == len(tokens)
            self.check_kept(slots, node, len(tokens))
        else:
            self.check_computed(slots, tokens + tuple(node.key.token_ids), len(tokens), spans)


def longest_match(
    harness: Harness, key: Sequence[int], acceptance: Any, cache_salt: str | None = None
) -> int:
    """The longest legal match of `key`, by brute force over all paths of the tree."""
    best = [0]

    def walk(node: Any, depth: int) -> None:
        best.append(depth)
        for key_, child in node.children.items():
            if child.key.cache_salt != cache_salt or isinstance(key_, DetachedKey):
                continue
            own = list(child.key.token_ids)
            rest = list(key[depth : depth + len(own)])
            if isinstance(child, SpanNode):
                inside = range(depth, depth + len(own))
                wanted = {at for pair in acceptance.protected for at in range(*pair)} & set(inside)
                kept = {at for pair in child.origin.protected for at in range(*pair)}
                needed = acceptance.budget.slots(len(own), 1, len(wanted))
                whole = child.origin.forced or child.num_slots == len(own)
                good = child.origin.quality >= acceptance.min_quality
                good = good and (whole or (wanted <= kept and child.num_slots >= needed))
                if acceptance.mode != "exact" and good and own == rest:
                    walk(child, depth + len(own))
            else:
                same = 0
                while same < len(rest) and own[same] == rest[same]:
                    same += 1
                if same == len(own):
                    walk(child, depth + same)
                else:
                    best.append(depth + same)

    walk(harness.cache.root_node, 0)
    return max(best)
