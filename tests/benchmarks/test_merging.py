from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.fidelity.merging import (
    MERGING_METHODS,
    MergedLayer,
    MergingMethod,
    adjacent_groups,
    asymkv_merged,
    cam_values,
    d2o_merged,
    key_curvature,
    merge_layer,
)
from grkv_sglang.core import (
    LayerInputs,
    Profile,
    attend,
    compress_layer,
    get_profile,
    plan_queries,
)
from tests.core.reference import naive_attention, random, rotary_table, rotated

PROFILE = replace(get_profile("paper"), n_window=5, n_held_out=3, sinks=2)
PLAIN = replace(PROFILE, value_step=False, key_step=False)


def inputs_for(
    profile: Profile,
    n: int,
    *,
    n_kv_heads: int = 2,
    group: int = 3,
    d: int = 8,
    p: int = 0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> LayerInputs:
    plan = plan_queries(n, profile)
    raw = random(len(plan.positions), n_kv_heads * group, d, seed=seed, scale=2.0)
    return LayerInputs(
        keys=random(n, n_kv_heads, d, seed=seed + 1).to(dtype),
        values=random(n, n_kv_heads, 6, seed=seed + 2).to(dtype),
        queries=rotated(raw, plan.positions, d, is_neox=True).float(),
        scale=0.4,
        ancestor_keys=random(p, n_kv_heads, d, seed=seed + 3).to(dtype) if p else None,
        ancestor_values=random(p, n_kv_heads, 6, seed=seed + 4).to(dtype) if p else None,
        layer=seed,
        n_layers=seed + 1,
    )


def merge(
    method: MergingMethod,
    inputs: LayerInputs,
    n_slots: int,
    *,
    profile: Profile = PROFILE,
    starts_sequence: bool = True,
) -> MergedLayer:
    return merge_layer(
        method,
        inputs,
        plan_queries(len(inputs.keys), profile),
        profile,
        n_slots=n_slots,
        starts_sequence=starts_sequence,
        rotary=rotary_table(8, is_neox=True),
    )


def held_out_error(inputs: LayerInputs, result: MergedLayer) -> float:
    """By loops, with every kept token as often as it counts."""
    plan = plan_queries(len(inputs.keys), PROFILE)
    n, n_kv_heads, d = inputs.keys.shape
    at = plan.positions[plan.held_out]
    # From their own positions to the last one.
    queries = rotated(inputs.queries[plan.held_out].double(), n - 1 - at, d, is_neox=True)
    past = inputs.keys[:0] if inputs.ancestor_keys is None else inputs.ancestor_keys
    past_values = inputs.values[:0] if inputs.ancestor_values is None else inputs.ancestor_values
    error = 0.0
    for h in range(n_kv_heads):
        group = queries.shape[1] // n_kv_heads
        query, one = queries[:, h * group : (h + 1) * group], slice(h, h + 1)
        times = torch.ones(result.kept.shape[1], dtype=torch.int64)
        if result.log_counts is not None:
            times = result.log_counts[h].exp().round().long()
        target, _ = naive_attention(
            query,
            torch.cat((past[:, one], inputs.keys[:, one])),
            torch.cat((past_values[:, one], inputs.values[:, one])),
            scale=inputs.scale,
        )
        output, _ = naive_attention(
            query,
            torch.cat((past[:, one], result.keys[:, one].repeat_interleave(times, dim=0))),
            torch.cat((past_values[:, one], result.values[:, one].repeat_interleave(times, dim=0))),
            scale=inputs.scale,
        )
        error += float((output - target).square().sum())
    return error


# -- CaM -----------------------------------------------------------------------------------------------


def test_cam_by_hand() -> None:
    """Probabilities of 0 and 1, so that no lot decides."""
    values = torch.arange(1.0, 7.0).view(1, 6, 1)
    kept = torch.tensor([[1, 3, 4]])
    # Token 0: 0.9 against the mean of 0.1, 0.2, 0.3 is certain; token 2 got nothing; token 5 has none behind.
    mass = torch.tensor([[0.9, 0.1, 0.0, 0.2, 0.3, 0.5]])
    new, merged = cam_values(values, mass, kept, torch.Generator().manual_seed(0))
    assert merged.tolist() == [True]
    torch.testing.assert_close(new, torch.tensor([[[2 + 1 / 3], [4 + 1 / 3], [5 + 1 / 3]]]))
    # Something against nothing is certain, too; nothing against nothing is dropped.
    mass = torch.tensor([[0.0, 0.1, 0.7, 0.0, 0.0, 0.0]])
    new, _ = cam_values(values, mass, kept, torch.Generator().manual_seed(0))
    torch.testing.assert_close(new, torch.tensor([[[2.0], [4 + 3 / 2], [5 + 3 / 2]]]))


def test_cam_spreads_over_32_tokens_at_most() -> None:
    n = 60
    values = torch.zeros(1, n, 1)
    values[0, 3] = 64.0
    mass = torch.zeros(1, n)
    mass[0, 3] = 1.0
    kept = torch.tensor([[s for s in range(n) if s not in (3, 10)]])
    new, _ = cam_values(values, mass, kept, torch.Generator().manual_seed(0))
    # Kept tokens 4 .. 36 without 10 are the 32 behind it; 0, 1, 2 come before.
    assert new[0, :, 0].tolist() == [0.0] * 3 + [2.0] * 32 + [0.0] * (n - 2 - 3 - 32)


def test_cam_merges_with_its_probability_and_keeps_what_the_output_had() -> None:
    values = random(2, 9, 3, seed=1)
    kept = torch.tensor([[2, 5, 6, 8], [1, 2, 4, 7]])
    mass = random(2, 9, seed=2).sigmoid() * 0.1
    # No lot is certain, so that the mean is the contribution of the evicted tokens.
    mass.scatter_(1, kept, 0.3 + 0.1 * random(2, 4, seed=3).sigmoid())
    generator = torch.Generator().manual_seed(0)
    runs = torch.stack([cam_values(values, mass, kept, generator)[0] for _ in range(4000)]).mean(dim=0)
    expected = torch.zeros_like(runs)
    for h in range(2):
        tokens = kept[h].tolist()
        expected[h] = values[h, tokens]
        for i in sorted(set(range(9)) - set(tokens)):
            behind = [j for j, s in enumerate(tokens) if s > i]
            if behind:
                mean = sum(float(mass[h, tokens[j]]) for j in behind) / len(behind)
                for j in behind:
                    expected[h, j] += float(mass[h, i]) / mean * values[h, i] / len(behind)
    torch.testing.assert_close(runs, expected, rtol=0.05, atol=0.03)
    # The same seed draws the same lots.
    same = [cam_values(values, mass, kept, torch.Generator().manual_seed(3))[0] for _ in range(2)]
    assert torch.equal(*same)


def test_cam_without_attention_is_plain_selection() -> None:
    values, kept = random(1, 7, 2, seed=4).float(), torch.tensor([[0, 4, 6]])
    mass = torch.zeros(1, 7)
    mass[0, kept[0]] = 0.3
    new, merged = cam_values(values, mass, kept, torch.Generator())
    assert torch.equal(new, values[:, kept[0]])
    assert merged.tolist() == [False]


# -- D2O -----------------------------------------------------------------------------------------------


def test_d2o_by_hand() -> None:
    keys = torch.tensor([[[1.0, 0.0], [0.0, 2.0], [3.0, 0.0], [0.0, 1.0], [-1.0, -1.0], [2.0, 2.0]]])
    values = torch.arange(1.0, 7.0).view(1, 6, 1)
    kept = torch.tensor([[0, 1]])
    # Similarities: 2 to 0 and 3 to 1 are 1; 4 is -0.71 to both, 5 is 0.71 to both. Mean of the best: 0.5.
    new_keys, new_values, merged = d2o_merged(keys, values, kept)
    half = math.exp(math.sqrt(0.5))
    weights = {0: math.e + math.e + half, 1: math.e + math.e}
    torch.testing.assert_close(
        new_keys,
        torch.tensor(
            [
                [
                    [(math.e * 1 + math.e * 3 + half * 2) / weights[0], half * 2 / weights[0]],
                    [0.0, (math.e * 2 + math.e * 1) / weights[1]],
                ]
            ]
        ),
    )
    expected = [(math.e * 1 + math.e * 3 + half * 6) / weights[0], (math.e * 2 + math.e * 4) / weights[1]]
    torch.testing.assert_close(new_values, torch.tensor(expected).view(1, 2, 1))
    assert merged.tolist() == [True]


@pytest.mark.parametrize("n_kv_heads", [1, 3])
def test_d2o_against_loops(n_kv_heads: int) -> None:
    n, c = 17, 6
    keys, values = random(n_kv_heads, n, 5, seed=5), random(n_kv_heads, n, 3, seed=6)
    kept = torch.stack(
        [
            torch.randperm(n, generator=torch.Generator().manual_seed(h))[:c].sort()[0]
            for h in range(n_kv_heads)
        ]
    )
    new_keys, new_values, _ = d2o_merged(keys, values, kept)
    for h in range(n_kv_heads):
        tokens = kept[h].tolist()
        best = {}
        for i in set(range(n)) - set(tokens):
            similar = [
                float(keys[h, i] @ keys[h, s]) / float(keys[h, i].norm() * keys[h, s].norm()) for s in tokens
            ]
            best[i] = max(zip(similar, range(c), strict=True))
        threshold = sum(similarity for similarity, _ in best.values()) / len(best)
        for j, s in enumerate(tokens):
            joining = [i for i, (similarity, to) in best.items() if to == j and similarity >= threshold]
            share = {s: math.e, **{i: math.exp(best[i][0]) for i in joining}}
            for old, new in ((keys, new_keys), (values, new_values)):
                mean = sum(weight * old[h, i] for i, weight in share.items()) / sum(share.values())
                torch.testing.assert_close(new[h, j], torch.as_tensor(mean))
            if not joining:
                assert torch.equal(new_keys[h, j], keys[h, s])


# -- AsymKV --------------------------------------------------------------------------------------------


def test_groups_by_hand() -> None:
    def groups(mass: list[float], apart: list[bool], n_groups: int) -> list[list[int]]:
        return [list(range(g.start, g.stop)) for g in adjacent_groups(mass, apart, n_groups)]

    mass = [9.0, 1.0, 1.5, 4.0, 0.1, 0.2, 9.0]
    free = [False] * 7
    assert groups(mass, free, 7) == [[0], [1], [2], [3], [4], [5], [6]]
    assert groups(mass, free, 6) == [[0], [1], [2], [3], [4, 5], [6]]
    # (1 + 1.5) * 2 against (4 + 0.3) * 3.
    assert groups(mass, free, 5) == [[0], [1, 2], [3], [4, 5], [6]]
    # (4 + 0.3) * 3 = 12.9 against (2.5 + 4) * 3 = 19.5 and (9 + 1) * 2, (0.3 + 9) * 3.
    assert groups(mass, free, 4) == [[0], [1, 2], [3, 4, 5], [6]]
    assert groups(mass, free, 1) == [[0, 1, 2, 3, 4, 5, 6]]
    # Equal weights: the earlier pair.
    assert groups([1.0] * 4, free, 3) == [[0, 1], [2], [3]]
    assert groups([1.0] * 4, free, 2) == [[0, 1], [2, 3]]
    # Token 4 stays alone.
    alone = [s == 4 for s in range(7)]
    assert groups(mass, alone, 3) == [[0, 1, 2, 3], [4], [5, 6]]
    with pytest.raises(ValueError, match="at least 3 groups, so many cannot be merged, got 2"):
        groups(mass, alone, 2)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(0, 1000), st.data())
