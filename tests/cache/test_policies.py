"""When and what is compressed, and what stays: named situations of jobs, pressure, merges and retention."""

from __future__ import annotations

from itertools import pairwise

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from grkv_sglang.cache.census import take_census
from grkv_sglang.cache.span import SpanNode, path_facts
from grkv_sglang.policy.boundaries import MessageMarkers
from tests.cache.harness import Harness

HEADER = [9, 8, 7]
DOC = [1, 2, 3, 1, 1, 2, 2, 3, 3, 1, 2, 1]
OTHER = [2, 1, 1, 3, 2, 2, 1, 3]
LONG = [1 + (i * i + i // 3) % 3 for i in range(40)]
MARKERS = MessageMarkers(end_of_message=(50,), user_header=(60, 61))
SYSTEM = [4, 5, 4, 4, 5, 5, 4, 50, 40]
"""A system message of nine tokens; the template puts the last one between two messages."""


def ranges(h: Harness) -> list[tuple[int, int, int]]:
    """Start, end and slots of all spans in reach."""
    return sorted((s.start_tokens, s.end_tokens, s.num_slots) for s in h.cache.spans() if h.cache.in_reach(s))


def failed(h: Harness) -> dict[str, int]:
    return dict(h.cache.counters.compressions_failed)


# -- boundaries ------------------------------------------------------------------------------------


def test_a_short_shared_header_stays_exact_and_is_held_once():
    h = Harness()
    h.run([*HEADER, *OTHER, 7])
    h.run([*HEADER, *DOC, 7], {"prefix_end_tokens": 15})
    assert ranges(h) == [(3, 15, 5)]  # ceil(0.34 * 12)
    req = h.submit([*HEADER, *DOC, 9, 9])
    facts = path_facts(req.last_node)
    assert (req.prefix_len, facts.span_tokens, int(h.gaps.tensor[req.kv.req_pool_idx])) == (15, 12, 7)
    h.check()


def test_a_long_shared_part_becomes_a_span_of_its_own_that_both_prompts_use():
    h = Harness()
    h.run([*DOC, *OTHER, 7])
    h.run([*DOC, *LONG[:10], 7], {"prefix_end_tokens": 22})
    h.work()
    assert ranges(h) == [(0, 12, 5), (12, 22, 4)]
    first, second = sorted(h.cache.spans(), key=lambda s: s.start_tokens)
    assert second.parent is first
    assert (first.origin.shared, second.origin.shared) == (True, True)
    req = h.submit([*DOC, *LONG[:10], 9])
    assert path_facts(req.last_node).span_tokens == 22
    # What the other prompt left was computed on the exact document and is kept: behind the span.
    other = h.submit([*DOC, *OTHER, 9])
    assert (other.prefix_len, path_facts(other.last_node).spans) == (20, [first])
    h.check()


def test_both_parts_were_compressed_from_exact_kv():
    """The second span of a job is not compressed on top of the first: its source is the exact path."""
    h = Harness()
    h.run([*DOC, *OTHER, 7])
    calls = h.compressor.calls
    h.run([*DOC, *LONG[:10], 7], {"prefix_end_tokens": 22})  # TableCompressor checks every source slot
    h.work()
    assert h.compressor.calls == calls + 2
    assert h.cache.counters.compressions_started == 1
    assert h.cache.counters.compressions_done == 2


def test_the_span_that_is_there_is_continued_not_made_again():
    h = Harness()
    h.run([*DOC, 7], {"prefix_end_tokens": 12})
    h.run([*DOC, *OTHER, 7], {"prefix_end_tokens": 20})
    h.run([*DOC, *LONG[:10], 7], {"prefix_end_tokens": 22})
    assert ranges(h) == [(0, 12, 5), (12, 20, 3), (12, 22, 4)]
    h.check()


def test_nothing_is_moved_behind_a_span_of_no_slots():
    h = Harness(allow_forced=True)
    h.run([*DOC, 1, 2], {"prefix_end_tokens": 12, "forced": "none"})
    assert ranges(h) == [(0, 12, 0)]
    assert h.cache.total_size() == 0
    assert h.submit([*DOC, 1, 2, 3]).prefix_len == 12
    h.check()


# -- steps -----------------------------------------------------------------------------------------


def test_work_is_spread_over_steps_and_its_slots_count_as_protected():
    h = Harness(step_tokens=4)  # 12 tokens, 3 layers: one layer per step
    req = h.submit([*DOC, 7], {"prefix_end_tokens": 12})
    h.finish_prefill(req)
    h.finish(req)  # the probe
    assert h.cache.state()["pool"]["in_work_slots"] == 5
    assert h.cache.protected_size() == 12 + 5
    h.check()
    seen = []
    while h.cache.on_idle(fully_idle=False):
        seen.append(h.cache.state()["pool"]["in_work_slots"])
        h.check()
    assert seen == [5, 5]  # the third layer finishes it
    assert ranges(h) == [(0, 12, 5)]
    take_census(h.cache)


def test_a_split_of_the_path_in_the_middle_of_the_work_does_no_harm():
    h = Harness(step_tokens=4)
    h.run([*DOC, 7], {"prefix_end_tokens": 12})
    other = h.submit([*DOC[:5], 9, 9])
    assert other.prefix_len == 5
    h.work()
    assert ranges(h) == [(0, 12, 5)]
    h.check()
    assert h.submit([*DOC, 9]).prefix_len == 12


def test_a_flush_in_the_middle_of_the_work_forgets_it():
    h = Harness(step_tokens=4)
    h.run([*DOC, 7], {"prefix_end_tokens": 12})
    h.cache.reset()
    h.pool.clear()
    h.allocator.clear()
    assert not h.cache.on_idle(fully_idle=True)
    assert h.cache.protected_size() == 0
    take_census(h.cache)


def test_the_work_is_given_up_before_eviction_fails():
    h = Harness(step_tokens=4)
    h.run([*DOC, 7, 7], {"prefix_end_tokens": 12})  # 5 slots in work beside a locked path of 12
    assert h.cache.evict(EvictParams(num_tokens=1)).num_tokens_evicted == 2
    assert h.cache._work.waiting
    assert h.cache.evict(EvictParams(num_tokens=1)).num_tokens_evicted == 5
    assert failed(h) == {"given_up_for_room": 1}
    assert not h.cache._work.waiting
    h.check()
    assert h.submit([*DOC, 9]).prefix_len == 12


def test_the_work_goes_after_spans_and_before_pinned_ones():
    h = Harness(pin_share=1.0)
    h.run([*DOC, 7], {"prefix_end_tokens": 12, "pin": True})
    h.run([*OTHER, 7], {"prefix_end_tokens": 8})
    h.cache.config = h.cache._work._config = h.config.model_copy(update={"step_tokens": 4})
    h.run([3, 3, *LONG[:10], 7], {"prefix_end_tokens": 12})
    assert ranges(h) == [(0, 8, 3), (0, 12, 5)]
    h.cache.evict(EvictParams(num_tokens=4))  # two answers, and the span that is not pinned
    assert ranges(h) == [(0, 12, 5)]
    assert h.cache._work.waiting
    h.cache.evict(EvictParams(num_tokens=1))
    assert (ranges(h), failed(h)) == ([(0, 12, 5)], {"given_up_for_room": 1})
    h.cache.evict(EvictParams(num_tokens=13))
    assert ranges(h) == []
    h.check()


def test_a_second_wish_for_a_waiting_prefix_is_merged_into_the_first():
    h = Harness(step_tokens=4)
    asked = [
        h.submit([*OTHER, 7], {"prefix_end_tokens": 8}),
        h.submit([*DOC, 7], {"prefix_end_tokens": 12, "pin": True}),
        h.submit([*DOC, 8], {"prefix_end_tokens": 12}),
    ]
    for req in asked:
        h.finish_prefill(req)
    for req in asked:
        h.finish(req)
    assert h.cache._work.waiting == 2
    h.work()
    assert ranges(h) == [(0, 8, 3), (0, 12, 5)]
    assert [s.pinned for s in h.cache.spans() if s.end_tokens == 12] == [True]


def test_a_failed_prefix_cools_down():
    h = Harness(cooldown_requests=3)
    h.compressor.fail_next = "non_finite"
    h.run([*DOC, 7], {"prefix_end_tokens": 12})
    assert failed(h) == {"non_finite": 1}
    h.run([*DOC, 8], {"prefix_end_tokens": 12})
    h.run([*DOC, 9], {"prefix_end_tokens": 12})
    assert h.cache.counters.compressions_skipped == {"cooling_down": 2}
    assert ranges(h) == []
    h.run([*DOC, 6], {"prefix_end_tokens": 12})
    assert ranges(h) == [(0, 12, 5)]


@pytest.mark.parametrize("where", ["fail_probe", "fail_next"])
def test_a_failure_gives_every_slot_back(where: str):
    h = Harness(step_tokens=4)
    setattr(h.compressor, where, "non_finite")
    h.run([*DOC, 7], {"prefix_end_tokens": 12})
    h.work()
    assert failed(h) == {"non_finite": 1}
    assert ranges(h) == []
    h.check()
    take_census(h.cache)
    assert h.submit([*DOC, 9]).prefix_len == 12


def test_a_failure_in_the_second_part_keeps_the_first():
    h = Harness(step_tokens=4)
    h.run([*DOC, *OTHER, 7])
    h.run([*DOC, *LONG[:10], 7], {"prefix_end_tokens": 22})
    while not ranges(h):
        h.cache.on_idle(fully_idle=False)
    h.compressor.fail_probe = "too_short"
    h.work()
    assert ranges(h) == [(0, 12, 5)]
    assert failed(h) == {"too_short": 1}
    h.check()


# -- passes ----------------------------------------------------------------------------------------


def test_passes_come_before_the_layers_one_chunk_per_step():
    h = Harness(step_tokens=4)
    h.compressor.num_chunks = 3
    req = h.submit([*DOC, 7], {"prefix_end_tokens": 12})
    h.finish_prefill(req)
    h.finish(req)  # the probe
    flight = h.cache._work._in_flight
    assert flight is not None
    seen = [(h.compressor.chunks_done, flight.layers_left)]
    while h.cache.on_idle(fully_idle=False):
        seen.append((h.compressor.chunks_done, flight.layers_left))
        assert h.cache.state()["pool"]["in_work_slots"] == 5
        h.check()
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3), (3, 2), (3, 1)]  # the third layer finishes it
    assert ranges(h) == [(0, 12, 5)]
    take_census(h.cache)


