"""Random lives of the cache against a brute-force model: every step checks books, owners and lineage."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from grkv_sglang.cache.census import take_census
from grkv_sglang.policy.acceptance import acceptance_of
from grkv_sglang.policy.options import RequestOptions
from tests.cache.harness import Harness, longest_match

# Few documents that share beginnings, so that requests meet in every way a tree allows.
DOCUMENTS = [
    [1, 2, 3, 1, 1, 2, 2, 3, 3, 1, 2, 1, 2, 3, 1, 3, 2, 1, 1, 1, 3, 2, 3],
    [1, 2, 3, 1, 1, 2, 2, 3, 3, 1, 1, 1, 1, 2, 3, 3, 1, 2, 2, 2, 1, 3, 1],
    [1, 2, 3, 3, 3, 3, 2, 2, 1, 1, 2, 3],
    [2, 1, 2, 1, 2, 1],
]

prompts = st.builds(
    lambda doc, cut, tail: DOCUMENTS[doc][:cut] + tail,
    st.integers(0, len(DOCUMENTS) - 1),
    st.integers(1, 23),
    st.lists(st.integers(1, 3), min_size=1, max_size=6),
)
modes = st.sampled_from([None, "exact", "prefer_exact", "prefer_compressed"])
budgets = st.sampled_from([None, 0.2, 0.34, 0.7, 1.0])
salts = st.sampled_from([None, None, None, "tenant"])


class CacheLife(RuleBasedStateMachine):
    @initialize(
        num_slots=st.integers(40, 110),
        twin=st.sampled_from(["at_once", "under_pressure"]),
        mode=st.sampled_from(["prefer_exact", "prefer_compressed"]),
    )
    def start(self, num_slots: int, twin: str, mode: str) -> None:
        self.h = Harness(num_slots=num_slots, free_exact_twin=twin, mode=mode, allow_forced=True)
        self.chunked: set[str] = set()

    @rule(
        tokens=prompts,
        mode=modes,
        budget=budgets,
        explicit=st.booleans(),
        end=st.integers(1, 30),
        chunk=st.sampled_from([None, None, 3, 7]),
        quality=st.sampled_from([None, None, 0.8, 0.95]),
        salt=salts,
        forced=st.sampled_from([None, None, None, "all", "none"]),
    )
    def submit(self, tokens, mode, budget, explicit, end, chunk, quality, salt, forced):
        options = {"mode": mode, "budget": budget, "min_quality": quality}
        if explicit:
            options["prefix_end_tokens"] = end
            options["forced"] = forced
        given_options = {name: value for name, value in options.items() if value is not None}
        wanted = acceptance_of(RequestOptions(**given_options), self.h.config)
        expected = longest_match(self.h, tokens[:-1], wanted, salt)
        req = self.h.try_submit(tokens, given_options or None, chunk=chunk, cache_salt=salt)
        if req is None:
            return
        assert req.prefix_len == expected
        if req.extend_end < len(tokens):
            self.chunked.add(req.rid)
        else:
            self.h.finish_prefill(req)

    @precondition(lambda self: self.chunked)
    @rule(data=st.data())
    def next_chunk(self, data):
        req = data.draw(st.sampled_from([r for r in self.h.running if r.rid in self.chunked]))
        if self.h.next_chunk(req, 5) and req.extend_end == len(req.full_untruncated_fill_ids):
            self.chunked.discard(req.rid)
            self.h.finish_prefill(req)

    def _decoding(self):
        return [r for r in self.h.running if r.rid not in self.chunked]

    @precondition(lambda self: self._decoding())
    @rule(data=st.data(), steps=st.integers(1, 4))
    def decode(self, data, steps):
        req = data.draw(st.sampled_from(self._decoding()))
        for _ in range(steps):
            if not self.h.decode(req):
                break

    @precondition(lambda self: self._decoding())
    @rule(data=st.data())
    def finish(self, data):
        self.h.finish(data.draw(st.sampled_from(self._decoding())))

    @precondition(lambda self: self._decoding())
    @rule(data=st.data())
    def retract_and_resume(self, data):
        req = data.draw(st.sampled_from(self._decoding()))
        self.h.retract(req)
        self.h.check()
        if self.h.resume(req):
            self.h.finish_prefill(req)

    @rule(reason=st.sampled_from(["exception", "non_finite"]))
    def next_compression_fails(self, reason):
        self.h.compressor.fail_next = reason

    @rule(quality=st.sampled_from([0.7, 0.9, 0.97]))
    def next_quality(self, quality):
        self.h.compressor.quality = quality

    @rule(num_tokens=st.integers(1, 60))
    def evict(self, num_tokens):
        before = self.h.allocator.available_size()
        available = self.h.cache.evictable_size()
        result = self.h.cache.evict(EvictParams(num_tokens=num_tokens))
        assert result.num_tokens_evicted == self.h.allocator.available_size() - before
        assert result.num_tokens_evicted >= min(num_tokens, available)

    @precondition(lambda self: not self.h.running)
    @rule()
    def idle(self):
        self.h.cache.on_idle(fully_idle=True)
        take_census(self.h.cache)

    @precondition(lambda self: not self.h.running)
    @rule()
    def flush(self):
        self.h.cache.reset()
        self.h.pool.clear()
        self.h.allocator.clear()

    @rule(tokens=prompts, mode=modes, budget=budgets)
    def match(self, tokens, mode, budget):
        options = {k: v for k, v in {"mode": mode, "budget": budget}.items() if v is not None}
        wanted = acceptance_of(RequestOptions(**options), self.h.config)
        result = self.h.cache.match_prefix(self.h.key_of(tokens, options))
        assert result.device_prefix_len == longest_match(self.h, tokens, wanted)

    @invariant()
    def everything_adds_up(self):
        if hasattr(self, "h"):
            self.h.check()

    def teardown(self):
        if not hasattr(self, "h"):
            return
        for req in list(self.h.running):
            self.h.finish(req)
        for _ in range(50):
            self.h.cache.on_idle(fully_idle=True)
        take_census(self.h.cache)


TestCacheLife = CacheLife.TestCase
TestCacheLife.settings = settings(
    max_examples=int(os.environ.get("TREE_TEST_EXAMPLES", "60")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