def test_groups_against_searching_all_pairs(n: int, seed: int, data: st.DataObject) -> None:
    mass = random(n, seed=seed).exp().tolist()
    apart = (random(n, seed=seed + 1) > 1.0).tolist()
    groups = [[s] for s in range(n)]

    def weight(at: int) -> float:
        left, right = groups[at], groups[at + 1]
        if apart[left[0]] or apart[right[0]]:
            return math.inf
        return (sum(mass[s] for s in left) + sum(mass[s] for s in right)) * (len(left) + len(right))

    least = 1 + sum(a != b or a for a, b in pairwise(apart))
    n_groups = data.draw(st.integers(least, n))
    while len(groups) > n_groups:
        at = min(range(len(groups) - 1), key=weight)
        groups[at : at + 2] = [groups[at] + groups[at + 1]]
    assert [list(range(g.start, g.stop)) for g in adjacent_groups(mass, apart, n_groups)] == groups


@pytest.mark.parametrize("is_neox", [True, False])
def test_curvature_is_the_mean_square_gradient(is_neox: bool) -> None:
    """By autograd: the squared Jacobian of the outputs in the keys, averaged over rotary pairs."""
    queries, values = random(2, 4, 8, seed=7), random(2, 5, 3, seed=8)
    keys = random(2, 5, 8, seed=9)
    rotary = rotary_table(6, is_neox=is_neox)
    got = key_curvature(queries, attend(queries, keys, values, scale=0.7), values, scale=0.7, rotary=rotary)

    def outputs(k: Tensor) -> Tensor:
        return (0.7 * queries @ k.transpose(1, 2)).softmax(dim=-1) @ values

    # [2, 4, 3, 2, 5, 8]
    jacobian: Tensor = torch.autograd.functional.jacobian(outputs, keys)
    square = jacobian.square().sum(dim=(0, 1, 2))
    expected = square.clone()
    for j in range(3):
        pair = [j, j + 3] if is_neox else [2 * j, 2 * j + 1]
        expected[..., pair] = square[..., pair].mean(dim=-1, keepdim=True)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("is_neox", [True, False])
