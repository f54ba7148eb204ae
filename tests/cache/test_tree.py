"""Named situations of the span tree: one test each, values asserted."""

from __future__ import annotations

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from grkv_sglang.cache.census import CensusError, take_census
from grkv_sglang.cache.span import path_facts
from tests.cache.harness import Harness

DOC = [1, 2, 3, 1, 1, 2, 2, 3, 3, 1, 2, 1]
END = len(DOC)


def spans(h: Harness) -> list:
    return list(h.cache.spans())


def compressed(budget: float = 0.34, **settings) -> Harness:
    """A cache whose document was compressed and its exact twin freed."""
    h = Harness(budget=budget, **settings)
    h.run([*DOC, 7, 8], {"prefix_end_tokens": END})
    return h


def test_explicit_prefix_becomes_one_span_and_the_full_kv_is_freed():
    h = compressed()
    (span,) = spans(h)
    assert (span.start_tokens, span.end_tokens, span.num_slots) == (0, 12, 5)  # ceil(0.34 * 12)
    assert span.twin_freed
    # The question, [7, 8], was computed on the exact document and hangs under its span now.
    assert h.cache.total_size() == 5 + 2
    assert h.allocator.available_size() == 120 - 5 - 2
    h.check()
    take_census(h.cache)
    assert h.submit([*DOC, 7, 8, 9]).prefix_len == END + 2


def test_later_request_is_served_from_the_span_and_compresses_nothing():
    h = compressed()
    req = h.submit([*DOC, 9, 9, 9])
    assert req.prefix_len == END
    assert int(h.gaps.tensor[req.kv.req_pool_idx]) == 12 - 5
    assert req.customized_info["grkv"] == [
        {"mode": "prefer_compressed", "exact_tokens": 0, "span_tokens": 12, "span_slots": 5, "spans": 1,
         "budget": round(5 / 12, 6), "quality": 0.9, "profile": "default",
         "reprefilled_tokens": 0}
    ]  # fmt: skip
    h.finish_prefill(req)
    h.finish(req)
    h.check()
    assert h.compressor.calls == 1
    assert h.cache.counters.span_hits == {"prefer_compressed": 1}
    assert h.cache.counters.span_tokens_served == 12
    # What was computed on the span hangs under it, beside the first question.
    (span,) = spans(h)
    assert len(span.children) == 2
    assert len(h.cache.root_node.children) == 1


def test_second_question_reuses_what_the_first_left_under_the_span():
    h = compressed()
    h.run([*DOC, 9, 9, 9])
    req = h.submit([*DOC, 9, 9, 5])
    assert req.prefix_len == END + 2
    assert path_facts(req.last_node).span_tokens == END


def test_divergence_inside_a_span_uses_no_part_of_it():
    h = compressed()
    other = [*DOC[:8], 5, 5, 5, 5, 5]
    req = h.submit(other)
    assert req.prefix_len == 0
    assert path_facts(req.last_node).spans == []
    h.finish_prefill(req)
    h.finish(req)
    h.check()


def test_exact_request_stays_exact_through_its_checkpoints():
    h = compressed()
    req = h.submit([*DOC, 4, 4], {"mode": "exact"}, chunk=5)
    assert req.prefix_len == 0
    assert h.next_chunk(req, 5)
    assert h.next_chunk(req, 50)
    h.finish_prefill(req)
    h.decode(req)
    assert int(h.gaps.tensor[req.kv.req_pool_idx]) == 0
    assert path_facts(req.last_node).spans == []
    h.check()
    h.finish(req)
    h.check()


def test_minimum_quality_refuses_a_poor_span():
    h = compressed()
    assert h.submit([*DOC, 9, 9], {"min_quality": 0.95}).prefix_len == 0
    assert h.submit([*DOC, 9, 9], {"min_quality": 0.9}).prefix_len == END


def test_a_larger_budget_is_not_served_from_a_smaller_span_and_replaces_it():
    h = compressed()
    req = h.submit([*DOC, 9, 9], {"budget": 0.6, "prefix_end_tokens": END})
    assert req.prefix_len == 0
    h.compressor.quality = 0.95
    h.finish_prefill(req)
    h.finish(req)
    h.check()
    (span,) = spans(h)
    assert span.num_slots == 8
    assert h.cache.counters.spans_superseded == 1