def test_a_short_span_with_a_pass_is_not_finished_in_the_step_that_begins_it():
    h = Harness()
    h.compressor.num_chunks = 1
    h.run([*DOC, 7], {"prefix_end_tokens": 12})
    assert (ranges(h), h.compressor.chunks_done) == ([], 0)
    assert h.cache.on_idle(fully_idle=False)
    assert (ranges(h), h.compressor.chunks_done) == ([], 1)
    assert not h.cache.on_idle(fully_idle=False)  # all layers at once
    assert ranges(h) == [(0, 12, 5)]


def test_every_part_of_a_job_has_its_own_passes():
    h = Harness()
    h.run([*DOC, *OTHER, 7])
    h.compressor.num_chunks = 2
    h.run([*DOC, *LONG[:10], 7], {"prefix_end_tokens": 22})
    h.work()
    assert ranges(h) == [(0, 12, 5), (12, 22, 4)]
    assert h.compressor.chunks_done == 4
    h.check()


@pytest.mark.parametrize("chunks_before", [0, 1, 2])
def test_work_is_given_up_between_two_chunks(chunks_before: int):
    h = Harness()
    h.compressor.num_chunks = 3
    h.run([*DOC, 7, 7], {"prefix_end_tokens": 12})
    for _ in range(chunks_before):
        h.cache.on_idle(fully_idle=False)
    assert (h.compressor.chunks_done, h.cache.protected_size()) == (chunks_before, 12 + 5)
    available = h.allocator.available_size()
    assert h.cache.surrender_slots() == 5
    assert (h.allocator.available_size(), h.cache.protected_size()) == (available + 5, 0)
    assert failed(h) == {"given_up_for_room": 1}
    h.check()
    h.work()
    assert (h.compressor.chunks_done, ranges(h)) == (chunks_before, [])
    take_census(h.cache)
    assert h.submit([*DOC, 9]).prefix_len == 12


