"""What a probe leaves of its queries, and which forward passes a compression plans beyond it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from grkv_sglang.attention.kv_scales import KVScales
from grkv_sglang.attention.ragged import RaggedRegion
from grkv_sglang.cache.compressor import (
    CHUNK_TOKENS,
    Compression,
    CompressionError,
    Compressor,
    SpanSource,
    _CachedAttention,
    _Probe,
)
from grkv_sglang.config import TORCH_ATTENTION
from grkv_sglang.core import PassChunk, Profile, get_profile, plan_queries, span_chunks
from grkv_sglang.policy.prompts import PassPrompts, longest_prompt, pass_chunks
from tests.core.reference import naive_attention, random, rotary_table, rotated

PROMPTS = PassPrompts(repeat_first=(1, 2, 3), repeat_cue=(4,), answer=(5, 6), questions=(7, 8, 9, 10))
BEHIND = longest_prompt(PROMPTS)
START, N = 40, 600


def source(n_merged: int = 0) -> SpanSource:
    """A span of `N` tokens, the first of them held by `n_merged` slots of an older span if there are any."""
    n_exact = N - 10 * n_merged
    return SpanSource(
        start_tokens=START,
        token_ids=range(N - n_exact, N),
        exact_start_tokens=START + N - n_exact,
        slots=torch.arange(n_exact),
        merged_token_ids=range(N - n_exact),
        merged_slots=torch.arange(n_merged),
        protected=(),
        ancestor_slots=torch.arange(START),
    )


def model_of_one_layer() -> SimpleNamespace:
    """As far as profiles look at a model."""
    layer = SimpleNamespace(
        rotary_emb=SimpleNamespace(cos_sin_cache=torch.zeros(4, 8), rotary_dim=8, is_neox_style=True),
        attn=SimpleNamespace(tp_q_head_num=2, v_head_dim=8, layer_id=0),
        o_proj=torch.nn.Linear(16, 16, bias=False),
    )
    return SimpleNamespace(modules=lambda: [layer])


def with_scorer(scorer: str, fit_repetition: int = 0) -> Profile:
    return replace(get_profile("paper"), scorer=scorer, fit_repetition=fit_repetition)


def chunks(
    profile: Profile,
    *,
    prompts: PassPrompts | None = PROMPTS,
    context_len: int = 100_000,
    span: SpanSource | None = None,
) -> dict[str, list[PassChunk]]:
    runner: Any = SimpleNamespace(
        token_to_kv_pool=None,
        model=torch.nn.Identity(),
        model_config=SimpleNamespace(context_len=context_len),
    )
    found: dict[str, list[PassChunk]] = {}
    for kind, chunk in Compressor(runner, prompts)._chunks(span or source(), profile):
        found.setdefault(kind, []).append(chunk)
    return found


def test_a_profile_without_passes_has_no_chunks():
    assert chunks(get_profile("paper")) == {}
    # Not even room behind the prefix.
    assert chunks(get_profile("paper"), context_len=START + N, prompts=None) == {}


@pytest.mark.parametrize("prompts", [PROMPTS, None])
@pytest.mark.parametrize("context_len", [100_000, START + N])
def test_a_pass_over_the_span_needs_neither_tokenizer_nor_room(prompts: PassPrompts | None, context_len: int):
    found = chunks(with_scorer("h2o"), prompts=prompts, context_len=context_len)
    assert found == {"span": span_chunks(range(N), chunk_tokens=CHUNK_TOKENS)}


def test_every_pass_that_a_profile_needs():
    profile = replace(with_scorer("h2o~question_mass", fit_repetition=8), repetition_reach_tokens=9)
    assert chunks(profile) == {
        kind: pass_chunks(kind, range(N), PROMPTS, chunk_tokens=CHUNK_TOKENS, reach_tokens=9)
        for kind in ("questions", "repetition", "span")
    }


def test_a_repetition_fits_behind_the_prefix():
    profile = with_scorer("kvzip")
    for room in (8, 20, CHUNK_TOKENS + 50):
        context_len = START + N + BEHIND + room
        (repeated,) = chunks(profile, context_len=context_len).values()
        assert {len(chunk.token_ids) - chunk.n_prompt for chunk in repeated[:-1]} == {min(room, CHUNK_TOKENS)}
        ends = [START + chunk.first_position + len(chunk.token_ids) for chunk in repeated]
        assert max(ends) <= context_len
    with pytest.raises(CompressionError, match="1 positions of the model's are missing") as failure:
        chunks(profile, context_len=START + N + BEHIND + 7)
    assert failure.value.reason == "no_positions"


def test_requests_fit_behind_the_prefix():
    profile = with_scorer("question_mass")
    chunks(profile, context_len=START + N + BEHIND)
    with pytest.raises(CompressionError, match="3 positions"):
        chunks(profile, context_len=START + N + BEHIND - 3)


@pytest.mark.parametrize("name", ["per_head", "release_per_head"])
def test_budgets_per_head_are_refused_where_the_server_does_not_hold_them(name: str):
    runner: Any = SimpleNamespace(token_to_kv_pool=None, model=model_of_one_layer(), lora_manager=None)
    assert Compressor(runner, PROMPTS).check_profile(name) is get_profile(name)
    refusing = Compressor(runner, PROMPTS, "is not held here; use 'default'")
    with pytest.raises(ValueError, match=f"^profile '{name}' is not held here; use 'default'$"):
        refusing.check_profile(name)
    assert refusing.check_profile("default") is get_profile("default")
    with pytest.raises(CompressionError, match=r"^forced='packed' is not held here") as failure:
        refusing.copy_packed(source(), torch.arange(N))
    assert failure.value.reason == "unsupported"


def test_budgets_per_layer_are_refused(monkeypatch: pytest.MonkeyPatch):
    runner: Any = SimpleNamespace(token_to_kv_pool=None, model=model_of_one_layer(), lora_manager=None)
    monkeypatch.setattr("grkv_sglang.cache.compressor.get_profile", with_scorer)
    with pytest.raises(ValueError, match=r"'pyramidkv', whose budgets differ .*'default'"):
        Compressor(runner, PROMPTS).check_profile("pyramidkv")


def random_pool(n_slots: int, n_kv_heads: int, dim: int, n_layers: int) -> MHATokenToKVPool:
    pool = MHATokenToKVPool(n_slots, 1, torch.float32, n_kv_heads, dim, n_layers, "cpu", False)
    for layer in range(n_layers):
        for buffer in pool.get_kv_buffer(layer):
            buffer.copy_(torch.randn(buffer.shape))
    return pool


@pytest.mark.parametrize("n_kv_heads", [1, 2, 3])
def test_a_packed_copy_holds_every_token_of_every_head(n_kv_heads: int):
    """Read back by hand: the heads' rows, one head behind the other."""
    n_layers, n = 2, 7
    pool = random_pool(40, n_kv_heads, 4, n_layers)
    slots, new_slots = torch.randperm(40)[: 2 * n].view(2, n) + 1
    span = replace(source(), start_tokens=0, token_ids=range(n), exact_start_tokens=0, slots=slots)
    runner: Any = SimpleNamespace(
        token_to_kv_pool=pool,
        model=torch.nn.Identity(),
        model_config=SimpleNamespace(num_hidden_layers=n_layers),
        device="cpu",
    )
    origin, counts = Compressor(runner).copy_packed(span, new_slots)
    assert (origin.forced, origin.quality) == (True, 1.0)
    assert counts.tolist() == [[n] * n_kv_heads] * n_layers
    for layer in range(n_layers):
        for buffer in pool.get_kv_buffer(layer):
            cells = [buffer[slot, head] for slot in new_slots for head in range(n_kv_heads)]
            rows = [buffer[slot, head] for head in range(n_kv_heads) for slot in slots]
            assert all(torch.equal(a, b) for a, b in zip(cells, rows, strict=True))


