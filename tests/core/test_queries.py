from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grkv_sglang.core import get_profile, plan_queries, profile_names, queries_needed


def test_window_and_held_out_of_the_paper() -> None:
    profile = replace(get_profile("paper"), n_window=4, n_held_out=2)
    plan = plan_queries(20, profile)
    # Held out: the middles of 0..9 and 10..19.
    assert plan.positions.tolist() == [5, 15, 16, 17, 18, 19]
    assert plan.score_window.tolist() == [False, False, True, True, True, True]
    assert plan.fit_window.tolist() == plan.score_window.tolist()
    assert plan.held_out.tolist() == [True, True, False, False, False, False]
    assert not (plan.score_strata | plan.fit_strata).any()
    assert plan.scoring("window") is plan.score_window
    assert plan.scoring("strata") is plan.score_strata


def test_strata_are_midpoints() -> None:
    profile = replace(get_profile("copy"), scorer="stratified", n_strata=5, n_held_out=1)
    plan = plan_queries(100, profile)
    # The one held-out midpoint, 50, is taken by the third stratum and moves to 49.
    assert plan.positions.tolist() == [10, 30, 49, 50, 70, 90]
    assert plan.positions[plan.held_out].tolist() == [49]


def test_scoring_and_fitting_may_take_different_strata() -> None:
    profile = replace(
        get_profile("default"), scorer="stratified", n_strata=5, fit_strata=2, fit_window=0, n_held_out=1
    )
    plan = plan_queries(100, profile)
    assert plan.positions[plan.score_strata].tolist() == [10, 30, 50, 70, 90]
    assert plan.positions[plan.fit_strata].tolist() == [25, 75]
    assert plan.positions[plan.held_out].tolist() == [49]
    assert queries_needed(profile) == 5 + 2 + 1
    # The same number is the same queries.
    assert queries_needed(replace(profile, fit_strata=5)) == 5 + 1


def test_a_mixture_of_fitted_queries() -> None:
    profile = replace(
        get_profile("paper"),
        n_window=3,
        fit_window=3,
        fit_strata=2,
        fit_repetition=7,
        fit_questions=5,
        n_held_out=1,
    )
    plan = plan_queries(40, profile)
    assert plan.positions.tolist() == [10, 20, 30, 37, 38, 39]
    assert plan.positions[plan.fit_window].tolist() == [37, 38, 39]
    assert plan.positions[plan.fit_strata].tolist() == [10, 30]
    # Queries of passes are no positions of the span.
    assert queries_needed(profile) == 3 + 2 + 1


def test_a_method_without_queries_needs_none() -> None:
    profile = replace(get_profile("copy"), scorer="kvzip", n_held_out=2)
    plan = plan_queries(20, profile)
    assert plan.positions.tolist() == [5, 15]
    assert plan.held_out.all()
    assert queries_needed(profile) == 2


def test_a_combination_scores_with_the_queries_of_its_parts() -> None:
    profile = replace(
        get_profile("paper"), scorer="snapkv+h2o+stratified", n_window=2, n_strata=2, n_held_out=1
    )
    plan = plan_queries(40, profile)
    assert plan.positions[plan.score_window].tolist() == [38, 39]
    assert plan.positions[plan.score_strata].tolist() == [10, 30]


def test_a_held_out_query_moves_out_of_the_window() -> None:
    profile = replace(get_profile("paper"), n_window=12, n_held_out=1)
    plan = plan_queries(20, profile)
    assert plan.positions[plan.held_out].tolist() == [7]


def test_window_and_strata_may_share_positions() -> None:
    profile = replace(get_profile("release"), n_window=8, fit_strata=8, n_held_out=2)
    plan = plan_queries(30, profile)
    assert int(plan.score_window.sum()) == 8
    assert int(plan.fit_strata.sum()) == 8
    assert int((plan.score_window & plan.fit_strata).sum()) == 2  # 24 and 28
    assert len(plan.positions) == 8 + 8 + 2 - 2


def test_no_fit_queries_where_nothing_regresses() -> None:
    copied = plan_queries(200, get_profile("copy"))
    assert not (copied.fit_window | copied.fit_strata).any()
    release_copy = replace(get_profile("release"), value_step=False, key_step=False)
    assert len(plan_queries(200, release_copy).positions) == 32 + 16
    assert queries_needed(release_copy) == 32 + 16


