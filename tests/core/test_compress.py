from __future__ import annotations

import ast
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

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
    PassKind,
    Profile,
    QueryPlan,
    RotaryTable,
    Scorer,
    ScoringContext,
    SpanQuality,
    Storage,
    WindowAttention,
    attend_probe,
    attention,
    compress_layer,
    get_profile,
    plan_queries,
    profile_names,
    quality,
    relative_error,
    scorer_names,
)
from grkv_sglang.core.selection import PassStatistics, QueryKind

from .reference import naive_attention, pass_statistics, random, rotary_table, rotated


def small(profile: Profile) -> Profile:
    """The same with fewer queries."""
    return replace(
        profile,
        n_window=5,
        window_tokens=10 if profile.window_tokens else None,
        window_queries=5 if profile.window_queries else None,
        n_strata=9 if profile.n_strata else 0,
        fit_strata=9 if profile.fit_strata else 0,
        fit_repetition=9 if profile.fit_repetition else 0,
        fit_questions=9 if profile.fit_questions else 0,
        n_held_out=3,
        sinks=2,
    )


SMALL = {name: small(get_profile(name)) for name in profile_names()}
# Nothing is re-rotated: held-out queries stay at their positions and see nothing behind them.
SMALL["causal"] = replace(SMALL["paper"], rerotate=False)
SMALL["mixture"] = replace(
    SMALL["release"],
    scorer="snapkv+kvzip+stratified_value",
    n_strata=6,
    fit_window=32,
    fit_strata=4,
    fit_repetition=7,
)
EVEN = sorted(name for name, profile in SMALL.items() if profile.storage == "even")


@dataclass(frozen=True)
class Layer:
    inputs: LayerInputs
    plan: QueryPlan
    profile: Profile
    rotary: RotaryTable
    raw: Tensor  # [m, Hq, d] queries before RoPE

    def compress(
        self, n_slots: int, *, starts_sequence: bool = True, protected: Tensor | None = None
    ) -> LayerResult:
        return compress_layer(
            self.inputs,
            self.plan,
            self.profile,
            n_slots=n_slots,
            starts_sequence=starts_sequence,
            rotary=self.rotary,
            protected=protected,
        )

    def fitted(self) -> list[tuple[Tensor, int]]:
        """The queries of the regression, each [1, Hq, d] where it is used and the last token that it sees."""
        last = len(self.inputs.keys) - 1
        found = []
        for chosen, moves in ((self.plan.fit_window, False), (self.plan.fit_strata, self.profile.rerotate)):
            for i in chosen.nonzero().flatten().tolist():
                at = last if moves else int(self.plan.positions[i])
                raw = self.raw[i : i + 1]
                found.append((rotated(raw, torch.tensor([at]), raw.shape[-1], is_neox=True), at))
        for kind in self.profile.fitted_of_passes:
            found += [(query, last) for query in self.inputs.pass_queries[kind].double().split(1)]
        return found

    def head(self, h: int) -> Layer:
        """One KV head, with its query heads, as a layer of its own."""
        inputs, n_kv_heads = self.inputs, self.inputs.keys.shape[1]
        group = self.raw.shape[1] // n_kv_heads
        of_group = slice(h * group, (h + 1) * group)
        assert inputs.output_projection is not None
        blocks = inputs.output_projection.unflatten(1, (n_kv_heads, -1))

        def one(tensor: Tensor | None, heads: slice = slice(h, h + 1)) -> Tensor | None:
            return None if tensor is None else tensor[:, heads]

        alone = replace(
            inputs,
            keys=inputs.keys[:, h : h + 1],
            values=inputs.values[:, h : h + 1],
            queries=inputs.queries[:, of_group],
            ancestor_keys=one(inputs.ancestor_keys),
            ancestor_values=one(inputs.ancestor_values),
            output_projection=blocks[:, h],
            passes={
                kind: PassStatistics(*(rest[h : h + 1] for rest in statistics_of(left)))
                for kind, left in inputs.passes.items()
            },
            pass_queries={kind: queries[:, of_group] for kind, queries in inputs.pass_queries.items()},
        )
        return replace(self, inputs=alone, raw=self.raw[:, of_group])


