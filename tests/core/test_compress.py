from __future__ import annotations

import ast
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import grkv_sglang.core
from grkv_sglang.core import (
    KEY_AND_VALUE,
    UNCHANGED,
    VALUE_ONLY,
    LayerInputs,
    LayerResult,
    Profile,
    QueryPlan,
    RotaryTable,
    SpanQuality,
    compress_layer,
    get_profile,
    plan_queries,
    profile_names,
    quality,
    relative_error,
)

from .reference import naive_attention, random, rotary_table, rotated

SMALL = {
    name: replace(get_profile(name), n_window=5, n_strata=9 if name != "paper" else 0, n_held_out=3, sinks=2)
    for name in profile_names()
}
# Nothing is re-rotated: held-out queries stay at their positions and see nothing behind them.
SMALL["causal"] = replace(SMALL["paper"], rerotate=False)


@dataclass(frozen=True)
class Layer:
    inputs: LayerInputs
    plan: QueryPlan
    profile: Profile
    rotary: RotaryTable
    raw: Tensor  # [m, Hq, d] queries before RoPE

    def compress(self, n_slots: int, *, starts_sequence: bool = True) -> LayerResult:
        return compress_layer(
            self.inputs,
            self.plan,
            self.profile,
            n_slots=n_slots,
            starts_sequence=starts_sequence,
            rotary=self.rotary,
        )