def test_no_query_before_the_first_exact_candidate() -> None:
    profile = replace(get_profile("copy"), scorer="stratified", n_strata=5, n_held_out=1)
    plan = plan_queries(140, profile, first=40)
    # The plan of a span of 100 tokens, moved by 40.
    assert plan.positions.tolist() == [50, 70, 89, 90, 110, 130]
    assert plan.positions[plan.held_out].tolist() == [89]
    window = replace(get_profile("paper"), n_window=4, n_held_out=2)
    plan = plan_queries(27, window, first=7)
    assert plan.positions.tolist() == [12, 22, 23, 24, 25, 26]
    assert plan.held_out.tolist() == [True, True, False, False, False, False]


def test_a_held_out_query_does_not_move_before_the_first() -> None:
    profile = replace(get_profile("paper"), n_window=3, n_held_out=2)
    plan = plan_queries(15, profile, first=10)
    # Middles 11 and 13; 13 is in the window and 10 is the only place left.
    assert plan.positions.tolist() == [10, 11, 12, 13, 14]
    assert plan.positions[plan.held_out].tolist() == [10, 11]


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(["snapkv", "stratified_value", "kvzip", "snapkv+stratified", "expected_attention+h2o"]),
    st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))),
    st.integers(1, 9),
    st.integers(0, 9),
    st.integers(1, 9),
    st.integers(0, 60),
    st.integers(0, 50),
)
def test_any_plan(
    scorer: str,
    window: tuple[int, int],
    n_strata: int,
    fit_strata: int,
    n_held_out: int,
    beyond: int,
    first: int,
) -> None:
    n_window, fit_window = window
    profile = replace(
        get_profile("paper"),
        scorer=scorer,
        n_window=n_window,
        n_strata=n_strata,
        fit_window=fit_window,
        fit_strata=fit_strata,
        n_held_out=n_held_out,
        value_step=fit_window + fit_strata > 0,
        key_step=False,
    )
    n_tokens = queries_needed(profile) + beyond
    moved = plan_queries(first + n_tokens, profile, first=first)
    plan = plan_queries(n_tokens, profile)
    assert (moved.positions - first).tolist() == plan.positions.tolist()
    for name in ("score_window", "score_strata", "fit_window", "fit_strata", "held_out"):
        assert torch.equal(getattr(moved, name), getattr(plan, name))
        assert getattr(plan, name).dtype == torch.bool
    positions = plan.positions
    assert positions.dtype == torch.int64
    assert positions.device.type == "cpu"
    assert (positions.diff() > 0).all()
    assert 0 <= int(positions[0]) <= int(positions[-1]) < n_tokens
    used = plan.score_window | plan.score_strata | plan.fit_window | plan.fit_strata
    assert not (plan.held_out & used).any()
    assert (plan.held_out | used).all()
    assert int(plan.held_out.sum()) == n_held_out
    in_window = n_window if "snapkv" in scorer else 0
    assert positions[plan.score_window].tolist() == list(range(n_tokens - in_window, n_tokens))
    fitted = positions[plan.fit_window] - (n_tokens - n_window)
    assert fitted.tolist() == sorted(n_window - 1 - i * n_window // fit_window for i in range(fit_window))
    sees_strata = "stratified" in scorer or "expected" in scorer
    for mask, count in (
        (plan.score_strata, n_strata if sees_strata else 0),
        (plan.fit_strata, fit_strata),
    ):
        assert int(mask.sum()) == count
        # The token that holds the middle of stratum [k n / S, (k + 1) n / S).
        middle = (2 * torch.arange(count) + 1) * n_tokens
        twice = 2 * count * positions[mask]
        assert ((twice <= middle) & (middle < twice + 2 * count)).all()


@pytest.mark.parametrize(
    ("name", "needed"), [("default", 40), ("best", 64), ("paper", 48), ("release", 80), ("copy", 40)]
)
def test_shortest_span(name: str, needed: int) -> None:
    profile = get_profile(name)
    assert queries_needed(profile) == needed
    plan_queries(needed, profile)
    with pytest.raises(ValueError, match=f"at least {needed} tokens .* '{name}', got {needed - 1}"):
        plan_queries(needed - 1, profile)
    assert int(plan_queries(needed + 70, profile, first=70).positions[0]) >= 70
    with pytest.raises(ValueError, match=f"at least {needed} tokens .* '{name}', got {needed - 1}"):
        plan_queries(needed + 69, profile, first=70)


def test_a_first_position_before_the_span_is_refused() -> None:
    with pytest.raises(ValueError, match="first >= 0, got -1"):
        plan_queries(200, get_profile("default"), first=-1)


def test_every_profile_plans_a_usual_span() -> None:
    assert {name: len(plan_queries(4000, get_profile(name)).positions) for name in profile_names()} == {
        "default": 72,
        "best": 96,
        "paper": 48,
        "release": 80,
        "copy": 72,
        "per_head": 72,
        "release_per_head": 80,
    }
