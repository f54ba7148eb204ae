from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grkv_sglang.core import Scorer, ScoringContext, get_profile, get_scorer, scorer_names, selection
from grkv_sglang.core.selection import PassStatistics
from grkv_sglang.core.selection.adakv import PerHead
from grkv_sglang.core.selection.base import always_kept_tokens, top_mask, top_mask_pooled, top_masks
from grkv_sglang.core.selection.combined import RankSum, ShareSum, ranks, shares
from grkv_sglang.core.selection.criticalkv import projected_norms

from .reference import pass_statistics, random, rotary_table, rotated

# KV heads, group, tokens: nothing divides anything.
SHAPES = [(1, 1, 7), (2, 3, 11), (1, 4, 23), (3, 1, 13), (5, 3, 17)]
BUILT_IN = (
    "snapkv",
    "snapkv_onward",
    "stratified",
    "stratified_value",
    "criticalkv",
    "kvzip",
    "kvzip_per_head",
    "question_mass",
    "repetition_mass",
    "repetition_energy",
    "h2o",
    "adakv",
    "critical_adakv",
    "pyramidkv",
    "expected_attention",
)


def context(
    n_kv_heads: int = 2,
    group: int = 3,
    n: int = 11,
    *,
    m: int = 3,
    n_window: int = 3,
    n_sinks: int = 0,
    seed: int = 0,
    is_neox: bool = True,
) -> ScoringContext:
    """Random float64: causal attention of the last m positions, that of strata that see everything."""
    window = random(n_kv_heads, m, group, n, seed=seed, scale=2.0)
    for i in range(m):
        window[:, i, :, n - m + i + 1 :] = -torch.inf
    strata = random(n_kv_heads, 4, group, n, seed=seed + 3, scale=2.0)
    return ScoringContext(
        keys=random(n_kv_heads, n, 6, seed=seed + 4),
        values=random(n_kv_heads, n, 4, seed=seed + 1),
        attention={"window": window.softmax(-1).mean((1, 2)), "strata": strata.softmax(-1).mean((1, 2))},
        queries={
            "window": random(n_kv_heads, m, group, 6, seed=seed + 9),
            "strata": random(n_kv_heads, 4, group, 6, seed=seed + 5),
        },
        passes={
            "span": pass_statistics(n_kv_heads, n, seed=seed + 6),
            "repetition": pass_statistics(n_kv_heads, n, seed=seed + 7),
            "questions": pass_statistics(n_kv_heads, n, seed=seed + 8),
        },
        output_projection=random(7, n_kv_heads * group * 4, seed=seed + 2),
        rotary=rotary_table(6, is_neox=is_neox, n_positions=600),
        scale=0.7,
        n_window=n_window,
        n_sinks=n_sinks,
        pool_kernel=5,
    )


def naive_snapkv(ctx: ScoringContext) -> list[list[float]]:
    before = ctx.keys.shape[1] - ctx.n_window
    half = ctx.pool_kernel // 2
    return [
        [
            sum(row[t] for t in range(s - half, s + half + 1) if 0 <= t < before) / ctx.pool_kernel
            for s in range(before)
        ]
        + row[max(before, 0) :]
        for row in ctx.attention["window"].tolist()
    ]


def naive_onward(ctx: ScoringContext) -> list[list[float]]:
    before = max(0, ctx.keys.shape[1] - ctx.n_window)
    return [
        [
            max(row[s], *(0.5 * row[s - d] * 2 ** (-d / 16) for d in range(1, 65) if d <= s), 0.0)
            for s in range(before)
        ]
        + row[before:]
        for row in naive_snapkv(ctx)
    ]


def naive_norm(ctx: ScoringContext, head: int, token: int) -> float:
    return sum(float(x) ** 2 for x in ctx.values[head, token]) ** 0.5


def naive_projected_norm(ctx: ScoringContext, head: int, token: int) -> float:
    assert ctx.output_projection is not None
    group, dv = ctx.queries["window"].shape[2], ctx.values.shape[-1]
    total = 0.0
    for query_head in range(head * group, (head + 1) * group):
        block = ctx.output_projection[:, query_head * dv : (query_head + 1) * dv]
        total += float((block @ ctx.values[head, token]).abs().sum())
    return total / group


def naive_expected_attention(ctx: ScoringContext, *, is_neox: bool, n_future: int) -> list[list[float]]:
    """By the definition: mean vector, covariance matrix, mean rotation matrix, one token at a time."""
    keys, queries = ctx.keys.numpy(), ctx.queries["strata"].numpy()
    n_kv_heads, m, group, d = queries.shape
    at = torch.arange(1, n_future + 1)
    # Row t, j: the j-th unit vector rotated by t + 1; its mean is a column of the rotation matrix.
    units = rotated(torch.eye(d, dtype=torch.float64).expand(n_future, d, d), at, d, is_neox=is_neox)
    rotation = units.mean(dim=0).numpy().T
    result = []
    for h in range(n_kv_heads):
        share = np.zeros(keys.shape[1])
        for g in range(group):
            mean = queries[h, :, g].mean(axis=0)
            spread = queries[h, :, g] - mean
            covariance = rotation @ (spread.T @ spread / m) @ rotation.T
            expected = np.array(
                [
                    np.exp(ctx.scale * key @ rotation @ mean + ctx.scale**2 * key @ covariance @ key / 2)
                    for key in keys[h]
                ]
            )
            expected[: ctx.n_sinks] = 0.0
            share += expected / expected.sum() / group
        result.append([float(share[s]) * naive_norm(ctx, h, s) for s in range(keys.shape[1])])
    largest = max(max(row) for row in result)
    return [[largest] * ctx.n_sinks + row[ctx.n_sinks :] for row in result]


