"""Finding the span that ends a prefix, and telling why there is none."""

from __future__ import annotations

from typing import Any

import pytest

from grkv_sglang.client import GrkvState
from grkv_sglang.client.state import namespace_name, tokens_sha256
from grkv_sglang.commands.compressing import END_SLACK_TOKENS, SharedPrefix, find_prefix, happened_since
from tests.commands.states import raw_state, state

IDS = tuple(range(1000))


def span(start: int, end: int, slots: int, **changes: Any) -> dict[str, Any]:
    (one,) = raw_state()["spans"]
    return {
        **one,
        "start_tokens": start,
        "end_tokens": end,
        "tokens": end - start,
        "slots": slots,
        "budget": slots / (end - start),
        "tokens_sha256": tokens_sha256(IDS[:end]),
        **changes,
    }


def find(*spans: dict[str, Any], namespace: str | None = None, least_budget: float = 0.0) -> Any:
    return find_prefix(state(spans=list(spans)), SharedPrefix(IDS, True), namespace, least_budget)


def test_one_span_behind_an_exact_head():
    found = find(span(20, 995, 100, quality=0.8))
    assert (found.tokens, found.slots, found.quality) == (995, 20 + 100, 0.8)
    assert found.saving == pytest.approx(1 - 120 / 995)


def test_spans_in_a_row_count_together():
    found = find(span(500, 1000, 50, quality=0.9), span(20, 500, 48, quality=0.7))
    assert (found.tokens, found.slots, found.quality) == (1000, 20 + 48 + 50, 0.7)
    assert [one.start_tokens for one in found.spans] == [20, 500]


def test_the_latest_of_two_is_taken():
    assert find(span(0, 1000, 300), span(0, 1000, 100)).slots == 300


@pytest.mark.parametrize(
    "other",
    [
        span(0, 1000 - END_SLACK_TOKENS - 1, 90),  # of a shorter prefix, such as the system message
        span(0, 1000, 100, tokens_sha256=tokens_sha256(range(1, 1001))),
        span(0, 1000, 100, namespace=namespace_name("other")),
        span(0, 1000, 99),  # keeps less than was asked for
    ],
)
def test_other_spans_are_not_taken(other: dict[str, Any]):
    assert find(other, least_budget=0.1) is None
    assert find(other, span(0, 1000, 100), least_budget=0.1).slots == 100


def test_a_namespace_of_its_own():
    name = namespace_name("salt")
    assert find(span(0, 1000, 100, namespace=name), namespace=name).slots == 100


def counted(**counters: Any) -> GrkvState:
    return state(counters={**raw_state()["counters"], **counters})


def test_reasons_are_what_was_counted_since():
    before = counted(compressions_failed={"no_room": 2}, compressions_skipped={})
    after = counted(compressions_failed={"no_room": 2, "too_short": 1}, compressions_skipped={"exists": 1})
    assert happened_since(before, after) == (
        "the server counted since then: failed: too_short 1; skipped: exists 1"
    )


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"compression": False}, "compression is off"),
        ({"triggers": ["reuse"]}, "do not include explicit"),
        ({"triggers": ["explicit"], "quality_floor": 0.9}, "quality_floor is 0.9"),
    ],
)
def test_settings_that_explain_it(settings: dict[str, Any], reason: str):
    assert reason in happened_since(state(), state(config=settings))


def test_where_a_prefix_ends_for_the_server():
    assert SharedPrefix(IDS, True).end_options() == {"prefix_end": "document"}
    assert SharedPrefix(IDS, False).end_options() == {"prefix_end_tokens": 1000}