def test_asymkv_merges_keys_before_rope(is_neox: bool) -> None:
    raw, values = random(7, 2, 8, seed=10), random(2, 7, 3, seed=11)
    at = torch.arange(7)
    keys = rotated(raw, at, 8, is_neox=is_neox).transpose(0, 1)
    # As `key_curvature` does, the same for both components of a pair.
    half = random(2, 7, 4, seed=12).exp()
    curvature = torch.cat([half, half], dim=-1) if is_neox else half.repeat_interleave(2, dim=-1)
    groups = [slice(0, 1), slice(1, 4), slice(4, 5), slice(5, 7)]
    new_keys, new_values, counts = asymkv_merged(
        keys, values, curvature, groups, rotary_table(8, is_neox=is_neox)
    )
    assert counts.tolist() == [1.0, 3.0, 1.0, 2.0]
    assert torch.equal(new_keys[:, 0], keys[:, 0])
    assert torch.equal(new_keys[:, 2], keys[:, 4])
    for h in range(2):
        for j, group in enumerate(groups):
            members = range(group.start, group.stop)
            merged = sum(curvature[h, s] * raw[s, h] for s in members)
            merged = torch.as_tensor(merged) / torch.as_tensor(sum(curvature[h, s] for s in members))
            last = torch.tensor([group.stop - 1])
            expected = rotated(merged.view(1, 1, 8), last, 8, is_neox=is_neox)[0, 0]
            torch.testing.assert_close(new_keys[h, j], expected)
            torch.testing.assert_close(new_values[h, j], values[h, group].mean(dim=0))