def numbers(tensor: Tensor) -> list[list[float]]:
    rows: list[list[float]] = tensor.tolist()
    return rows


def naive_scores(name: str, ctx: ScoringContext) -> list[list[float]]:
    if name in {"snapkv", "criticalkv", "adakv", "critical_adakv", "pyramidkv"}:
        return naive_snapkv(ctx)
    if name == "snapkv_onward":
        return naive_onward(ctx)
    if name == "expected_attention":
        return naive_expected_attention(ctx, is_neox=True, n_future=512)
    if name == "h2o":
        return numbers(ctx.passes["span"].total)
    if name in {"kvzip", "kvzip_per_head"}:
        return numbers(ctx.passes["repetition"].maximum)
    if name in {"question_mass", "repetition_mass", "repetition_energy"}:
        left = ctx.passes["questions" if name == "question_mass" else "repetition"]
        rows = numbers(left.square if name == "repetition_energy" else left.total)
        return [[x * naive_norm(ctx, h, s) for s, x in enumerate(row)] for h, row in enumerate(rows)]
    mean = ctx.attention["strata"].tolist()
    if name == "stratified":
        return mean
    assert name == "stratified_value"
    return [[x * naive_norm(ctx, h, s) for s, x in enumerate(row)] for h, row in enumerate(mean)]


def best(scores: list[float], candidates: set[int], count: int) -> set[int]:
    assert count <= len(candidates)
    return set(sorted(candidates, key=lambda s: -scores[s])[:count])


def best_pooled(scores: list[list[float]], candidates: list[set[int]], count: int) -> list[set[int]]:
    """Head by head, the highest of all heads' scores."""
    every = sorted(((-row[s], h, s) for h, row in enumerate(scores) for s in candidates[h]))[:count]
    return [{s for _, head, s in every if head == h} for h in range(len(scores))]


def naive_adakv(scores: list[list[float]], candidates: set[int], n_free: int) -> list[set[int]]:
    floor = n_free // 5
    safe = [best(row, candidates, floor) for row in scores]
    more = best_pooled(scores, [candidates - mine for mine in safe], len(scores) * (n_free - floor))
    return [mine | rest for mine, rest in zip(safe, more, strict=True)]


def naive_choice(name: str, ctx: ScoringContext, always: set[int], n_slots: int) -> list[set[int]]:
    scores = naive_scores(name, ctx)
    candidates = set(range(ctx.keys.shape[1])) - always
    n_free = n_slots - len(always)
    if name == "kvzip_per_head":
        chosen = best_pooled(scores, [candidates] * len(scores), len(scores) * n_free)
    elif name == "adakv":
        chosen = naive_adakv(scores, candidates, n_free)
    elif name in {"criticalkv", "critical_adakv"}:
        chosen = []
        for h, row in enumerate(scores):
            count, floor = n_free, 0
            if name == "critical_adakv":
                count, floor = len(naive_adakv(scores, candidates, n_free)[h]), n_free // 5
            # Half of the whole budget, for which those always kept count.
            half = (len(always) + count) // 2
            first = best(row, candidates, max(half - len(always), floor))
            second = [(x + 1e-4) * naive_projected_norm(ctx, h, s) for s, x in enumerate(row)]
            chosen.append(first | best(second, candidates - first, count - len(first)))
    else:
        chosen = [best(row, candidates, n_free) for row in scores]
    return [always | mine for mine in chosen]


def approximately(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def tokens(mask: Tensor) -> list[set[int]]:
    return [set(row.nonzero().flatten().tolist()) for row in mask]


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("shape", SHAPES)
def test_scores(name: str, shape: tuple[int, int, int]) -> None:
    for n_sinks in (0, 2):
        ctx = context(*shape, n_sinks=n_sinks, seed=shape[2])
        scores = get_scorer(name).score(ctx)
        torch.testing.assert_close(scores, approximately(naive_scores(name, ctx)))


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n_window", [1, 3])
def test_choices(name: str, shape: tuple[int, int, int], n_window: int) -> None:
    n = shape[2]
    ctx = context(*shape, n_window=n_window, m=n_window, seed=n + 1)
    always = torch.tensor([s == 1 or s >= n - n_window for s in range(n)])
    scorer = get_scorer(name)
    for n_slots in range(n_window + 2, n + 1):
        kept = scorer.select(ctx, scorer.score(ctx), always, n_slots)
        assert kept.dtype == torch.bool
        assert int(kept.sum()) == shape[0] * n_slots
        if scorer.storage != "per_head":
            assert kept.sum(dim=1).tolist() == [n_slots] * shape[0]
        assert tokens(kept) == naive_choice(name, ctx, {1, *range(n - n_window, n)}, n_slots)


@pytest.mark.parametrize("name", BUILT_IN)
def test_scores_of_a_context_in_float32(name: str) -> None:
    def single(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: tensor.float() for key, tensor in tensors.items()}

    ctx = context()
    coarse = replace(
        ctx,
        keys=ctx.keys.float(),
        values=ctx.values.float(),
        attention=single(ctx.attention),  # type: ignore[arg-type]
        queries=single(ctx.queries),  # type: ignore[arg-type]
        passes={
            kind: PassStatistics(left.total.float(), left.square.float(), left.maximum.float())
            for kind, left in ctx.passes.items()
        },
        output_projection=None if ctx.output_projection is None else ctx.output_projection.bfloat16(),
    )
    scores = get_scorer(name).score(coarse)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), get_scorer(name).score(ctx), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", BUILT_IN)
