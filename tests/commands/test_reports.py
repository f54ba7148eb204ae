"""What warm, inspect and verify print."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from rich.console import Console

from grkv_sglang.client import GrkvClient, GrkvConnectionError, RetryPolicy
from grkv_sglang.commands.compressing import CompressedPrefix, SharedPrefix
from grkv_sglang.commands.documents import Layout
from grkv_sglang.commands.inspect import duration, pool_text, render, run_inspect
from grkv_sglang.commands.verify import Check, Step, VerifyReport, default_text, print_report
from grkv_sglang.commands.warm import WarmResult, WarmSettings, results_table
from tests.commands.states import raw_state, state


def printed(*things: Any) -> str:
    console = Console(width=200, record=True)
    for thing in things:
        console.print(thing)
    return console.export_text()


def test_warm_shows_figures_and_problems():
    results = [
        WarmResult("a [b].txt", "compressed", 3.21, CompressedPrefix(4000, 400, 0.8765, ())),
        WarmResult("c.txt", "failed", 0.5, problem="400: too long [really]"),
    ]
    text = printed(results_table(results))
    for part in ("a [b].txt", "4,000", "400", "90%", "0.876", "3.2", "failed: 400: too long [really]"):
        assert part in text


def test_warm_sends_its_settings_as_options():
    settings = WarmSettings(Layout(), budget=0.2, profile="best", pin=True, ttl_s=60.0)
    assert settings.options(SharedPrefix((1, 2, 3), False)).model_dump(exclude_none=True) == {
        "budget": 0.2, "profile": "best", "pin": True, "ttl_s": 60.0, "prefix_end_tokens": 3,
    }  # fmt: skip
    plain = WarmSettings(Layout()).options(SharedPrefix((), True))
    assert plain.model_dump(exclude_none=True) == {"prefix_end": "document"}


@pytest.mark.parametrize("wrong", [{"budget": 0.0}, {"budget": 1.5}, {"ttl_s": -1.0}])
def test_warm_refuses_wrong_settings_at_once(wrong: dict[str, Any]):
    with pytest.raises(ValidationError):
        WarmSettings(Layout(), **wrong)


def test_inspect_shows_pool_spans_and_counters():
    text = printed(render(state()))
    (span,) = raw_state()["spans"]
    for part in (
        "120 slots", "exact 2", "spans 5", "free 113", "spans: 1", span["tokens_sha256"][:12], "0-12", "58%",
        "explicit", "compressions done: 1", "spans made: explicit 1", "12 tokens in 5 slots: 7 slots saved",
    ):  # fmt: skip
        assert part in text, part
    assert "spans expired" not in text  # never happened
    assert "census" not in text


def test_inspect_shows_wishes_a_broken_census_and_that_more_are_held():
    raw = raw_state(pin=True, ttl_s=7200.0)
    raw |= {"num_spans": 900, "census": {"ok": False, "checks": 3, "last_error": "slot 7 twice"}}
    text = printed(render(state(**raw)))
    for part in ("pinned, 2h unused", "spans: 1 of 900", "census FAILED: slot 7 twice"):
        assert part in text


def test_inspect_looks_again_until_the_server_is_gone():
    answers = [httpx.Response(200, json=[raw_state()]), httpx.Response(200, json=[raw_state()])]

    def answer(request: httpx.Request) -> httpx.Response:
        if not answers:
            raise httpx.ConnectError("gone")
        return answers.pop()

    transport = httpx.MockTransport(answer)
    with (
        GrkvClient("http://s", transport=transport, retry=RetryPolicy(attempts=1)) as client,
        pytest.raises(GrkvConnectionError, match="gone"),
    ):
        run_inspect(client, Console(width=200, quiet=True), watch_s=0.01, json=False)
    assert answers == []


def test_the_pools_bar_has_one_length():
    pool = state().pool
    bars = set()
    for free, exact, spans, in_work in [(120, 0, 0, 0), (0, 120, 0, 0), (7, 41, 33, 2), (1, 1, 1, 1)]:
        changes = {"free_slots": free, "exact_slots": exact, "span_slots": spans, "in_work_slots": in_work}
        bars.add(pool_text(pool.model_copy(update=changes)).plain.count("█"))
    assert bars == {60}
    assert "0 slots" in pool_text(pool.model_copy(update={"total_slots": 0})).plain


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59, "59s"), (60, "1m"), (7200, "2h"), (200000, "2d")]
)
def test_durations(seconds: float, text: str):
    assert duration(seconds) == text


def test_verify_needs_every_check():
    good, bad = Check("one", True, "4 = 4"), Check("two", False, "no [span]")
    assert VerifyReport(checks=[good]).ok
    assert not VerifyReport(checks=[good, bad]).ok
    assert not VerifyReport().ok


def test_verify_prints_sources_checks_and_a_verdict():
    report = VerifyReport(
        [Step("cold, exact", 1500, 0, "computed")],
        [Check("one", True, "4 = 4"), Check("two", False, "no [span]")],
    )
    console = Console(width=160, record=True)
    print_report(report, console)
    text = console.export_text()
    for part in ("cold, exact", "1,500", "computed", "FAILED", "no [span]", "not verified: 1 of 2 checks"):
        assert part in text


def test_verify_has_a_text_of_its_own():
    assert 5000 < len(default_text()) <= 6000