def test_asymkv_of_a_group_that_no_query_looks_at_is_the_mean() -> None:
    keys, values = random(1, 3, 4, seed=13).float(), random(1, 3, 2, seed=14).float()
    table = replace(
        rotary_table(4, is_neox=True), cos_sin=torch.cat((torch.ones(9, 2), torch.zeros(9, 2)), dim=1)
    )
    new_keys, _, _ = asymkv_merged(keys, values, torch.zeros(1, 3, 4), [slice(0, 3)], table)
    torch.testing.assert_close(new_keys[:, 0], keys.mean(dim=1))


def test_asymkv_of_equal_keys_loses_nothing() -> None:
    """Tokens of one key (before RoPE there is none here) and different values: the output is exact."""
    keys, values = random(2, 6, 8, seed=15), random(2, 6, 3, seed=16)
    keys[:, 2:5] = keys[:, 2:3]
    table = rotary_table(8, is_neox=True)
    still = replace(table, cos_sin=torch.cat((torch.ones(9, 4), torch.zeros(9, 4)), dim=1).double())
    groups = [slice(0, 1), slice(1, 2), slice(2, 5), slice(5, 6)]
    curvature = random(2, 6, 8, seed=17).exp()
    new_keys, new_values, counts = asymkv_merged(keys, values, curvature, groups, still)
    queries = random(2, 4, 8, seed=18)
    expected = attend(queries, keys, values, scale=0.7).output
    logits = 0.7 * queries @ new_keys.transpose(1, 2) + counts.log()
    torch.testing.assert_close(logits.softmax(dim=-1) @ new_values, expected)