def test_scoring_leaves_its_inputs_alone(name: str) -> None:
    ctx, same = context(n_sinks=2), context(n_sinks=2)
    scorer = get_scorer(name)
    scores = scorer.score(ctx)
    kept = scores.clone()
    scorer.select(ctx, scores, torch.tensor([s >= 8 for s in range(11)]), 6)
    torch.testing.assert_close(scores, kept, rtol=0, atol=0)
    for new, old in ((ctx.attention, same.attention), (ctx.queries, same.queries)):
        assert all(torch.equal(new[key], old[key]) for key in old)
    for kind, left in same.passes.items():
        assert all(torch.equal(getattr(ctx.passes[kind], name), kept) for name, kept in vars(left).items())
    assert torch.equal(ctx.keys, same.keys)
    assert torch.equal(ctx.values, same.values)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6])
def test_snapkv_scores_of_spans_shorter_than_the_pool(n: int) -> None:
    ctx = context(1, 3, n, m=1, n_window=2)
    torch.testing.assert_close(get_scorer("snapkv").score(ctx), approximately(naive_snapkv(ctx)))


@pytest.mark.parametrize("n", [2, 3, 66, 68, 151])
def test_scores_carry_on_as_far_as_the_reach(n: int) -> None:
    ctx = context(2, 3, n, m=1, n_window=2)
    scores = get_scorer("snapkv_onward").score(ctx)
    torch.testing.assert_close(scores, approximately(naive_onward(ctx)))
    peak = torch.zeros(1, 151, dtype=torch.float64)
    peak[0, 20] = 1.0
    carried = get_scorer("snapkv_onward").score(
        replace(ctx, attention={"window": peak}, n_window=0, pool_kernel=1)
    )
    assert carried[0].nonzero().flatten().tolist() == list(range(20, 85))
    assert carried[0, [20, 36, 84]].tolist() == pytest.approx([1.0, 0.25, 0.5 / 16])


def test_projected_norms_of_more_tokens_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = context()
    assert ctx.output_projection is not None
    whole = projected_norms(ctx.values, ctx.output_projection)
    expected = approximately([[naive_projected_norm(ctx, h, s) for s in range(11)] for h in range(2)])
    torch.testing.assert_close(whole, expected)
    monkeypatch.setattr("grkv_sglang.core.selection.criticalkv._TOKENS_PER_CHUNK", 4)
    torch.testing.assert_close(projected_norms(ctx.values, ctx.output_projection), whole)


def test_criticalkv_differs_from_snapkv_when_values_do() -> None:
    ctx = context(n=14)
    ctx.values[:, 5] *= 1000
    always = torch.tensor([s >= 11 for s in range(14)])
    scores = get_scorer("snapkv").score(ctx)
    scores[:, 5] = 0.0
    assert get_scorer("criticalkv").select(ctx, scores, always, 7)[:, 5].all()
    assert not get_scorer("snapkv").select(ctx, scores, always, 7)[:, 5].any()


@pytest.mark.parametrize("name", ["criticalkv", "critical_adakv"])
def test_the_first_stage_counts_always_kept_tokens(name: str) -> None:
    """By hand: attention falls along the tokens, the values' size rises steeply."""
    n = 20
    ctx = replace(
        context(),
        values=(10.0 ** torch.arange(n)).view(1, n, 1),
        attention={"window": torch.zeros(1, n)},
        queries={"window": torch.zeros(1, 1, 1, 6)},
        output_projection=torch.ones(1, 1),
    )
    scores = torch.arange(n, 0, -1).view(1, n) / n

    def chosen(n_always: int, n_slots: int) -> list[int]:
        always = torch.arange(n) >= n - n_always
        kept = get_scorer(name).select(ctx, scores, always, n_slots) & ~always
        return kept[0].nonzero().flatten().tolist()

    # AdaKV's floor, a fifth of what is free, is below all that.
    assert chosen(0, 9) == [0, 1, 2, 3, 15, 16, 17, 18, 19]
    # 4 of 10 or 11 slots are always kept: 1 by attention makes them 5, half of the budget.
    assert chosen(4, 10) == [0, 11, 12, 13, 14, 15]
    assert chosen(4, 11) == [0, 10, 11, 12, 13, 14, 15]
    # Half of the budget or more is always kept: nothing by attention, but what is safe.
    first = [0] if name == "critical_adakv" else []
    assert chosen(6, 12) == first + [8, 9, 10, 11, 12, 13][len(first) :]
    assert chosen(9, 14) == first + [6, 7, 8, 9, 10][len(first) :]
    assert chosen(9, 12) == [8, 9, 10]


