"""Our methods and kvpress's of the same definition keep the same tokens.

`expected_selections.json` holds what kvpress 0.5.5 kept of tiny random caches, with all inputs;
`benchmarks/peers/record_expectations.py` describes its fields. The tensors go through `compress_layer`, so
that the layout of heads, the causal masks and the rotations are part of what is compared.

Where a definition of ours differs on purpose, the settings below make up for it:

- Window and sinks. A method of ours keeps the profile's window and sinks whatever it scores by. kvpress keeps
  SnapKV's window only (here 8 tokens, `n_window=8, sinks=0`), and Expected Attention's and KVzip's first 4
  tokens only (`n_window=0, sinks=4`). It gives them the largest score plus 1, so these scores are left out.
- SnapKV pools every query head by itself and takes the mean over the group behind it; ours comes first. Both
  are linear.
- AdaKV's floor is a share of the whole budget in kvpress, where the window is part of it, and a share of what
  is not always kept in ours. Neither decides anything here.
- Expected Attention takes the statistics of all tokens' queries but the first 4; ours takes strata queries,
  here a plan whose strata are just these tokens. kvpress rotates statistics of queries without a position by
  n .. n + 511 on average; ours, queries at the last position by 1 .. 512 more.
- KVzip counts the queries of the instruction, too, which our pass leaves out (`PassChunk.n_prompt`): all
  queries of the file are reduced. The repetition is one chunk, so that its softmax covers the whole context
  in both.
- The number of tokens. kvpress rounds a share of the tokens down, `slots_for_budget` rounds it up.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grkv_sglang.core import (
    LayerInputs,
    PassChunk,
    PassResults,
    Profile,
    QueryPlan,
    RotaryTable,
    Scorer,
    ScoringContext,
    compress_layer,
    get_profile,
    get_scorer,
    rotate_forward,
)
from grkv_sglang.core.selection import PassStatistics
from grkv_sglang.core.selection.adakv import ALPHA
from grkv_sglang.core.selection.base import top_mask
from grkv_sglang.core.selection.criticalkv import EPSILON, projected_norms
from grkv_sglang.core.selection.expected_attention import N_FUTURE

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("expected_selections.json").read_text())
CASES: dict[int, dict[str, Any]] = {case["n"]: case for case in RECORDED["cases"]}
BUDGETS = ("0.3", "0.5")
WINDOW: int = RECORDED["window"]
N_SINKS: int = RECORDED["kvzip"]["n_sink"]
N_KV_HEADS: int = RECORDED["n_kv_heads"]
HEAD_DIM: int = RECORDED["head_dim"]
SCALE = HEAD_DIM**-0.5

# Their name in the file, ours, and the recorded score that they select by (in the first stage).
METHODS = {
    "snapkv": ("snapkv", "snapkv"),
    "criticalkv": ("criticalkv", "snapkv"),
    "adakv": ("adakv", "snapkv"),
    "critical_adakv": ("critical_adakv", "snapkv"),
    "expected_attention": ("expected_attention", "expected_attention"),
    "kvzip_even": ("kvzip", "kvzip"),
}


def by_window(name: str) -> bool:
    return METHODS[name][1] == "snapkv"


def profile_for(name: str, n: int) -> Profile:
    window = by_window(name)
    return replace(
        get_profile("copy"),
        scorer=METHODS[name][0],
        n_window=WINDOW if window else 0,
        sinks=0 if window else N_SINKS,
        n_strata=n - N_SINKS,
        fit_window=0,
        n_held_out=1,
        pool_kernel=RECORDED["kernel"],
        rerotate=True,
    )


def plan_for(n: int) -> QueryPlan:
    """Every position's query: the last ones score as a window, all but the sinks' as strata."""
    at = torch.arange(n)
    none = torch.zeros(n, dtype=torch.bool)
    return QueryPlan(
        positions=at,
        score_window=at >= n - WINDOW,
        score_strata=at >= N_SINKS,
        fit_window=none,
        fit_strata=none,
        held_out=at == 0,
    )


def rotary() -> RotaryTable:
    angles = torch.arange(600)[:, None] * torch.tensor(RECORDED["rope"]["inv_freq"])
    return RotaryTable(torch.cat((angles.cos(), angles.sin()), dim=1), HEAD_DIM, is_neox=True)


def queries_of(case: dict[str, Any]) -> Tensor:
    """[n, H, d] post-RoPE queries of all tokens."""
    states = torch.tensor(case["hidden_states"]) @ torch.tensor(case["q_weight"]).T
    raw = states.view(case["n"], RECORDED["n_heads"], HEAD_DIM)
    return rotate_forward(raw, torch.arange(case["n"]), rotary())


def repetition_of(case: dict[str, Any]) -> PassStatistics:
    """What a pass of KVzip's repetition leaves."""
    keys, own_keys, queries = (
        torch.tensor(case[name]).transpose(0, 1) for name in ("keys", "kvzip_keys", "kvzip_queries")
    )
    chunk = PassChunk(tuple(range(len(queries))), case["n"], 0, (), own_keys=True)
    results = PassResults()
    # The outputs do not matter, so any values will do.
    results.attend(
        0,
        chunk,
        queries=queries,
        own_keys=own_keys,
        own_values=own_keys,
        keys=keys,
        values=keys,
        n_tokens=case["n"],
        scale=SCALE,
    )
    return results.statistics(0)