def test_a_tiny_budget_of_one_request_does_not_degrade_the_others():
    h = Harness(budget=0.5)
    h.run([*DOC, 7, 8], {"prefix_end_tokens": END, "budget": 0.1})
    assert [s.num_slots for s in spans(h)] == [2]
    assert h.submit([*DOC, 9]).prefix_len == 0  # the server's own budget is the minimum
    assert h.submit([*DOC, 9], {"budget": 0.1}).prefix_len == END


@pytest.mark.parametrize(
    ("mode", "span_tokens"), [("exact", 0), ("prefer_exact", 0), ("prefer_compressed", 12)]
)
def test_modes_at_equal_length(mode, span_tokens):
    h = Harness(free_exact_twin="under_pressure")
    h.run([*DOC, 7, 8], {"prefix_end_tokens": END})
    req = h.submit([*DOC, 9, 9], {"mode": mode})
    assert req.prefix_len == END
    assert path_facts(req.last_node).span_tokens == span_tokens


def test_longest_match_wins_over_preference():
    h = Harness(free_exact_twin="under_pressure")
    h.run([*DOC, 7, 8, 6, 6], {"prefix_end_tokens": END})
    req = h.submit([*DOC, 7, 8, 6, 5])  # the exact branch knows three tokens more
    assert req.prefix_len == END + 3
    assert path_facts(req.last_node).spans == []


def test_reuse_by_a_second_request_compresses_without_being_asked():
    doc = DOC * 3  # 36 tokens; a reused stretch ends 16 tokens early
    h = Harness()
    h.run([*doc, 7, 7])
    assert spans(h) == []
    h.run([*doc, 8, 8])
    (span,) = spans(h)
    assert (span.start_tokens, span.end_tokens) == (0, 36 - 16)
    h.check()
    h.run([*doc, 9, 9])
    assert h.compressor.calls == 1


def test_no_reuse_when_switched_off_or_too_short():
    doc = DOC * 3
    for settings in ({"triggers": "explicit"}, {"compression": False}, {"min_span_tokens": 21}):
        h = Harness(**settings)
        h.run([*doc, 7, 7])
        h.run([*doc, 8, 8])
        assert spans(h) == []
        assert h.compressor.calls == 0


def test_identical_prompt_twice():
    h = Harness()
    h.run([*DOC, 7, 8], {"prefix_end_tokens": END})
    req = h.run([*DOC, 7, 8], {"prefix_end_tokens": END})
    assert req.customized_info["grkv"][0]["span_tokens"] == END
    assert h.compressor.calls == 1
    h.check()


def test_two_prompts_racing_for_one_document():
    h = Harness()
    a = h.submit([*DOC, 7, 7], {"prefix_end_tokens": END})
    b = h.submit([*DOC, 8, 8], {"prefix_end_tokens": END})
    assert (a.prefix_len, b.prefix_len) == (0, 0)
    h.finish_prefill(a)
    h.finish_prefill(b)
    h.check()
    h.finish(a)
    h.check()
    (span,) = spans(h)
    assert not span.twin_freed  # b still reads the exact document
    h.finish(b)
    h.check()
    assert h.compressor.calls == 1
    assert span.twin_freed
    assert h.cache.total_size() == 5 + 4  # and the two questions


def test_twin_held_by_a_running_request_is_freed_when_it_is_done():
    h = Harness()
    long = h.submit([*DOC, 7, 7])
    h.finish_prefill(long)
    h.run([*DOC, 8, 8], {"prefix_end_tokens": END})
    (span,) = spans(h)
    assert not span.twin_freed
    h.decode(long)
    h.check()
    h.finish(long)
    assert span.twin_freed
    assert h.cache.total_size() == span.num_slots + 3 + 2  # and what the two requests left
    h.check()


def test_header_shared_with_another_prompt_stays_exact():
    h = Harness()
    h.run([*DOC[:4], 9, 9, 9])
    h.run([*DOC, 7, 7], {"prefix_end_tokens": END})
    h.check()
    req = h.submit([*DOC[:4], 9, 9, 5])
    assert req.prefix_len == 6
    assert path_facts(req.last_node).spans == []


def test_failed_compression_leaves_the_exact_prefix_serving():
    for reason in ("exception", "non_finite"):
        h = Harness()
        h.compressor.fail_next = reason
        h.run([*DOC, 7, 8], {"prefix_end_tokens": END})
        assert spans(h) == []
        assert h.cache.counters.compressions_failed == {reason: 1}
        h.check()
        req = h.submit([*DOC, 9, 9])
        assert req.prefix_len == END
        h.check()


