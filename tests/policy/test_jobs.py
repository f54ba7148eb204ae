"""Which finished request leaves which work, and into which spans the work is cut."""

from __future__ import annotations

from array import array
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grkv_sglang.config import GrkvConfig
from grkv_sglang.policy.acceptance import Acceptance, Budget
from grkv_sglang.policy.boundaries import MessageMarkers
from grkv_sglang.policy.jobs import (
    HEADER_REACH_TOKENS,
    MARGIN_TOKENS,
    RequestState,
    make_job,
    natural_end,
    plan_parts,
    reused_stretch,
)
from grkv_sglang.policy.options import NO_OPTIONS, RequestOptions

PROMPT_TOKENS = 990
TOKENS = array("q", range(1000))
"""A prompt and ten tokens of output, without any message marker."""
CONFIG = GrkvConfig(budget=0.2, min_span_tokens=100)
EVERY = GrkvConfig(budget=0.2, min_span_tokens=100, triggers=("explicit", "insert", "reuse", "pressure"))
END, HEADER = 5001, (5002, 5003)
MARKERS = MessageMarkers(end_of_message=(END,), user_header=HEADER)


def chat(*headers: int) -> array[int]:
    """`TOKENS` with a user header at each of these positions."""
    tokens = array("q", TOKENS)
    for at in headers:
        tokens[at : at + 2] = array("q", HEADER)
    return tokens


def job(
    options=NO_OPTIONS,
    reused=0,
    *,
    tokens=TOKENS,
    prompt_tokens=PROMPT_TOKENS,
    whole=False,
    last_span_end=0,
    config=CONFIG,
    page_size=1,
    markers=None,
):
    state = RequestState.of(options, config)
    state.reused_tokens, state.reused_whole, state.last_span_end = reused, whole, last_span_end
    return make_job(
        state,
        tokens,
        prompt_tokens=prompt_tokens,
        extra_key="key",
        cache_salt="tenant",
        lora_id="adapter",
        config=config,
        page_size=page_size,
        markers=markers,
    )


def test_explicit_job_carries_the_requests_wishes_and_namespace():
    made = job(RequestOptions(prefix_end_tokens=700, budget=0.5, profile="paper", pin=True, ttl_s=2.5))
    assert made.token_ids == TOKENS[:700]
    assert (made.extra_key, made.cache_salt, made.lora_id) == ("key", "tenant", "adapter")
    assert (made.reason, made.budget, made.profile) == ("explicit", Budget(0.5, None), "paper")
    assert (made.forced, made.pin, made.ttl_s, made.shared) == (None, True, 2.5, True)
    assert made.acceptance == Acceptance("prefer_compressed", Budget(0.5, None), 0.0)
    assert (made.protected, made.exact_tokens) == ((), 0)


def test_protected_ranges_are_carried_by_explicit_jobs_only():
    options = RequestOptions(prefix_end_tokens=700, protected="20-30,0-10")
    made = job(options)
    assert made.protected == ((0, 10), (20, 30))
    assert made.acceptance == Acceptance("prefer_compressed", Budget(0.2, None), 0.0, ((0, 10), (20, 30)))
    # The server does not act on marks: the span it makes on reuse is for everyone.
    config = GrkvConfig(budget=0.2, min_span_tokens=100, triggers="reuse")
    assert job(options, 500, config=config).protected == ()


def test_explicit_job_without_wishes_is_made_by_the_servers_settings():
    made = job(RequestOptions(prefix_end_tokens=700))
    assert (made.budget, made.profile, made.pin, made.ttl_s) == (Budget(0.2, None), "default", False, None)


def test_forced_is_carried():
    options = RequestOptions(prefix_end_tokens=700, forced="none")
    assert job(options).forced == "none"


