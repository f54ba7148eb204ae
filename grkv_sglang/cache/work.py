"""Compression work: a queue of jobs, one in flight, done in bounded steps between batches.

A job becomes one span or several next to each other (a long shared part is a span of its own). Each span
takes a probe pass and then its layers, a few per step. The path is locked while it is read; the new slots
count as protected until the tree takes them over. Whatever goes wrong, the exact prefix goes on serving and
a counter says so.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode
from torch import Tensor

from grkv_sglang.attention.ragged import RaggedRegion
from grkv_sglang.attention.rows import physical_slots
from grkv_sglang.cache.compressor import Compression, CompressionError, Compressor, SpanSource
from grkv_sglang.cache.counters import Counters
from grkv_sglang.cache.ranks import Ranks
from grkv_sglang.cache.span import SpanNode, SpanOrigin, path_facts
from grkv_sglang.config import GrkvConfig
from grkv_sglang.core import SpanQuality
from grkv_sglang.policy import ranges
from grkv_sglang.policy.acceptance import Acceptance
from grkv_sglang.policy.boundaries import MessageMarkers, system_end
from grkv_sglang.policy.jobs import CompressionJob, plan_parts

if TYPE_CHECKING:
    from grkv_sglang.cache.tree import SpanTree

logger = logging.getLogger(__name__)

MAX_COOLING = 4096
"""Failed prefixes that are remembered at once."""


@dataclass(frozen=True)
class FinishedJob:
    job: CompressionJob
    made: list[SpanNode]
    """New spans, first to last; none where there was nothing to do."""
    last: SpanNode
    """The span that the job's prefix ends with, new or not."""


@dataclass
class _InFlight:
    """The job that is being done."""

    job: CompressionJob
    key: RadixKey
    end: TreeNode
    """Of the exact path that is compressed."""
    locks: list[Any]
    """The path, and the job's own spans while others are to follow."""
    parts: deque[tuple[int, int]]
    covered: int
    """Where the job's own tokens start; everything before is `before`."""
    before: Tensor
    before_regions: tuple[RaggedRegion, ...]
    """Which of `before`, as columns, hold other tokens for each head."""
    exact: Tensor
    """Slots of the exact tokens, from `exact_start` to the job's end."""
    exact_start: int
    merged: list[SpanNode]
    """Older spans that the new one takes in, first to last."""
    parent: TreeNode
    """Where the next span starts."""
    made: list[SpanNode] = field(default_factory=list)
    new_slots: Tensor | None = None
    work: Compression | None = None
    """The current span in the making; None where its contents need no layers."""
    origin: SpanOrigin | None = None
    """Of a span whose contents need no layers."""
    counts: Tensor | None = None
    """Of such a span, where its heads hold tokens of their own."""
    layers_left: int | None = None
    """Of the current span; None before it is begun."""
    failure: CompressionError | None = None