def test_a_flush_between_two_chunks_forgets_the_work():
    h = Harness()
    h.compressor.num_chunks = 3
    h.run([*DOC, 7], {"prefix_end_tokens": 12})
    h.cache.on_idle(fully_idle=False)
    h.cache.reset()
    h.pool.clear()
    h.allocator.clear()
    assert not h.cache.on_idle(fully_idle=True)
    assert (h.compressor.chunks_done, h.cache.protected_size()) == (1, 0)
    take_census(h.cache)


@pytest.mark.parametrize("reason", ["no_positions", "exception"])
@pytest.mark.parametrize("chunks_before", [0, 2])
def test_a_chunk_that_fails_ends_the_job(reason: str, chunks_before: int):
    h = Harness(cooldown_requests=2)
    h.compressor.num_chunks = 3
    h.run([*DOC, 7], {"prefix_end_tokens": 12})
    for _ in range(chunks_before):
        h.cache.on_idle(fully_idle=False)
    h.compressor.fail_chunk = reason
    assert not h.cache.on_idle(fully_idle=False)
    assert failed(h) == {reason: 1}
    assert (h.compressor.chunks_done, ranges(h)) == (chunks_before + 1, [])
    assert (h.cache.protected_size(), h.cache.state()["pool"]["in_work_slots"]) == (0, 0)
    h.check()
    take_census(h.cache)
    again = h.run([*DOC, 9], {"prefix_end_tokens": 12})
    assert again.customized_info["grkv"][0]["exact_tokens"] == 12
    assert h.cache.counters.compressions_skipped == {"cooling_down": 1}


# -- quality floor ---------------------------------------------------------------------------------


def test_a_span_below_the_quality_floor_is_not_stored():
    h = Harness(quality_floor=0.91, cooldown_requests=3, step_tokens=4)
    h.run([*DOC, 7], {"prefix_end_tokens": 12})
    h.work()
    assert (ranges(h), failed(h)) == ([], {"low_quality": 1})
    assert (h.cache.counters.compressions_started, h.cache.counters.compressions_done) == (1, 0)
    assert h.allocator.available_size() == 120 - 13
    h.check()
    take_census(h.cache)
    for question in (8, 9):
        req = h.run([*DOC, question], {"prefix_end_tokens": 12})
        assert (req.customized_info["grkv"][0]["exact_tokens"], h.compressor.calls) == (12, 1)
    assert h.cache.counters.compressions_skipped == {"cooling_down": 2}
    h.compressor.quality = 0.91
    h.run([*DOC, 6], {"prefix_end_tokens": 12})
    h.work()
    assert (ranges(h), h.compressor.calls) == ([(0, 12, 5)], 2)


