"""Request options: flat, typed, and errors that say what is valid."""

from __future__ import annotations

import pytest

from grkv_sglang.config import GrkvConfig
from grkv_sglang.policy.acceptance import Budget, acceptance_of
from grkv_sglang.policy.options import NO_OPTIONS, OptionsError, RequestOptions, check_options, parse_options
from grkv_sglang.policy.resolve import resolve_options


@pytest.mark.parametrize("params", [None, {}, {"other": 1}, {"grkv": {}}])
def test_no_options(params):
    assert parse_options(params) == NO_OPTIONS


def test_all_fields():
    raw = {
        "mode": "prefer_exact",
        "prefix_end_tokens": 9,
        "budget": 0.2,
        "min_quality": 0.5,
        "profile": "paper",
        "pin": True,
        "ttl_s": 1.5,
    }
    assert parse_options({"grkv": raw}).model_dump(exclude_none=True) == raw


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            {"modes": "exact"},
            "unknown field 'modes'; valid fields are mode, prefix_end_tokens, prefix_end, budget",
        ),
        ({"mode": "fast"}, "mode: Input should be 'exact', 'prefer_exact' or 'prefer_compressed'"),
        ({"budget": "0.1"}, "budget: Input should be a valid number"),
        ({"budget": 0.0}, "budget: Input should be greater than 0"),
        ({"budget": 0.1, "budget_tokens": 5}, "budget or budget_tokens, not both"),
        ({"prefix_end": "system", "prefix_end_tokens": 5}, "prefix_end or prefix_end_tokens, not both"),
        ({"prefix_end": "question"}, "prefix_end: Input should be 'system' or 'document'"),
        ({"prefix_end_tokens": True}, "prefix_end_tokens: Input should be a valid integer"),
        ({"min_quality": 1.1}, "min_quality: Input should be less than or equal to 1"),
        ({"forced": "all"}, "forced needs prefix_end_tokens"),
        ({"pin": True}, "pin needs prefix_end_tokens or prefix_end"),
        ({"pin": False, "budget": 0.1}, "pin needs prefix_end_tokens or prefix_end"),
        ({"ttl_s": 60.0}, "ttl_s needs prefix_end_tokens or prefix_end"),
        ({"prefix_end_tokens": 5, "pin": 1}, "pin: Input should be a valid boolean"),
        ({"prefix_end_tokens": 5, "ttl_s": 0}, "ttl_s: Input should be greater than 0"),
        ({"prefix_end_tokens": 5, "ttl_s": "60"}, "ttl_s: Input should be a valid number"),
        ([1], "must be an object with the fields mode, prefix_end_tokens"),
        ("x", "must be an object"),
    ],
)
def test_bad_options(raw, message):
    with pytest.raises(OptionsError, match=message):
        parse_options({"grkv": raw})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix_end_tokens": 10}, "at least one token of the prompt behind it, got 10 of 10"),
        (
            {"prefix_end_tokens": 3, "forced": "all"},
            "test option; start the server with GRKV_ALLOW_FORCED=true",
        ),
        ({"profile": "best-ever"}, "profile: .*paper"),
    ],
)
def test_options_that_cannot_be_served(options, message):
    with pytest.raises(OptionsError, match=message):
        check_options(RequestOptions(**options), GrkvConfig(), prompt_tokens=10)


def test_resolved_options_are_flat_scalars():
    resolved = resolve_options({"grkv": {"prefix_end_tokens": 4, "budget": 0.5}}, list(range(10)), None)
    assert resolved == {"prefix_end_tokens": 4, "budget": 0.5}
    with pytest.raises(OptionsError, match="no tokenizer"):
        resolve_options({"grkv": {"prefix_end": "system"}}, list(range(10)), None)


def test_pin_and_ttl_go_with_either_end():
    for end in ({"prefix_end": "document"}, {"prefix_end_tokens": 5}):
        options = parse_options({"grkv": {**end, "pin": True, "ttl_s": 60}})
        assert (options.pin, options.ttl_s) == (True, 60.0)
    raw = {"prefix_end_tokens": 4, "pin": False, "ttl_s": 60.0}
    assert resolve_options({"grkv": raw}, list(range(10)), None) == raw


def test_acceptance_combines_request_and_server():
    config = GrkvConfig(budget=0.2, min_quality=0.4, mode="prefer_exact")
    server = acceptance_of(NO_OPTIONS, config)
    assert (server.mode, server.budget, server.min_quality) == ("prefer_exact", Budget(0.2, None), 0.4)
    own = acceptance_of(RequestOptions(mode="exact", budget_tokens=7, min_quality=0.0), config)
    assert (own.mode, own.budget, own.min_quality) == ("exact", Budget(None, 7), 0.0)
    absolute = acceptance_of(NO_OPTIONS, GrkvConfig(budget_tokens=64))
    assert absolute.budget == Budget(None, 64)


@pytest.mark.parametrize(
    ("mode", "slots", "quality", "forced", "accepted"),
    [
        ("prefer_compressed", 20, 0.5, False, True),
        ("prefer_compressed", 19, 0.5, False, False),
        ("prefer_compressed", 20, 0.39, False, False),
        ("prefer_exact", 20, 0.5, False, True),
        ("exact", 100, 1.0, False, False),
        ("prefer_exact", 0, 1.0, True, True),
    ],
)
def test_accepts(mode, slots, quality, forced, accepted):
    acceptance = acceptance_of(RequestOptions(mode=mode), GrkvConfig(budget=0.2, min_quality=0.4))
    assert (
        acceptance.accepts(n_tokens=100, n_slots=slots, quality=quality, forced=forced, page_size=1)
        is accepted
    )