def statistics_of(left: PassStatistics) -> tuple[Tensor, Tensor, Tensor]:
    return left.total, left.square, left.maximum


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
            passes={
                kind: PassStatistics(
                    *(rest.float() for rest in statistics_of(pass_statistics(n_kv_heads, n, seed=seed + i)))
                )
                for i, kind in enumerate(get_args(PassKind), 7)
            },
            pass_queries={
                kind: random(count, n_kv_heads * group, d, seed=seed + 9 + 20 * i, scale=2.0).float()
                for i, (kind, count) in enumerate(profile.fitted_of_passes.items())
            },
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
        kept = result.kept[h][result.kept[h] >= 0]
        new_keys, new_values = result.keys[: len(kept), one], result.values[: len(kept), one]
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
                torch.cat((past_keys, new_keys[seen])),
                torch.cat((past_values, new_values[seen])),
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
    st.integers(27, 43),
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

    valid = result.kept >= 0
    counts = valid.sum(dim=1)
    width = int(counts.max())
    assert int(counts.sum()) == n_kv_heads * c
    assert profile.storage == "per_head" or counts.tolist() == [c] * n_kv_heads
    assert result.kept.shape == (n_kv_heads, width)
    assert result.kept.dtype == torch.int64
    assert (result.kept < n).all()
    assert result.keys.shape == (width, n_kv_heads, 8)
    assert result.values.shape == (width, n_kv_heads, 6)
    assert result.keys.dtype == result.values.dtype == dtype
    assert result.keys.is_contiguous()
    assert result.values.is_contiguous()
    assert result.keys.isfinite().all()
    assert result.values.isfinite().all()
    assert result.states.dtype == torch.int8
    assert result.select_s > 0
    assert result.regress_s > 0
    assert 0 < result.reference < math.inf

    for h, count in enumerate(counts.tolist()):
        n_fixed = int(profile.fixed_share * count + 1e-9)
        assert (result.kept[h, count:] == -1).all()
        assert (result.keys[count:, h] == 0).all()
        assert (result.values[count:, h] == 0).all()
        kept = result.kept[h, :count].tolist()
        assert kept == sorted(set(kept))
        always = [s for s in range(n) if s < sinks or s >= n - profile.n_window]
        assert set(always) <= set(kept)
        old_keys, old_values = made.inputs.keys[kept, h], made.inputs.values[kept, h]
        same_keys = (result.keys[:count, h] == old_keys).all(dim=1)
        same_values = (result.values[:count, h] == old_values).all(dim=1)
        for j, s in enumerate(kept):
            if s in always:
                assert same_keys[j]
                assert same_values[j]
        assert int((same_keys & same_values).sum()) >= min(len(always) + n_fixed, count)
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
    assert result.states.tolist() == [UNCHANGED if name == "copy" else KEY_AND_VALUE] * 2


def test_selection_is_by_the_scorer_over_the_joint_softmax() -> None:
    """Scores by loops: re-rotated queries, ancestors in the softmax, times the value norm."""
    profile = replace(SMALL["release"], scorer="stratified_value", n_strata=9)
    made = layer(profile, 37, p=4, seed=3)
    inputs, n = made.inputs, 37
    assert inputs.ancestor_keys is not None
    assert inputs.ancestor_values is not None
    chosen = made.plan.score_strata
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


class Spy(Scorer):
    """Keeps what it is shown, and the earliest tokens."""

    name = "spy"
    queries: frozenset[QueryKind] = frozenset({"window", "strata"})
    passes: frozenset[PassKind] = frozenset({"span"})

    def __init__(self) -> None:
        self.seen: list[ScoringContext] = []

    def score(self, ctx: ScoringContext) -> Tensor:
        self.seen.append(ctx)
        return -torch.arange(ctx.keys.shape[1], dtype=torch.float32).expand(ctx.keys.shape[0], -1)


@pytest.mark.parametrize("p", [0, 4])
@pytest.mark.parametrize("starts_sequence", [True, False])
@pytest.mark.parametrize("rerotate", [True, False])
def test_what_a_selection_method_sees(
    monkeypatch: pytest.MonkeyPatch, p: int, starts_sequence: bool, rerotate: bool
) -> None:
    spy = Spy()
    profile = replace(SMALL["mixture"], rerotate=rerotate)
    made = layer(profile, 33, n_kv_heads=2, group=3, p=p, seed=21)
    made = replace(made, inputs=replace(made.inputs, layer=3, n_layers=7))
    monkeypatch.setattr("grkv_sglang.core.compress.get_scorer", lambda name: spy)
    result = made.compress(14, starts_sequence=starts_sequence)
    assert result.kept.tolist() == [[*range(9), *range(28, 33)]] * 2

    (ctx,) = spy.seen
    inputs = made.inputs
    torch.testing.assert_close(ctx.keys, inputs.keys.transpose(0, 1))
    torch.testing.assert_close(ctx.values, inputs.values.transpose(0, 1))
    assert (ctx.layer, ctx.n_layers, ctx.scale) == (3, 7, inputs.scale)
    assert (ctx.n_window, ctx.n_sinks, ctx.pool_kernel) == (5, 2 if starts_sequence else 0, 5)
    assert ctx.rotary is made.rotary
    assert ctx.output_projection is inputs.output_projection
    assert all(ctx.passes[kind] is inputs.passes[kind] for kind in spy.passes)
    assert set(ctx.attention) == set(ctx.queries) == {"window", "strata"}
    past = inputs.keys[:0] if inputs.ancestor_keys is None else inputs.ancestor_keys
    past_values = inputs.values[:0] if inputs.ancestor_values is None else inputs.ancestor_values
    for kind, chosen, moves in (
        ("window", made.plan.score_window, False),
        ("strata", made.plan.score_strata, rerotate),
    ):
        at = made.plan.positions[chosen]
        at = torch.full_like(at, 32) if moves else at
        queries = rotated(made.raw[chosen], at, 8, is_neox=True)
        _, weights = naive_attention(
            queries,
            torch.cat((past, inputs.keys)),
            torch.cat((past_values, inputs.values)),
            scale=inputs.scale,
            last_seen=[p + position for position in at.tolist()],
        )
        m = len(at)
        # [m, Hq, x] -> [Hkv, m, G, x]
        expected = queries.view(m, 2, 3, 8).transpose(0, 1)
        torch.testing.assert_close(ctx.queries[kind].double(), expected, rtol=1e-4, atol=1e-4)  # type: ignore[index]
        expected = weights[:, :, p:].view(m, 2, 3, 33).mean(dim=(0, 2))
        torch.testing.assert_close(ctx.attention[kind].double(), expected, rtol=1e-3, atol=1e-6)  # type: ignore[index]