@pytest.mark.parametrize("reused", [0, 500])
def test_jobs_nobody_marked_are_made_by_the_servers_settings(reused):
    made = job(RequestOptions(budget=0.9, mode="prefer_exact", profile="paper"), reused, config=EVERY)
    assert (made.reason, made.end_tokens) == (("reuse", 484) if reused else ("insert", 974))
    assert (made.budget, made.profile, made.forced) == (Budget(0.2, None), "default", None)
    assert (made.pin, made.ttl_s) == (False, None)
    assert (made.extra_key, made.cache_salt, made.lora_id) == ("key", "tenant", "adapter")


@pytest.mark.parametrize(
    ("triggers", "marked", "reused", "expected"),
    [
        ("explicit,insert,reuse", 700, 500, ("explicit", 700)),
        ("explicit,insert,reuse", None, 500, ("reuse", 484)),
        ("explicit,insert,reuse", None, 0, ("insert", 974)),
        # A mark that the server does not act on leaves the request as it would be without.
        ("insert,reuse", 700, 500, ("reuse", 484)),
        ("insert", 700, 0, ("insert", 974)),
        ("explicit,reuse,pressure", None, 0, None),
        ("reuse,pressure", 700, 0, None),
        ("pressure", 700, 0, None),
        ("", 700, 0, None),
    ],
)
def test_explicit_beats_reuse_beats_insert(triggers, marked, reused, expected):
    config = GrkvConfig(min_span_tokens=100, triggers=triggers)
    made = job(RequestOptions(prefix_end_tokens=marked), reused, config=config)
    assert (made and (made.reason, made.end_tokens)) == expected


@pytest.mark.parametrize(("mode", "made"), [("exact", False), ("prefer_exact", True)])
def test_insert_not_for_exact_requests(mode, made):
    config = GrkvConfig(min_span_tokens=100, triggers="insert")
    assert (job(RequestOptions(mode=mode), config=config) is not None) is made


def test_insert_on_a_server_of_exact_requests():
    config = GrkvConfig(min_span_tokens=100, triggers="insert", mode="exact")
    assert job(config=config) is None
    assert job(RequestOptions(mode="prefer_exact"), config=config).end_tokens == 974


def test_an_exact_request_may_mark_its_prefix():
    assert job(RequestOptions(mode="exact", prefix_end_tokens=700)).reason == "explicit"


@pytest.mark.parametrize(
    ("options", "reused", "whole", "shared"),
    [
        (RequestOptions(prefix_end_tokens=700), 0, True, True),
        (RequestOptions(prefix_end_tokens=700), 500, True, True),
        (NO_OPTIONS, 500, False, True),  # two prompts part there
        (NO_OPTIONS, 500, True, False),  # the next turn of a chat
        (NO_OPTIONS, 0, False, False),
        (NO_OPTIONS, 0, True, False),
    ],
)
def test_shared_where_other_prompts_part(options, reused, whole, shared):
    assert job(options, reused, whole=whole, config=EVERY).shared is shared


@pytest.mark.parametrize(
    ("end", "page_size", "expected"),
    [(703, 16, 688), (704, 16, 704), (703, 1, 703), (15, 16, None), (16, 16, 16), (999, 64, 960)],
)
def test_explicit_ends_are_page_aligned(end, page_size, expected):
    made = job(RequestOptions(prefix_end_tokens=end), page_size=page_size)
    assert (made and made.end_tokens) == expected


def test_other_ends_are_page_aligned():
    assert job(reused=500, page_size=64).end_tokens == 448  # of 484
    assert job(config=EVERY, page_size=64).end_tokens == 960  # of 974
    # 100 tokens are left of 116 reused ones, but only 96 of them are whole pages.
    assert job(reused=116, page_size=1).end_tokens == 100
    assert job(reused=116, page_size=16) is None


def test_no_job_beyond_what_the_tree_holds():
    assert job(RequestOptions(prefix_end_tokens=1000)).end_tokens == 1000
    assert job(RequestOptions(prefix_end_tokens=1001)) is None
    assert job(RequestOptions(prefix_end_tokens=999)).end_tokens == 999
    assert job(RequestOptions(prefix_end_tokens=1)).end_tokens == 1