def test_compression_without_room_is_counted_and_harmless():
    h = Harness(num_slots=18, row_tokens=32)
    other = h.submit([3, 3, 3, 3])  # 4 slots held by a running request
    h.run([*DOC, 7, 8], {"prefix_end_tokens": END, "budget": 0.9})  # needs 11 beside the locked 12
    assert spans(h) == []
    assert h.cache.counters.compressions_failed == {"no_room": 1}
    h.check()
    h.finish_prefill(other)
    h.finish(other)
    h.check()


def exact_leaves(h: Harness) -> set[tuple[int, ...]]:
    return {tuple(n.key.token_ids) for n in h.cache.nodes() if not n.children and n not in spans(h)}


def test_eviction_takes_twins_then_exact_leaves_then_spans():
    h = Harness(free_exact_twin="under_pressure")
    h.run([*DOC, 7, 8], {"prefix_end_tokens": END})
    h.cache.evict(EvictParams(num_tokens=1))  # what the request left behind the twin
    assert exact_leaves(h) == {tuple(DOC)}
    h.run([5, 5, 5, 5])
    h.cache.match_prefix(h.key_of([*DOC, 9], {"mode": "exact"}))  # the twin is the youngest now
    h.cache.evict(EvictParams(num_tokens=1))
    assert exact_leaves(h) == {(5, 5, 5, 5)}
    assert len(spans(h)) == 1
    h.check()
    h.cache.evict(EvictParams(num_tokens=1))
    assert exact_leaves(h) == set()
    assert len(spans(h)) == 1, "spans go last, though it is the oldest"
    h.cache.evict(EvictParams(num_tokens=1))
    assert spans(h) == []
    assert h.cache.total_size() == 0
    assert h.cache.spans_evicted == 1
    h.check()


def test_a_running_request_keeps_its_span_from_eviction():
    h = compressed()
    req = h.submit([*DOC, 9, 9])
    h.cache.evict(EvictParams(num_tokens=1000))
    assert len(spans(h)) == 1
    h.check_row(req)
    h.check()


def test_span_after_span_has_one_gap():
    h = compressed()
    more = [*DOC, *DOC[::-1]]
    h.run([*more, 7], {"prefix_end_tokens": len(more)})
    first, second = sorted(spans(h), key=lambda s: s.start_tokens)
    assert (second.start_tokens, second.end_tokens) == (12, 24)
    assert second.parent is first
    req = h.submit([*more, 9, 9])
    assert req.prefix_len == 24
    assert int(h.gaps.tensor[req.kv.req_pool_idx]) == 24 - first.num_slots - second.num_slots
    h.check()


def test_forced_spans_keep_all_or_nothing():
    h = Harness(allow_forced=True)
    dummies = [4] * 6
    h.run([*dummies, 1], {"prefix_end_tokens": 6, "forced": "none"})
    h.run([*dummies, *DOC, 7], {"prefix_end_tokens": 6 + END, "forced": "all"})
    none, every = sorted(spans(h), key=lambda s: s.start_tokens)
    assert (none.num_slots, every.num_slots) == (0, END)
    req = h.submit([*dummies, *DOC, 9, 9])
    assert req.prefix_len == 6 + END
    assert int(h.gaps.tensor[req.kv.req_pool_idx]) == 6
    h.check()


def test_namespaces_do_not_share_spans():
    h = Harness()
    h.run([*DOC, 7, 8], {"prefix_end_tokens": END}, cache_salt="a")
    assert h.submit([*DOC, 9, 9], cache_salt="a").prefix_len == END
    assert h.submit([*DOC, 9, 9], cache_salt="b").prefix_len == 0
    assert h.submit([*DOC, 9, 9]).prefix_len == 0
    h.check()


def test_retracted_request_resumes_on_the_span_with_the_right_gap():
    h = compressed()
    req = h.submit([*DOC, 9, 9, 9])
    h.finish_prefill(req)
    h.decode(req)
    h.retract(req)
    h.check()
    assert h.resume(req)
    assert int(h.gaps.tensor[req.kv.req_pool_idx]) == 12 - 5
    h.check()
    assert h.cache.counters.span_hits == {"prefer_compressed": 1}, "a resumed request is the same request"