def budget_of(n: int, budget: str) -> int:
    return max(1, int(n * (1 - (1 - float(budget)))))


def ours(name: str, case: dict[str, Any], n_slots: int) -> tuple[Tensor, Tensor]:
    """Kept tokens [Hkv, n] bool and the scores [Hkv, n] behind them."""
    n = case["n"]
    profile = profile_for(name, n)
    kind = type(get_scorer(profile.scorer))
    score, seen = kind.score, list[Tensor]()

    def watched(self: Scorer, ctx: ScoringContext) -> Tensor:
        seen.append(score(self, ctx))
        return seen[-1]

    inputs = LayerInputs(
        keys=torch.tensor(case["keys"]).transpose(0, 1),
        values=torch.tensor(case["values"]).transpose(0, 1),
        queries=queries_of(case),
        scale=SCALE,
        output_projection=torch.tensor(case["o_weight"]),
        passes={"repetition": repetition_of(case)},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "score", watched)
        result = compress_layer(
            inputs, plan_for(n), profile, n_slots=n_slots, starts_sequence=True, rotary=rotary()
        )
    return mask_of([[s for s in row if s >= 0] for row in result.kept.tolist()], n), seen[0]


def mask_of(positions: list[list[int]], n: int) -> Tensor:
    mask = torch.zeros(len(positions), n, dtype=torch.bool)
    for row, kept in zip(mask, positions, strict=True):
        row[kept] = True
    return mask


def assert_same_choice(
    found: Tensor, expected: Tensor, scores: Tensor, settled: Tensor, *, pooled: bool = False
) -> None:
    """The masks [Hkv, n] differ at most in tokens that tie with the boundary to float32 rounding.

    Args:
        scores: [Hkv, n], which decide about the tokens that are not `settled` [Hkv, n] before.
        pooled: the heads share one budget, and so one boundary, the lowest score that is kept.
    """
    deciding = scores.masked_fill(~expected | settled, torch.inf)
    boundary = deciding.amin() if pooled else deciding.amin(dim=-1, keepdim=True)
    tied = (scores - boundary).abs() <= 4 * torch.finfo(torch.float32).eps * boundary.abs()
    differing = (found != expected) & ~(tied & ~settled)
    assert not differing.any(), (
        f"(head, token) {differing.nonzero().tolist()} at boundary {boundary.tolist()}"
    )
    assert int(found.sum()) == int(expected.sum())


def first_stage(name: str, scores: Tensor, always: Tensor, kept: Tensor) -> Tensor:
    """[Hkv, n] bool: the always-kept tokens and the best others, half of what a head keeps in all."""
    chosen = always.expand_as(kept).clone()
    for h, row in enumerate(chosen):
        half = int(kept[h].sum()) // 2
        order = scores[h].masked_fill(always, -torch.inf).argsort(descending=True)
        row[order[: max(0, half - int(always.sum()))]] = True
    return chosen


@pytest.mark.parametrize("n", CASES)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", METHODS)
def test_kept_positions(name: str, budget: str, n: int) -> None:
    case = CASES[n]
    n_slots = budget_of(n, budget)
    found, _ = ours(name, case, n_slots)
    expected = mask_of(case["kept"][budget][name], n)
    scores = torch.tensor(case["scores"][METHODS[name][1]])
    at = torch.arange(n)
    always = at >= n - WINDOW if by_window(name) else at < N_SINKS
    settled = always.expand_as(found)
    assert (expected & always == settled).all(), "kvpress keeps what ours always keeps"
    if name in {"criticalkv", "critical_adakv"}:
        settled = first_stage(name, scores, always, expected)
        scores = (scores + EPSILON) * torch.tensor(case["scores"]["value_projection"])
    assert_same_choice(found, expected, scores, settled, pooled=name == "adakv")
    assert (found & always).sum() == N_KV_HEADS * always.sum()
    if get_scorer(METHODS[name][0]).storage == "even":
        assert found.sum(dim=1).tolist() == [n_slots] * N_KV_HEADS
    assert int(found.sum()) == N_KV_HEADS * n_slots