def layer(
    profile: Profile,
    n: int,
    *,
    n_kv_heads: int = 2,
    group: int = 3,
    d: int = 8,
    dv: int = 6,
    p: int = 0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Layer:
    """A random layer. All numbers are representable in bfloat16, so that dtypes can be compared."""

    def coarse(*shape: int, offset: int, scale: float = 1.0) -> Tensor:
        return random(*shape, seed=seed + offset, scale=scale).bfloat16().to(dtype)

    plan = plan_queries(n, profile)
    raw = random(len(plan.positions), n_kv_heads * group, d, seed=seed + 1, scale=2.0)
    return Layer(
        inputs=LayerInputs(
            keys=coarse(n, n_kv_heads, d, offset=2),
            values=coarse(n, n_kv_heads, dv, offset=3),
            queries=rotated(raw, plan.positions, d, is_neox=True).float(),
            scale=0.4,
            ancestor_keys=coarse(p, n_kv_heads, d, offset=4) if p else None,
            ancestor_values=coarse(p, n_kv_heads, dv, offset=5) if p else None,
            output_projection=random(10, n_kv_heads * group * dv, seed=seed + 6).float(),
        ),
        plan=plan,
        profile=profile,
        rotary=rotary_table(d, is_neox=True),
        raw=raw,
    )


def held_out_sums(made: Layer, result: LayerResult) -> tuple[float, float, float]:
    """(before, after, reference) by loops: queries rotated from their raw vectors, one KV head at a time."""
    inputs, n = made.inputs, len(made.inputs.keys)
    at = made.plan.positions[made.plan.held_out]
    used_at = torch.full_like(at, n - 1) if made.profile.rerotate else at
    queries = rotated(made.raw[made.plan.held_out], used_at, made.raw.shape[-1], is_neox=True)
    n_kv_heads = inputs.keys.shape[1]
    group = queries.shape[1] // n_kv_heads
    before = after = reference = 0.0
    for h in range(n_kv_heads):
        one = slice(h, h + 1)
        past_keys = inputs.keys[:0, one] if inputs.ancestor_keys is None else inputs.ancestor_keys[:, one]
        past_values = (
            inputs.values[:0, one] if inputs.ancestor_values is None else inputs.ancestor_values[:, one]
        )
        kept = result.kept[h]
        for i, position in enumerate(used_at.tolist()):
            query = queries[i : i + 1, h * group : (h + 1) * group]
            seen = kept <= position

            def attention(keys: Tensor, values: Tensor, query: Tensor = query) -> Tensor:
                return naive_attention(query, keys, values, scale=inputs.scale)[0]

            target = attention(
                torch.cat((past_keys, inputs.keys[: position + 1, one])),
                torch.cat((past_values, inputs.values[: position + 1, one])),
            )
            selected = attention(
                torch.cat((past_keys, inputs.keys[kept[seen], one])),
                torch.cat((past_values, inputs.values[kept[seen], one])),
            )
            changed = attention(
                torch.cat((past_keys, result.keys[seen, one])),
                torch.cat((past_values, result.values[seen, one])),
            )
            before += float((selected - target).square().sum())
            after += float((changed - target).square().sum())
            reference += float(target.square().sum())
    return before, after, reference


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("p", [0, 7])
def test_errors_are_those_of_the_held_out_queries(name: str, p: int) -> None:
    made = layer(SMALL[name], 31, p=p, seed=1)
    result = made.compress(14)
    before, after, reference = held_out_sums(made, result)
    assert result.error_before == pytest.approx(before, rel=1e-4)
    assert result.error_after == pytest.approx(after, rel=1e-4)
    assert result.reference == pytest.approx(reference, rel=1e-4)
    assert (result.error_after == result.error_before) == (name == "copy")


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(sorted(SMALL)),
    st.integers(1, 3),
    st.sampled_from([1, 3, 4, 8]),
    st.integers(19, 43),
    st.integers(0, 9),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.data(),
)
def test_any_layer(
    name: str,
    n_kv_heads: int,
    group: int,
    n: int,
    p: int,
    starts_sequence: bool,
    dtype: torch.dtype,
    data: st.DataObject,
) -> None:
    profile = SMALL[name]
    made = layer(profile, n, n_kv_heads=n_kv_heads, group=group, p=p, seed=n, dtype=dtype)
    sinks = profile.sinks if starts_sequence else 0
    c = data.draw(st.integers(profile.n_window + sinks + 1, n - 1))
    result = made.compress(c, starts_sequence=starts_sequence)

    assert result.kept.shape == (n_kv_heads, c)
    assert result.kept.dtype == torch.int64
    assert (result.kept.diff(dim=1) > 0).all()
    assert (result.kept >= 0).all()
    assert (result.kept < n).all()
    assert result.keys.shape == (c, n_kv_heads, 8)
    assert result.values.shape == (c, n_kv_heads, 6)
    assert result.keys.dtype == result.values.dtype == dtype
    assert result.keys.is_contiguous()
    assert result.values.is_contiguous()
    assert result.keys.isfinite().all()
    assert result.values.isfinite().all()
    assert result.states.dtype == torch.int8
    assert result.select_s > 0
    assert result.regress_s > 0
    assert 0 < result.reference < math.inf

    n_fixed = int(profile.fixed_share * c + 1e-9)
    for h in range(n_kv_heads):
        kept = result.kept[h].tolist()
        always = [s for s in range(n) if s < sinks or s >= n - profile.n_window]
        assert set(always) <= set(kept)
        old_keys, old_values = made.inputs.keys[result.kept[h], h], made.inputs.values[result.kept[h], h]
        same_keys = (result.keys[:, h] == old_keys).all(dim=1)
        same_values = (result.values[:, h] == old_values).all(dim=1)
        for j, s in enumerate(kept):
            if s in always:
                assert same_keys[j]
                assert same_values[j]
        assert int((same_keys & same_values).sum()) >= min(len(always) + n_fixed, c)
        state = int(result.states[h])
        # A change of values can round away beside one of keys.
        assert bool(same_keys.all()) == (state != KEY_AND_VALUE)
        assert state == KEY_AND_VALUE or bool(same_values.all()) == (state == UNCHANGED)


@pytest.mark.parametrize("name", profile_names())
def test_the_built_in_profiles_as_they_are(name: str) -> None:
    made = layer(get_profile(name), 97, seed=2)
    result = made.compress(53)
    before, after, reference = held_out_sums(made, result)
    assert result.error_before == pytest.approx(before, rel=1e-4)
    assert result.error_after == pytest.approx(after, rel=1e-4)
    assert result.reference == pytest.approx(reference, rel=1e-4)
    expected = {"default": KEY_AND_VALUE, "paper": KEY_AND_VALUE, "release": KEY_AND_VALUE, "copy": UNCHANGED}
    assert result.states.tolist() == [expected[name]] * 2