@pytest.mark.parametrize("name", ["paper", "default", "mixture", "release_per_head"])
@pytest.mark.parametrize("p", [0, 4])
def test_what_a_probe_knows_of_the_window_changes_nothing(name: str, p: int) -> None:
    made = layer(SMALL[name], 41, p=p, seed=5)
    inputs, plan = made.inputs, made.plan
    ancestors = None
    if inputs.ancestor_keys is not None and inputs.ancestor_values is not None:
        ancestors = inputs.ancestor_keys, inputs.ancestor_values
    keys, values = inputs.keys, inputs.values
    if ancestors is not None:
        keys, values = torch.cat((ancestors[0], keys)), torch.cat((ancestors[1], values))
    last = torch.full((int(plan.held_out.sum()),), 40, dtype=torch.int64)
    held_out = inputs.queries[plan.held_out]
    if made.profile.rerotate:
        held_out = rotated(made.raw[plan.held_out], last, 8, is_neox=True).float()
    known, of_held_out = attend_probe(
        inputs.queries[plan.score_window], held_out, keys, values,
        positions=plan.positions[plan.score_window], n_tokens=len(inputs.keys), scale=inputs.scale,
        visible=torch.ones(0, 41, dtype=torch.bool)
        if made.profile.rerotate
        else torch.arange(41) <= plan.positions[plan.held_out][:, None],
    )  # fmt: skip
    output, weights = naive_attention(
        inputs.queries[plan.score_window].double(),
        keys,
        values,
        scale=inputs.scale,
        last_seen=[p + at for at in plan.positions[plan.score_window].tolist()],
    )
    torch.testing.assert_close(known.output.double(), output, rtol=1e-4, atol=1e-5)
    m = len(weights)
    expected = weights[:, :, p:].view(m, 2, -1, 41).mean(dim=(0, 2))
    torch.testing.assert_close(known.mean.double(), expected, rtol=1e-4, atol=1e-7)
    plain = made.compress(20)
    told = replace(made, inputs=replace(inputs, window=known, held_out=of_held_out)).compress(20)
    assert torch.equal(told.kept, plain.kept)
    assert told.reference == pytest.approx(plain.reference, rel=1e-5)
    assert told.error_before == pytest.approx(plain.error_before, rel=1e-4)
    torch.testing.assert_close(told.values, plain.values, rtol=1e-4, atol=1e-5)
    # On so few queries the key step makes percents of a key out of a target's last bit, unless many fit it.
    loose = name in ("paper", "mixture")
    torch.testing.assert_close(told.keys, plain.keys, rtol=1e-4, atol=0.2 if loose else 1e-5)
    assert told.error_after == pytest.approx(plain.error_after, rel=0.05 if loose else 1e-3)


HELD = torch.tensor([[1, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0]]).bool()
"""Which of three heads holds a token in which of six rows before the span: the second holds none."""


@pytest.mark.parametrize("name", ["paper", "default", "release", "mixture"])
def test_heads_that_hold_different_tokens_before_the_span(name: str) -> None:
    """Each head is compressed as if it were alone with what it holds."""
    made = layer(SMALL[name], 41, p=6, seed=8, n_kv_heads=3)
    told = replace(made, inputs=replace(made.inputs, ancestor_held=HELD)).compress(20)
    sums = torch.zeros(3, dtype=torch.float64)
    for h, held in enumerate(HELD):
        alone = made.head(h)
        keys, values = alone.inputs.ancestor_keys, alone.inputs.ancestor_values
        assert keys is not None
        assert values is not None
        own = replace(alone.inputs, ancestor_keys=keys[held], ancestor_values=values[held])
        expected = replace(alone, inputs=own).compress(20)
        assert torch.equal(told.kept[h], expected.kept[0])
        torch.testing.assert_close(told.values[:, h], expected.values[:, 0], rtol=1e-4, atol=1e-5)
        sums += torch.tensor([expected.error_before, expected.error_after, expected.reference])
    got = torch.tensor([told.error_before, told.error_after, told.reference], dtype=torch.float64)
    torch.testing.assert_close(got, sums, rtol=1e-3, atol=1e-8)
    # It is looked at: with all rows seen, other sums come out.
    assert made.compress(20).reference != pytest.approx(told.reference, rel=1e-3)


