"""Random lives of the cache against a brute-force model: every step checks books, owners and lineage."""

from __future__ import annotations

import os
from hashlib import sha256

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from grkv_sglang.cache.census import take_census
from grkv_sglang.cache.retention import CommandError
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
# What empties the tree happens seldom, or nothing would ever grow old in it.
seldom = st.sampled_from([False] * 7 + [True])
salts = st.sampled_from([None, None, None, "tenant"])


class CacheLife(RuleBasedStateMachine):
    @initialize(
        num_slots=st.integers(40, 110),
        twin=st.sampled_from(["at_once", "under_pressure"]),
        mode=st.sampled_from(["prefer_exact", "prefer_compressed"]),
        triggers=st.sets(st.sampled_from(["explicit", "insert", "reuse", "pressure"]), min_size=1),
        step_tokens=st.sampled_from([1, 5, 1024]),
        merge_after=st.sampled_from([2, 3]),
        generations=st.sampled_from([0, 2]),
        watermark=st.sampled_from([0.1, 0.3, 0.6]),
        cooldown=st.sampled_from([1, 3]),
        pin_share=st.sampled_from([0.1, 1.0]),
        ttl=st.sampled_from([None, None, 50.0]),
        floor=st.sampled_from([0.0, 0.0, 0.8]),
        profile=st.sampled_from(["default", "default", "per_head"]),
    )
    def start(
        self, num_slots, twin, mode, triggers, step_tokens, merge_after, generations, watermark, cooldown,
        pin_share, ttl, floor, profile,
    ) -> None:  # fmt: skip
        self.h = Harness(
            num_slots=num_slots,
            free_exact_twin=twin,
            mode=mode,
            allow_forced=True,
            triggers=tuple(sorted(triggers)),
            step_tokens=step_tokens,
            merge_after_spans=merge_after,
            max_generations=generations,
            pressure_watermark=watermark,
            pressure_reserve=0.05,
            cooldown_requests=cooldown,
            pin_share=pin_share,
            ttl_s=ttl,
            quality_floor=floor,
            profile=profile,
        )
        self.chunked: set[str] = set()
        self.history: list[int] = []

    @rule(
        tokens=prompts,
        mode=modes,
        budget=budgets,
        explicit=st.booleans(),
        end=st.integers(1, 30),
        chunk=st.sampled_from([None, None, 3, 7]),
        quality=st.sampled_from([None, None, 0.8, 0.95]),
        salt=salts,
        forced=st.sampled_from([None, None, None, None, "all", "none", "packed"]),
        profile=st.sampled_from([None, None, "paper", "per_head"]),
        pin=st.sampled_from([None, None, True]),
        ttl=st.sampled_from([None, None, 20.0]),
        protected=st.sampled_from([None, None, "0-2", "3-5,9-10"]),
    )
    def submit(
        self, tokens, mode, budget, explicit, end, chunk, quality, salt, forced, profile, pin, ttl, protected
    ):
        options = {"mode": mode, "budget": budget, "min_quality": quality}
        if explicit:
            options |= {"prefix_end_tokens": end, "forced": forced, "pin": pin, "ttl_s": ttl}
            options |= {"protected": protected, "profile": profile}
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

    def _whole(self, tokens, options, decodes):
        req = self.h.try_submit(tokens, options)
        if req is None:
            return None
        self.h.finish_prefill(req)
        for _ in range(decodes):
            if not self.h.decode(req):
                break
        tokens = list(req.full_untruncated_fill_ids)
        self.h.finish(req)
        return tokens

    @rule(
        doc=st.integers(0, len(DOCUMENTS) - 1),
        question=st.lists(st.integers(1, 3), min_size=1, max_size=3),
        mark=st.sampled_from([False, True, True]),
        mode=st.sampled_from([None, None, None, "exact"]),
        pin=st.sampled_from([None, None, True]),
        decodes=st.integers(0, 3),
    )
    def ask_about_a_document(self, doc, question, mark, mode, pin, decodes):
        """A whole request, its document marked or not."""
        tokens = DOCUMENTS[doc]
        options = {"mode": mode}
        if mark:
            options |= {"prefix_end_tokens": len(tokens), "pin": pin}
        given = {name: value for name, value in options.items() if value is not None}
        self._whole([*tokens, *question], given or None, decodes)

    @rule(turn=st.lists(st.integers(1, 3), min_size=3, max_size=8), decodes=st.integers(0, 5))
    def next_turn_of_a_chat(self, turn, decodes):
        """A conversation that grows: its history is the prompt and the answer of the turn before."""
        history = self._whole([*self.history, *turn], None, decodes)
        if history is not None:
            self.history = history if len(history) < 48 else []

    @rule()
    def new_chat(self):
        self.history = []

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

    @precondition(lambda self: self.h.running)
    @rule(data=st.data())
    def abort(self, data):
        req = data.draw(st.sampled_from(self.h.running))
        self.chunked.discard(req.rid)
        self.h.abort(req)

    @rule(reason=st.sampled_from([None, None, None, "exception", "non_finite"]))
    def next_compression_fails(self, reason):
        self.h.compressor.fail_next = reason

    @rule(now=seldom)
    def next_probe_fails(self, now):
        if now:
            self.h.compressor.fail_probe = "too_short"

    @rule(reason=st.sampled_from([None, None, None, "exception", "no_positions"]))
    def next_chunk_of_a_pass_fails(self, reason):
        self.h.compressor.fail_chunk = reason

    @rule(number=st.sampled_from([0, 0, 1, 3]))
    def next_compressions_have_passes(self, number):
        self.h.compressor.num_chunks = number

    @rule()
    def a_turn_without_a_batch(self):
        self.h.cache.on_idle(fully_idle=False)

    @rule(seconds=st.sampled_from([1.0, 1.0, 1.0, 15.0, 60.0]))
    def time_passes(self, seconds):
        self.h.clock.time_s += seconds

    @rule(now=seldom)
    def weights_change(self, now):
        if not now:
            return
        self.h.cache.weights_changed()
        assert not [span for span in self.h.cache.spans() if self.h.cache.in_reach(span)]

    @rule(action=st.sampled_from(["delete", "pin", "pin", "pin", "unpin"]), data=st.data())
    def command_on_a_span(self, action, data):
        cache = self.h.cache
        listed = cache.state()["spans"]
        if not listed:
            return
        chosen = data.draw(st.sampled_from(listed))
        named = [
            span
            for span in cache.spans()
            if cache.in_reach(span)
            and sha256(cache.path_tokens(span).tobytes()).hexdigest() == chosen["tokens_sha256"]
        ]
        refusal = ""
        try:
            cache.command({"action": action, "tokens_sha256": chosen["tokens_sha256"]})
        except CommandError as error:
            refusal = str(error)
        assert not refusal or (action == "pin" and "pinned spans may hold" in refusal)
        if action == "delete":
            assert not any(cache.in_reach(span) and span in set(cache.nodes()) for span in named)
        elif action == "unpin":
            assert not any(span.pinned for span in named)
        limit = self.h.config.pin_share * self.h.allocator.size
        assert cache.state()["pool"]["pinned_slots"] <= limit

    @rule()
    def delete_a_tenant(self):
        cache = self.h.cache
        cache.command({"action": "delete", "cache_salt": "tenant"})
        for node in cache.nodes():
            assert node.key.cache_salt != "tenant" or not cache.in_reach(node)

    @rule(quality=st.sampled_from([0.7, 0.9, 0.97]))
    def next_quality(self, quality):
        self.h.compressor.quality = quality

    @rule(num_tokens=st.sampled_from([1, 1, 3, 5, 10, 60]))
    def evict(self, num_tokens):
        before = self.h.allocator.available_size()
        available = self.h.cache.evictable_size()
        in_order = self.eviction_groups()
        result = self.h.cache.evict(EvictParams(num_tokens=num_tokens))
        left = self.eviction_groups()
        # Nothing of a later group goes while an evictable leaf of an earlier one stays.
        for group, before_group in in_order.items():
            if before_group - left.get(group, set()):
                assert not any(in_order.get(g, set()) & left.get(g, set()) for g in range(group))
        assert result.num_tokens_evicted == self.h.allocator.available_size() - before
        assert result.num_tokens_evicted >= min(num_tokens, available)

    def eviction_groups(self):
        groups: dict[int, set] = {}
        for leaf in self.h.cache.evictable_leaves:
            groups.setdefault(self.h.cache._eviction_rank(leaf)[0], set()).add(leaf)
        return groups

    @precondition(lambda self: not self.h.running)
    @rule()
    def idle(self):
        self.h.work()
        take_census(self.h.cache)

    @precondition(lambda self: not self.h.running)
    @rule(now=seldom)
    def flush(self, now):
        if not now:
            return
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
            floor = self.h.config.quality_floor
            assert all(s.origin.forced or s.origin.quality >= floor for s in self.h.cache.spans())

    def teardown(self):
        if not hasattr(self, "h"):
            return
        for req in list(self.h.running):
            self.h.finish(req)
        self.h.work()
        take_census(self.h.cache)
        assert not self.h.cache._detached


TestCacheLife = CacheLife.TestCase
TestCacheLife.settings = settings(
    max_examples=int(os.environ.get("TREE_TEST_EXAMPLES", "60")),
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