def test_selection_is_by_the_scorer_over_the_joint_softmax() -> None:
    """The default's scores by loops: re-rotated queries, ancestors in the softmax, times the value norm."""
    made = layer(SMALL["default"], 37, p=4, seed=3)
    inputs, n = made.inputs, 37
    assert inputs.ancestor_keys is not None
    assert inputs.ancestor_values is not None
    chosen = made.plan.score
    queries = rotated(
        made.raw[chosen], torch.full((int(chosen.sum()),), n - 1, dtype=torch.int64), 8, is_neox=True
    )
    _, weights = naive_attention(
        queries,
        torch.cat((inputs.ancestor_keys, inputs.keys)),
        torch.cat((inputs.ancestor_values, inputs.values)),
        scale=inputs.scale,
    )
    result = made.compress(15, starts_sequence=False)
    for h in range(2):
        score = weights[:, 3 * h : 3 * h + 3, 4:].mean(dim=(0, 1)) * inputs.values[:, h].double().norm(dim=-1)
        best = score[: n - 5].argsort(descending=True)[:10].tolist()
        assert result.kept[h].tolist() == sorted([*best, *range(n - 5, n)])
        # The floor(0.1 * 15) = 1 best of them is fixed.
        j = result.kept[h].tolist().index(best[0])
        assert torch.equal(result.keys[j, h], inputs.keys[best[0], h])
        assert torch.equal(result.values[j, h], inputs.values[best[0], h])
        j = result.kept[h].tolist().index(best[1])
        assert not torch.equal(result.values[j, h], inputs.values[best[1], h])


@pytest.mark.parametrize("name", ["default", "release", "paper"])
@pytest.mark.parametrize("p", [0, 4])
def test_values_are_the_ridge_regression_of_the_fit_queries(name: str, p: int) -> None:
    """The value step alone, from raw queries to stored values, in float64 and one KV head at a time."""
    profile = replace(
        SMALL[name], key_step=False, guard=False, cap_v=None, fixed_share=0.0, query_weight=0.5, lambda_v=0.02
    )
    n, c = 37, 17
    made = layer(profile, n, p=p, seed=12)
    if p:
        # A plan of one's own: the last query scores but is not fitted.
        last = made.plan.positions == made.plan.positions[made.plan.fit].max()
        made = replace(made, plan=replace(made.plan, fit=made.plan.fit & ~last))
    inputs = made.inputs
    result = made.compress(c)
    at = made.plan.positions[made.plan.fit]
    used_at = torch.full_like(at, n - 1) if profile.fit_queries == "strata" and profile.rerotate else at
    queries = rotated(made.raw[made.plan.fit], used_at, 8, is_neox=True)
    for h in range(2):
        one, kept = slice(h, h + 1), result.kept[h]
        past_keys = inputs.keys[:0, one] if inputs.ancestor_keys is None else inputs.ancestor_keys[:, one]
        past_values = (
            inputs.values[:0, one] if inputs.ancestor_values is None else inputs.ancestor_values[:, one]
        )
        old = inputs.values[kept, h].double()
        free = torch.tensor([2 <= s < n - 5 for s in kept.tolist()])
        design, residual = [], []
        for i, position in enumerate(used_at.tolist()):
            query = queries[i : i + 1, 3 * h : 3 * h + 3]
            target, _ = naive_attention(
                query,
                torch.cat((past_keys, inputs.keys[: position + 1, one])),
                torch.cat((past_values, inputs.values[: position + 1, one])),
                scale=inputs.scale,
            )
            seen = kept <= position
            output, weights = naive_attention(
                query,
                torch.cat((past_keys, inputs.keys[kept[seen], one])),
                torch.cat((past_values, inputs.values[kept[seen], one])),
                scale=inputs.scale,
            )
            row = torch.zeros(3, c, dtype=torch.float64)
            row[:, seen] = weights[0, :, p:]
            design.append(row[:, free])
            residual.append((target - output)[0])
        x = torch.cat((*design, (0.02 / 0.5) ** 0.5 * torch.eye(int(free.sum()), dtype=torch.float64)))
        right = torch.cat((*residual, torch.zeros(int(free.sum()), 6, dtype=torch.float64)))
        expected = old.clone()
        expected[free] += torch.linalg.lstsq(x, right).solution
        torch.testing.assert_close(result.values[:, h].double(), expected, rtol=1e-3, atol=1e-4)
        assert (expected - old).norm() > 0.1


