from __future__ import annotations

import math
from dataclasses import replace

import pytest

from grkv_sglang.core import get_profile, profile_names


def test_built_ins_are_found_by_their_own_name() -> None:
    assert profile_names() == (
        "default", "best", "paper", "release", "copy", "per_head", "release_per_head"
    )  # fmt: skip
    assert all(get_profile(name).name == name for name in profile_names())


def test_published_settings() -> None:
    paper = get_profile("paper")
    assert (paper.scorer, paper.fit_window, paper.fit_strata, paper.fit_repetition) == ("snapkv", 32, 0, 0)
    assert (paper.n_window, paper.query_weight) == (32, 1.0)
    assert (paper.lambda_k, paper.lambda_v, paper.cap_k, paper.cap_v) == (1e-2, 1e-2, None, None)
    assert (paper.fixed_share, paper.steps, paper.guard) == (0.1, 1, False)

    release = get_profile("release")
    assert (release.scorer, release.fit_window, release.fit_repetition) == ("criticalkv", 0, 0)
    assert (release.fit_strata, release.rerotate, release.query_weight) == (32, True, 6 / 32)
    assert (release.lambda_k, release.lambda_v, release.cap_k, release.cap_v) == (1e-2, 1e-2, 0.025, 0.1)
    assert (release.fixed_share, release.steps, release.guard) == (0.1, 1, True)


def test_copy_selects_like_the_default_and_changes_nothing() -> None:
    copy = get_profile("copy")
    assert not copy.regresses
    assert replace(copy, name="default", value_step=True, key_step=True) == get_profile("default")


def test_unknown_name_lists_the_valid_ones() -> None:
    with pytest.raises(ValueError, match=r"default, best, .*, release_per_head, got 'papper'"):
        get_profile("papper")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lambda_k": math.nan}, "finite lambda_k"),
        ({"query_weight": math.inf}, "finite query_weight"),
        ({"query_weight": 0.0}, "query_weight > 0"),
        ({"lambda_v": -1e-3}, "lambda_v >= 0"),
        ({"cap_k": -0.1}, "cap_k >= 0"),
        ({"cap_v": math.nan}, "finite cap_v"),
        ({"fixed_share": 1.1}, "fixed_share between 0 and 1"),
        ({"n_held_out": 0}, "n_held_out >= 1"),
        ({"steps": 0}, "steps >= 1"),
        ({"cg_iterations": 0}, "cg_iterations >= 1"),
        ({"pool_kernel": 4}, "pool_kernel to be odd"),
        ({"scorer": "snap"}, "snapkv"),
        ({"scorer": "kvzip+"}, "snapkv"),
        ({"scorer": "stratified", "n_strata": 0}, "n_strata >= 1"),
        ({"fit_window": -1}, "fit_window >= 0"),
        ({"fit_strata": -1}, "fit_strata >= 0"),
        ({"fit_repetition": -1}, "fit_repetition >= 0"),
        ({"fit_questions": -1}, "fit_questions >= 0"),
        (
            {"fit_window": 0, "fit_strata": 0, "fit_repetition": 0, "fit_questions": 0},
            "needs queries to fit: .* fit_strata, fit_repetition or fit_questions",
        ),
        ({"repetition_reach_tokens": -1}, "repetition_reach_tokens >= 0"),
        ({"guard_share": -0.1}, "guard_share between 0 and 0.5, got -0.1"),
        ({"guard_share": 0.51}, "guard_share between 0 and 0.5, got 0.51"),
        ({"guard_share": math.nan}, "finite guard_share"),
        ({"sinks": -1}, "sinks >= 0"),
        ({"n_window": 0, "window_tokens": None}, "n_window >= 1"),
        ({"n_window": -1}, "n_window >= 0"),
        ({"window_tokens": 0}, "window_tokens >= 1"),
        ({"window_queries": 0}, "window_queries >= 1"),
        ({"n_window": -1, "scorer": "kvzip", "fit_window": 0}, "n_window >= 0"),
    ],
)
def test_validation(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(get_profile("default"), **change)  # type: ignore[arg-type]


def test_a_window_of_no_tokens_is_fine_where_no_query_comes_from_it() -> None:
    without = replace(get_profile("release"), scorer="kvzip", n_window=0)
    assert (without.n_window, without.n_strata) == (0, 0)
    for change in ({"scorer": "snapkv"}, {"scorer": "kvzip+snapkv"}, {"fit_window": 1}):
        with pytest.raises(ValueError, match="n_window >= 1"):
            replace(without, **change)
    with pytest.raises(ValueError, match="n_strata >= 1"):
        replace(without, scorer="kvzip+expected_attention")


def test_passes_are_those_of_the_selection_and_of_the_fitted_queries() -> None:
    plain = replace(get_profile("release"), scorer="snapkv")
    assert plain.passes == frozenset()
    assert replace(plain, scorer="h2o").passes == {"span"}
    assert replace(plain, scorer="snapkv+h2o+kvzip").passes == {"span", "repetition"}
    fitting = replace(plain, fit_repetition=8)
    assert fitting.passes == {"repetition"}
    assert replace(fitting, fit_strata=0).passes == {"repetition"}
    assert replace(fitting, value_step=False, key_step=False).passes == frozenset()
    asking = replace(fitting, fit_questions=5)
    assert asking.passes == {"repetition", "questions"}
    assert asking.fitted_of_passes == {"repetition": 8, "questions": 5}
    assert replace(asking, value_step=False, key_step=False).fitted_of_passes == {}


def test_two_profiles_share_the_budget_among_the_heads_of_a_layer() -> None:
    assert {name for name in profile_names() if get_profile(name).storage == "per_head"} == {
        "per_head",
        "release_per_head",
    }
    for name, even in (("per_head", "default"), ("release_per_head", "release")):
        shared = get_profile(name)
        assert shared.passes == get_profile(even).passes
        assert replace(shared, name=even, scorer=get_profile(even).scorer) == get_profile(even)
    assert replace(get_profile("paper"), scorer="pyramidkv").storage == "per_layer"


def test_only_passes_over_the_span_cost_a_prefill() -> None:
    assert {name: get_profile(name).extra_prefills for name in profile_names()} == {
        "default": 0,
        "best": 1,
        "paper": 0,
        "release": 0,
        "copy": 0,
        "per_head": 0,
        "release_per_head": 0,
    }
    assert get_profile("default").passes == get_profile("copy").passes == {"questions"}
    assert get_profile("best").passes == {"questions", "repetition"}
    plain = replace(get_profile("release"), scorer="snapkv")
    assert replace(plain, scorer="h2o").extra_prefills == 1
    assert replace(plain, scorer="question_mass", fit_repetition=1).extra_prefills == 1
    assert replace(plain, scorer="h2o~kvzip~repetition_mass~question_mass").extra_prefills == 2


def test_the_ends_of_what_is_valid() -> None:
    for change in ({"guard_share": 0.5}, {"repetition_reach_tokens": 0}, {"repetition_reach_tokens": None}):
        replace(get_profile("best"), **change)