def test_prompt_that_is_the_prefix_and_one_token():
    h = compressed()
    req = h.submit([*DOC, 9])
    assert (req.prefix_len, req.extend_end) == (END, END + 1)
    assert h.submit(DOC).prefix_len == 0  # the last prompt token is always computed: the span is too long


def test_flush_forgets_everything():
    h = compressed()
    h.cache.reset()
    h.pool.clear()
    h.allocator.clear()
    assert spans(h) == []
    assert h.cache.total_size() == 0
    assert int(h.gaps.tensor.abs().sum()) == 0
    assert h.submit([*DOC, 9, 9]).prefix_len == 0
    h.check()


def test_a_span_is_never_split():
    h = compressed()
    (span,) = spans(h)
    with pytest.raises(RuntimeError, match="whole or not at all"):
        h.cache._split_node(span.key, span, 3)


def test_census_sees_a_leak_a_double_owner_and_a_wrong_book():
    h = compressed()
    take_census(h.cache)
    lost = h.allocator.alloc(1)
    assert lost is not None
    with pytest.raises(CensusError, match="without an owner"):
        take_census(h.cache)
    h.allocator.free(lost)
    (span,) = spans(h)
    h.allocator.free_pages = __import__("torch").cat([h.allocator.free_pages, span.value[-1:]])
    with pytest.raises(CensusError, match="two owners"):
        take_census(h.cache)
    h.allocator.free_pages = h.allocator.free_pages[:-1]
    h.cache.evictable_size_ += 1
    with pytest.raises(CensusError, match="the books say"):
        take_census(h.cache)


def test_state_is_plain_data_and_adds_up():
    import json

    h = compressed()
    state = json.loads(json.dumps(h.cache.state()))
    assert state["pool"] == {
        "total_slots": 120,
        "free_slots": 113,
        "exact_slots": 2,
        "span_slots": 5,
        "in_work_slots": 0,
        "pinned_slots": 0,
    }
    assert state["counters"]["compressions_done"] == 1
    assert state["counters"]["twins_freed"] == 1
    (span,) = state["spans"]
    assert (span["tokens"], span["slots"], span["twin_freed"], span["quality"]) == (12, 5, True, 0.9)
    from array import array
    from hashlib import sha256

    assert span["tokens_sha256"] == sha256(array("q", DOC).tobytes()).hexdigest()


def test_pretty_print_shows_spans(capsys):
    h = compressed()
    h.cache.pretty_print()
    assert "span 5 slots" in capsys.readouterr().out


def test_reused_stretch_that_a_span_already_covers_is_not_compressed_again():
    doc = DOC * 3
    h = Harness()
    h.run([*doc, 7, 7], {"prefix_end_tokens": len(doc)})
    h.run([*doc, 8, 8], {"mode": "exact"})  # brings the exact twin back
    h.run([*doc, 9, 9], {"min_quality": 0.99})  # reuses the exact twin: 36 tokens
    assert h.compressor.calls == 1
    assert h.cache.counters.compressions_skipped == {"exists": 1}
    h.check()


def test_twin_asked_for_anew_is_the_first_to_be_evicted():
    h = compressed()
    h.run([*DOC, 8, 8], {"mode": "exact"})
    h.cache.evict(EvictParams(num_tokens=4))  # [7, 8] under the span, [8, 8] behind the twin
    h.run([6, 6, 6, 6])
    h.cache.match_prefix(h.key_of([*DOC, 9], {"mode": "exact"}))
    h.cache.evict(EvictParams(num_tokens=1))
    assert exact_leaves(h) == {(6, 6, 6, 6)}
    h.check()


def test_an_unused_twin_ages_while_its_span_serves():
    h = Harness(free_exact_twin="under_pressure")
    h.run([*DOC, 7, 8], {"prefix_end_tokens": END})
    (span,) = spans(h)
    ((twin,),) = h.cache.exact_twins(span)
    before = twin.last_access_time
    h.run([*DOC, 9, 9])
    assert twin.last_access_time == before
    assert span.last_access_time > before


def test_key_of_a_span_cannot_be_a_token_key():
    h = compressed()
    (span,) = spans(h)
    key = RadixKey(span.key.token_ids)
    assert span.child_key != key.child_key(1)
    assert span.child_key in h.cache.root_node.children