def test_window_queries_are_causal() -> None:
    """No window query sees a later token: what comes behind a query cannot change its score."""
    profile = replace(SMALL["causal"], n_window=1, value_step=False, key_step=False, pool_kernel=1)
    made = layer(profile, 21, seed=4)
    # The plan's one score query sits in the middle; the tokens behind it shout at it.
    middle = 10
    plan = QueryPlan(
        torch.tensor([middle, 20]),
        torch.tensor([True, False]),
        torch.tensor([False, False]),
        torch.tensor([False, True]),
    )
    queries = torch.ones(2, 6, 8)
    keys = torch.full((21, 2, 8), -0.1)
    keys[[3, 7]] = 1.0
    keys[middle + 1 :] = 100.0
    result = compress_layer(
        replace(made.inputs, keys=keys, queries=queries),
        plan,
        profile,
        n_slots=3,
        starts_sequence=False,
        rotary=None,
    )
    assert result.kept.tolist() == [[3, 7, 20]] * 2


def test_window_queries_are_not_rotated_and_strata_are() -> None:
    made = layer(SMALL["release"], 40, seed=5)
    moved = replace(made.inputs, queries=made.inputs.queries.clone())
    result = made.compress(20)
    # The same layer with strata and held-out queries given at the last position, and no re-rotation.
    at_end = rotated(made.raw, torch.full((len(made.raw),), 39, dtype=torch.int64), 8, is_neox=True).float()
    strata = (made.plan.fit | made.plan.held_out) & ~made.plan.score
    assert not (made.plan.score & made.plan.fit)[made.plan.positions < 35].any()
    moved.queries[strata] = at_end[strata]
    by_hand = replace(made.profile, rerotate=False)
    shared = int((made.plan.score & made.plan.fit).sum())
    assert shared == 1  # one stratum's middle lies in the window; it cannot be given both ways
    plan = replace(
        made.plan,
        fit=made.plan.fit & ~made.plan.score,
        positions=torch.where(strata, 39, made.plan.positions),
    )
    fewer = replace(made.plan, fit=plan.fit)
    expected = compress_layer(moved, plan, by_hand, n_slots=20, starts_sequence=True, rotary=None)
    got = compress_layer(
        made.inputs, fewer, made.profile, n_slots=20, starts_sequence=True, rotary=made.rotary
    )
    assert torch.equal(got.kept, expected.kept)
    assert torch.equal(got.kept, result.kept)
    torch.testing.assert_close(got.keys, expected.keys, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(got.values, expected.values, rtol=1e-3, atol=1e-4)
    assert got.error_before == pytest.approx(expected.error_before, rel=1e-4)
    assert got.error_before == pytest.approx(result.error_before, rel=1e-6)


@pytest.mark.parametrize("name", profile_names())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keeping_everything_is_the_identity(name: str, dtype: torch.dtype) -> None:
    made = layer(SMALL[name], 23, dtype=dtype, p=3)
    result = made.compress(23)
    assert result.kept.tolist() == [list(range(23))] * 2
    assert torch.equal(result.keys, made.inputs.keys)
    assert torch.equal(result.values, made.inputs.values)
    assert result.keys.data_ptr() != made.inputs.keys.data_ptr()
    assert (result.error_before, result.error_after) == (0.0, 0.0)
    assert result.states.tolist() == [UNCHANGED] * 2
    spans = SpanQuality()
    spans.add(result)
    assert spans.quality == 1.0


def test_a_budget_that_leaves_nothing_to_select() -> None:
    made = layer(SMALL["default"], 31)
    with pytest.raises(ValueError, match=r"more than 7 slots \(5 window \+ 2 sink tokens .* got 7"):
        made.compress(7)
    made.compress(8)
    made.compress(7, starts_sequence=False)
    with pytest.raises(ValueError, match=r"more than 5 slots .* got 5"):
        made.compress(5, starts_sequence=False)


@pytest.mark.parametrize("name", ["default", "release"])
def test_regression_lowers_the_error_of_queries_it_did_not_see(name: str) -> None:
    profile = replace(get_profile(name), n_strata=24, n_window=8, n_held_out=8)
    made = layer(profile, 200, seed=6)
    # Queries around two directions, as in a model; independent ones could not be generalised to.
    centres = random(2, 6, 8, seed=7, scale=2.0)
    raw = centres[torch.arange(len(made.raw)) % 2] + random(*made.raw.shape, seed=8, scale=0.3)
    queries = rotated(raw, made.plan.positions, 8, is_neox=True).float()
    result = replace(made, inputs=replace(made.inputs, queries=queries)).compress(60)
    assert result.error_after < 0.7 * result.error_before


def test_regression_lowers_the_error_of_the_queries_that_it_fits() -> None:
    made = layer(replace(SMALL["default"], n_strata=20), 60, seed=9)
    plan = replace(made.plan, held_out=made.plan.fit)  # measured on the fitted ones
    after = []
    for change in ({}, {"key_step": False}, {"value_step": False, "key_step": False}):
        result = replace(made, plan=plan, profile=replace(made.profile, **change)).compress(30)  # type: ignore[arg-type]
        after.append(result.error_after)
    assert after[0] < after[1] < after[2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_storage_rounds_the_float32_result(dtype: torch.dtype) -> None:
    profile = replace(SMALL["paper"], key_step=False)
    single = layer(profile, 33, seed=10).compress(15)
    stored = layer(profile, 33, seed=10, dtype=dtype).compress(15)
    assert torch.equal(stored.kept, single.kept)
    assert stored.states.tolist() == [VALUE_ONLY] * 2
    assert torch.equal(stored.values, single.values.to(dtype))
    assert torch.equal(stored.keys, single.keys.to(dtype))


@pytest.mark.parametrize("name", ["default", "paper"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_non_finite_head_stays_unchanged_and_alone(name: str, bad: float) -> None:
    clean = layer(SMALL[name], 31, n_kv_heads=3, seed=11)
    dirty = layer(SMALL[name], 31, n_kv_heads=3, seed=11)
    expected = clean.compress(14)
    dirty.inputs.values[12, 1, 0] = bad
    result = dirty.compress(14)
    assert result.states[1] == UNCHANGED
    kept = result.kept[1]
    torch.testing.assert_close(
        result.values[:, 1], dirty.inputs.values[kept, 1], rtol=0, atol=0, equal_nan=True
    )
    assert torch.equal(result.keys[:, 1], dirty.inputs.keys[kept, 1])
    for h in (0, 2):
        assert torch.equal(result.kept[h], expected.kept[h])
        assert result.states[h] == expected.states[h]
        torch.testing.assert_close(result.keys[:, h], expected.keys[:, h])
        torch.testing.assert_close(result.values[:, h], expected.values[:, h])
    assert math.isfinite(expected.error_after)
    assert not math.isfinite(result.error_after)
    assert quality(result.error_after, result.reference) == 0.0


def test_inputs_are_not_changed() -> None:
    made = layer(SMALL["release"], 31, p=3)
    tensors = [t for t in vars(made.inputs).values() if isinstance(t, Tensor)]
    before = [t.clone() for t in tensors]
    made.compress(14)
    assert len(tensors) == 6
    assert all(torch.equal(new, old) for new, old in zip(tensors, before, strict=True))


def test_no_ancestors_is_the_same_as_empty_ones() -> None:
    made = layer(SMALL["default"], 31)
    empty = replace(made.inputs, ancestor_keys=torch.empty(0, 2, 8), ancestor_values=torch.empty(0, 2, 6))
    expected, got = made.compress(14), replace(made, inputs=empty).compress(14)
    assert torch.equal(got.keys, expected.keys)
    assert got.error_after == expected.error_after


def test_one_query_of_each_kind() -> None:
    profile = replace(SMALL["default"], n_strata=1, n_held_out=1)
    made = layer(profile, 9, n_kv_heads=1, group=1)
    result = made.compress(8, starts_sequence=True)
    assert result.keys.shape == (8, 1, 8)
    assert result.error_before == pytest.approx(held_out_sums(made, result)[0], rel=1e-4)


def test_quality() -> None:
    assert relative_error(4.0, 16.0) == 0.5
    assert quality(4.0, 16.0) == 0.5
    assert quality(0.0, 0.0) == quality(0.0, 3.0) == 1.0
    assert quality(5.0, 1.0) == quality(1.0, 0.0) == 0.0
    assert quality(math.nan, 1.0) == quality(1.0, math.nan) == quality(math.inf, 1.0) == 0.0
    assert relative_error(1.0, 0.0) == relative_error(math.nan, 1.0) == math.inf


def test_span_quality_relates_sums_to_each_other() -> None:
    made = layer(SMALL["default"], 31).compress(14)
    spans = SpanQuality()
    spans.add(replace(made, error_before=9.0, error_after=4.0, reference=10.0))
    spans.add(replace(made, error_before=7.0, error_after=0.0, reference=90.0))
    assert (spans.error_before, spans.error_after, spans.quality) == (0.4, 0.2, 0.8)
    assert spans.sums == (16.0, 4.0, 100.0)


def test_span_quality_of_several_ranks_relates_the_sums_of_all() -> None:
    ranks = [SpanQuality(), SpanQuality()]
    ranks[0].add_sums(9.0, 4.0, 10.0)
    ranks[1].add_sums(3.0, 0.0, 30.0)
    ranks[1].add_sums(4.0, 0.0, 60.0)
    assert [rank.sums for rank in ranks] == [(9.0, 4.0, 10.0), (7.0, 0.0, 90.0)]
    whole = SpanQuality()
    assert (whole.sums, whole.quality) == ((0.0, 0.0, 0.0), 1.0)
    for rank in ranks:
        whole.add_sums(*rank.sums)
    assert whole.sums == (16.0, 4.0, 100.0)
    assert (whole.error_before, whole.error_after, whole.quality) == (0.4, 0.2, 0.8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": torch.zeros(31, 2)}, r"keys \[n, Hkv, d\]"),
        ({"values": torch.zeros(30, 2, 6)}, r"got \[31, 2, 8\] and \[30, 2, 6\]"),
        ({"values": torch.zeros(31, 2, 6, dtype=torch.float16)}, "one dtype"),
        ({"keys": torch.zeros(31, 2, 8).double(), "values": torch.zeros(31, 2, 6).double()}, "torch.float64"),
        ({"queries": torch.zeros(11, 6, 8)}, r"queries \[12, a multiple of 2, 8\]"),
        ({"queries": torch.zeros(12, 5, 8)}, r"got \[12, 5, 8\]"),
        ({"keys": torch.zeros(25, 2, 8), "values": torch.zeros(25, 2, 6)}, "plan for a span of 25 tokens"),
        ({"ancestor_keys": torch.zeros(3, 2, 8)}, "together"),
        (
            {"ancestor_keys": torch.zeros(3, 2, 8), "ancestor_values": torch.zeros(4, 2, 6)},
            r"got \[3, 2, 8\] and \[4, 2, 6\]",
        ),
    ],
)
def test_inputs_that_do_not_fit(change: dict[str, Tensor], message: str) -> None:
    made = layer(SMALL["default"], 31)
    inputs = replace(made.inputs, **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        replace(made, inputs=inputs).compress(14)


def test_other_errors_name_what_is_missing() -> None:
    made = layer(SMALL["release"], 31)
    with pytest.raises(ValueError, match="rotary table, which profile 'release' needs"):
        compress_layer(made.inputs, made.plan, made.profile, n_slots=14, starts_sequence=True, rotary=None)
    with pytest.raises(ValueError, match="needs the layer's output projection"):
        replace(made, inputs=replace(made.inputs, output_projection=None)).compress(14)
    for n_slots in (0, 32):
        with pytest.raises(ValueError, match=f"between 1 and 31 slots for 31 tokens, got {n_slots}"):
            made.compress(n_slots)


def test_the_core_imports_nothing_but_torch() -> None:
    folder = Path(grkv_sglang.core.__file__).parent
    sources = sorted(folder.rglob("*.py"))
    assert len(sources) > 8
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0
                names = [node.module or ""]
            for name in names:
                allowed = name.split(".")[0] in {"torch", *sys.stdlib_module_names}
                assert allowed or name.startswith("grkv_sglang.core"), f"{source.name} imports {name}"