# -- a layer -------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(MERGING_METHODS),
    st.integers(1, 3),
    st.sampled_from([1, 3, 4]),
    st.integers(19, 47),
    st.integers(0, 7),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.data(),
)
def test_any_layer(
    method: MergingMethod,
    n_kv_heads: int,
    group: int,
    n: int,
    p: int,
    starts_sequence: bool,
    dtype: torch.dtype,
    data: st.DataObject,
) -> None:
    inputs = inputs_for(PROFILE, n, n_kv_heads=n_kv_heads, group=group, p=p, dtype=dtype, seed=n)
    before = [tensor.clone() for tensor in (inputs.keys, inputs.values, inputs.queries)]
    c = data.draw(st.integers(PROFILE.n_window + 2 + 1, n - 1))
    result = merge(method, inputs, c, starts_sequence=starts_sequence)
    assert result.kept.shape == (n_kv_heads, c)
    assert (result.kept.diff(dim=1) > 0).all()
    assert 0 <= int(result.kept.min()) <= int(result.kept.max()) < n
    assert result.keys.shape == (c, n_kv_heads, 8)
    assert result.values.shape == (c, n_kv_heads, 6)
    assert result.keys.dtype == result.values.dtype == dtype
    assert result.keys.is_contiguous()
    assert result.values.is_contiguous()
    assert result.keys.isfinite().all()
    assert result.values.isfinite().all()
    assert all(math.isfinite(x) for x in (result.error_before, result.error_after, result.reference))
    assert result.error_after > 0
    always = {*range(n - 5, n), *(range(2) if starts_sequence else ())}
    assert all(always <= set(tokens) for tokens in result.kept.tolist())
    for new, old in zip((inputs.keys, inputs.values, inputs.queries), before, strict=True):
        assert torch.equal(new, old)
    if method == "cam":
        for h in range(n_kv_heads):
            assert torch.equal(result.keys[:, h], inputs.keys[result.kept[h], h])
    if method == "asymkv":
        assert result.log_counts is not None
        assert result.log_counts.exp().sum(dim=1).round().tolist() == [n] * n_kv_heads
        for tokens, counts in zip(result.kept.tolist(), result.log_counts.tolist(), strict=True):
            alone = [count == 0.0 for token, count in zip(tokens, counts, strict=True) if token in always]
            assert all(alone)
    else:
        assert result.log_counts is None
        plain = compress_layer(
            inputs,
            plan_queries(n, PLAIN),
            PLAIN,
            n_slots=c,
            starts_sequence=starts_sequence,
            rotary=rotary_table(8, is_neox=True),
        )
        assert torch.equal(result.kept, plain.kept)


