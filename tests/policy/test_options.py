"""Request options: flat, typed, and errors that say what is valid."""

from __future__ import annotations

import pytest

from grkv_sglang.config import GrkvConfig
from grkv_sglang.policy.acceptance import Budget, acceptance_of, with_possible_spans
from grkv_sglang.policy.options import NO_OPTIONS, OptionsError, RequestOptions, check_options, parse_options
from grkv_sglang.policy.resolve import resolve_options
from grkv_sglang.settings import ConfigError


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
        "protected": "0-2,5-9",
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
        ({"protected": "0-4"}, "protected needs prefix_end_tokens or prefix_end"),
        ({"prefix_end_tokens": 5, "protected": "0-4;"}, "protected: .*ranges such as .*got '0-4;'"),
        ({"prefix_end": "system", "protected": "4-4"}, "protected: .*end lies behind its start, got '4-4'"),
        ({"prefix_end_tokens": 5, "protected": [[0, 4]]}, "protected: Input should be a valid string"),
        ({"prefix_end_tokens": 5, "protected": ""}, "protected: .*ranges such as"),
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
        (
            {"prefix_end_tokens": 5, "protected": "0-2,4-6"},
            "protected must lie in the prefix of 5 tokens, got an end of 6",
        ),
    ],
)
def test_options_that_cannot_be_served(options, message):
    with pytest.raises(OptionsError, match=message):
        check_options(RequestOptions(**options), GrkvConfig(), prompt_tokens=10)


BOUNDED = GrkvConfig(budget_min=0.2, budget_max=0.5)


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({"budget": 0.19}, "0.19"),
        ({"budget": 0.51}, "0.51"),
        ({"budget": 1.0, "prefix_end_tokens": 40}, "1"),
        # Tokens are a share of the marked prefix, or else of the prompt.
        ({"budget_tokens": 7, "prefix_end_tokens": 40}, "0.175"),
        ({"budget_tokens": 21, "prefix_end_tokens": 40}, "0.525"),
        ({"budget_tokens": 19}, "0.19"),
        ({"budget_tokens": 51}, "0.51"),
        ({"budget_tokens": 5000}, "1"),
    ],
)
def test_budgets_beyond_the_servers_bounds_are_refused(options, share):
    message = f"allows budgets between 0.2 and 0.5 of a prefix's tokens, got {share}$"
    with pytest.raises(OptionsError, match=message):
        check_options(RequestOptions(**options), BOUNDED, prompt_tokens=100)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"budget": 0.2},
        {"budget": 0.5},
        {"budget_tokens": 8, "prefix_end_tokens": 40},
        {"budget_tokens": 20, "prefix_end_tokens": 40},
        {"budget_tokens": 20},
        {"budget_tokens": 50},
    ],
)
def test_budgets_within_the_servers_bounds(options):
    check_options(RequestOptions(**options), BOUNDED, prompt_tokens=100)


def test_all_budgets_down_to_a_hundredth_are_taken_unless_the_server_says_otherwise():
    check_options(RequestOptions(budget=0.01), GrkvConfig(), prompt_tokens=100)
    check_options(RequestOptions(budget_tokens=5000), GrkvConfig(), prompt_tokens=100)
    with pytest.raises(OptionsError, match=r"between 0\.01 and 1 of"):
        check_options(RequestOptions(budget=0.009), GrkvConfig(), prompt_tokens=100)


def test_the_whole_prefix_may_be_protected():
    check_options(RequestOptions(prefix_end_tokens=5, protected="0-5"), GrkvConfig(), prompt_tokens=10)
    raw = {"prefix_end_tokens": 5, "protected": "3-5,0-1"}
    assert resolve_options({"grkv": raw}, list(range(10)), None) == raw
    with pytest.raises(OptionsError, match="protected must lie in the prefix of 5 tokens"):
        resolve_options({"grkv": {**raw, "protected": "0-9"}}, list(range(10)), None)


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
    assert (server.protected, own.protected) == ((), ())
    kept = acceptance_of(RequestOptions(prefix_end_tokens=9, protected="4-6,0-2,1-3"), config)
    assert kept.protected == ((0, 3), (4, 6))
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
        acceptance.accepts(
            start_tokens=0, n_tokens=100, n_slots=slots, quality=quality, forced=forced, page_size=1
        )
        is accepted
    )