class CompressionWork:
    """Does jobs one after another. Owned by the radix cache, whose tree it changes."""

    def __init__(
        self,
        tree: SpanTree,
        compressor: Compressor,
        config: GrkvConfig,
        counters: Counters,
        ranks: Ranks,
        markers: MessageMarkers | None,
    ) -> None:
        self._tree, self._compressor, self._config = tree, compressor, config
        self._counters, self._ranks, self._markers = counters, ranks, markers
        self._jobs: OrderedDict[tuple[object, ...], CompressionJob] = OrderedDict()
        self._cooling: OrderedDict[tuple[object, ...], int] = OrderedDict()
        self._in_flight: _InFlight | None = None
        self._allocating = False
        self._requests_seen = 0
        self.finished: list[FinishedJob] = []
        """For the cache to clean up after."""

    # -- the queue ---------------------------------------------------------------------------------

    def add(self, job: CompressionJob, requests_seen: int) -> None:
        """Queue a job, together with one for the same prefix, unless it failed not long ago."""
        if self.is_cooling(job, requests_seen):
            self._counters.compressions_skipped["cooling_down"] += 1
            return
        self._cooling.pop(job.identity, None)
        waiting = self._jobs.get(job.identity)
        self._jobs[job.identity] = job if waiting is None else waiting.with_wishes_of(job)

    def is_cooling(self, job: CompressionJob, requests_seen: int) -> bool:
        return requests_seen < self._cooling.get(job.identity, 0)

    @property
    def waiting(self) -> int:
        return len(self._jobs) + (self._in_flight is not None)

    @property
    def held_slots(self) -> int:
        """Slots allocated for a span that is not in the tree yet."""
        slots = None if self._in_flight is None else self._in_flight.new_slots
        return 0 if slots is None else slots.numel()

    def forget(self) -> None:
        """The tree was flushed: its slots and nodes are gone."""
        self._jobs.clear()
        self._cooling.clear()
        self.finished.clear()
        self._in_flight = None

    def cancel(self, reason: str) -> int:
        """End the job in flight; the spans it has finished stay. Returns the slots given back."""
        flight = self._in_flight
        if flight is None or self._allocating:
            return 0
        freed = self.held_slots
        flight.failure = CompressionError(reason, "given up")
        self._end(flight)
        return freed

    @property
    def lost_its_path(self) -> bool:
        """Whether no request can reach any more what the job in flight compresses, or goes on from."""
        flight = self._in_flight
        return flight is not None and not (
            self._tree.in_reach(flight.end) and self._tree.in_reach(flight.parent)
        )

    # -- a step ------------------------------------------------------------------------------------

    def step(self, requests_seen: int) -> None:
        """Do a bounded piece of work: a probe, a chunk of a pass, some layers, or the end of a span."""
        self._requests_seen = requests_seen
        while self._in_flight is None and self._jobs:
            _, job = self._jobs.popitem(last=False)
            self._in_flight = self._open(job)
        flight = self._in_flight
        if flight is None:
            return
        if flight.layers_left is None:
            self._next_span(flight)
        elif flight.work is not None and flight.work.chunks:
            self._attempt(flight, flight.work.advance_pass)
            self._some_rank_failed(flight)
        else:
            self._next_layers(flight)

    def _open(self, job: CompressionJob) -> _InFlight | None:
        """Find and lock the path; None if there is nothing to do."""
        tree = self._tree
        key = RadixKey(job.token_ids, job.extra_key, cache_salt=job.cache_salt)
        if tree.covered_tokens(key, job.acceptance) == len(key):
            self._counters.compressions_skipped["exists"] += 1
            last = tree.find(key, job.acceptance).node
            if isinstance(last, SpanNode):
                self.finished.append(FinishedJob(job, [], last))
            return None
        end = tree.find(key, Acceptance("prefer_exact", job.budget, min_quality=0.0))
        if end.length != len(key):
            self._counters.compressions_skipped["prefix_gone"] += 1
            return None
        node = tree.land(end)
        partings = {*tree.branches_above(node), *tree.partings_from_spans(key, job.acceptance)}
        shared_end = self._shared_end(job, partings)
        if shared_end is not None:
            return self._open(replace(job, token_ids=job.token_ids[:shared_end]))
        facts = path_facts(node)
        exact_start = facts.last_span_end
        if exact_start == len(key):  # by spans that the acceptance of this job does not take
            self._counters.compressions_skipped["exists"] += 1
            return None
        merged = self._to_merge(job, facts.spans, len(key) - exact_start)
        covered = merged[0].start_tokens if merged else exact_start
        below, base = [], node
        while base.parent is not None and not isinstance(base, SpanNode):
            below.append(base.value)
            base = base.parent
        if merged:
            base = merged[0].parent
        if merged or job.forced is not None:
            parts = [(covered, len(key))]
        else:
            parts = plan_parts(
                covered=covered,
                end=len(key),
                cuts=partings | self._further_cuts(job, key),
                min_tokens=self._config.min_span_tokens,
                exact_until=job.exact_tokens,
            )
            if not parts:
                # Cooling, so that pressure looks at other stretches.
                self._counters.compressions_skipped["protected"] += 1
                self._cool(job)
                return None
        # A header that stays exact ends at a node of its own.
        parent = tree.node_at(node, parts[0][0]) if parts[0][0] > covered else base
        self._counters.compressions_started += 1
        return _InFlight(
            job=job,
            key=key,
            end=node,
            locks=[tree.lock(node)],
            parts=deque(parts),
            covered=covered,
            before=physical_slots(tree.path_device_indices(base)),
            before_regions=path_facts(base).physical_regions,
            exact=torch.cat(below[::-1]),
            exact_start=exact_start,
            merged=merged,
            parent=parent,
        )

    def _shared_end(self, job: CompressionJob, partings: set[int]) -> int | None:
        """Where a job that nobody asked for ends earlier: at the last stretch of it that other prompts share,
        if what follows is too short for a span of its own. A span over both would serve none of the others,
        and take the shared stretch's exact KV with it."""
        if job.reason not in ("reuse", "insert"):
            return None
        least = self._config.min_span_tokens
        ends = [at for at in partings if max(least, job.end_tokens - least + 1) <= at < job.end_tokens]
        return min(ends, default=None)

    def _further_cuts(self, job: CompressionJob, key: RadixKey) -> set[int]:
        """Where a job may be cut into spans beside other prompts' ways: other spans' ends, the system
        message's."""
        page = self._tree.page_size
        cuts = self._tree.span_ends(key, job.acceptance)
        if self._markers is not None:
            system = system_end(job.token_ids, self._markers)
            if system is not None:
                cuts.add(system // page * page)
        return cuts

    def _to_merge(self, job: CompressionJob, spans: list[SpanNode], tail_tokens: int) -> list[SpanNode]:
        """The spans at the end of a path (`spans` is last to first) that a job takes in: enough private ones
        in a row, not compressed again too often, with enough exact KV behind them to take queries from."""
        if job.forced is not None or tail_tokens < self._config.min_span_tokens:
            return []
        run: list[SpanNode] = []
        for span in spans:
            origin = span.origin
            keeps = job.budget.slots(len(span.key), self._tree.page_size)
            if origin.shared or origin.forced or span.pinned or span.num_slots < keeps:
                break
            if span.counts is not None:  # its slots are not one candidate each, but one per head
                break
            if origin.generation >= self._config.max_generations:
                break
            # What was compressed before does not come back token by token.
            if ranges.within(job.protected, span.start_tokens, job.end_tokens - tail_tokens):
                break
            run.append(span)
        return run[::-1] if len(run) >= self._config.merge_after_spans else []

    def _next_span(self, flight: _InFlight) -> None:
        """Begin the next span of the job, or take the one that is there. A short span is finished at once."""
        start, end = flight.parts[0]
        existing = self._tree.span_over(flight.parent, flight.key[start:end], flight.job.acceptance)
        if existing is not None:
            self._follow(flight, existing)
            return
        self._attempt(flight, lambda: self._begin(flight, start, end))
        if self._some_rank_failed(flight):
            return
        flight.layers_left = 0 if flight.work is None else self._compressor.num_layers
        one_step = flight.layers_left <= self._layers_per_step(end - start)
        if one_step and not (flight.work is not None and flight.work.chunks):
            self._next_layers(flight)

    def _next_layers(self, flight: _InFlight) -> None:
        """Some layers of the current span; behind the last one it goes into the tree."""
        start, end = flight.parts[0]
        count = min(flight.layers_left or 0, self._layers_per_step(end - start))
        work = flight.work
        if work is not None:
            self._attempt(flight, lambda: work.advance(count))
        # Counted on every rank alike, also where one has failed: they meet behind the last layer.
        flight.layers_left = (flight.layers_left or 0) - count
        if flight.failure is not None and self._ranks.size == 1:
            self._end(flight)
        elif flight.layers_left == 0 and not self._some_rank_failed(flight):
            self._finish(flight, start, end)

    def _attempt(self, flight: _InFlight, action: Callable[[], None]) -> None:
        """Do `action` unless this rank has failed; keep what goes wrong."""
        if flight.failure is not None:
            return
        try:
            action()
        except CompressionError as error:
            flight.failure = error
        except Exception as error:
            # Nothing is lost: the tree is as it was. The traceback and the counter say what happened.
            logger.exception("grkv: compression failed")
            flight.failure = CompressionError("exception", str(error))

    def _some_rank_failed(self, flight: _InFlight) -> bool:
        """Ask all ranks, and end the job if one has failed."""
        failed = self._ranks.sum([float(flight.failure is not None)])[0]
        if failed:
            flight.failure = flight.failure or CompressionError("other_rank", "it failed on another rank")
            self._end(flight)
        return failed > 0

    def _layers_per_step(self, n_tokens: int) -> int:
        layers = self._compressor.num_layers
        return min(layers, max(1, math.floor(layers * self._config.step_tokens / n_tokens)))

    def _begin(self, flight: _InFlight, start: int, end: int) -> None:
        """Allocate the span's slots; probe, or copy where the span is forced."""
        job = flight.job
        n_tokens = end - start
        if job.forced is not None:
            n_slots = 0 if job.forced == "none" else n_tokens
        else:
            protected = ranges.size(ranges.within(job.protected, start, end))
            n_slots = job.budget.slots(n_tokens, self._tree.page_size, protected)
        first = max(start, flight.exact_start)
        source = SpanSource(
            start_tokens=start,
            token_ids=job.token_ids[first:end],
            exact_start_tokens=first,
            slots=flight.exact[first - flight.exact_start : end - flight.exact_start],
            merged_token_ids=job.token_ids[start:first],
            merged_slots=self._slots_of(flight.merged),
            protected=job.protected,
            ancestor_slots=torch.cat([flight.before, flight.exact[: max(0, start - flight.exact_start)]]),
            ancestor_regions=flight.before_regions,
        )
        flight.new_slots = self._allocate(n_slots, may_evict=job.reason != "pressure")
        if job.forced == "none":
            flight.origin = SpanOrigin("copy", 1.0, 0.0, 0.0, forced=True)
        elif job.forced == "all":
            flight.origin = self._compressor.copy(source, flight.new_slots)
        elif job.forced == "packed":
            flight.origin, flight.counts = self._compressor.copy_packed(source, flight.new_slots)
        else:
            profile = self._compressor.check_profile(job.profile)
            flight.work = self._compressor.start(source, profile, flight.new_slots, job.lora_id)

    def _slots_of(self, spans: list[SpanNode]) -> Tensor:
        """Slots from the first of these spans to the last, with exact nodes in between."""
        if not spans:
            return self._tree.empty_slots
        row = self._tree.path_device_indices(spans[-1])
        before = self._tree.path_device_indices(spans[0].parent)
        return physical_slots(row)[physical_slots(before).numel() :]

    def _allocate(self, n_slots: int, *, may_evict: bool) -> Tensor:
        if n_slots == 0:
            return self._tree.empty_slots
        allocator = self._tree.token_to_kv_pool_allocator
        if may_evict:
            self._allocating = True
            try:
                evict_from_tree_cache(self._tree, n_slots)
            finally:
                self._allocating = False
        slots = allocator.alloc(n_slots)
        if slots is None:
            raise CompressionError("no_room", f"no {n_slots} free KV slots, and nothing more to evict")
        return slots.to(torch.int64, copy=True)

    def _finish(self, flight: _InFlight, start: int, end: int) -> None:
        """Hang the span into the tree."""
        origin, new_slots, counts = flight.origin, flight.new_slots, flight.counts
        if flight.work is not None:
            counts = flight.work.counts
            quality = SpanQuality()
            quality.add_sums(*self._ranks.sum(flight.work.quality.sums))  # over the heads of all ranks
            origin = flight.work.origin(quality)
        if origin is None or new_slots is None:
            raise RuntimeError("a span is finished before it is begun")
        origin = replace(
            origin,
            reason=flight.job.reason,
            # Only the last span of a job ends where its prefix ends; the others end where prompts part.
            shared=flight.job.shared or end != len(flight.key),
            generation=1 + max(s.origin.generation for s in flight.merged) if flight.merged else 0,
            quality=origin.quality * min((s.origin.quality for s in flight.merged), default=1.0),
            protected=ranges.within(flight.job.protected, start, end),
        )
        if origin.quality < self._config.quality_floor and not origin.forced:
            flight.failure = CompressionError(
                "low_quality",
                f"quality {origin.quality:.4f} is below the floor of {self._config.quality_floor:g}; "
                "the prefix stays exact",
            )
            self._end(flight)
            return
        span = self._tree.add_span(
            flight.parent, flight.key[start:end], new_slots, start, origin, flight.merged, counts
        )
        self._counters.compressions_done += 1
        self._counters.spans_made[flight.job.reason] += 1
        logger.info(
            "grkv: compressed tokens [%d, %d) into %d slots in %.3f s "
            "(%s, profile %s, quality %.4f, error %.4f -> %.4f)",
            span.start_tokens, span.end_tokens, span.num_slots, origin.compress_s, origin.reason,
            origin.profile, origin.quality, origin.error_before, origin.error_after,
        )  # fmt: skip
        flight.made.append(span)
        flight.new_slots = flight.work = flight.origin = flight.counts = flight.layers_left = None
        self._follow(flight, span)

    def _follow(self, flight: _InFlight, span: SpanNode) -> None:
        """Go on behind `span`, or end the job."""
        flight.parts.popleft()
        flight.parent = span
        flight.locks.append(self._tree.lock(span))
        if not flight.parts:
            self._end(flight)

    def _end(self, flight: _InFlight) -> None:
        """Unlock the path, give back what the tree did not take, remember a failure."""
        if flight.new_slots is not None and flight.new_slots.numel():
            self._tree.token_to_kv_pool_allocator.free(flight.new_slots)
        for lock in flight.locks:
            self._tree.unlock(lock)
        self._in_flight = None
        if flight.failure is not None:
            reason = flight.failure.reason
            self._counters.compressions_failed[reason] += 1
            logger.warning(
                "grkv: %s compression of %d tokens not done: %s (%s)",
                flight.job.reason, len(flight.key), flight.failure, reason,
            )  # fmt: skip
            if flight.failure.reason != "deleted":  # when it comes again, nothing speaks against it
                self._cool(flight.job)
        if isinstance(flight.parent, SpanNode) and flight.parent.start_tokens >= flight.covered:
            self.finished.append(FinishedJob(flight.job, flight.made, flight.parent))

    def _cool(self, job: CompressionJob) -> None:
        """Do not try this job again for some requests."""
        self._cooling[job.identity] = self._requests_seen + self._config.cooldown_requests
        while len(self._cooling) > MAX_COOLING:
            self._cooling.popitem(last=False)