@pytest.mark.parametrize("method", MERGING_METHODS)
@pytest.mark.parametrize("p", [0, 4])
def test_errors_are_those_of_the_held_out_queries(method: MergingMethod, p: int) -> None:
    inputs = inputs_for(PROFILE, 41, p=p, seed=31)
    result = merge(method, inputs, 15)
    assert result.error_after == pytest.approx(held_out_error(inputs, result), rel=1e-3)
    plain = compress_layer(
        inputs,
        plan_queries(41, PLAIN),
        PLAIN,
        n_slots=15,
        starts_sequence=True,
        rotary=rotary_table(8, is_neox=True),
    )
    assert (result.error_before, result.reference) == (plain.error_before, plain.reference)
    assert result.error_after != result.error_before
    assert (result.states > 0).all()


@pytest.mark.parametrize("method", MERGING_METHODS)
def test_keeping_everything_merges_nothing(method: MergingMethod) -> None:
    inputs = inputs_for(PROFILE, 23, dtype=torch.bfloat16, seed=32)
    result = merge(method, inputs, 23)
    assert result.kept.tolist() == [list(range(23))] * 2
    assert torch.equal(result.keys, inputs.keys)
    assert torch.equal(result.values, inputs.values)
    assert (result.error_before, result.error_after, result.log_counts) == (0.0, 0.0, None)


def test_cam_reads_the_attention_of_the_window_and_merges_by_it() -> None:
    """A layer against its parts: the window's attention by loops, the lots of this layer's seed."""
    inputs = inputs_for(PROFILE, 31, p=3, seed=33)
    plan = plan_queries(31, PROFILE)
    result = merge("cam", inputs, 12)
    assert inputs.ancestor_keys is not None
    assert inputs.ancestor_values is not None
    _, weights = naive_attention(
        inputs.queries[plan.score_window],
        torch.cat((inputs.ancestor_keys, inputs.keys)),
        torch.cat((inputs.ancestor_values, inputs.values)),
        scale=inputs.scale,
        last_seen=[3 + s for s in range(26, 31)],
    )
    mass = torch.stack([weights[:, :3, 3:].mean(dim=(0, 1)), weights[:, 3:, 3:].mean(dim=(0, 1))])
    expected, _ = cam_values(
        inputs.values.transpose(0, 1), mass, result.kept, torch.Generator().manual_seed(33)
    )
    torch.testing.assert_close(result.values.transpose(0, 1), expected, rtol=1e-4, atol=1e-5)


def test_asymkv_keeps_what_queries_of_the_window_look_at_apart() -> None:
    inputs = inputs_for(PROFILE, 40, seed=34)
    # Every query of the window likes one key that is far away.
    inputs.keys[17] = 4.0
    inputs.queries[plan_queries(40, PROFILE).score_window] = 2.0
    result = merge("asymkv", inputs, 14)
    assert result.log_counts is not None
    assert (result.kept == 17).any(dim=1).all()
    assert result.log_counts[result.kept == 17].tolist() == [0.0, 0.0]


def test_refusals() -> None:
    inputs = inputs_for(PROFILE, 31)
    with pytest.raises(ValueError, match="one of cam, d2o, asymkv, got 'kvmerger'"):
        merge("kvmerger", inputs, 14)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="more than 7 slots"):
        merge("d2o", inputs, 7)
    unseen = replace(PROFILE, scorer="kvzip")
    with pytest.raises(ValueError, match="scores by window queries, got 'paper'"):
        merge("cam", inputs_for(unseen, 31), 14, profile=unseen)
    ragged = replace(PROFILE, scorer="adakv")
    with pytest.raises(ValueError, match="even budgets, got profile 'paper'"):
        merge("cam", inputs_for(ragged, 31), 14, profile=ragged)
    causal = replace(PROFILE, rerotate=False)
    with pytest.raises(ValueError, match="rotary table, which 'asymkv' needs"):
        merge_layer(
            "asymkv",
            inputs,
            plan_queries(31, causal),
            causal,
            n_slots=14,
            starts_sequence=True,
            rotary=None,
        )
