"""The radix cache SGLang talks to: the span tree plus what to do when a request comes and goes.

A request is looked at twice: when its row is allocated (what serves it, what it reuses) and when it is
released (what to compress now). The work itself happens in bounded steps in `flush_pending_backups`, which
SGLang calls right after each batch's results are processed (frees made during that processing are not
available earlier), and at idle.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.radix_cache import RadixKey

from grkv_sglang.attention.rows import RowGaps
from grkv_sglang.cache import retention
from grkv_sglang.cache.census import CensusError, take_census
from grkv_sglang.cache.compressor import Compressor
from grkv_sglang.cache.counters import Counters
from grkv_sglang.cache.pressure import cold_stretches
from grkv_sglang.cache.ranks import Ranks
from grkv_sglang.cache.span import PathFacts, SpanNode, path_facts
from grkv_sglang.cache.tree import SpanTree
from grkv_sglang.cache.work import CompressionWork, FinishedJob
from grkv_sglang.config import GrkvConfig
from grkv_sglang.policy.acceptance import Acceptance, Budget, acceptance_of, budget_of
from grkv_sglang.policy.boundaries import MessageMarkers
from grkv_sglang.policy.jobs import CompressionJob, RequestState, exact_head, make_job, reused_stretch
from grkv_sglang.policy.options import NO_OPTIONS, OPTIONS_KEY, OptionsError, parse_options

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    from grkv_sglang.cache.metrics import CacheMetrics

logger = logging.getLogger(__name__)

ANY_BUDGET = Budget(None, 1)
LISTED_SPANS = 200
"""Most spans that `state` lists, latest first."""


class GrkvRadixCache(SpanTree):
    """``--radix-cache-backend grkv``."""

    def __init__(
        self,
        params: CacheInitParams,
        config: GrkvConfig,
        row_gaps: RowGaps,
        compressor: Compressor,
        markers: MessageMarkers | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.config = config
        self.counters = Counters()
        self._markers = markers
        self._ranks = ranks or Ranks()
        self._work = CompressionWork(self, compressor, config, self.counters, self._ranks, markers)
        self._requests_seen = 0
        self._lora_of: dict[str, str] = {}
        self._censuses = 0
        self._census_error: str | None = None
        self._metrics: CacheMetrics | None = None
        super().__init__(params, row_gaps, acceptance_of(NO_OPTIONS, config))
        if params.enable_metrics:
            # Not earlier: prometheus_client looks for SGLang's multiprocess folder when it is imported.
            from grkv_sglang.cache.metrics import CacheMetrics

            self._metrics = CacheMetrics(self.metrics_collector.labels)

    def reset(self) -> None:
        """A flush: spans, waiting work and postponed frees go with the tree."""
        self._work.forget()
        self._twins_to_free: list[SpanNode] = []
        self._superseded: list[SpanNode] = []
        self._released_since_flush = False
        self._pressure_seen = False
        self._any_ttl = self.config.ttl_s is not None
        self._now_s = 0.0
        super().reset()

    def protected_size(self) -> int:
        """Stock: slots of locked nodes. Here with those of a span in the making."""
        return int(super().protected_size()) + self._work.held_slots

    @property
    def _compresses_under_pressure(self) -> bool:
        return self.config.compression and "pressure" in self.config.triggers

    def reserve_slots(self) -> int:
        if not self._compresses_under_pressure:
            return 0
        return int(self.config.pressure_reserve * self.token_to_kv_pool_allocator.size)

    def surrender_slots(self) -> int:
        return self._work.cancel("given_up_for_room")

    # -- a request comes ---------------------------------------------------------------------------

    def acceptance_for(self, req: Req | None) -> Acceptance:
        return self.default_acceptance if req is None else self._state_of(req).acceptance

    def maybe_hand_to_session(self, req: Req) -> None:
        super().maybe_hand_to_session(req)
        state = self._state_of(req)
        # A chunk or a resumed request is the same request: counted once.
        if state.admitted:
            return
        state.admitted = True
        facts = path_facts(req.last_node)
        reprefilled = self._count(req, state, facts)
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
            "reprefilled_tokens": reprefilled,
        }
        req.customized_info = {**(req.customized_info or {}), OPTIONS_KEY: [served]}

    def _count(self, req: Req, state: RequestState, facts: PathFacts) -> int:
        """Note what serves a new request; returns how many tokens it prefills that a span holds."""
        self._requests_seen += 1
        if req.lora_id is not None and req.extra_key is not None:
            self._lora_of[req.extra_key] = req.lora_id
        # SGLang's hit counts feed its frequency-based eviction policies; stock counts them at insertion from
        # the root.
        node = req.last_node
        while node.parent is not None:
            self._inc_hit_count(node)
            node = node.parent
        for span in facts.spans:
            span.hits += 1
            span.used_at_s = self._now_s
        if facts.spans:
            self.counters.span_hits[state.acceptance.mode] += 1
            self.counters.span_tokens_served += facts.span_tokens
        state.last_span_end = facts.last_span_end
        # SGLang sends n > 1 as a first pass of no new tokens, which counts, and n samples behind it.
        sample = req.sampling_params.n > 1 and req.sampling_params.max_new_tokens > 0
        state.reused_tokens = reused_stretch(
            matched_tokens=0 if sample else facts.logical_tokens,
            last_span_end=facts.last_span_end,
            hits=req.last_node.hit_count - 1,
            config=self.config,
            mode=state.acceptance.mode,
        )
        state.reused_whole = not req.last_node.children
        if not self._spans_at:
            return 0
        key = RadixKey(req.origin_input_ids, req.extra_key, cache_salt=req.cache_salt)
        covered = self.covered_tokens(key, Acceptance("prefer_compressed", ANY_BUDGET, min_quality=0.0))
        reprefilled = max(0, min(covered, len(key) - 1) - facts.logical_tokens)
        self.counters.reprefilled_tokens += reprefilled
        return reprefilled

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
        tokens = self.path_tokens(req.last_node)
        key = RadixKey(tokens, req.extra_key, cache_salt=req.cache_salt)
        if path_facts(req.last_node).span_tokens == 0:
            self.mark_twins_of(req.last_node, key)
        job = make_job(
            self._state_of(req),
            tokens,
            prompt_tokens=len(req.origin_input_ids),
            extra_key=req.extra_key,
            cache_salt=req.cache_salt,
            lora_id=req.lora_id,
            config=self.config,
            page_size=self.page_size,
            markers=self._markers,
        )
        if job is None:
            return
        # A reused stretch ends where two prompts diverged; a span may reach further along this prompt.
        if job.reason != "explicit" and self.covered_tokens(key, job.acceptance) >= job.end_tokens:
            self.counters.compressions_skipped["exists"] += 1
            return
        self._work.add(job, self._requests_seen)

    def flush_pending_backups(self) -> None:
        """A bounded step of work after each batch, so that running requests keep their pace."""
        if self._released_since_flush:
            self._released_since_flush = False
            self._pressure_seen = False
            self._free_postponed()
        if self._any_ttl:
            self._now_s = self._ranks.now_s()
            self._expire()
        if not self._work.waiting:
            self._relieve_pressure()
        self._work.step(self._requests_seen)
        for finished in self._work.finished:
            self._clean_up_after(finished)
        if self._work.finished:
            self._work.finished.clear()
            self._free_postponed()
        if self._metrics is not None and self._metrics.due():
            self._metrics.publish(self.counters, self._gauges())

    def on_idle(self, *, fully_idle: bool) -> bool:
        """Called instead of SGLang's idle housekeeping while there is work: then returns True."""
        self.flush_pending_backups()
        if self._work.waiting:
            return True
        if fully_idle and self.config.census:
            self._censuses += 1
            try:
                take_census(self)
            except CensusError as error:
                self._census_error = str(error)
                raise
        return False

    # -- around the work ---------------------------------------------------------------------------

    def _relieve_pressure(self) -> None:
        """At the watermark: free what spans stand for, then compress the coldest long stretch."""
        config, allocator = self.config, self.token_to_kv_pool_allocator
        if self._pressure_seen or not self._compresses_under_pressure:
            return
        missing = int(config.pressure_watermark * allocator.size) - allocator.available_size()
        if missing <= 0:
            return
        for span in list(self.spans()):
            if not span.twin_freed:
                self.free_exact_twin(span)
        missing = int(config.pressure_watermark * allocator.size) - allocator.available_size()
        if missing <= self.evict_twins(missing):
            return
        for stretch in cold_stretches(self, config.min_span_tokens, self._markers):
            job = CompressionJob(
                stretch.token_ids,
                stretch.extra_key,
                stretch.cache_salt,
                self._lora_of.get(stretch.extra_key or ""),
                "pressure",
                budget_of(NO_OPTIONS, config),
                config.profile,
                exact_tokens=exact_head(
                    stretch.path_tokens, config=config, page_size=self.page_size, markers=self._markers
                ),
                shared=stretch.shared,
            )
            if not self._work.is_cooling(job, self._requests_seen):
                self._work.add(job, self._requests_seen)
                return
        self._pressure_seen = True  # nothing to compress until a request leaves something

    def _clean_up_after(self, finished: FinishedJob) -> None:
        """Pin, postpone the frees that the new spans allow, and mark what is no longer needed."""
        retention.apply(self, finished.last, pin=finished.job.pin, ttl_s=finished.job.ttl_s)
        if finished.job.ttl_s is not None and not self._any_ttl:
            self._any_ttl = True
            self._now_s = self._ranks.now_s()
        for span in (*finished.made, finished.last):
            span.used_at_s = self._now_s
            if span.ttl_s is None:
                span.ttl_s = self.config.ttl_s
        for span in reversed(finished.made):
            if self._metrics is not None:
                self._metrics.span_made(span)
            self._superseded.extend(self._worse_than(span))
            if self.config.free_exact_twin == "at_once" or finished.job.reason == "pressure":
                self._twins_to_free.append(span)

    def _worse_than(self, span: SpanNode) -> list[SpanNode]:
        """Spans of the same tokens that the new one replaces."""
        return [
            other
            for other in self._spans_at.get(span.parent.id, ())
            if other is not span
            and not other.origin.forced
            and not other.pinned
            and other.num_slots <= span.num_slots
            and other.origin.quality <= span.origin.quality
            and len(other.key) == len(span.key)
            and other.matches(span.key, 0)
        ]

    def _free_postponed(self) -> None:
        """Free twins, superseded spans and deleted nodes that nobody holds any more."""
        self.drop_detached()
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

    def _expire(self) -> None:
        for span in retention.expired(self, self._now_s):
            self.detach(span)
            self.counters.spans_expired += 1
            self.end_lost_work("expired")

    # -- what an operator does ---------------------------------------------------------------------

    def weights_changed(self) -> None:
        """New weights: no span of the old ones may serve. (Exact KV is SGLang's to flush or keep.)"""
        self._work.cancel("weights_changed")
        spans = [span for span in self.spans() if self.in_reach(span)]
        self.counters.spans_outdated += len(spans)
        for span in spans:
            if self.in_reach(span):  # not gone with one before it
                self.detach(span)

    def command(self, command: Mapping[str, Any]) -> None:
        """Do what an operator asked for. Raises retention.CommandError."""
        self.counters.deleted_slots += retention.execute(self, retention.parse_command(command))

    def end_lost_work(self, reason: str) -> None:
        """End the compression in flight if its path has been put out of reach."""
        if self._work.lost_its_path:
            self._work.cancel(reason)
            self.drop_detached()

    def _gauges(self) -> dict[str, int]:
        """Current sizes, for the metrics endpoint."""
        spans = list(self.spans())
        slots = sum(span.num_slots for span in spans)
        return {
            "spans": len(spans),
            "span_slots": slots,
            "saved_slots": sum(len(span.key) for span in spans) - slots,
            "pinned_slots": retention.pinned_slots(self),
            "jobs_waiting": self._work.waiting,
        }

    # -- what the outside sees ---------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Plain data for ``/server_info``: settings, pool, counters, spans (latest first), census."""
        held_spans = [node for node in self.nodes() if isinstance(node, SpanNode)]
        span_slots = sum(s.num_slots for s in held_spans)
        spans = sorted(filter(self.in_reach, held_spans), key=lambda s: s.created_at, reverse=True)
        held = self._work.held_slots
        return {
            "config": self.config.model_dump(),
            "pool": {
                "total_slots": self.token_to_kv_pool_allocator.size,
                "free_slots": self.token_to_kv_pool_allocator.available_size(),
                "exact_slots": self.total_size() - span_slots,
                "span_slots": span_slots,
                "in_work_slots": held,
                "pinned_slots": retention.pinned_slots(self),
            },
            "counters": {
                **self.counters.as_dict(),
                "spans_evicted": self.spans_evicted,
                "twin_slots_freed": self.twin_slots_freed,
                "jobs_waiting": self._work.waiting,
                "detached_nodes": len(self._detached),
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
        return {
            "start_tokens": span.start_tokens,
            "end_tokens": span.end_tokens,
            "tokens": len(span.key),
            "slots": span.num_slots,
            "budget": span.budget,
            "hits": span.hits,
            "twin_freed": span.twin_freed,
            "age_s": time.time() - span.created_at,
            "pinned": span.pinned,
            "ttl_s": span.ttl_s,
            "namespace": retention.namespace_of(span),
            "tokens_sha256": sha256(self.path_tokens(span).tobytes()).hexdigest(),
            **vars(span.origin),
            "protected": [list(kept) for kept in span.origin.protected],
        }