def test_a_probe_whose_heads_hold_different_tokens_before_the_span() -> None:
    made = layer(SMALL["paper"], 41, p=6, seed=8, n_kv_heads=3)
    inputs, plan = made.inputs, made.plan
    assert inputs.ancestor_keys is not None
    assert inputs.ancestor_values is not None
    at = plan.positions[plan.score_window]
    others = inputs.queries[plan.held_out]
    assert len(others) >= 2
    known, of_others = attend_probe(
        inputs.queries[plan.score_window],
        others,
        torch.cat((inputs.ancestor_keys, inputs.keys)),
        torch.cat((inputs.ancestor_values, inputs.values)),
        positions=at, visible=torch.arange(41)[None] <= 7, n_tokens=41, scale=inputs.scale, held=HELD,
    )  # fmt: skip
    for h, held in enumerate(HELD):
        one, group = slice(h, h + 1), slice(h * 3, h * 3 + 3)
        output, weights = naive_attention(
            inputs.queries[plan.score_window][:, group].double(),
            torch.cat((inputs.ancestor_keys[held][:, one], inputs.keys[:, one])),
            torch.cat((inputs.ancestor_values[held][:, one], inputs.values[:, one])),
            scale=inputs.scale,
            last_seen=[int(held.sum()) + position for position in at.tolist()],
        )
        torch.testing.assert_close(known.output[:, group].double(), output, rtol=1e-4, atol=1e-5)
        mean = weights[:, :, int(held.sum()) :].mean(dim=(0, 1))
        torch.testing.assert_close(known.mean[h].double(), mean, rtol=1e-4, atol=1e-7)
        output, _ = naive_attention(
            others[:, group].double(),
            torch.cat((inputs.ancestor_keys[held][:, one], inputs.keys[:, one])),
            torch.cat((inputs.ancestor_values[held][:, one], inputs.values[:, one])),
            scale=inputs.scale,
            last_seen=[int(held.sum()) + last for last in (7, *[40] * (len(others) - 1))],
        )
        torch.testing.assert_close(of_others[:, group].double(), output, rtol=1e-4, atol=1e-5)


def test_attention_of_another_window_is_refused() -> None:
    made = layer(SMALL["paper"], 41, seed=5)
    known = WindowAttention(torch.zeros(2, 41), torch.zeros(4, 6, 8))
    with pytest.raises(ValueError, match=r"mean \[2, 41\] and an output \[5, 6, dv\], got"):
        replace(made, inputs=replace(made.inputs, window=known)).compress(20)
    known = WindowAttention(torch.zeros(2, 40), torch.zeros(5, 6, 8))
    with pytest.raises(ValueError, match=r"got \[2, 40\]"):
        replace(made, inputs=replace(made.inputs, window=known)).compress(20)
    count = int(made.plan.held_out.sum())
    with pytest.raises(ValueError, match=rf"held-out queries \[{count}, 6, dv\], got \[{count + 1}, 6, 8\]"):
        replace(made, inputs=replace(made.inputs, held_out=torch.zeros(count + 1, 6, 8))).compress(20)


@pytest.mark.parametrize("at_once", [1, 150, 400, 2**21])
@pytest.mark.parametrize(("n_kv_heads", "group"), [(1, 1), (1, 4), (3, 3)])
@pytest.mark.parametrize(("m", "j", "k"), [(5, 3, 6), (0, 2, 2), (5, 0, 3), (5, 2, 2), (4, 0, 0), (0, 0, 1)])
def test_attention_of_a_probe(
    at_once: int, n_kv_heads: int, group: int, m: int, j: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "WEIGHTS_AT_ONCE", {"cpu": at_once})
    p, n = 4, 23
    window, others = (random(c, n_kv_heads * group, 8, seed=c + i) for i, c in enumerate((m, k)))
    keys, values = random(p + n, n_kv_heads, 8, seed=5), random(p + n, n_kv_heads, 6, seed=6)
    positions = torch.tensor([9, 15, 20, 21, 22])[5 - m :]
    seen = torch.tensor([11, 0, 22])[:j]
    found, of_others = attend_probe(
        window, others, keys, values,
        positions=positions, visible=torch.arange(n) <= seen[:, None], n_tokens=n, scale=0.4,
    )  # fmt: skip
    last = [p + at for at in positions.tolist()]
    output, weights = naive_attention(window, keys, values, scale=0.4, last_seen=last)
    torch.testing.assert_close(found.output.double(), output, rtol=1e-4, atol=1e-5)
    if m:
        mean = weights[:, :, p:].unflatten(1, (n_kv_heads, group)).mean(dim=(0, 2))
        torch.testing.assert_close(found.mean.double(), mean, rtol=1e-4, atol=1e-7)
    last = [p + at for at in seen.tolist()] + [p + n - 1] * (k - j)
    output, _ = naive_attention(others, keys, values, scale=0.4, last_seen=last)
    torch.testing.assert_close(of_others.double(), output, rtol=1e-4, atol=1e-5)


RIDGE = {
    **{name: SMALL[name] for name in ("paper", "release", "causal", "mixture", "release_per_head")},
    "strata": replace(SMALL["release"], scorer="stratified_value", n_strata=9),
    "repetition": replace(SMALL["paper"], fit_window=0, fit_repetition=8),
    "some of the window": replace(SMALL["paper"], fit_window=2),
    "some of a window unseen": replace(SMALL["release"], fit_window=3),
    "window and repetition": replace(SMALL["paper"], fit_repetition=3),
    "both passes": replace(SMALL["paper"], fit_window=0, fit_repetition=4, fit_questions=5),
}