@pytest.mark.parametrize(
    ("budget", "n_tokens", "page_size", "protected", "slots"),
    [
        (Budget(0.1, None), 100, 1, 0, 10),
        (Budget(0.1, None), 100, 1, 20, 28),  # a tenth of the other 80 on top
        (Budget(0.1, None), 100, 1, 99, 100),
        (Budget(0.1, None), 100, 1, 100, 100),
        (Budget(0.1, None), 100, 16, 100, 100),  # no multiple of the page, but all there is
        (Budget(0.1, None), 100, 16, 20, 32),  # 28, in whole pages
        (Budget(0.1, None), 100, 16, 24, 32),  # 24 + 8: just two pages
        (Budget(0.1, None), 100, 16, 25, 48),  # 25 + 8
        (Budget(0.1, None), 100, 64, 60, 64),  # 60 + 4
        (Budget(0.1, None), 100, 64, 61, 100),  # two pages would be more than there is
        (Budget(0.3, None), 10, 1, 7, 8),  # a whole token
        (Budget(None, 7), 100, 1, 20, 27),
        (Budget(None, 7), 100, 16, 20, 32),
        (Budget(None, 90), 100, 1, 20, 100),  # more than there is beside the protected ones
        (Budget(None, 7), 5, 1, 5, 5),
        (Budget(1.0, None), 100, 16, 20, 100),
    ],
)
def test_protected_tokens_come_on_top_of_the_budget(budget, n_tokens, page_size, protected, slots):
    assert budget.slots(n_tokens, page_size, protected) == slots


@pytest.mark.parametrize("share", [0.01, 0.07, 0.1, 0.29, 0.3, 1 / 3, 0.5, 1.0])
@pytest.mark.parametrize("always_kept", [0, 1, 36])
def test_the_shortest_span_with_something_to_select(share, always_kept):
    budget = Budget(share, None)
    least = budget.least_tokens(always_kept)
    assert least is not None
    assert budget.slots(least, 1) > always_kept
    assert least == 1 or budget.slots(least - 1, 1) <= always_kept


def test_no_span_is_shorter_than_its_budget_allows():
    config = GrkvConfig(budget=0.1, min_span_tokens=200)
    assert with_possible_spans(config, 36) == GrkvConfig(budget=0.1, min_span_tokens=361)
    assert with_possible_spans(config, 19) is config
    assert with_possible_spans(GrkvConfig(budget_tokens=37, min_span_tokens=8), 36).min_span_tokens == 38
    with pytest.raises(
        ConfigError, match="budget_tokens 36 is not more than the 36 tokens that profile 'default'"
    ):
        with_possible_spans(GrkvConfig(budget_tokens=36), 36)


PROTECTING = acceptance_of(
    RequestOptions(prefix_end_tokens=200, protected="10-20,150-160"), GrkvConfig(budget=0.2)
)


@pytest.mark.parametrize(
    ("start", "slots", "kept", "accepted"),
    [
        (0, 28, ((10, 20),), True),  # 10 and a fifth of the other 90
        (0, 27, ((10, 20),), False),
        (0, 28, (), False),
        (0, 99, (), False),
        (0, 100, (), True),  # all tokens are as they were
        (0, 28, ((10, 19),), False),
        (0, 28, ((11, 20),), False),
        (0, 28, ((10, 14), (16, 20)), False),
        (0, 28, ((0, 30),), True),
        (0, 28, ((5, 20), (90, 95)), True),
        (30, 20, (), True),  # [30, 130): nothing to protect in it
        (30, 19, (), False),
        (100, 28, ((150, 160),), True),
        (100, 28, ((10, 20),), False),
        # Half of a range lies in it.
        (15, 24, ((15, 20),), True),  # 5 + ceil(19)
        (15, 23, ((15, 20),), False),
        (15, 24, ((16, 20),), False),
    ],
)
def test_a_span_serves_a_request_whose_protected_tokens_it_kept(start, slots, kept, accepted):
    found = PROTECTING.accepts(
        start_tokens=start,
        n_tokens=100,
        n_slots=slots,
        quality=1.0,
        forced=False,
        page_size=1,
        protected=kept,
    )
    assert found is accepted


def test_protection_does_not_stand_in_for_mode_quality_or_force():
    def serves(n_slots, protected=(), forced=False, **options):
        asked = RequestOptions(prefix_end_tokens=200, protected="10-20", **options)
        return acceptance_of(asked, GrkvConfig()).accepts(
            start_tokens=0, n_tokens=100, n_slots=n_slots, quality=0.5, forced=forced, page_size=1,
            protected=protected,
        )  # fmt: skip

    assert serves(100, ((0, 100),))
    assert not serves(100, ((0, 100),), min_quality=0.6)
    assert not serves(100, ((0, 100),), mode="exact")
    # A forced span is a test option.
    assert serves(0, forced=True)