@pytest.mark.parametrize("name", ["criticalkv", "critical_adakv"])
def test_the_second_stage_needs_a_fitting_projection(name: str) -> None:
    ctx = context()
    assert [other for other in BUILT_IN if get_scorer(other).needs_output_projection] == [
        "criticalkv",
        "critical_adakv",
    ]
    with pytest.raises(
        ValueError, match=rf"'{name}' needs .* got None: pass an unquantised weight .* such as 'snapkv'"
    ):
        get_scorer(name).score(replace(ctx, output_projection=None))
    with pytest.raises(ValueError, match=r"\[hidden, 24\], got \[7, 23\]"):
        get_scorer(name).score(replace(ctx, output_projection=torch.zeros(7, 23)))


def test_adakv_by_hand() -> None:
    # 5 free slots per head: 1 is safe in each, 8 go to the best that are left.
    scores = torch.tensor(
        [
            [0.90, 0.80, 0.70, 0.60, 0.50, 0.40, 0.30, 0.20, 0.0],
            [0.45, 0.44, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.0],
        ]
    )
    always = torch.tensor([s == 8 for s in range(9)])
    kept = get_scorer("adakv").select(context(), scores, always, 6)
    assert tokens(kept) == [{0, 1, 2, 3, 4, 5, 6, 7, 8}, {0, 1, 8}]
    # Without the floor the second head would have nothing.
    scores[1] = torch.arange(9) / 1000
    kept = get_scorer("adakv").select(context(), scores, always, 5)
    assert kept.sum(dim=1).tolist() == [9, 1]
    kept = get_scorer("adakv").select(context(), scores, always, 6)
    assert tokens(kept) == [set(range(9)), {6, 7, 8}]


def test_the_floor_counts_whole_fifths_as_written() -> None:
    scores = torch.stack((torch.arange(301) + 1000.0, torch.arange(301) * 1.0))
    always = torch.zeros(301, dtype=torch.bool)
    for n_slots in range(1, 151):
        kept = get_scorer("adakv").select(context(), scores, always, n_slots)
        assert kept.sum(dim=1).tolist() == [2 * n_slots - n_slots // 5, n_slots // 5]


def test_critical_adakv_by_hand() -> None:
    values = torch.ones(2, 8, 1)
    values[0, 6], values[1, 2] = 50.0, 50.0
    ctx = replace(
        context(),
        values=values,
        attention={"window": torch.zeros(2, 8)},
        queries={"window": torch.zeros(2, 1, 1, 6)},
        output_projection=torch.ones(1, 2),
    )
    scores = torch.tensor(
        [
            [0.90, 0.80, 0.70, 0.60, 0.50, 0.40, 0.30, 0.20],
            [0.05, 0.04, 0.03, 0.02, 0.01, 0.0, 0.0, 0.0],
        ]
    )
    # 5 slots each: one safe, then the 8 best; so 8 and 2... of 8 tokens the first head takes all.
    kept = get_scorer("critical_adakv").select(ctx, scores, torch.zeros(8, dtype=torch.bool), 5)
    assert tokens(kept) == [set(range(8)), {0, 2}]
    # 3 slots each, none safe: all 6 to the first head, 3 by score, then token 6 for its value.
    kept = get_scorer("critical_adakv").select(ctx, scores, torch.zeros(8, dtype=torch.bool), 3)
    assert tokens(kept) == [{0, 1, 2, 3, 4, 6}, set()]


def test_safe_tokens_survive_the_second_stage() -> None:
    """A floor above half of a head's budget: its best scores stay although their values are small."""
    values = torch.ones(2, 20, 1)
    values[1, :3] = 1e-6
    ctx = replace(
        context(),
        values=values,
        attention={"window": torch.zeros(2, 20)},
        queries={"window": torch.zeros(2, 1, 1, 6)},
        output_projection=torch.ones(1, 2),
    )
    scores = torch.stack((torch.full((20,), 0.9), torch.arange(20, 0, -1) / 1000))
    kept = get_scorer("critical_adakv").select(ctx, scores, torch.zeros(20, dtype=torch.bool), 10)
    # Floors of 2, 16 others to the first head.
    assert kept.sum(dim=1).tolist() == [18, 2]
    assert tokens(kept)[1] == {0, 1}


def test_pyramidkv_by_hand() -> None:
    def slots(n_layers: int, n_tokens: int, n_slots: int, always: int = 5) -> list[int]:
        scorer = get_scorer("pyramidkv")
        return [
            scorer.layer_slots(at, n_layers, n_tokens=n_tokens, n_slots=n_slots, n_always_kept=always)
            for at in range(n_layers)
        ]

    # Beyond 5: 39, 26 1/3, 13 2/3, 1.
    assert slots(4, 200, 25) == [44, 32, 18, 6]
    # No more than the 25 tokens there are: 20 free ones, then 20 * (2 * 12 - 20).
    assert slots(3, 25, 17) == [25, 17, 9]
    assert slots(1, 200, 25) == [25]
    assert slots(2, 200, 6) == [6, 6]
    assert slots(2, 200, 7) == [8, 6]
    assert slots(5, 40, 40) == [40] * 5


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 64), st.integers(0, 40), st.integers(1, 300), st.integers(0, 3000))
def test_pyramidkv_totals(n_layers: int, n_always_kept: int, n_free: int, n_evicted: int) -> None:
    n_slots, n_tokens = n_always_kept + n_free, n_always_kept + n_free + n_evicted
    slots = [
        get_scorer("pyramidkv").layer_slots(
            at, n_layers, n_tokens=n_tokens, n_slots=n_slots, n_always_kept=n_always_kept
        )
        for at in range(n_layers)
    ]
    assert sum(slots) == n_layers * n_slots
    assert n_always_kept + 1 <= min(slots)
    assert max(slots) <= n_tokens
    assert all(lower >= upper for lower, upper in pairwise(slots))
    if n_layers > 1:
        first = min(2 * n_free - max(1.0, n_free / 20), n_tokens - n_always_kept)
        for at, count in enumerate(slots):
            line = first + (2 * n_free - 2 * first) * at / (n_layers - 1)
            assert abs(count - n_always_kept - line) < 1


