"""How a pool with scales is read and written, per narrow dtype; pool and attention layer are SGLang's."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from torch import Tensor

from grkv_sglang.cache.compressor import (
    Compression,
    Compressor,
    PathKV,
    SpanSource,
    _CachedAttention,
    _Reader,
)
from grkv_sglang.core import LayerInputs, Storage, compress_layer, get_profile, plan_queries

HEADS, KV_HEADS, DIM = 4, 2, 8
SCALES = 0.07, 3.0


def scaled_pool(dtype: torch.dtype, slots: Tensor) -> tuple[Any, RadixAttention]:
    """A pool whose `slots` were written by SGLang with a checkpoint's scales, and the layer that has them."""
    layer = RadixAttention(HEADS, DIM, 0.3, KV_HEADS, 0)
    for side, scale in zip("kv", SCALES, strict=True):
        setattr(layer, f"{side}_scale", torch.nn.Parameter(torch.tensor(scale), requires_grad=False))
        setattr(layer, f"{side}_scale_float", scale)
    pool = MHATokenToKVPool(120, 1, dtype, KV_HEADS, DIM, 1, "cpu", False)
    kv = torch.randn(2, len(slots), KV_HEADS, DIM, generator=torch.Generator().manual_seed(0))
    pool.set_kv_buffer(layer, KVWriteLoc(slots), *kv, layer.k_scale, layer.v_scale)
    return pool, layer


@pytest.mark.parametrize("backend", ["grkv_triton", "grkv_flashinfer"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16], ids=str)
def test_a_scaled_pool_is_compressed_as_it_is_read(dtype: torch.dtype, backend: str) -> None:
    n, n_before, n_slots = 40, 6, 18
    slots = torch.randperm(119, generator=torch.Generator().manual_seed(1))[: n_before + n] + 1
    before, span = slots[:n_before], slots[n_before:]
    new_slots = torch.tensor(sorted({*range(1, 120)} - {*slots.tolist()}))[:n_slots]
    pool, layer = scaled_pool(dtype, slots)
    runner: Any = SimpleNamespace(
        token_to_kv_pool=pool, model=torch.nn.Sequential(layer), decode_attention_backend_str=backend,
        model_config=SimpleNamespace(num_hidden_layers=1), device="cpu",
    )  # fmt: skip
    profile = replace(get_profile("release"), scorer="snapkv", n_window=5, n_strata=6, fit_strata=6)
    profile = replace(profile, n_held_out=4, rerotate=False)
    plan = plan_queries(n, profile)
    queries = 2 * torch.randn(len(plan.positions), HEADS, DIM)
    compressor = Compressor(runner)
    source = SpanSource(n_before, range(n), n_before, span, (), span[:0], (), before)
    probe: Any = SimpleNamespace(queries={0: (queries, layer.scaling)}, window={}, held_out={})
    work = Compression(compressor, source, profile, plan, new_slots, probe, None, None)
    buffers = pool.get_kv_buffer(0)
    stored = [buffer.clone() for buffer in buffers]
    result = compressor.compress_layer(work, 0)

    storages = [Storage(dtype, scale) for scale in SCALES]
    keys, values = (storage.load(buffer) for storage, buffer in zip(storages, stored, strict=True))
    exact = LayerInputs(
        keys=keys[span], values=values[span], queries=queries, scale=layer.scaling,
        ancestor_keys=keys[before], ancestor_values=values[before],
    )  # fmt: skip
    in_float32 = compress_layer(
        exact, plan, profile, n_slots=n_slots, starts_sequence=False, rotary=None
    )  # fmt: skip
    assert torch.equal(result.kept, in_float32.kept)
    assert result.error_before == pytest.approx(in_float32.error_before, rel=1e-5)
    assert not torch.equal(result.kept, torch.arange(n - n_slots, n).expand(KV_HEADS, -1))
    others = torch.ones(len(stored[0]), dtype=torch.bool)
    others[new_slots] = False
    written = zip(buffers, stored, (result.keys, result.values), strict=True)
    for buffer, was, rows in written:
        assert torch.equal(buffer[new_slots].float(), rows.float())
        assert torch.equal(buffer[others].float(), was[others].float())
    # What the window keeps as it is has the same bits in its new slots.
    assert torch.equal(buffers[0][new_slots[-5:]].float(), stored[0][span[-5:]].float())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16], ids=str)
def test_passes_attend_to_what_decoding_attends_to(dtype: torch.dtype) -> None:
    slots = torch.tensor([7, 3, 90, 12])
    pool, layer = scaled_pool(dtype, slots)
    seen: list[Tensor] = []

    class Recorder(_Reader):
        def attend(
            self, layer: RadixAttention, queries: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor
        ) -> Tensor:
            seen.extend((keys, values))
            return queries

    reader = Recorder()
    reader.path = PathKV(slots, n_before=0, regions=())
    runner: Any = SimpleNamespace(
        token_to_kv_pool=pool, model=layer, decode_attention_backend_str="grkv_triton"
    )  # fmt: skip
    backend = _CachedAttention(pool, Compressor(runner)._scales, [(1, reader)])
    own = torch.zeros(1, KV_HEADS * DIM)
    backend.forward(torch.zeros(1, HEADS * DIM), own, own, layer, None)
    for found, buffer, scale in zip(seen, pool.get_kv_buffer(0), SCALES, strict=True):
        assert found.dtype == torch.float32
        assert torch.equal(found, buffer[slots].float() * scale)