def test_no_job_without_compression():
    config = EVERY.model_copy(update={"compression": False})
    assert job(RequestOptions(prefix_end_tokens=700), 500, config=config) is None
    assert job(config=config) is None


@pytest.mark.parametrize(
    ("reused", "last_span_end", "end"),
    [(116, 0, 100), (115, 0, None), (416, 300, 400), (415, 300, None), (10, 0, None), (310, 300, None)],
)
def test_reuse_needs_a_long_enough_stretch_behind_the_last_span(reused, last_span_end, end):
    made = job(reused=reused, last_span_end=last_span_end)
    assert (made and made.end_tokens) == end


@pytest.mark.parametrize(("last_span_end", "made"), [(874, True), (875, False), (974, False), (980, False)])
def test_insert_needs_a_long_enough_stretch_behind_the_last_span(last_span_end, made):
    assert (job(last_span_end=last_span_end, config=EVERY) is not None) is made


def test_explicit_prefixes_may_be_short():
    made = job(RequestOptions(prefix_end_tokens=702), last_span_end=700)
    assert made.end_tokens == 702


@pytest.mark.parametrize(
    ("headers", "reused", "end"),
    [
        ([495], 500, 495),
        ([436], 500, 436),  # as far back as is looked
        ([435], 500, 484),  # one further: its first token is out of sight
        ([498], 500, 498),  # the prompts part right behind the header
        ([499], 500, 484),  # they part within it
        ([450, 480], 500, 480),
        ([480, 600], 500, 480),  # what comes later was not reused
        ([], 500, 484),
        ([0], 40, 0),
    ],
)
def test_reuse_ends_at_a_user_header_within_reach(headers, reused, end):
    config = GrkvConfig(min_span_tokens=2)
    assert (MARGIN_TOKENS, HEADER_REACH_TOKENS) == (16, 64)
    made = job(reused=reused, tokens=chat(*headers), config=config, markers=MARKERS)
    assert (made.end_tokens if made else 0) == end


def test_reuse_without_markers_keeps_the_margin():
    assert job(reused=500, tokens=chat(495), markers=None).end_tokens == 484


@pytest.mark.parametrize(
    ("headers", "markers", "end"),
    [
        ([], None, 974),
        ([300, 800], None, 974),
        ([], MARKERS, 974),
        ([800], MARKERS, 800),
        ([300, 800], MARKERS, 800),
        ([0], MARKERS, 0),
        ([998], MARKERS, 998),  # written by the model itself
    ],
)
def test_natural_end(headers, markers, end):
    assert natural_end(chat(*headers), PROMPT_TOKENS, markers) == end


def test_natural_end_of_a_header_cut_off():
    assert natural_end(array("q", [1, 2, HEADER[0]]), 3, MARKERS) == 3 - 16


def test_insert_ends_where_the_last_user_message_starts():
    made = job(config=EVERY, tokens=chat(300, 800), markers=MARKERS)
    assert (made.reason, made.end_tokens) == ("insert", 800)
    # A chat of one user message and no system message has nothing to share.
    assert job(config=EVERY, tokens=chat(0), markers=MARKERS) is None
    assert job(config=EVERY, tokens=chat(99), markers=MARKERS) is None
    assert job(config=EVERY, tokens=chat(100), markers=MARKERS).end_tokens == 100


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("prompt_tokens", [1, 15, 16, 17])
def test_no_insert_from_a_prompt_within_the_margin(prompt_tokens, page_size):
    config = GrkvConfig(min_span_tokens=2, triggers="insert")
    tokens = array("q", range(prompt_tokens + 5))
    assert job(tokens=tokens, prompt_tokens=prompt_tokens, config=config, page_size=page_size) is None
    assert job(tokens=TOKENS[:23], prompt_tokens=18, config=config).end_tokens == 2