def test_other_methods_give_every_layer_the_same() -> None:
    for name in BUILT_IN:
        if name != "pyramidkv":
            slots = get_scorer(name).layer_slots(3, 7, n_tokens=100, n_slots=20, n_always_kept=5)
            assert slots == 20


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("n_positions", [600, 40])
def test_expected_attention_rotates_like_the_model(is_neox: bool, n_positions: int) -> None:
    ctx = replace(
        context(n_sinks=1), rotary=rotary_table(6, is_neox=is_neox, n_positions=n_positions, factor=1.3)
    )
    expected = naive_expected_attention(ctx, is_neox=is_neox, n_future=min(512, n_positions - 1))
    torch.testing.assert_close(get_scorer("expected_attention").score(ctx), approximately(expected))


def test_expected_attention_is_the_mean_attention_of_many_normal_queries() -> None:
    """Without a rotation, the formula against a sample of normally distributed queries."""
    ctx = context(1, 1, 9)
    assert ctx.rotary is not None
    still = torch.cat((torch.ones(3, 3), torch.zeros(3, 3)), dim=1)
    sample = random(40000, 6, seed=1, scale=0.6) + random(6, seed=2)
    ctx = replace(
        ctx,
        queries={"strata": sample.view(1, -1, 1, 6)},
        rotary=replace(ctx.rotary, cos_sin=still.double()),
        values=torch.ones(1, 9, 4, dtype=torch.float64),
    )
    mean = (ctx.scale * sample @ ctx.keys[0].T).exp().mean(dim=0)
    scores = get_scorer("expected_attention").score(ctx)[0]
    torch.testing.assert_close(scores / scores.sum(), mean / mean.sum(), rtol=0.05, atol=1e-3)


def test_expected_attention_needs_a_rotary_table() -> None:
    with pytest.raises(ValueError, match="'expected_attention' needs the model's rotary table"):
        get_scorer("expected_attention").score(replace(context(), rotary=None))


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
    for h in range(n_kv_heads):
        chosen = best(scores[h].tolist(), set(range(sinks, n - n_window)), n_slots - n_window - sinks)
        assert tokens(kept)[h] == {*range(sinks), *range(n - n_window, n), *chosen}


def test_sinks_belong_to_the_start_of_the_sequence() -> None:
    device = torch.device("cpu")
    inner = always_kept_tokens(9, n_slots=4, n_window=3, sinks=4, starts_sequence=False, device=device)
    assert inner.tolist() == [False] * 6 + [True] * 3
    with pytest.raises(ValueError, match=r"more than 7 slots \(3 window \+ 4 sink tokens .* got 7"):
        always_kept_tokens(9, n_slots=7, n_window=3, sinks=4, starts_sequence=True, device=device)
    with pytest.raises(ValueError, match=r"more than 3 slots .* got 3"):
        always_kept_tokens(9, n_slots=3, n_window=3, sinks=4, starts_sequence=False, device=device)


def test_protected_tokens_are_always_kept() -> None:
    def always(n_slots: int) -> Tensor:
        return always_kept_tokens(
            9,
            n_slots=n_slots,
            n_window=2,
            sinks=1,
            starts_sequence=True,
            device=torch.device("cpu"),
            # One of them is in the window and counts once.
            protected=torch.tensor([s in {4, 5, 8} for s in range(9)]),
        )

    assert always(6).nonzero().flatten().tolist() == [0, 4, 5, 7, 8]
    with pytest.raises(ValueError, match=r"more than 5 slots \(2 window \+ 1 sink tokens and the protected"):
        always(5)