@pytest.mark.parametrize("name", RIDGE)
@pytest.mark.parametrize("p", [0, 4])
def test_values_are_the_ridge_regression_of_the_fit_queries(name: str, p: int) -> None:
    """The value step alone, from raw queries to stored values, in float64 and one KV head at a time."""
    profile = replace(
        RIDGE[name],
        key_step=False,
        guard=False,
        cap_v=None,
        fixed_share=0.0,
        query_weight=0.5,
        lambda_v=0.02,
    )
    n = 37
    made = layer(profile, n, p=p, seed=12)
    plan = made.plan
    if p and (plan.fit_window | plan.fit_strata).any():
        # A plan of one's own: the last query scores but is not fitted.
        last = plan.positions == plan.positions[plan.fit_window | plan.fit_strata].max()
        plan = replace(plan, fit_window=plan.fit_window & ~last, fit_strata=plan.fit_strata & ~last)
        made = replace(made, plan=plan)
    inputs = made.inputs
    result = made.compress(17)
    fitted = made.fitted()
    assert len(fitted) == int(plan.fit_window.sum() + plan.fit_strata.sum()) + sum(
        profile.fitted_of_passes.values()
    )
    for h in range(2):
        one = slice(h, h + 1)
        kept = result.kept[h][result.kept[h] >= 0]
        c = len(kept)
        past_keys = inputs.keys[:0, one] if inputs.ancestor_keys is None else inputs.ancestor_keys[:, one]
        past_values = (
            inputs.values[:0, one] if inputs.ancestor_values is None else inputs.ancestor_values[:, one]
        )
        old = inputs.values[kept, h].double()
        free = torch.tensor([2 <= s < n - 5 for s in kept.tolist()])
        design, residual = [], []
        for all_heads, position in fitted:
            query = all_heads[:, 3 * h : 3 * h + 3]
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
        torch.testing.assert_close(result.values[:c, h].double(), expected, rtol=1e-3, atol=1e-4)
        assert (expected - old).norm() > 0.1