@pytest.mark.parametrize("n", CASES)
@pytest.mark.parametrize("name", METHODS)
def test_scores(name: str, n: int) -> None:
    case = CASES[n]
    _, scores = ours(name, case, n // 2)
    expected = torch.tensor(case["scores"][METHODS[name][1]])
    compared = slice(0, n - WINDOW) if by_window(name) else slice(N_SINKS, n)
    torch.testing.assert_close(scores[:, compared], expected[:, compared], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("n", CASES)
def test_projected_norms(n: int) -> None:
    case = CASES[n]
    norms = projected_norms(torch.tensor(case["values"]), torch.tensor(case["o_weight"]))
    torch.testing.assert_close(norms, torch.tensor(case["scores"]["value_projection"]))


def test_the_inputs_are_what_kvpress_saw() -> None:
    for case in CASES.values():
        window = torch.tensor(case["window_queries"]).transpose(0, 1)
        torch.testing.assert_close(queries_of(case)[-WINDOW:], window, rtol=1e-4, atol=1e-5)


def test_the_constants_are_the_same() -> None:
    assert RECORDED["kvpress"] == "0.5.5"
    assert RECORDED["epsilon"] == EPSILON
    assert RECORDED["first_stage_ratio"] == 0.5
    assert RECORDED["alpha_safeguard"] == ALPHA
    assert RECORDED["expected_attention"] == {
        "n_future_positions": N_FUTURE,
        "n_sink": N_SINKS,
        "epsilon": 0.0,
    }


@pytest.mark.parametrize("n", CASES)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", ["adakv", "critical_adakv"])
def test_no_floor_of_adakv_decides(name: str, budget: str, n: int) -> None:
    """What this module says about them."""
    n_slots = budget_of(n, budget)
    assert int(RECORDED["alpha_safeguard"] * n_slots) <= WINDOW
    kept, _ = ours(name, CASES[n], n_slots)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grkv_sglang.core.selection.adakv.ALPHA", 0.0)
        without, _ = ours(name, CASES[n], n_slots)
    assert torch.equal(kept, without)


def test_only_ties_may_differ() -> None:
    scores = torch.tensor([[9.0, 0.5, 0.5, 0.4, 0.1], [9.0, 0.5 + 1e-5, 0.5, 0.4, 0.1]])
    settled = torch.tensor([True, False, False, False, False]).expand(2, -1)
    expected = mask_of([[0, 1], [0, 1]], 5)
    assert_same_choice(mask_of([[0, 2], [0, 1]], 5), expected, scores, settled)
    for wrong in ([[0, 3], [0, 1]], [[0, 1], [0, 2]], [[1, 2], [0, 1]], [[0, 1, 2], [0, 1]]):
        with pytest.raises(AssertionError):
            assert_same_choice(mask_of(wrong, 5), expected, scores, settled)
    # One boundary for both heads: 0.5.
    shared = mask_of([[0, 1], [0, 1, 2]], 5)
    assert_same_choice(mask_of([[0, 1, 2], [0, 1]], 5), shared, scores, settled, pooled=True)
    with pytest.raises(AssertionError):
        assert_same_choice(mask_of([[0, 1, 2], [0, 2]], 5), shared, scores, settled, pooled=True)


@pytest.mark.parametrize("n", CASES)
@pytest.mark.parametrize("budget", BUDGETS)
def test_the_recorded_choices_tell_rules_apart(budget: str, n: int) -> None:
    """Agreement would mean little if another rule kept the same tokens."""
    case = CASES[n]
    kept = case["kept"][budget]
    assert kept["criticalkv"] != kept["snapkv"]
    assert kept["critical_adakv"] != kept["adakv"]
    assert kept["adakv"] != kept["snapkv"]
    # A first stage of half the tokens that are not always kept.
    scores, n_slots = torch.tensor(case["scores"]["snapkv"]), budget_of(n, budget)
    by_value = (scores + EPSILON) * torch.tensor(case["scores"]["value_projection"])
    always = (torch.arange(n) >= n - WINDOW).expand_as(scores)
    n_free = n_slots - WINDOW
    first = always | top_mask(scores, ~always, n_free // 2)
    halved = first | top_mask(by_value, ~first, n_free - n_free // 2)
    assert not torch.equal(halved, mask_of(kept["criticalkv"], n))