def test_non_finite_scores_still_select() -> None:
    scores = torch.tensor([[torch.nan, 1.0, torch.inf, -torch.inf, 2.0, torch.nan], [torch.nan] * 6])
    candidates = torch.tensor([True, True, True, True, True, False]).expand(2, -1)
    assert top_mask(scores, candidates, 3)[0].tolist() == [False, True, True, False, True, False]
    mask = top_mask(scores, candidates, 4)
    assert mask.sum(dim=1).tolist() == [4, 4]
    assert not mask[:, 5].any()
    by_head = top_masks(scores, candidates, torch.tensor([3, 5]))
    assert by_head.tolist() == [[False, True, True, False, True, False], [True] * 5 + [False]]
    pooled = top_mask_pooled(scores, candidates, 7)
    assert int(pooled.sum()) == 7
    assert pooled[0, [1, 2, 4]].all()
    assert not pooled[:, 5].any()


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_head_of_nan_still_gets_its_tokens(name: str) -> None:
    ctx = context(n=14)
    scorer = get_scorer(name)
    scores = scorer.score(ctx)
    scores[1] = torch.nan
    always = torch.tensor([s >= 11 for s in range(14)])
    kept = scorer.select(ctx, scores, always, 8)
    assert int(kept.sum()) == 16
    assert kept[:, 11:].all()


def test_ranks() -> None:
    scores = torch.tensor([[3.0, 1.0, torch.nan, torch.inf, -torch.inf], [0.5, 0.5, 0.5, 0.1, 0.5]])
    # Of equals the earlier one is lower; NaN and -inf are equal.
    assert (ranks(scores) * 4).tolist() == [[3.0, 2.0, 0.0, 4.0, 1.0], [1.0, 2.0, 3.0, 0.0, 4.0]]
    assert ranks(torch.ones(2, 1)).tolist() == [[0.0], [0.0]]


def test_rank_sum() -> None:
    ctx = context(2, 3, 13)
    names = ("snapkv", "kvzip", "stratified_value")
    expected = torch.zeros(2, 13)
    for name in names:
        for h, row in enumerate(naive_scores(name, ctx)):
            for s, score in enumerate(row):
                expected[h, s] += sum(other < score for other in row) / 12
    combined = get_scorer("+".join(names))
    torch.testing.assert_close(combined.score(ctx), expected)
    assert combined.name == "snapkv+kvzip+stratified_value"
    assert combined.queries == {"window", "strata"}
    assert combined.passes == {"repetition"}
    assert combined.storage == "even"
    assert not combined.needs_output_projection
    assert get_scorer("h2o+kvzip").passes == {"span", "repetition"}
    with pytest.raises(ValueError, match="got 'snap'"):
        get_scorer("kvzip+snap")
    with pytest.raises(ValueError, match="got ''"):
        get_scorer("kvzip+")


def test_shares() -> None:
    scores = torch.tensor(
        [[1.0, 3.0, 0.0, 4.0], [0.0, 0.0, 0.0, 0.0], [torch.nan, 1.0, 1.0, 2.0], [torch.nan] * 4]
    )
    expected = [[0.125, 0.375, 0.0, 0.5], [0.0] * 4, [0.0, 0.25, 0.25, 0.5], [0.0] * 4]
    assert shares(scores).tolist() == expected
    assert shares(scores.double()).dtype == torch.float32
    # Whatever the scale: relative to the row.
    torch.testing.assert_close(shares(scores[:1] * 1e-30), torch.tensor(expected[:1]))


def test_share_sum() -> None:
    ctx = context(2, 3, 13)
    names = ("snapkv", "kvzip", "stratified_value")
    expected = torch.zeros(2, 13)
    for name in names:
        for h, row in enumerate(naive_scores(name, ctx)):
            expected[h] += torch.tensor([score / sum(row) for score in row])
    combined = get_scorer("~".join(names))
    torch.testing.assert_close(combined.score(ctx), expected)
    assert combined.name == "snapkv~kvzip~stratified_value"
    assert combined.queries == {"window", "strata"}
    assert combined.passes == {"repetition"}
    assert combined.storage == "even"
    assert get_scorer("h2o~question_mass").passes == {"span", "questions"}
    for broken in ("kvzip~", "~kvzip", "kvzip~~snapkv"):
        with pytest.raises(ValueError, match="got ''"):
            get_scorer(broken)


@pytest.mark.parametrize(("separator", "scaled"), [("+", ranks), ("~", shares)])
def test_a_method_named_twice_counts_twice(separator: str, scaled: Callable[[Tensor], Tensor]) -> None:
    ctx = context(2, 3, 13)
    one, other = get_scorer("snapkv"), get_scorer("kvzip")
    combined = get_scorer(separator.join(("snapkv", "kvzip", "snapkv")))
    expected = 2 * scaled(one.score(ctx)) + scaled(other.score(ctx))
    torch.testing.assert_close(combined.score(ctx), expected)
    assert combined.name == separator.join(("snapkv", "kvzip", "snapkv"))