def test_same_work_has_one_identity():
    assert job(reused=500).identity == job(reused=500).identity
    assert job(reused=500).identity != job(reused=501).identity
    marked = RequestOptions(prefix_end_tokens=484)
    assert job(marked).identity == job(reused=500).identity
    others = [
        RequestOptions(prefix_end_tokens=484, budget=0.3),
        RequestOptions(prefix_end_tokens=484, budget_tokens=9),
        RequestOptions(prefix_end_tokens=484, profile="paper"),
        RequestOptions(prefix_end_tokens=484, forced="all"),
        RequestOptions(prefix_end_tokens=484, protected="0-9"),
        RequestOptions(prefix_end_tokens=484, protected="0-9,10-11"),
    ]
    found = {job(options).identity for options in others}
    assert len(found | {job(marked).identity}) == 7
    # The same positions are the same work however they are written.
    again = RequestOptions(prefix_end_tokens=484, protected="5-9, 0-5")
    assert job(again).identity in found


@pytest.mark.parametrize(
    ("end_at", "headers", "page_size", "head"),
    [
        (80, [81], 1, 81),  # with what the template puts between the two messages
        (80, [81], 16, 96),
        (79, [80], 16, 80),
        (80, [81, 300], 1, 81),  # the first user message counts
        (None, [81], 1, 0),  # no system message
        (80, [], 1, 0),  # no user message: nothing says what the first one is
        (90, [81], 1, 0),  # it ends the user message
    ],
)
@pytest.mark.parametrize("marked", [82, 80, 40, 700])
def test_the_system_message_is_found_in_the_whole_prompt(end_at, headers, page_size, head, marked):
    """Also by jobs that end within it or right behind it."""
    tokens = chat(*headers)
    if end_at is not None:
        tokens[end_at] = END
    options = RequestOptions(prefix_end_tokens=marked)
    config = CONFIG.model_copy(update={"protect_system": True})
    made = job(options, tokens=tokens, config=config, page_size=page_size, markers=MARKERS)
    assert made.exact_tokens == head
    assert job(options, tokens=tokens, config=config, page_size=page_size).exact_tokens == 0
    assert job(options, tokens=tokens, page_size=page_size, markers=MARKERS).exact_tokens == 0


@pytest.mark.parametrize(
    ("matched", "span_end", "hits", "settings", "mode", "expected"),
    [
        (400, 0, 1, {}, "prefer_compressed", 400),
        (400, 0, 0, {}, "prefer_compressed", 0),
        (400, 0, 1, {}, "prefer_exact", 400),
        (400, 0, 1, {}, "exact", 0),
        (100, 0, 1, {}, "prefer_exact", 100),
        (99, 0, 1, {}, "prefer_exact", 0),
        (400, 300, 1, {}, "prefer_compressed", 400),
        (400, 301, 1, {}, "prefer_compressed", 0),
        (400, 400, 1, {}, "prefer_compressed", 0),
        (400, 0, 2, {"reuse_min_hits": 3}, "prefer_compressed", 0),
        (400, 0, 3, {"reuse_min_hits": 3}, "prefer_compressed", 400),
        (400, 0, 1, {"triggers": "explicit,insert,pressure"}, "prefer_compressed", 0),
        (400, 0, 1, {"compression": False}, "prefer_compressed", 0),
        (0, 0, 1, {}, "prefer_compressed", 0),
    ],
)
def test_reused_stretch(matched, span_end, hits, settings, mode, expected):
    config = GrkvConfig(min_span_tokens=100, **settings)
    got = reused_stretch(matched_tokens=matched, last_span_end=span_end, hits=hits, config=config, mode=mode)
    assert got == expected