@pytest.mark.parametrize("n_kv_heads", [1, 3])
def test_what_a_probe_sees_of_spans_whose_heads_hold_tokens_of_their_own(n_kv_heads: int):
    """Two regions among the ancestors, two layers with other counts: gathered rows head by head."""
    n_layers, n = 2, 6
    pool = random_pool(60, n_kv_heads, 4, n_layers)
    before, slots = (torch.randperm(60) + 1).split([11, 49])
    # Columns 2 to 3 and 4 to 6 of the eleven.
    counts = {1: ([[2], [2]], [[3], [3]]), 3: ([[6, 0, 0], [1, 2, 3]], [[0, 4, 5], [9, 0, 0]])}[n_kv_heads]
    regions = tuple(
        RaggedRegion(first, size, torch.tensor(of_region))
        for first, size, of_region in zip((2, 4), (2, 3), counts, strict=True)
    )
    span = replace(
        source(), token_ids=range(n), exact_start_tokens=START, slots=slots[:n],
        ancestor_slots=before, ancestor_regions=regions,
    )  # fmt: skip
    for attended in (None, torch.tensor([0, 3, 4])):
        path = span.path if attended is None else span.path_with(span.candidates[attended])
        of_span = slots[:n] if attended is None else slots[:n][attended]
        for layer in range(n_layers):
            held = path.held(layer)
            assert held is not None
            for buffer in pool.get_kv_buffer(layer):
                rows = path.gather(buffer, layer)
                n_before = len(rows) - len(of_span)
                assert held.shape == (n_kv_heads, n_before)
                assert torch.equal(rows[n_before:], buffer[of_span])
                assert torch.equal(rows[n_before - 6 : n_before], buffer[before[[0, 1, 7, 8, 9, 10]]])
                for head in range(n_kv_heads):
                    expected = []
                    for region in regions:
                        at = int(region.counts[layer, :head].sum())
                        for j in range(at, at + int(region.counts[layer, head])):
                            slot = before[region.first_column + j // n_kv_heads]
                            expected.append(buffer[slot, j % n_kv_heads])
                    expected += [buffer[slot, head] for slot in before[[0, 1, 7, 8, 9, 10]]]
                    got = rows[:n_before, head][held[head]]
                    assert torch.equal(got, torch.stack(expected))
                    assert bool((rows[:n_before, head][~held[head]] == 0).all())


def test_without_such_spans_a_probe_sees_the_slots_as_they_are():
    buffer = torch.randn(700, 2, 4)
    span = source()
    assert span.path.held(0) is None
    assert torch.equal(span.path.gather(buffer, 0), buffer[torch.cat([torch.arange(START), torch.arange(N)])])


@pytest.mark.parametrize(("heads", "n_kv_heads"), [(3, 3), (6, 2)])
def test_the_attention_of_a_probe_behind_such_spans(heads: int, n_kv_heads: int):
    """Through the backend of the probe's forward pass: window and other queries, each head by itself."""
    torch.manual_seed(heads)
    n, dim, layer_id, profile = (
        60,
        8,
        1,
        replace(get_profile("paper"), n_window=5, fit_window=5, n_held_out=4),
    )
    pool = random_pool(120, n_kv_heads, dim, 2)
    before, slots = (torch.randperm(120) + 1).split([20, 100])
    counts = torch.tensor([[12] * n_kv_heads, [12 + 9, *[12] * (n_kv_heads - 2), 12 - 9]])
    region = RaggedRegion(3, 12, counts)
    span = replace(
        source(), token_ids=range(n), exact_start_tokens=START, slots=slots[:n],
        ancestor_slots=before, ancestor_regions=(region,),
    )  # fmt: skip
    plan = plan_queries(n, profile)
    probe = _Probe(span, plan, None)
    m, group = len(plan.positions), heads // n_kv_heads
    layer = RadixAttention(heads, dim, 0.3, n_kv_heads, layer_id)
    queries = torch.randn(m, heads, dim)
    own = torch.randn(2, m, n_kv_heads, dim)
    backend = _CachedAttention(pool, {layer_id: KVScales()}, [(m, probe)])
    got = backend.forward(queries.flatten(1), own[0], own[1], layer, None).view(m, heads, dim)
    keys, values = (buffer.double() for buffer in pool.get_kv_buffer(layer_id))
    others = [column for column in range(20) if not 3 <= column < 15]
    for head in range(heads):
        kv_head = head // group
        at = int(counts[layer_id, :kv_head].sum())
        cells = [
            (int(before[3 + j // n_kv_heads]), j % n_kv_heads)
            for j in range(at, at + int(counts[layer_id, kv_head]))
        ]
        cells += [(int(before[column]), kv_head) for column in others]
        for i, position in enumerate(plan.positions.tolist()):
            seen = [*cells, *((int(slot), kv_head) for slot in slots[: position + 1])]
            index = tuple(zip(*seen, strict=True))
            logits = keys[index] @ queries[i, head].double() * 0.3
            expected = logits.softmax(0) @ values[index]
            torch.testing.assert_close(got[i, head].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("scorer", "n_slots"), [("adakv", 20), ("adakv", 60), ("snapkv", 20)])
def test_a_layer_is_written_head_by_head(scorer: str, n_slots: int):
    """What a layer's heads keep, in the order of their tokens, cell by cell; nothing else is touched."""
    torch.manual_seed(n_slots)
    n, heads, n_kv_heads, dim, n_layers = 60, 6, 3, 8, 2
    profile = replace(
        get_profile("paper"), scorer=scorer, n_window=5, fit_window=5, n_held_out=4, rerotate=False, sinks=1
    )
    pool = random_pool(150, n_kv_heads, dim, n_layers)
    for layer in range(n_layers):
        for buffer in pool.get_kv_buffer(layer):
            buffer[:, 1] *= 3  # heads whose attention is more peaked keep fewer tokens
    slots, new_slots, others = (torch.randperm(150) + 1).split([n, n_slots, 150 - n - n_slots])
    span = replace(
        source(), start_tokens=0, exact_start_tokens=0, token_ids=range(n), slots=slots,
        ancestor_slots=torch.arange(0),
    )  # fmt: skip
    runner: Any = SimpleNamespace(
        token_to_kv_pool=pool,
        model=torch.nn.ModuleList(RadixAttention(heads, dim, 0.4, n_kv_heads, i) for i in range(n_layers)),
        decode_attention_backend_str=TORCH_ATTENTION,
        model_config=SimpleNamespace(num_hidden_layers=n_layers),
        device="cpu",
    )
    compressor, plan = Compressor(runner), plan_queries(n, profile)
    probe = _Probe(span, plan, None)
    probe.queries = {i: (torch.randn(len(plan.positions), heads, dim), 0.4) for i in range(n_layers)}
    before = [[buffer.clone() for buffer in pool.get_kv_buffer(i)] for i in range(n_layers)]
    work = Compression(compressor, span, profile, plan, new_slots, probe, None, None)
    for layer in range(n_layers):
        result = compressor.compress_layer(work, layer)
        cells = [(int(slot), row) for slot in new_slots for row in range(n_kv_heads)]
        for buffer, old, rows in zip(
            pool.get_kv_buffer(layer), before[layer], (result.keys, result.values), strict=True
        ):
            assert torch.equal(buffer[others], old[others])
            assert torch.equal(buffer[slots], old[slots])
            if work.counts is None:
                assert torch.equal(buffer[new_slots], rows)
                continue
            expected = [
                rows[i, head]
                for head in range(n_kv_heads)
                for i, token in enumerate(result.kept[head].tolist())
                if token >= 0
            ]
            assert torch.equal(torch.stack([buffer[cell] for cell in cells]), torch.stack(expected))
            assert work.counts[layer].tolist() == [
                sum(token >= 0 for token in tokens) for tokens in result.kept.tolist()
            ]
    assert (work.counts is not None) == (scorer == "adakv" and n_slots < n)
    if work.counts is not None:
        assert len(set(work.counts[0].tolist())) > 1


def test_merged_spans():
    span = source(n_merged=5)
    (repeated,) = chunks(with_scorer("kvzip"), span=span).values()
    assert [token for chunk in repeated for token in chunk.token_ids[chunk.n_prompt :]] == list(range(N))
    assert {chunk.attended for chunk in repeated} == {None}
    with pytest.raises(CompressionError, match="merged spans") as failure:
        chunks(with_scorer("h2o"), span=span)
    assert failure.value.reason == "unsupported"


@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize(("scorer", "fit_window"), [("snapkv", 8), ("kvzip", 0)])
def test_a_probe_keeps_what_the_core_would_compute_again(moves: bool, scorer: str, fit_window: int):
    """Window and held-out queries, and the output of every query at its own position."""
    profile = replace(
        with_scorer(scorer), fit_window=fit_window, fit_strata=3, n_held_out=4, window_tokens=8, n_window=8
    )
    span, plan = source(), plan_queries(N, profile)
    rotary = rotary_table(16, is_neox=True, n_positions=N)
    n_queries, n_kv_heads, group = len(plan.positions), 2, 3
    layer = RadixAttention(n_kv_heads * group, 16, 0.3, n_kv_heads, layer_id=7)
    raw = random(n_queries, n_kv_heads * group, 16, seed=1, scale=2.0)
    queries = rotated(raw, plan.positions, 16, is_neox=True).float()
    keys, values = (random(START + N, n_kv_heads, 16, seed=seed).float() for seed in (2, 3))
    probe = _Probe(span, plan, rotary if moves else None)
    unused = torch.zeros(n_queries, n_kv_heads, 16)
    output = probe.attend(layer, queries, unused, unused, keys, values)

    own = [START + at for at in plan.positions.tolist()]
    expected, _ = naive_attention(queries, keys, values, scale=0.3, last_seen=own)
    torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-5)
    stored, scale = probe.queries[7]
    assert torch.equal(stored, queries)
    assert scale == 0.3
    torch.testing.assert_close(probe.window[7].output, output[plan.score_window], rtol=0, atol=0)
    assert bool(plan.score_window.any()) == (scorer == "snapkv")
    held_out = expected[plan.held_out]
    if moves:
        at_end = rotated(raw[plan.held_out], torch.full((4,), N - 1), 16, is_neox=True)
        held_out, _ = naive_attention(at_end, keys, values, scale=0.3)
    torch.testing.assert_close(probe.held_out[7].double(), held_out, rtol=1e-4, atol=1e-4)