def test_a_share_keeps_what_one_method_finds_far_above_all_else() -> None:
    ctx = context(1, 1, 12)
    ctx.passes["repetition"].maximum[0] = torch.tensor([100.0] + [1.0] * 11)
    ctx.passes["span"].total[0] = torch.arange(12.0) + 10.0
    none = torch.zeros(12, dtype=torch.bool)
    for name, kept in (("kvzip~h2o", [0, 11]), ("kvzip+h2o", [10, 11])):
        scorer = get_scorer(name)
        assert tokens(scorer.select(ctx, scorer.score(ctx), none, 2)) == [set(kept)]


def test_shares_bind_tighter_than_ranks() -> None:
    ctx = context(2, 3, 13)
    pair = get_scorer("snapkv~stratified").score(ctx)
    expected = ranks(get_scorer("kvzip").score(ctx)) + ranks(pair)
    for name in ("kvzip+snapkv~stratified", "snapkv~stratified+kvzip"):
        mixed = get_scorer(name)
        assert type(mixed) is RankSum
        assert mixed.name == name
        torch.testing.assert_close(mixed.score(ctx), expected)
        assert mixed.queries == {"window", "strata"}
    with pytest.raises(ValueError, match="got 'snap'"):
        get_scorer("kvzip+snap~h2o")
    with pytest.raises(ValueError, match="got 'adakv', which has per_head budgets"):
        get_scorer("kvzip+snapkv~adakv")


@pytest.mark.parametrize("separator", ["+", "~"])
@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ("criticalkv", "does not select by its score alone"),
        ("critical_adakv", "has per_head budgets"),
        ("adakv", "has per_head budgets"),
        ("kvzip_per_head", "has per_head budgets"),
        ("pyramidkv", "has per_layer budgets"),
    ],
)
def test_a_sum_refuses_parts_whose_own_rule_it_would_drop(separator: str, part: str, reason: str) -> None:
    for parts in ((part, "kvzip"), ("kvzip", "stratified", part), (part, part)):
        name = separator.join(parts)
        with pytest.raises(ValueError, match=f"nothing else, got '{part}', which {reason}: a sum would"):
            get_scorer(name)
    with pytest.raises(ValueError, match=f"got '{part}'"):
        {"+": RankSum, "~": ShareSum}[separator]([get_scorer("snapkv"), get_scorer(part)])


def test_a_sum_takes_all_other_methods() -> None:
    plain = [name for name in BUILT_IN if get_scorer(name).storage == "even" and name != "criticalkv"]
    assert len(plain) == 10
    combined = get_scorer("+".join(plain))
    assert combined.name == "+".join(plain)
    # A sum keeps its highest scores, too.
    nested = RankSum([combined, get_scorer("kvzip")])
    assert nested.queries == {"window", "strata"}
    ctx = context()
    expected = ranks(combined.score(ctx)) + ranks(ctx.passes["repetition"].maximum)
    torch.testing.assert_close(nested.score(ctx), expected)


@pytest.mark.parametrize(
    "name", [*BUILT_IN, "question_mass~snapkv", "kvzip+h2o~question_mass", "per_head:kvzip"]
)
def test_a_method_reads_what_it_says_of_its_passes(name: str) -> None:
    """The same scores where nothing else was counted."""
    ctx, scorer = context(2, 3, 13), get_scorer(name)
    full = scorer.score(ctx)
    for kind, statistics in ctx.passes.items():
        kept = {n: t if n in scorer.statistics else t[:, :0] for n, t in vars(statistics).items()}
        ctx = replace(ctx, passes={**ctx.passes, kind: PassStatistics(**kept)})
    assert torch.equal(scorer.score(ctx), full)


def test_a_sum_reads_what_its_parts_read() -> None:
    assert get_scorer("question_mass~snapkv").statistics == {"total"}
    assert get_scorer("kvzip+repetition_energy").statistics == {"maximum", "square"}
    assert get_scorer("per_head:kvzip").statistics == {"maximum"}
    assert get_profile("default").scorer.startswith("question_mass~")  # the cheap ones, in serving
    assert get_scorer(get_profile("default").scorer).statistics == {"total"}


def test_a_sum_needs_the_projection_that_a_part_scores_by() -> None:
    class Projected(Newest):
        name = "projected"
        needs_output_projection = True

    assert RankSum([get_scorer("snapkv"), Projected()]).needs_output_projection


@pytest.mark.parametrize("scores", ["stratified", "kvzip~stratified_value", "question_mass~snapkv~snapkv"])
@pytest.mark.parametrize("shape", SHAPES)
def test_any_scores_with_one_budget_per_layer(scores: str, shape: tuple[int, int, int]) -> None:
    ctx = context(*shape, seed=shape[2])
    even, shared = get_scorer(scores), get_scorer(f"per_head:{scores}")
    assert (shared.name, shared.storage) == (f"per_head:{scores}", "per_head")
    assert (shared.queries, shared.passes) == (even.queries, even.passes)
    assert torch.equal(shared.score(ctx), even.score(ctx))
    always = {0, shape[2] - 1}
    mask = torch.tensor([s in always for s in range(shape[2])])
    candidates = set(range(shape[2])) - always
    for n_slots in range(3, shape[2] + 1):
        kept = shared.select(ctx, shared.score(ctx), mask, n_slots)
        chosen = naive_adakv(numbers(even.score(ctx)), candidates, n_slots - 2)
        assert tokens(kept) == [always | mine for mine in chosen]