def test_the_quality_floor_leaves_the_parts_before():
    h = Harness(quality_floor=0.8)
    h.run([*DOC, *OTHER, 7])
    h.compressor.num_chunks = 1
    h.run([*DOC, *LONG[:10], 7], {"prefix_end_tokens": 22})
    while not ranges(h):
        h.cache.on_idle(fully_idle=False)
    h.compressor.quality = 0.79
    h.work()
    assert (ranges(h), failed(h)) == ([(0, 12, 5)], {"low_quality": 1})
    assert h.submit([*DOC, *LONG[:10], 9]).prefix_len == 22
    h.check()


def test_the_quality_floor_holds_for_the_product_of_merged_spans():
    h = Harness(num_slots=250, row_tokens=250, merge_after_spans=2, max_generations=1, quality_floor=0.85)
    chat(h, 4)  # each of 0.9
    assert failed(h) == {"low_quality": 1}
    assert {s.origin.generation for s in h.cache.spans()} == {0}
    h.check()


def test_forced_spans_know_no_quality_floor():
    h = Harness(quality_floor=0.95, allow_forced=True)
    h.run([*DOC, 7], {"prefix_end_tokens": 12, "forced": "all"})
    h.run([*OTHER, 7], {"prefix_end_tokens": 8, "forced": "none"})
    assert ranges(h) == [(0, 8, 0), (0, 12, 12)]
    assert failed(h) == {}


# -- what stays exact ------------------------------------------------------------------------------


def test_the_system_message_stays_exact():
    h = Harness(markers=MARKERS, protect_system=True)
    prompt = [*SYSTEM, 60, 61, *DOC, 50, 7]
    end = len(prompt) - 1
    h.run(prompt, {"prefix_end_tokens": end})
    assert ranges(h) == [(9, end, 6)]  # ceil(0.34 * 15)
    h.check()
    req = h.submit([*prompt, 7])
    facts = path_facts(req.last_node)
    assert (facts.logical_tokens, facts.span_tokens, facts.span_slots) == (end + 1, 15, 6)
    assert h.submit([*SYSTEM, 60, 61, 3]).prefix_len == 9  # another chat shares it
    h.check()


def test_without_protection_the_system_message_is_a_span_of_its_own():
    h = Harness(markers=MARKERS)
    h.run([*SYSTEM, 60, 61, *DOC, 50, 7], {"prefix_end_tokens": 24})
    h.work()
    assert ranges(h) == [(0, 8, 3), (8, 24, 6)]


@pytest.mark.parametrize("end", [4, 8, 9])
def test_a_job_that_ends_in_the_system_message_is_skipped(end: int):
    h = Harness(markers=MARKERS, protect_system=True)
    prompt = [*SYSTEM, 60, 61, *DOC, 50, 7]
    h.run(prompt, {"prefix_end_tokens": end})
    assert (ranges(h), h.compressor.calls, failed(h)) == ([], 0, {})
    assert h.cache.counters.compressions_skipped == {"protected": 1}
    assert h.cache.counters.compressions_started == 0
    h.check()
    assert h.submit([*prompt, 7]).prefix_len == len(prompt)


def test_a_reused_system_message_is_skipped():
    h = Harness(markers=MARKERS, protect_system=True)
    h.run([*SYSTEM, 60, 61, *DOC, 50])
    h.run([*SYSTEM, 60, 61, *OTHER, 50])
    assert (ranges(h), h.cache.counters.compressions_skipped) == ([], {"protected": 1})
    without = Harness(markers=MARKERS)
    without.run([*SYSTEM, 60, 61, *DOC, 50])
    without.run([*SYSTEM, 60, 61, *OTHER, 50])
    assert ranges(without) == [(0, 9, 4)]


def test_pressure_passes_over_system_messages():
    h = under_pressure(markers=MARKERS, protect_system=True)
    h.run([*SYSTEM, 60, 61, *OTHER[:3], 50])  # the coldest: its stretch is the system message
    h.run([*LONG, 7])
    h.work()
    assert ranges(h) == [(0, 25, 9)]
    assert h.cache.counters.compressions_skipped == {"protected": 1}
    assert h.submit([*SYSTEM, 60, 61, *OTHER[:3], 50, 7]).prefix_len == 15
    h.check()


def test_prompts_without_a_chat_are_not_protected():
    h = Harness(markers=MARKERS, protect_system=True)
    h.run([*DOC, 7], {"prefix_end_tokens": 12})
    assert ranges(h) == [(0, 12, 5)]


# -- protected ranges ------------------------------------------------------------------------------


def test_protected_tokens_come_on_top_of_the_budget():
    h = Harness()
    h.run([*DOC, 7], {"prefix_end_tokens": 12, "protected": "0-2,5-8"})
    (span,) = h.cache.spans()
    assert (span.num_slots, span.origin.protected) == (5 + 3, ((0, 2), (5, 8)))  # ceil(0.34 * 7)
    h.check()