def test_fitting_the_queries_that_were_scored_is_no_different(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their attention is then taken from the selection instead of computed again."""
    made = layer(replace(SMALL["release"], scorer="stratified", n_strata=9), 37, p=4, seed=22)
    # Chooses the same whatever the scored queries are.
    spy = Spy()
    spy.queries = frozenset({"strata"})
    monkeypatch.setattr("grkv_sglang.core.compress.get_scorer", lambda name: spy)
    shared = made.compress(17)
    fewer = made.plan.score_strata & (made.plan.positions > made.plan.positions[made.plan.score_strata][0])
    apart = replace(made, plan=replace(made.plan, score_strata=fewer)).compress(17)
    assert torch.equal(apart.kept, shared.kept)
    torch.testing.assert_close(apart.keys, shared.keys)
    torch.testing.assert_close(apart.values, shared.values)
    assert not torch.equal(shared.values[:, 0], made.inputs.values[shared.kept[0], 0])


@pytest.mark.parametrize("scorer", ["adakv", "kvzip_per_head", "critical_adakv"])
@pytest.mark.parametrize("p", [0, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_ragged_layer_is_every_head_by_itself(scorer: str, p: int, dtype: torch.dtype) -> None:
    # Few iterations: with more, conjugate gradients amplify the rounding of another order of sums.
    profile = replace(SMALL["mixture"], scorer=scorer, cg_iterations=3)
    made = layer(profile, 61, n_kv_heads=3, p=p, seed=24, dtype=dtype)
    result = made.compress(32)
    counts = (result.kept >= 0).sum(dim=1).tolist()
    assert sum(counts) == 3 * 32
    assert len(set(counts)) == 3
    # Half of every head's budget holds its floor and the 7 always kept, so that no first stage hangs on the
    # floor: by itself a head has another one.
    assert scorer != "critical_adakv" or min(counts) // 2 >= 7 + int(0.2 * (32 - 7))
    before = after = reference = 0.0
    for h, count in enumerate(counts):
        alone = made.head(h).compress(count)
        assert result.kept[h, :count].tolist() == alone.kept[0].tolist()
        rtol, atol = (1e-3, 1e-4) if dtype == torch.float32 else (2e-2, 2e-2)
        torch.testing.assert_close(result.keys[:count, h], alone.keys[:, 0], rtol=rtol, atol=atol)
        torch.testing.assert_close(result.values[:count, h], alone.values[:, 0], rtol=rtol, atol=atol)
        assert int(result.states[h]) == int(alone.states[0])
        before += alone.error_before
        after += alone.error_after
        reference += alone.reference
    assert result.error_before == pytest.approx(before, rel=1e-4)
    assert result.error_after == pytest.approx(after, rel=1e-2)
    assert result.reference == pytest.approx(reference, rel=1e-4)
    assert (result.states == KEY_AND_VALUE).all()
    assert result.error_after < result.error_before


@pytest.mark.parametrize("n_slots", [8, 20, 39, 40])
def test_layers_of_a_pyramid_keep_as_many_tokens_together(n_slots: int) -> None:
    made = layer(replace(SMALL["release"], scorer="pyramidkv"), 40, seed=25)
    widths = []
    for at in range(5):
        result = replace(made, inputs=replace(made.inputs, layer=at, n_layers=5)).compress(n_slots)
        widths.append(result.kept.shape[1])
        assert (result.kept >= 0).all()
    assert sum(widths) == 5 * n_slots
    assert widths == sorted(widths, reverse=True)
    assert n_slots not in (20, 39) or widths[0] > widths[-1]


ALL_SCORERS = [*scorer_names(), "snapkv+kvzip", "h2o+stratified_value+expected_attention"]


@pytest.mark.parametrize("scorer", ALL_SCORERS)
@pytest.mark.parametrize("shape", [(1, 1, 41), (1, 4, 37), (3, 3, 43)])
def test_every_method_keeps_protected_tokens_as_they_are(scorer: str, shape: tuple[int, int, int]) -> None:
    n_kv_heads, group, n = shape
    # Caps off: what may change does.
    profile = replace(SMALL["mixture"], scorer=scorer, cap_k=None, cap_v=None, guard=False)
    made = layer(profile, n, n_kv_heads=n_kv_heads, group=group, p=3, seed=26)
    protected = torch.tensor([s % 5 == 3 for s in range(n)])
    always = [s for s in range(n) if s < 2 or s >= n - 5 or s % 5 == 3]
    result = made.compress(len(always) + 8, protected=protected)
    before, after, reference = held_out_sums(made, result)
    assert result.error_before == pytest.approx(before, rel=1e-4)
    assert result.error_after == pytest.approx(after, rel=1e-4)
    assert result.reference == pytest.approx(reference, rel=1e-4)
    for h in range(n_kv_heads):
        kept = result.kept[h].tolist()
        assert set(always) <= set(kept)
        for j, s in enumerate(kept):
            same = torch.equal(result.keys[j, h], made.inputs.keys[s, h])
            same = same and torch.equal(result.values[j, h], made.inputs.values[s, h])
            assert same or s not in always
    assert (result.states == KEY_AND_VALUE).all()
    with pytest.raises(ValueError, match=f"more than {len(always)} slots .* protected"):
        made.compress(len(always), protected=protected)


def test_a_missing_pass_is_named() -> None:
    made = layer(replace(SMALL["release"], scorer="snapkv+h2o+kvzip"), 31)
    without = replace(made, inputs=replace(made.inputs, passes={}))
    with pytest.raises(
        ValueError, match=r"results of pass repetition, span, which selection 'snapkv\+h2o\+kvzip' needs"
    ):
        without.compress(14)
    one: dict[PassKind, PassStatistics] = {"span": made.inputs.passes["span"]}
    with pytest.raises(ValueError, match="results of pass repetition, which"):
        replace(made, inputs=replace(made.inputs, passes=one)).compress(14)
    fitting = layer(replace(SMALL["paper"], fit_repetition=4, fit_questions=3), 31)
    given = dict(fitting.inputs.pass_queries)
    fitting.compress(14)
    for kind, count in (("repetition", 4), ("questions", 3)):
        message = f"expected {count} queries of pass '{kind}', which profile 'paper' fits, got none"
        fewer = {other: queries for other, queries in given.items() if other != kind}
        nothing = {other: queries[:0] if other == kind else queries for other, queries in given.items()}
        for pass_queries in (fewer, nothing):
            with pytest.raises(ValueError, match=message):
                replace(fitting, inputs=replace(fitting.inputs, pass_queries=pass_queries)).compress(14)


@pytest.mark.parametrize("p", [0, 7])
def test_known_outputs_of_pass_queries_are_not_computed_again(p: int) -> None:
    # Without the key step, whose iterations enlarge the rounding of their target.
    profile = replace(SMALL["paper"], fit_repetition=4, fit_questions=3, key_step=False)
    made = layer(profile, 31, p=p)
    inputs = made.inputs
    keys, values = (
        tensor if ancestors is None else torch.cat([ancestors, tensor])
        for ancestors, tensor in (
            (inputs.ancestor_keys, inputs.keys),
            (inputs.ancestor_values, inputs.values),
        )
    )

    def output(queries: Tensor) -> Tensor:
        every_key, every_value = (x.double().repeat_interleave(3, dim=1) for x in (keys, values))
        weights = (torch.einsum("qhd,shd->hqs", queries.double(), every_key) * inputs.scale).softmax(-1)
        return torch.einsum("hqs,shv->qhv", weights, every_value).float()

    known = {kind: output(queries) for kind, queries in inputs.pass_queries.items()}
    expected = made.compress(14)
    result = replace(made, inputs=replace(inputs, pass_outputs=known)).compress(14)
    torch.testing.assert_close(result.values, expected.values, rtol=1e-4, atol=1e-4)
    assert result.error_after == pytest.approx(expected.error_after, rel=1e-4)
    # They are what is fitted, not decoration.
    wrong = {kind: -outputs for kind, outputs in known.items()}
    other = replace(made, inputs=replace(inputs, pass_outputs=wrong)).compress(14)
    assert (other.values - expected.values).abs().max() > 0.01


def test_window_queries_are_causal() -> None:
    """No window query sees a later token: what comes behind a query cannot change its score."""
    profile = replace(SMALL["causal"], n_window=1, value_step=False, key_step=False, pool_kernel=1)
    made = layer(profile, 21, seed=4)
    # The plan's one score query sits in the middle; the tokens behind it shout at it.
    middle = 10
    none = torch.tensor([False, False])
    plan = QueryPlan(
        positions=torch.tensor([middle, 20]),
        score_window=torch.tensor([True, False]),
        score_strata=none,
        fit_window=none,
        fit_strata=none,
        held_out=torch.tensor([False, True]),
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
    window, fit = made.plan.score_window, made.plan.fit_strata
    strata = (fit | made.plan.held_out) & ~window
    assert not (window & fit)[made.plan.positions < 35].any()
    moved.queries[strata] = at_end[strata]
    by_hand = replace(made.profile, rerotate=False)
    shared = int((window & fit).sum())
    assert shared == 1  # one stratum's middle lies in the window; it cannot be given both ways
    plan = replace(
        made.plan,
        fit_strata=fit & ~window,
        positions=torch.where(strata, 39, made.plan.positions),
    )
    fewer = replace(made.plan, fit_strata=plan.fit_strata)
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
    profile = get_profile(name)
    profile = replace(
        profile, n_strata=24 if profile.n_strata else 0, fit_strata=24, n_window=8, n_held_out=8
    )
    made = layer(profile, 200, seed=6)
    # Queries around two directions, as in a model; independent ones could not be generalised to.
    centres = random(2, 6, 8, seed=7, scale=2.0)
    raw = centres[torch.arange(len(made.raw)) % 2] + random(*made.raw.shape, seed=8, scale=0.3)
    queries = rotated(raw, made.plan.positions, 8, is_neox=True).float()
    result = replace(made, inputs=replace(made.inputs, queries=queries)).compress(60)
    assert result.error_after < 0.7 * result.error_before


def test_regression_lowers_the_error_of_the_queries_that_it_fits() -> None:
    profile = replace(SMALL["release"], scorer="stratified_value", n_strata=20, fit_strata=20)
    made = layer(profile, 60, seed=9)
    plan = replace(made.plan, held_out=made.plan.fit_strata)  # measured on the fitted ones
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


EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2]


def stored_and_loaded(made: Layer, key: Storage, value: Storage) -> tuple[Layer, Layer]:
    """The layer with everything stored, and with the float32 numbers that this stands for."""
    inputs = made.inputs
    stored: dict[str, Any] = {}
    loaded: dict[str, Any] = {}
    for name, storage in (("keys", key), ("values", value)):
        for field in (name, f"ancestor_{name}"):
            exact = getattr(inputs, field)
            if exact is not None:
                stored[field] = storage.store(exact)
                loaded[field] = storage.load(stored[field])
    return (
        replace(made, inputs=replace(inputs, **stored, key_scale=key.scale, value_scale=value.scale)),
        replace(made, inputs=replace(inputs, **loaded)),
    )


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.07, 3.0)], ids=["unscaled", "scaled"])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, *EIGHT_BITS], ids=lambda dtype: str(dtype).removeprefix("torch.")
)
@pytest.mark.parametrize("name", ["default", "release", "per_head"])
def test_what_is_stored_stands_for_what_is_computed(
    name: str, dtype: torch.dtype, scales: tuple[float, float]
) -> None:
    """Selection and errors are those of the numbers that the stored ones stand for, in float64."""
    key, value = (Storage(dtype, scale) for scale in scales)
    stored, loaded = stored_and_loaded(layer(SMALL[name], 41, p=5, seed=12), key, value)
    result = stored.compress(19)
    assert result.keys.dtype == result.values.dtype == dtype
    assert result.is_finite
    assert torch.equal(result.kept, loaded.compress(19).kept)
    read_back = replace(result, keys=key.load(result.keys), values=value.load(result.values))
    before, after, reference = held_out_sums(loaded, read_back)
    assert result.error_before == pytest.approx(before, rel=1e-4)
    assert result.error_after == pytest.approx(after, rel=1e-4)
    assert result.reference == pytest.approx(reference, rel=1e-4)
    for h in range(2):
        kept = result.kept[h][result.kept[h] >= 0]
        always = (kept < stored.profile.sinks) | (kept >= 41 - stored.profile.n_window)
        same = (result.keys[: len(kept), h].float() == stored.inputs.keys.float()[kept, h]).all(dim=1)
        assert same[always].all()
        assert not same.all() or result.states[h] != KEY_AND_VALUE
    everything = stored.compress(41)
    assert torch.equal(everything.keys.float(), stored.inputs.keys.float())


@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_eight_bit_storage_rounds_the_float32_result(dtype: torch.dtype, scale: float) -> None:
    """Without caps, the value step's result is the rounded one of a float32 pool with the same numbers."""
    storage = Storage(dtype, scale)
    made = layer(replace(SMALL["paper"], key_step=False), 33, seed=10)
    stored, loaded = stored_and_loaded(made, storage, storage)
    result, single = stored.compress(15), loaded.compress(15)
    assert result.states.tolist() == [VALUE_ONLY] * 2
    assert torch.equal(result.values.float(), storage.store(single.values).float())
    assert torch.equal(result.keys.float(), storage.store(single.keys).float())


@pytest.mark.parametrize(
    ("dtype", "bad"),
    # float8_e4m3fn has no infinity.
    [(torch.float8_e4m3fn, torch.nan), (torch.float8_e5m2, torch.nan), (torch.float8_e5m2, torch.inf)],
)
def test_a_non_finite_eight_bit_number_is_not_stored_as_a_large_one(dtype: torch.dtype, bad: float) -> None:
    made = layer(SMALL["default"], 31, n_kv_heads=3, seed=11)
    stored, _ = stored_and_loaded(made, Storage(dtype), Storage(dtype))
    stored.inputs.values[30, 1, 0] = bad
    result = stored.compress(14)
    assert not result.is_finite
    assert not math.isfinite(result.error_after)


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
    made = layer(SMALL["mixture"], 31, p=3)
    tensors = [t for t in vars(made.inputs).values() if isinstance(t, Tensor)]
    tensors += [rest for left in made.inputs.passes.values() for rest in statistics_of(left)]
    tensors += made.inputs.pass_queries.values()
    before = [t.clone() for t in tensors]
    made.compress(14)
    assert len(tensors) == 6 + 3 * len(get_args(PassKind)) + 1
    assert all(torch.equal(new, old) for new, old in zip(tensors, before, strict=True))


def test_no_ancestors_is_the_same_as_empty_ones() -> None:
    made = layer(SMALL["default"], 31)
    empty = replace(made.inputs, ancestor_keys=torch.empty(0, 2, 8), ancestor_values=torch.empty(0, 2, 6))
    expected, got = made.compress(14), replace(made, inputs=empty).compress(14)
    assert torch.equal(got.keys, expected.keys)
    assert got.error_after == expected.error_after


def test_one_query_of_each_kind() -> None:
    profile = replace(SMALL["mixture"], n_window=1, n_strata=1, fit_strata=1, fit_repetition=1, n_held_out=1)
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
        ({"queries": torch.zeros(11, 6, 8)}, r"queries \[13, a multiple of 2, 8\]"),
        ({"queries": torch.zeros(8, 5, 8)}, r"got \[8, 5, 8\]"),
        ({"keys": torch.zeros(25, 2, 8), "values": torch.zeros(25, 2, 6)}, "plan for a span of 25 tokens"),
        ({"ancestor_keys": torch.zeros(3, 2, 8)}, "together"),
        (
            {"ancestor_keys": torch.zeros(3, 2, 8), "ancestor_values": torch.zeros(4, 2, 6)},
            r"got \[3, 2, 8\] and \[4, 2, 6\]",
        ),
        ({"ancestor_held": torch.ones(2, 3, dtype=torch.bool)}, r"ancestor_held \[2, 0\] bool, got \[2, 3\]"),
        (
            {
                "ancestor_keys": torch.zeros(3, 2, 8),
                "ancestor_values": torch.zeros(3, 2, 6),
                "ancestor_held": torch.ones(2, 3),
            },
            r"ancestor_held \[2, 3\] bool, got \[2, 3\] torch.float32",
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


@pytest.mark.parametrize("kind", ["window", "strata"])
def test_a_plan_without_the_queries_that_a_selection_looks_at(kind: QueryKind) -> None:
    made = layer(replace(SMALL["mixture"], scorer="snapkv+stratified"), 33, seed=27)
    none = torch.zeros_like(made.plan.held_out)
    without = replace(made, plan=replace(made.plan, **{f"score_{kind}": none}))
    message = (
        rf"a plan with {kind} queries, which selection 'snapkv\+stratified' looks at, got none in score_"
    )
    for n_slots in (14, 33):
        with pytest.raises(ValueError, match=message + kind):
            without.compress(n_slots)
    # A method that does not look at them does without.
    other = {"window": "stratified", "strata": "snapkv"}[kind]
    assert replace(without, profile=replace(made.profile, scorer=other)).compress(14).kept.shape == (2, 14)


@pytest.mark.parametrize("name", ["paper", "default", "mixture"])
def test_a_plan_without_queries_to_fit(name: str) -> None:
    profile = SMALL[name]
    made = layer(profile, 33, seed=28)
    none = torch.zeros_like(made.plan.held_out)
    without = replace(made, plan=replace(made.plan, fit_window=none, fit_strata=none))
    message = (
        f"a plan with queries to fit, because profile '{profile.name}' has a value or key step, got none"
    )
    if profile.fitted_of_passes:
        # Those of passes are no part of a plan, and enough.
        assert without.compress(14).error_after > 0
        without = replace(without, profile=replace(profile, fit_repetition=0, fit_questions=0))
    with pytest.raises(ValueError, match=message):
        without.compress(14)
    # Nothing is fitted where no step runs.
    still = replace(without, profile=replace(profile, value_step=False, key_step=False))
    result = still.compress(14)
    assert result.error_after == result.error_before


def test_the_core_imports_nothing_but_torch_and_in_one_place_kernels() -> None:
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
                top = name.split(".")[0]
                allowed = top in {"torch", *sys.stdlib_module_names}
                allowed |= top == "grkv_kernels" and source.name == "kernels.py"
                assert allowed or name.startswith("grkv_sglang.core"), f"{source.name} imports {name}"
