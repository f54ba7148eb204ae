from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grkv_sglang.core import ScoringContext, get_scorer, scorer_names
from grkv_sglang.core.selection.base import always_kept_tokens, indices_of, top_mask
from grkv_sglang.core.selection.criticalkv import projected_norms

from .reference import random


def context(
    *, n_kv_heads: int = 2, m: int = 3, group: int = 3, n: int = 11, n_window: int = 3, seed: int = 0
) -> ScoringContext:
    """Causal softmax weights of the last m positions, and random values and projection."""
    logits = random(n_kv_heads, m, group, n, seed=seed, scale=2.0)
    for i in range(m):
        logits[:, i, :, n - m + i + 1 :] = -torch.inf
    return ScoringContext(
        weights=logits.softmax(-1),
        values=random(n_kv_heads, n, 4, seed=seed + 1),
        output_projection=random(7, n_kv_heads * group * 4, seed=seed + 2),
        n_window=n_window,
        pool_kernel=5,
    )


def naive_mean(ctx: ScoringContext) -> list[list[float]]:
    n_kv_heads, m, group, n = ctx.weights.shape
    return [
        [
            sum(float(ctx.weights[h, i, g, s]) for i in range(m) for g in range(group)) / (m * group)
            for s in range(n)
        ]
        for h in range(n_kv_heads)
    ]


def naive_snapkv(ctx: ScoringContext) -> list[list[float]]:
    before = ctx.weights.shape[-1] - ctx.n_window
    half = ctx.pool_kernel // 2
    return [
        [
            sum(row[t] for t in range(s - half, s + half + 1) if 0 <= t < before) / ctx.pool_kernel
            for s in range(before)
        ]
        + row[before:]
        for row in naive_mean(ctx)
    ]


def naive_projected_norm(ctx: ScoringContext, head: int, token: int) -> float:
    assert ctx.output_projection is not None
    group, dv = ctx.weights.shape[2], ctx.values.shape[-1]
    total = 0.0
    for query_head in range(head * group, (head + 1) * group):
        block = ctx.output_projection[:, query_head * dv : (query_head + 1) * dv]
        total += float((block @ ctx.values[head, token]).abs().sum())
    return total / group


def approximately(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_snapkv_scores(group: int) -> None:
    ctx = context(group=group)
    torch.testing.assert_close(get_scorer("snapkv").score(ctx), approximately(naive_snapkv(ctx)))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6])
def test_snapkv_scores_of_spans_shorter_than_the_pool(n: int) -> None:
    ctx = context(n=n, m=1, n_window=2, n_kv_heads=1)
    torch.testing.assert_close(get_scorer("snapkv").score(ctx), approximately(naive_snapkv(ctx)))


def test_stratified_scores() -> None:
    ctx = context()
    mean = approximately(naive_mean(ctx))
    torch.testing.assert_close(get_scorer("stratified").score(ctx), mean)
    norms = approximately(
        [[sum(float(x) ** 2 for x in ctx.values[h, s]) ** 0.5 for s in range(11)] for h in range(2)]
    )
    torch.testing.assert_close(get_scorer("stratified_value").score(ctx), mean * norms)


def test_projected_norms() -> None:
    ctx = context(n=9)
    assert ctx.output_projection is not None
    expected = approximately([[naive_projected_norm(ctx, h, s) for s in range(9)] for h in range(2)])
    torch.testing.assert_close(projected_norms(ctx.values, ctx.output_projection), expected)


def test_projected_norms_of_more_tokens_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = context(n=11)
    assert ctx.output_projection is not None
    whole = projected_norms(ctx.values, ctx.output_projection)
    monkeypatch.setattr("grkv_sglang.core.selection.criticalkv._TOKENS_PER_CHUNK", 4)
    torch.testing.assert_close(projected_norms(ctx.values, ctx.output_projection), whole)