def test_a_span_without_the_protected_tokens_is_made_anew():
    h = Harness()
    h.run([*DOC, 7], {"prefix_end_tokens": 12})
    asked = {"prefix_end_tokens": 12, "protected": "5-8"}
    assert h.submit([*DOC, 8], asked).prefix_len == 0
    h.run([*DOC, 9], asked)
    assert [s.origin.protected for s in h.cache.spans()] == [((5, 8),)]
    assert ranges(h) == [(0, 12, 3 + 4)]  # it replaces the other one
    # It serves a part of these, and who protects nothing; it does not serve more.
    for protected, length in (("5-8", 12), ("6-8", 12), (None, 12), ("4-8", 0), ("5-8,9-10", 0)):
        options = {"prefix_end_tokens": 12, **({"protected": protected} if protected else {})}
        assert h.cache.match_prefix(h.key_of([*DOC, 6], options)).device_prefix_len == length
    h.check()


def test_every_part_of_a_job_keeps_the_protected_tokens_inside():
    h = Harness()
    h.run([*DOC, *OTHER, 7])
    h.run([*DOC, *LONG[:10], 7], {"prefix_end_tokens": 22, "protected": "10-14,20-21"})
    h.work()
    first, second = sorted(h.cache.spans(), key=lambda s: s.start_tokens)
    assert (first.origin.protected, first.num_slots) == (((10, 12),), 2 + 4)  # ceil(0.34 * 10)
    assert (second.origin.protected, second.num_slots) == (((12, 14), (20, 21)), 3 + 3)  # ceil(0.34 * 7)
    asked = {"prefix_end_tokens": 22, "protected": "10-14,20-21"}
    assert path_facts(h.submit([*DOC, *LONG[:10], 9], asked).last_node).span_tokens == 22
    h.check()


def test_a_prefix_that_is_all_protected_is_stored_whole():
    h = Harness()
    h.run([*DOC, 7], {"prefix_end_tokens": 12, "protected": "0-12"})
    assert ranges(h) == [(0, 12, 12)]
    h.check()


def merging() -> tuple[Harness, list[int]]:
    """A chat of two private spans, with an exact tail that the next job merges with them."""
    h = Harness(num_slots=300, row_tokens=250, merge_after_spans=2, max_generations=1)
    history = chat(h, 3)
    assert [s.origin.shared for s in h.cache.spans()] == [False, False]
    return h, history