@pytest.mark.parametrize(
    ("covered", "end", "cuts", "parts"),
    [
        (0, 100, [], [(0, 100)]),
        (0, 100, [10], [(0, 10), (10, 100)]),  # exactly long enough
        (0, 100, [9], [(9, 100)]),  # a short header stays exact
        (0, 100, [3, 9], [(9, 100)]),
        (0, 100, [1], [(1, 100)]),
        (0, 100, [0], [(0, 100)]),
        (0, 100, [90], [(0, 90), (90, 100)]),  # just enough behind it
        (0, 100, [91], [(0, 100)]),
        (0, 100, [100, 101, 1000], [(0, 100)]),
        (0, 100, [60, 30, 60], [(0, 30), (30, 60), (60, 100)]),  # any order, twice
        (0, 100, [30, 39, 40], [(0, 30), (30, 40), (40, 100)]),
        (0, 100, [5, 12], [(5, 100)]),  # 5 to 12 is too short for a span
        (0, 100, [5, 15], [(5, 15), (15, 100)]),
        (50, 100, [20, 50], [(50, 100)]),  # before what is left to do
        (50, 100, [20, 55, 70], [(55, 70), (70, 100)]),
        (50, 100, [60], [(50, 60), (60, 100)]),
        (0, 19, [5, 9], [(9, 19)]),
        (0, 18, [9], [(0, 18)]),  # else nine would be left
        (0, 7, [3], [(0, 7)]),  # an explicit prefix shorter than a span is made otherwise
        (6, 7, [], [(6, 7)]),
    ],
)
def test_plan_parts(covered, end, cuts, parts):
    assert plan_parts(covered=covered, end=end, cuts=cuts, min_tokens=10) == parts


@given(
    st.integers(0, 40), st.integers(1, 80), st.lists(st.integers(-5, 130), max_size=12), st.integers(2, 25)
)
def test_any_parts(covered, length, cuts, min_tokens):
    end = covered + length
    parts = plan_parts(covered=covered, end=end, cuts=cuts, min_tokens=min_tokens)
    start = parts[0][0]
    assert covered <= start
    assert start - covered < min_tokens
    assert parts[-1][1] == end
    assert all(before[1] == after[0] for before, after in pairwise(parts))
    assert all(a < b for a, b in parts)
    if start > covered or len(parts) > 1:
        assert all(b - a >= min_tokens for a, b in parts)
    seams = {start, *(a for a, _ in parts)} - {covered}
    assert seams <= set(cuts)
    # No cut is passed over that could be used: each is close behind the last seam or close to the end.
    for cut in cuts:
        if covered < cut <= end - min_tokens:
            before = max(a for a, _ in parts if a <= cut) if cut >= start else covered
            assert cut - before < min_tokens


@pytest.mark.parametrize(
    ("covered", "end", "cuts", "exact_until", "parts"),
    [
        (0, 100, [], 30, [(30, 100)]),
        (0, 100, [30], 30, [(30, 100)]),
        (0, 100, [30, 60], 30, [(30, 60), (60, 100)]),
        (0, 100, [10, 20], 30, [(30, 100)]),  # what lies before is not cut
        (0, 100, [35], 30, [(35, 100)]),  # a short header behind it stays exact, too
        (50, 100, [], 30, [(50, 100)]),  # a span is there already
        (0, 100, [], 99, [(99, 100)]),
        (0, 100, [], 100, []),
        (0, 100, [40], 140, []),
    ],
)
def test_parts_behind_what_stays_exact(covered, end, cuts, exact_until, parts):
    found = plan_parts(covered=covered, end=end, cuts=cuts, min_tokens=10, exact_until=exact_until)
    assert found == parts


@given(
    st.integers(0, 40),
    st.integers(1, 80),
    st.lists(st.integers(-5, 130), max_size=12),
    st.integers(2, 25),
    st.integers(0, 130),
)
def test_any_parts_behind_what_stays_exact(covered, length, cuts, min_tokens, exact_until):
    end = covered + length
    parts = plan_parts(covered=covered, end=end, cuts=cuts, min_tokens=min_tokens, exact_until=exact_until)
    if exact_until >= end:
        assert parts == []
        return
    assert parts[0][0] >= max(covered, exact_until)
    assert parts[-1][1] == end
    assert all(before[1] == after[0] for before, after in pairwise(parts))
    assert all(a < b for a, b in parts)
    # As if a span ended there.
    assert parts == plan_parts(covered=max(covered, exact_until), end=end, cuts=cuts, min_tokens=min_tokens)