@pytest.mark.parametrize("n_slots", [5, 8, 9])
def test_criticalkv_chooses_in_two_stages(n_slots: int) -> None:
    ctx = context(n=14, n_window=3)
    scorer = get_scorer("criticalkv")
    scores = scorer.score(ctx)
    torch.testing.assert_close(scores, approximately(naive_snapkv(ctx)))
    always = torch.tensor([s >= 11 for s in range(14)])
    kept = scorer.select(ctx, scores, always, n_slots)
    for h in range(2):
        rest = sorted(range(11), key=lambda s: -float(scores[h, s]))
        first, rest = rest[: (n_slots - 3) // 2], rest[(n_slots - 3) // 2 :]
        rest.sort(key=lambda s: -(float(scores[h, s]) + 1e-4) * naive_projected_norm(ctx, h, s))
        second = rest[: n_slots - 3 - len(first)]
        assert kept[h].tolist() == sorted([*first, *second, 11, 12, 13])


def test_criticalkv_differs_from_snapkv_when_values_do() -> None:
    ctx = context(n=14, n_window=3)
    ctx.values[:, 5] *= 1000
    always = torch.tensor([s >= 11 for s in range(14)])
    scores = get_scorer("snapkv").score(ctx)
    scores[:, 5] = 0.0
    assert (get_scorer("criticalkv").select(ctx, scores, always, 7) == 5).any(dim=1).all()
    assert not (get_scorer("snapkv").select(ctx, scores, always, 7) == 5).any()


def test_criticalkv_needs_a_fitting_projection() -> None:
    ctx = context()
    assert get_scorer("criticalkv").needs_output_projection
    assert not get_scorer("snapkv").needs_output_projection
    without = ScoringContext(ctx.weights, ctx.values, None, 3, 5)
    with pytest.raises(ValueError, match=r"got None: pass an unquantised weight .* such as 'snapkv'"):
        get_scorer("criticalkv").score(without)
    wrong = ScoringContext(ctx.weights, ctx.values, torch.zeros(7, 23), 3, 5)
    with pytest.raises(ValueError, match=r"\[hidden, 24\], got \[7, 23\]"):
        get_scorer("criticalkv").score(wrong)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(0, 5), st.integers(0, 4), st.integers(1, 20), st.data())
def test_selection_keeps_the_always_kept_and_the_best(
    n_kv_heads: int, n_window: int, sinks: int, n_more: int, data: st.DataObject
) -> None:
    n = n_window + sinks + n_more
    n_slots = data.draw(st.integers(n_window + sinks + 1, n))
    scores = torch.rand(n_kv_heads, n, generator=torch.Generator().manual_seed(n * 31 + n_slots))
    always = always_kept_tokens(
        n,
        n_slots=n_slots,
        n_window=n_window,
        sinks=sinks,
        starts_sequence=True,
        device=torch.device("cpu"),
    )
    assert always.tolist() == [s < sinks or s >= n - n_window for s in range(n)]
    kept = get_scorer("stratified").select(context(), scores, always, n_slots)
    assert kept.dtype == torch.int64
    for h in range(n_kv_heads):
        by_score = sorted(range(sinks, n - n_window), key=lambda s: -float(scores[h, s]))
        best = by_score[: n_slots - n_window - sinks]
        assert kept[h].tolist() == sorted([*range(sinks), *range(n - n_window, n), *best])


def test_sinks_belong_to_the_start_of_the_sequence() -> None:
    device = torch.device("cpu")
    inner = always_kept_tokens(9, n_slots=4, n_window=3, sinks=4, starts_sequence=False, device=device)
    assert inner.tolist() == [False] * 6 + [True] * 3
    with pytest.raises(ValueError, match=r"more than 7 slots \(3 window \+ 4 sink tokens .* got 7"):
        always_kept_tokens(9, n_slots=7, n_window=3, sinks=4, starts_sequence=True, device=device)
    with pytest.raises(ValueError, match=r"more than 3 slots .* got 3"):
        always_kept_tokens(9, n_slots=3, n_window=3, sinks=4, starts_sequence=False, device=device)


def test_non_finite_scores_still_select() -> None:
    scores = torch.tensor([[torch.nan, 1.0, torch.inf, -torch.inf, 2.0, torch.nan], [torch.nan] * 6])
    candidates = torch.tensor([True, True, True, True, True, False]).expand(2, -1)
    assert top_mask(scores, candidates, 3)[0].tolist() == [False, True, True, False, True, False]
    mask = top_mask(scores, candidates, 4)
    assert mask.sum(dim=1).tolist() == [4, 4]
    assert not mask[:, 5].any()


def test_indices_are_ascending() -> None:
    mask = torch.tensor([[False, True, False, True], [True, False, False, True]])
    assert indices_of(mask, 2).tolist() == [[1, 3], [0, 3]]


def test_registry() -> None:
    assert scorer_names() == ("snapkv", "stratified", "stratified_value", "criticalkv")
    assert [get_scorer(name).name for name in scorer_names()] == list(scorer_names())
    with pytest.raises(ValueError, match="snapkv, stratified, stratified_value, criticalkv, got 'h2o'"):
        get_scorer("h2o")