def test_one_budget_per_layer_needs_the_projection_that_its_scores_need() -> None:
    class Projected(Newest):
        name = "projected"
        needs_output_projection = True

    assert PerHead(Projected()).needs_output_projection


@pytest.mark.parametrize("scores", ["criticalkv", "adakv", "pyramidkv", "per_head:snapkv"])
def test_one_budget_per_layer_refuses_methods_whose_own_rule_it_would_drop(scores: str) -> None:
    with pytest.raises(ValueError, match=f"nothing else behind 'per_head:', got '{scores}'"):
        get_scorer(f"per_head:{scores}")


def test_registry() -> None:
    assert scorer_names() == BUILT_IN
    assert [get_scorer(name).name for name in BUILT_IN] == list(BUILT_IN)
    assert {name: get_scorer(name).storage for name in BUILT_IN if get_scorer(name).storage != "even"} == {
        "kvzip_per_head": "per_head",
        "adakv": "per_head",
        "critical_adakv": "per_head",
        "pyramidkv": "per_layer",
    }
    assert {name: set(get_scorer(name).passes) for name in BUILT_IN if get_scorer(name).passes} == {
        "kvzip": {"repetition"},
        "kvzip_per_head": {"repetition"},
        "question_mass": {"questions"},
        "repetition_mass": {"repetition"},
        "repetition_energy": {"repetition"},
        "h2o": {"span"},
    }
    with pytest.raises(ValueError, match=r"snapkv, .*, or several joined by '\+' or '~', .*, got 'snap'"):
        get_scorer("snap")
    with pytest.raises(ValueError, match="got 'snap'"):
        get_scorer("per_head:snap")


class Newest(Scorer):
    """Later tokens first: what another package might add."""

    name = "newest"

    def score(self, ctx: ScoringContext) -> Tensor:
        n_kv_heads, n, _ = ctx.keys.shape
        return torch.arange(n, dtype=torch.float32).expand(n_kv_heads, n)


class Nameless(Newest):
    name = "newer"


@dataclass(frozen=True)
class EntryPoint:
    name: str
    loaded: object
    value: str = "elsewhere:Newest"

    def load(self) -> object:
        return self.loaded


@pytest.fixture
def entry_points(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    """What other packages register; the list may be filled."""
    points: list[EntryPoint] = []

    def find(*, group: str, name: str | None = None) -> list[EntryPoint]:
        assert group == "grkv_sglang.scorers"
        return [point for point in points if name in (None, point.name)]

    def forget() -> None:
        selection.get_scorer.cache_clear()
        selection._registered.cache_clear()

    monkeypatch.setattr(selection, "entry_points", find)
    forget()
    yield points
    forget()


def test_an_entry_point_adds_a_method(entry_points: list[EntryPoint]) -> None:
    entry_points.append(EntryPoint("newest", Newest))
    # A built-in of that name stays what it is.
    entry_points.append(EntryPoint("snapkv", Newest))
    assert scorer_names() == (*BUILT_IN, "newest")
    assert isinstance(get_scorer("newest"), Newest)
    assert get_scorer("newest") is get_scorer("newest")
    assert get_scorer("snapkv").name == "snapkv"
    kept = get_scorer("newest+newest").select(
        context(), get_scorer("newest+newest").score(context()), torch.zeros(11, dtype=torch.bool), 4
    )
    assert tokens(kept) == [{7, 8, 9, 10}] * 2
    with pytest.raises(ValueError, match=r"expected_attention, newest, or several"):
        get_scorer("oldest")


@pytest.mark.parametrize("wrong", [Newest(), Nameless, object, len, "newest", None])
def test_an_entry_point_that_is_no_scorer(entry_points: list[EntryPoint], wrong: object) -> None:
    entry_points.append(EntryPoint("newest", wrong))
    with pytest.raises(
        ValueError,
        match=r"entry point 'newest' of grkv_sglang\.scorers \(elsewhere:Newest\) must be a subclass of "
        r"grkv_sglang\.core\.Scorer whose name is 'newest', got ",
    ):
        get_scorer("newest")


def test_methods_of_a_pass_read_their_own_statistic() -> None:
    ctx = context()
    left = ctx.passes["repetition"]
    norms = torch.linalg.vector_norm(ctx.values, dim=-1)
    expected = {
        "h2o": ctx.passes["span"].total,
        "kvzip": left.maximum,
        "kvzip_per_head": left.maximum,
        "question_mass": ctx.passes["questions"].total * norms,
        "repetition_mass": left.total * norms,
        "repetition_energy": left.square * norms,
    }
    for name, scores in expected.items():
        torch.testing.assert_close(get_scorer(name).score(ctx), scores)