def test_protected_tokens_behind_merged_spans_are_kept():
    h, history = merging()
    end, n = max(s.end_tokens for s in h.cache.spans()), len(history)
    asked = {"prefix_end_tokens": n, "protected": f"{end}-{end + 5},{n - 1}-{n}"}
    h.run([*history, 7], asked)
    (span,) = [s for s in h.cache.spans() if s.replaces]
    assert (span.start_tokens, span.end_tokens) == (0, n)
    assert span.origin.protected == ((end, end + 5), (n - 1, n))
    assert span.num_slots == 6 + -(-34 * (n - 6) // 100)
    h.check()


def test_spans_over_protected_tokens_are_not_merged():
    """What such spans keep is not the tokens' own KV any more, so that the merged one could not claim it."""
    h, history = merging()
    h.compressor.num_chunks = 5
    h.run([*DOC, 7], {"prefix_end_tokens": 12})  # what follows has to wait
    h.run([*history, 7], {"prefix_end_tokens": len(history), "protected": "10-12"})
    assert h.cache._work.waiting == 2
    # The exact path that the request left is evicted before its turn comes; the chat's own one is not.
    for node in list(h.cache.root_node.children.values()):
        if not isinstance(node, SpanNode) and list(node.key.token_ids)[:4] == history[:4]:
            h.cache.drop(node)
    h.compressor.num_chunks = 0
    h.work()
    assert not [s for s in h.cache.spans() if s.replaces]
    assert not [s for s in h.cache.spans() if s.origin.protected]
    h.check()


# -- triggers --------------------------------------------------------------------------------------


def test_insert_compresses_what_one_request_leaves():
    h = Harness(triggers="insert")
    h.run([*LONG, 7])  # 41 tokens of prompt, a margin of 16 stays exact
    assert ranges(h) == [(0, 25, 9)]
    h.check()
    h.run([*LONG[:15], 7])  # too short behind the margin
    assert len(ranges(h)) == 1


def test_reuse_waits_for_as_many_hits_as_it_should():
    h = Harness(reuse_min_hits=2)
    h.run([*LONG, 7])
    h.run([*LONG, 8])
    assert ranges(h) == []
    h.run([*LONG, 9])
    assert ranges(h) == [(0, 24, 9)]


@pytest.mark.parametrize(
    ("shared", "second"),
    [(30, [(0, 30), (30, 34)]), (32, [(0, 32)])],  # what follows is long enough for a span of its own, or not
)
def test_what_a_span_shares_with_others_becomes_a_span_of_its_own(shared, second):
    """The first reuse of a prefix may be that of one prompt behind it, whose span fits no other prompt."""
    h = Harness(row_tokens=80)
    prefix = [1 + i % 2 + i // 7 % 3 for i in range(shared)]
    for last in (7, 8):
        h.run([*prefix, *[5] * (50 - shared), last])
    assert [(start, end) for start, end, _ in ranges(h)] == [(0, 34)]
    for last in (7, 8):
        h.run([*prefix, *[6] * (50 - shared), last])
    h.work()
    assert h.cache.counters.span_hits == {}  # the first span took the prefix's exact KV with it
    assert [(start, end) for start, end, _ in ranges(h)] == sorted([(0, 34), *second])
    assert h.submit([*prefix, 9, 9]).prefix_len == shared
    h.check()


def test_samples_of_one_request_do_not_count_as_reuse():
    h = Harness()
    h.run([*LONG, 7])
    req = h.submit([*LONG, 8])
    req.sampling_params.n = 2
    h.finish_prefill(req)
    h.finish(req)
    assert ranges(h) == [(0, 24, 9)]  # n is looked at when the request is admitted: this one was n = 1


def test_marks_are_ignored_where_the_server_does_not_take_them():
    h = Harness(triggers="reuse")
    h.run([*DOC, 7], {"prefix_end_tokens": 12})
    assert ranges(h) == []


# -- pressure --------------------------------------------------------------------------------------


def under_pressure(**settings) -> Harness:
    return Harness(
        num_slots=100, triggers="explicit,pressure", pressure_watermark=0.5, pressure_reserve=0.1, **settings
    )


def test_pressure_compresses_the_coldest_stretch_and_frees_it():
    h = under_pressure()
    h.run([*LONG, 7])
    assert ranges(h) == []  # 59 of 100 slots are free
    h.run([3, 3, *LONG[:20], 7])
    assert ranges(h) == [(0, 25, 9)]  # the first path, to a margin before its end; the second stays
    assert h.cache.counters.spans_made == {"pressure": 1}
    h.check()
    # The 16 tokens behind it hang under the span now.
    assert h.allocator.available_size() == 100 - 9 - 16 - 23
    assert h.submit([*LONG, 7, 7]).prefix_len == 41


def test_pressure_ends_a_stretch_where_prompts_part():
    h = under_pressure()
    h.run([*LONG[:30], 7, 7, 7])
    h.run([*LONG[:30], 8, 8, 8])
    h.run([3, 3, 3, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2])
    assert ranges(h) == [(0, 30, 11)]
    (span,) = h.cache.spans()
    assert span.origin.shared
    h.check()


def test_pressure_frees_twins_before_it_compresses():
    h = under_pressure(free_exact_twin="under_pressure")
    h.run([*DOC, 7], {"prefix_end_tokens": 12})
    (span,) = h.cache.spans()
    assert h.cache.exact_twins(span)
    h.run([3, 3, *LONG[:34], 7])
    assert not h.cache.exact_twins(span)
    assert h.cache.counters.spans_made == {"explicit": 1}


def test_pressure_leaves_what_a_request_uses():
    h = under_pressure()
    held = h.submit([*LONG, 7])
    h.finish_prefill(held)
    h.run([3, 3, *OTHER, 7])
    assert ranges(h) == []
    h.check()
    h.finish(held)
    h.work()
    h.check()


def test_eviction_leaves_a_reserve_for_the_next_compression():
    h = under_pressure()
    h.run([*LONG[:20], 7])
    h.run([2, 2, *LONG[:20], 7])
    h.cache._pressure_seen = True  # nothing more is compressed
    before = h.allocator.available_size()
    req = h.submit([3] * (before + 1))
    assert h.allocator.available_size() >= 10  # 0.1 of the pool, beyond what was asked for
    h.check_row(req)


# -- multi-turn ------------------------------------------------------------------------------------


def chat(h: Harness, turns: int, size: int = 20) -> list[int]:
    """A conversation of `turns` turns, each prompt the history and `size` new tokens."""
    history: list[int] = []
    for turn in range(turns):
        prompt = [*history, *(1 + (turn + i * i) % 3 for i in range(size))]
        req = h.submit(prompt)
        h.finish_prefill(req)
        for _ in range(3):
            assert h.decode(req)
        history = list(req.full_untruncated_fill_ids)
        h.finish(req)
        h.check()
    return history


def test_a_growing_chat_is_compressed_span_after_span():
    h = Harness(num_slots=200, row_tokens=200, merge_after_spans=9)
    history = chat(h, 6)
    spans = sorted(h.cache.spans(), key=lambda s: s.start_tokens)
    assert len(spans) >= 3
    for before, after in pairwise(spans):
        assert (after.start_tokens, after.parent) == (before.end_tokens, before)
    assert not any(span.origin.shared for span in spans)
    # The tree holds the spans and the newest turn, nothing twice.
    exact = len(history) - spans[-1].end_tokens
    assert h.cache.total_size() <= sum(s.num_slots for s in spans) + exact
    req = h.submit([*history, 1])
    assert req.prefix_len >= len(history) - 1
    assert path_facts(req.last_node).spans[0] is spans[-1]
    h.check()


def test_a_request_knows_where_heads_hold_tokens_of_their_own():
    """One span, two in a row, none; `check_row` compares what is noted for a row with the request's path."""
    h = Harness(num_slots=300, row_tokens=100, profile="per_head")
    other = [2, 2, 1, 1, 3, 3, 2, 2, 1, 1, 3, 3]
    h.run([*DOC, *DOC, 7], {"prefix_end_tokens": 24})
    h.run([*DOC, *other, 7], {"prefix_end_tokens": 24})  # in two parts: both prompts share the first
    h.work()
    shared = h.submit([*DOC, *other, 9], chunk=5)
    whole = h.submit([*DOC, *DOC, 8])
    plain = h.submit([*other, 9])
    regions = [h.gaps.regions_of(req.kv.req_pool_idx) for req in (shared, whole, plain)]
    assert [[(r.first_column, r.num_slots) for r in of_row] for of_row in regions] == [
        [(24 - 10, 5), (24 - 5, 5)],
        [(24 - 9, 9)],
        [],
    ]
    for req in (shared, whole, plain):
        h.finish_prefill(req)
        assert h.decode(req)
        h.finish(req)
    h.check()
    # A row goes to another request: nothing of the last one's stays.
    again = h.submit([*other, 5])
    assert h.gaps.regions_of(again.kv.req_pool_idx) == ()
    h.cache.reset()
    assert all(h.gaps.regions_of(row) == () for row in range(9))


def test_a_chat_is_compressed_behind_budgets_per_head_but_never_merges_them():
    """What a compression is told of the slots before it is checked by `TableCompressor`."""
    h = Harness(num_slots=300, row_tokens=200, profile="per_head", merge_after_spans=2)
    chat(h, 5)
    spans = sorted(h.cache.spans(), key=lambda s: s.start_tokens)
    assert len(spans) >= 3
    assert all(span.counts is not None and not span.replaces for span in spans)
    for before, after in pairwise(spans):
        assert after.parent is before
    # Behind one of them even spans are merged as always: the run ends at it.
    mixed = Harness(num_slots=400, row_tokens=400, merge_after_spans=2, budget=0.34)
    history = [*DOC, *DOC]
    mixed.run([*history, 7], {"prefix_end_tokens": 24, "profile": "per_head"})
    for turn in range(5):
        req = mixed.run([*history, *(1 + (turn + i * i) % 3 for i in range(20))])
        history = list(req.full_untruncated_fill_ids)
        mixed.check()
    merged = [span for span in mixed.cache.spans() if span.replaces]
    assert merged
    assert all(old.counts is None for span in merged for old in span.replaces)
    assert min(span.start_tokens for span in merged) == 24


def test_private_spans_are_merged_into_the_next_one():
    h = Harness(num_slots=250, row_tokens=250, merge_after_spans=2, max_generations=1)
    history = chat(h, 4)
    merged = [s for s in h.cache.spans() if s.replaces]
    (span,) = merged
    assert (span.start_tokens, span.origin.generation) == (0, 1)
    assert [s.origin.generation for s in span.replaces] == [0, 0]
    assert span.num_slots == -(-34 * len(span.key) // 100)
    assert span.origin.quality == pytest.approx(0.9 * 0.9)
    # The merged spans are the first to go; their exact tail is gone already.
    assert all(h.cache.is_twin(old) for old in span.replaces)
    assert h.cache.exact_twins(span) == []
    req = h.submit([*history, 1])
    assert path_facts(req.last_node).spans[0] is span
    h.check()
    h.finish_prefill(req)
    h.finish(req)
    h.cache.evict(EvictParams(num_tokens=1))
    assert span.replaces[-1] not in set(h.cache.spans())
    h.check()


def test_generations_are_limited():
    h = Harness(num_slots=400, row_tokens=400, merge_after_spans=2, max_generations=2)
    chat(h, 14)
    assert {s.origin.generation for s in h.cache.spans()} <= {0, 1, 2}
    assert max(s.origin.generation for s in h.cache.spans()) == 2
    never = Harness(num_slots=400, row_tokens=400, merge_after_spans=2, max_generations=0)
    chat(never, 6)
    assert {s.origin.generation for s in never.cache.spans()} == {0}


def test_a_marked_document_is_not_merged_into_a_chat_about_it():
    h = Harness(num_slots=250, row_tokens=250, merge_after_spans=2)
    h.run([*LONG, 7], {"prefix_end_tokens": 40})
    history = [*LONG]
    for turn in range(4):
        req = h.run([*history, *(1 + (turn + i) % 2 for i in range(22))])
        history = list(req.full_untruncated_fill_ids)
    assert (0, 40, 14) in ranges(h)
    assert not any(s.replaces and s.start_tokens == 0 for s in h.cache.spans())


# -- retention -------------------------------------------------------------------------------------


def test_pinned_spans_go_last_and_only_within_the_limit():
    h = Harness(pin_share=0.05)  # 6 of 120 slots
    h.run([*DOC, 7], {"prefix_end_tokens": 12, "pin": True})
    h.run([*OTHER, 7], {"prefix_end_tokens": 8, "pin": True})
    assert [(s.end_tokens, s.pinned) for s in h.cache.spans()] == [(12, True), (8, False)]
    assert h.cache.counters.pins_refused == 1
    h.cache.evict(EvictParams(num_tokens=2 + 1))  # what lies behind them first
    assert ranges(h) == [(0, 12, 5)]
    h.cache.evict(EvictParams(num_tokens=1))
    assert ranges(h) == []  # a pin is a wish, not a wall


def test_a_pin_on_a_span_that_is_there():
    h = Harness()
    h.run([*DOC, 7], {"prefix_end_tokens": 12})
    h.run([*DOC, 8], {"prefix_end_tokens": 12, "pin": True})
    (span,) = h.cache.spans()
    assert span.pinned
    assert h.compressor.calls == 1


def test_unused_spans_expire_and_used_ones_do_not():
    h = Harness(ttl_s=10.0)
    h.run([*DOC, 7], {"prefix_end_tokens": 12})
    h.run([*OTHER, 7], {"prefix_end_tokens": 8, "ttl_s": 100.0})
    for _ in range(3):
        h.clock.time_s += 6
        h.run([*DOC, 8])
    assert ranges(h) == [(0, 8, 3), (0, 12, 5)]
    h.clock.time_s += 11
    h.cache.on_idle(fully_idle=True)
    assert ranges(h) == [(0, 8, 3)]
    assert h.cache.counters.spans_expired == 1
    h.check()


def test_a_deleted_document_that_is_read_is_out_of_reach_at_once_and_gone_afterwards():
    h = Harness()
    h.run([*DOC, 7], {"prefix_end_tokens": 12})
    reader = h.submit([*DOC, 8, 8])
    h.finish_prefill(reader)
    (listed,) = h.cache.state()["spans"]
    h.cache.command({"action": "delete", "tokens_sha256": listed["tokens_sha256"]})
    assert ranges(h) == []
    assert h.submit([*DOC, 9]).prefix_len == 0
    h.decode(reader)
    h.check()
    h.finish(reader)
    assert not h.cache._detached
    assert not list(h.cache.spans())
    h.check()


def test_deleting_a_document_takes_its_exact_copy_but_not_a_shared_header():
    h = Harness(free_exact_twin="under_pressure")
    h.run([*HEADER, *OTHER, 7])
    h.run([*HEADER, *DOC, 7], {"prefix_end_tokens": 15})
    (listed,) = h.cache.state()["spans"]
    h.cache.command({"action": "delete", "tokens_sha256": listed["tokens_sha256"]})
    assert h.submit([*HEADER, *DOC, 9]).prefix_len == 3
    assert h.submit([*HEADER, *OTHER, 9]).prefix_len == 11
    h.check()


def test_deleting_a_tenant_takes_exact_prefixes_too():
    h = Harness()
    h.run([*DOC, 7], {"prefix_end_tokens": 12}, cache_salt="a")
    h.run([*OTHER, 7], cache_salt="a")
    h.run([*OTHER, 7], cache_salt="b")
    h.cache.command({"action": "delete", "cache_salt": "a"})
    assert h.cache.counters.deleted_slots == 5 + 1 + 9
    assert h.submit([*DOC, 9], cache_salt="a").prefix_len == 0
    assert h.submit([*OTHER, 9], cache_salt="a").prefix_len == 0
    assert h.submit([*OTHER, 9], cache_salt="b").prefix_len == 8
    h.check()


def test_new_weights_put_every_span_out_of_reach_and_what_runs_on_them_goes_on():
    h = Harness()
    h.run([*DOC, 7], {"prefix_end_tokens": 12})
    h.run([*DOC, *OTHER, 7], {"prefix_end_tokens": 20})
    runner = h.submit([*DOC, *OTHER, 8, 8])
    h.finish_prefill(runner)
    h.cache.weights_changed()
    assert h.cache.counters.spans_outdated == 2
    assert ranges(h) == []
    assert h.submit([*DOC, 9]).prefix_len == 0
    h.decode(runner)
    h.check()
    h.finish(runner)
    h.work()
    assert not list(h.cache.spans())
    h.check()


def test_the_price_of_exact_is_counted():
    h = Harness()
    h.run([*DOC, 7], {"prefix_end_tokens": 12})
    req = h.submit([*DOC, 9], {"mode": "exact"})
    assert req.customized_info["grkv"][0]["reprefilled_tokens"] == 12
    poor = h.submit([*DOC, 8], {"min_quality": 0.99})
    assert poor.customized_info["grkv"][0]["reprefilled_tokens"] == 12
    assert h.submit([*DOC, 6]).customized_info["grkv"][0]["reprefilled_tokens"] == 0
    assert h.cache.counters.reprefilled_tokens == 24


def test_deleting_a_tenant_ends_its_own_compression_and_no_other():
    h = Harness(step_tokens=4)  # 12 tokens, 3 layers: one layer per step
    h.run([*OTHER, 7], cache_salt="b")
    h.run([*DOC, 7], {"prefix_end_tokens": 12}, cache_salt="a")
    assert h.cache._work.held_slots == 5
    h.cache.command({"action": "delete", "cache_salt": "b"})
    assert h.cache._work.held_slots == 5
    h.cache.command({"action": "delete", "cache_salt": "a"})
    assert h.cache._work.held_slots == 0
    assert h.allocator.available_size() == 120
    assert h.cache.counters.compressions_failed == {"deleted": 1}
    h.check()
    # It is no failure of the document's: when it comes again it is compressed at once.
    h.run([*DOC, 7], {"prefix_end_tokens": 12}, cache_salt="a")
    h.work()
    assert ranges(h) == [(0, 12, 5)]
    h.check()
