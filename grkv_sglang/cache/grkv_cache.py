"""The radix cache SGLang talks to: the span tree plus what to do when a request comes and goes.

A request is looked at twice: when its row is allocated (what serves it, what it reuses) and when it is
released (what to compress now). The work itself happens in `flush_pending_backups`, which SGLang calls
right after each batch's results are processed (frees made during that processing are not available
earlier), and at idle.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import OrderedDict
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode
from torch import Tensor

from grkv_sglang.attention.rows import RowGaps, physical_slots
from grkv_sglang.cache.census import CensusError, take_census
from grkv_sglang.cache.compressor import CompressionError, Compressor, SpanSource
from grkv_sglang.cache.counters import Counters
from grkv_sglang.cache.span import SpanNode, SpanOrigin, path_facts
from grkv_sglang.cache.tree import SpanTree
from grkv_sglang.config import GrkvConfig
from grkv_sglang.policy.acceptance import Acceptance, acceptance_of
from grkv_sglang.policy.jobs import CompressionJob, RequestState, make_job, reuse_end
from grkv_sglang.policy.options import NO_OPTIONS, OPTIONS_KEY, OptionsError, parse_options

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

logger = logging.getLogger(__name__)

LISTED_SPANS = 200
"""Most spans that `state` lists, latest first."""


class GrkvRadixCache(SpanTree):
    """``--radix-cache-backend grkv``."""

    def __init__(
        self, params: CacheInitParams, config: GrkvConfig, row_gaps: RowGaps, compressor: Compressor
    ) -> None:
        self.config = config
        self.compressor = compressor
        self.counters = Counters()
        self._censuses = 0
        self._census_error: str | None = None
        super().__init__(params, row_gaps, acceptance_of(NO_OPTIONS, config))

    def reset(self) -> None:
        """A flush: spans, waiting work and postponed frees go with the tree."""
        self._jobs: OrderedDict[tuple[object, ...], CompressionJob] = OrderedDict()
        self._twins_to_free: list[SpanNode] = []
        self._superseded: list[SpanNode] = []
        self._released_since_flush = False
        super().reset()

    # -- a request comes ---------------------------------------------------------------------------

    def acceptance_for(self, req: Req | None) -> Acceptance:
        return self.default_acceptance if req is None else self._state_of(req).acceptance

    def maybe_hand_to_session(self, req: Req) -> None:
        super().maybe_hand_to_session(req)
        state = self._state_of(req)
        facts = path_facts(req.last_node)
        # A chunk or a resumed request is the same request: counted once. (SGLang's hit counts feed its
        # frequency-based eviction policies; stock counts them at insertion from the root.)
        if not state.admitted:
            state.admitted = True
            node = req.last_node
            while node.parent is not None:
                self._inc_hit_count(node)
                node = node.parent
            for span in facts.spans:
                span.hits += 1
            if facts.spans:
                self.counters.span_hits[state.acceptance.mode] += 1
                self.counters.span_tokens_served += facts.span_tokens
            state.reuse_end_tokens = reuse_end(
                matched_tokens=facts.logical_tokens,
                last_span_end=facts.last_span_end,
                config=self.config,
                page_size=self.page_size,
                mode=state.acceptance.mode,
            )
        deepest = facts.spans[0] if facts.spans else None
        served: dict[str, Any] = {
            "mode": state.acceptance.mode,
            "exact_tokens": facts.logical_tokens - facts.span_tokens,
            "span_tokens": facts.span_tokens,
            "span_slots": facts.span_slots,
            "spans": len(facts.spans),
            "budget": round(deepest.budget, 6) if deepest else None,
            "quality": round(min(s.origin.quality for s in facts.spans), 6) if facts.spans else None,
            "profile": deepest.origin.profile if deepest else None,
        }
        info = req.customized_info or {}
        if OPTIONS_KEY not in info:  # later chunks have the first one's prefix
            req.customized_info = {**info, OPTIONS_KEY: [served]}

    def _state_of(self, req: Req) -> RequestState:
        state = getattr(req, "grkv_state", None)
        if state is None:
            try:
                options = parse_options(req.sampling_params.custom_params)
            except OptionsError:
                # The tokenizer process refuses these with a 400; a request that came another way is served
                # by the server's settings.
                logger.exception("grkv: request %s has bad options and is served without them", req.rid)
                self.counters.compressions_skipped["bad_options"] += 1
                options = NO_OPTIONS
            state = req.grkv_state = RequestState.of(options, self.config)
        return state

    # -- a request goes ----------------------------------------------------------------------------

    def on_release(self, req: Req, *, checkpointed: bool) -> None:
        self._released_since_flush = True
        if not (checkpointed and req.finished()):
            return
        key = RadixKey(req.full_untruncated_fill_ids, req.extra_key, cache_salt=req.cache_salt)
        if path_facts(req.last_node).span_tokens == 0:
            self.mark_twins_of(req.last_node, key)
        job = make_job(
            self._state_of(req),
            req.origin_input_ids,
            extra_key=req.extra_key,
            cache_salt=req.cache_salt,
            config=self.config,
            page_size=self.page_size,
        )
        if job is None:
            return
        # A reused stretch ends where two prompts diverged; a span may reach further along this prompt.
        if job.reason == "reuse" and self.covered_tokens(key, job.acceptance) >= job.end_tokens:
            self.counters.compressions_skipped["exists"] += 1
            return
        self._jobs[job.identity] = job

    def flush_pending_backups(self) -> None:
        """One job per batch, so that running requests wait for one compression at most."""
        if self._released_since_flush:
            self._released_since_flush = False
            self._free_postponed()
        if self._jobs:
            _, job = self._jobs.popitem(last=False)
            self._run(job)

    def on_idle(self, *, fully_idle: bool) -> None:
        """Called before SGLang's idle housekeeping (and its memory check)."""
        self.flush_pending_backups()
        if fully_idle and self.config.census:
            self._censuses += 1
            try:
                take_census(self)
            except CensusError as error:
                self._census_error = str(error)
                raise

    # -- the work ----------------------------------------------------------------------------------

    def _run(self, job: CompressionJob) -> None:
        """Do one job. Whatever goes wrong, the exact prefix goes on serving and a counter says so."""
        key = RadixKey(job.token_ids, job.extra_key, cache_salt=job.cache_salt)
        if self.covered_tokens(key, job.acceptance) == len(key):
            self.counters.compressions_skipped["exists"] += 1
            return
        exact_first = Acceptance("prefer_exact", job.budget, min_quality=0.0)
        end = self.find(key, exact_first)
        if end.length != len(key):
            self.counters.compressions_skipped["prefix_gone"] += 1
            return
        node = self.land(end)
        start = path_facts(node).last_span_end
        if start == len(key):
            self.counters.compressions_skipped["exists"] += 1
            return
        self.counters.compressions_started += 1
        try:
            span = self._compress(job, key, node, start)
        except CompressionError as error:
            self.counters.compressions_failed[error.reason] += 1
            logger.warning("grkv: %s compression of %d tokens not done: %s", job.reason, len(key), error)
            return
        except Exception:
            # Nothing is lost: the tree is as it was. The traceback and the counter say what happened.
            self.counters.compressions_failed["exception"] += 1
            logger.exception("grkv: %s compression of %d tokens failed", job.reason, len(key))
            return
        self.counters.compressions_done += 1
        logger.info(
            "grkv: compressed tokens [%d, %d) into %d slots in %.3f s "
            "(%s, profile %s, quality %.4f, error %.4f -> %.4f)",
            span.start_tokens, span.end_tokens, span.num_slots, span.origin.compress_s, job.reason,
            span.origin.profile, span.origin.quality, span.origin.error_before, span.origin.error_after,
        )  # fmt: skip
        self._superseded.extend(self._worse_than(span))
        if self.config.free_exact_twin == "at_once":
            self._twins_to_free.append(span)
        self._free_postponed()

    def _compress(self, job: CompressionJob, key: RadixKey, node: TreeNode, start: int) -> SpanNode:
        n_tokens = len(key) - start
        if job.forced is not None:
            n_slots = n_tokens if job.forced == "all" else 0
        else:
            n_slots = job.budget.slots(n_tokens, self.page_size)
        parent = node
        parts = []
        while path_facts(parent).logical_tokens > start:
            parts.append(parent.value)
            parent = parent.parent
        source = SpanSource(
            token_ids=job.token_ids[start:],
            start_tokens=start,
            slots=torch.cat(parts[::-1]),
            ancestor_slots=physical_slots(self.path_device_indices(parent)),
        )
        # Eviction to make room must not take the path that is being compressed.
        lock = self.lock(node)
        try:
            new_slots = self._allocate(n_slots)
            try:
                origin = self._fill(job, source, new_slots)
            except BaseException:
                self.token_to_kv_pool_allocator.free(new_slots)
                raise
        finally:
            self.unlock(lock)
        return self.add_span(parent, key[start:], new_slots, start, origin)

    def _allocate(self, n_slots: int) -> Tensor:
        if n_slots == 0:
            return self._empty_device_indices
        evict_from_tree_cache(self, n_slots)
        slots = self.token_to_kv_pool_allocator.alloc(n_slots)
        if slots is None:
            raise CompressionError("no_room", f"no {n_slots} free KV slots, and nothing more to evict")
        return slots.to(torch.int64, copy=True)

    def _fill(self, job: CompressionJob, source: SpanSource, new_slots: Tensor) -> SpanOrigin:
        if job.forced == "none":
            return SpanOrigin("copy", 1.0, 0.0, 0.0, forced=True)
        if job.forced == "all":
            return self.compressor.copy(source, new_slots)
        return self.compressor.compress(source, self.compressor.check_profile(job.profile), new_slots)

    def _worse_than(self, span: SpanNode) -> list[SpanNode]:
        """Spans of the same tokens that the new one replaces."""
        return [
            other
            for other in self._spans_at.get(span.parent.id, ())
            if other is not span
            and not other.origin.forced
            and other.num_slots <= span.num_slots
            and other.origin.quality <= span.origin.quality
            and len(other.key) == len(span.key)
            and other.matches(span.key, 0)
        ]

    def _free_postponed(self) -> None:
        """Free twins and superseded spans that nobody holds any more."""
        alive = set(self.spans())
        waiting = []
        for span in self._twins_to_free:
            if span in alive and not self.free_exact_twin(span):
                waiting.append(span)
            elif span in alive:
                self.counters.twins_freed += 1
        self._twins_to_free = waiting
        waiting = []
        for span in self._superseded:
            if span not in alive:
                continue
            if self.is_idle(span):
                self.drop(span)
                self.counters.spans_superseded += 1
            else:
                waiting.append(span)
        self._superseded = waiting

    # -- what the outside sees ---------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Plain data for ``/server_info``: settings, pool, counters, spans (latest first), census."""
        spans = sorted(self.spans(), key=lambda s: s.created_at, reverse=True)
        span_slots = sum(s.num_slots for s in spans)
        return {
            "config": self.config.model_dump(),
            "pool": {
                "total_slots": self.token_to_kv_pool_allocator.size,
                "free_slots": self.token_to_kv_pool_allocator.available_size(),
                "exact_slots": self.total_size() - span_slots,
                "span_slots": span_slots,
            },
            "counters": {
                **self.counters.as_dict(),
                "spans_evicted": self.spans_evicted,
                "twin_slots_freed": self.twin_slots_freed,
                "jobs_waiting": len(self._jobs),
            },
            "num_spans": len(spans),
            "spans": [self._describe(s) for s in spans[:LISTED_SPANS]],
            "census": {
                "enabled": self.config.census,
                "ok": self._census_error is None,
                "checks": self._censuses,
                "last_error": self._census_error,
            },
        }

    def _describe(self, span: SpanNode) -> dict[str, Any]:
        tokens = array("q")
        node: TreeNode = span
        parts = []
        while node.parent is not None:
            parts.append(node.key.raw_token_ids())
            node = node.parent
        for part in reversed(parts):
            tokens.extend(part)
        return {
            "start_tokens": span.start_tokens,
            "end_tokens": span.end_tokens,
            "tokens": len(span.key),
            "slots": span.num_slots,
            "budget": span.budget,
            "hits": span.hits,
            "twin_freed": span.twin_freed,
            "age_s": time.time() - span.created_at,
            "tokens_sha256": sha256(tokens.tobytes()).hexdigest(),
            **vars(span.origin),
        }
