"""SGLang's pools in every dtype that is served: what we read is what it wrote, and we write the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from grkv_kernels import read_slots, write_slots
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool

from grkv_sglang.attention.kv_scales import KVScales, attention_layers, kv_pool_problems, kv_scales
from grkv_sglang.core import STORAGE_DTYPES, Storage

HEADS, KV_HEADS, DIM, SLOTS = 4, 2, 16, 32
TORCH, TRITON, FLASHINFER = "grkv_torch", "grkv_triton", "grkv_flashinfer"
# Half a step of the dtype, relative; e5m2 has two bits behind the point, e4m3fn three.
HALF_STEP = {
    torch.float32: 2**-24,
    torch.bfloat16: 2**-8,
    torch.float16: 2**-11,
    torch.float8_e4m3fn: 2**-4,
    torch.float8_e5m2: 2**-3,
}


def name(value: object) -> str:
    return str(value).removeprefix("torch.")


def pool_of(dtype: torch.dtype, **changes: Any) -> Any:
    return MHATokenToKVPool(SLOTS, 1, dtype, KV_HEADS, DIM, 1, "cpu", False, **changes)


def layer_with(key: float | None = None, value: float | None = None) -> RadixAttention:
    """A layer as SGLang leaves it after loading (``layers/quantization/kv_cache.py``)."""
    layer = RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, 0)
    if key is not None:
        layer.k_scale, layer.k_scale_float = torch.nn.Parameter(torch.tensor(key), requires_grad=False), key
    if value is not None:
        layer.v_scale, layer.v_scale_float = (
            torch.nn.Parameter(torch.tensor(value), requires_grad=False),
            value,
        )
    return layer


def test_half_steps_are_known_for_all() -> None:
    assert set(HALF_STEP) == set(STORAGE_DTYPES)


# SGLang divides by scales only where the pool's dtype is not the model's, here float32.
SCALED = [(dtype, KVScales(0.05, 1.7)) for dtype in STORAGE_DTYPES if dtype != torch.float32]


@pytest.mark.parametrize(
    ("dtype", "scales"),
    [*((dtype, KVScales()) for dtype in STORAGE_DTYPES), *SCALED],
    ids=lambda value: name(value) if isinstance(value, torch.dtype) else f"scales-{value[0]}-{value[1]}",
)
def test_what_sglang_writes_is_read_and_written_back(dtype: torch.dtype, scales: KVScales) -> None:
    pool, layer = pool_of(dtype), layer_with(*scales) if scales != KVScales() else layer_with()
    torch.manual_seed(0)
    exact = torch.randn(2, 5, KV_HEADS, DIM)
    slots, others = torch.tensor([3, 9, 4, 31, 17]), torch.tensor([8, 1, 2, 30, 7])
    pool.set_kv_buffer(layer, KVWriteLoc(slots), *exact.clone(), layer.k_scale, layer.v_scale)
    buffers = pool.get_key_buffer(0), pool.get_value_buffer(0)
    assert {buffer.dtype for buffer in buffers} == {dtype}
    for buffer, scale, wanted in zip(buffers, scales, exact, strict=True):
        storage = Storage(buffer.dtype, scale)
        loaded = storage.load(read_slots(buffer, slots))
        # Below the smallest normal number the steps stay as wide.
        floor = torch.finfo(dtype).smallest_normal * scale
        bound = HALF_STEP[dtype] * 1.001 * wanted.double().abs().clamp(min=floor)
        assert ((loaded.double() - wanted.double()).abs() <= bound).all()
        # Our own conversion is the pool's: the same bits as SGLang wrote, from the same numbers.
        write_slots(buffer, others, storage.store(wanted))
        assert torch.equal(read_slots(buffer, others).float(), read_slots(buffer, slots).float())
        untouched = [slot for slot in range(SLOTS) if slot not in {*slots.tolist(), *others.tolist()}]
        assert (buffer[untouched].float() == 0).all()


@pytest.mark.parametrize(
    ("backend", "key", "value", "expected"),
    [
        (TORCH, None, None, (1.0, 1.0)),
        (TORCH, 0.5, 2.0, (1.0, 1.0)),
        (TRITON, None, None, (1.0, 1.0)),
        (TRITON, 0.5, 2.0, (0.5, 2.0)),
        (TRITON, 0.5, None, (1.0, 1.0)),
        (FLASHINFER, None, None, (1.0, 1.0)),
        (FLASHINFER, 0.5, 2.0, (0.5, 2.0)),
        (FLASHINFER, 0.5, None, (0.5, 1.0)),
    ],
)
def test_what_each_backend_multiplies_by(
    backend: str, key: float | None, value: float | None, expected: tuple[float, float]
) -> None:
    assert kv_scales(layer_with(key, value), backend) == expected


def test_a_foreign_backend_has_no_known_scales() -> None:
    with pytest.raises(KeyError):
        kv_scales(layer_with(), "fa3")


@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=name)
def test_a_pool_of_every_stored_dtype_is_served(dtype: torch.dtype) -> None:
    model = torch.nn.Sequential(layer_with(), torch.nn.Linear(2, 2))
    assert list(attention_layers(model)) == [model[0]]
    assert kv_pool_problems(pool_of(dtype), model, (TORCH, TORCH)) == []
    # Scales of one change nothing, whoever ignores them.
    assert kv_pool_problems(pool_of(dtype), layer_with(1.0, 1.0), (TORCH, TORCH)) == []
    assert kv_pool_problems(pool_of(dtype), layer_with(0.5, 0.5), (TRITON, FLASHINFER)) == []


def test_scales_that_a_backend_ignores_are_refused() -> None:
    model = torch.nn.Sequential(layer_with(1.0, 1.0), layer_with(1.0, 0.5))
    for backends in ((TORCH, TORCH), (TORCH, TRITON), (FLASHINFER, TORCH)):
        (problem,) = kv_pool_problems(pool_of(torch.float8_e4m3fn), model, backends)
        assert "which grkv_torch ignores: set --kv-cache-dtype bfloat16" in problem
    # Nothing is divided by them in a pool of the model's own dtype.
    assert kv_pool_problems(pool_of(torch.bfloat16), model, (TORCH, TORCH)) == []


def test_scales_without_a_copy_on_the_host_are_refused() -> None:
    layer = layer_with(0.5, 0.5)
    layer.k_scale_float = layer.v_scale_float = None  # as LlamaModel.load_kv_cache_scales leaves it
    for backend in (TORCH, TRITON, FLASHINFER):
        (problem,) = kv_pool_problems(pool_of(torch.float8_e4m3fn), layer, (backend, backend))
        assert problem.startswith("KV scales of --quantization-param-path: drop it")


def test_other_pools_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    (problem,) = kv_pool_problems(pool_of(torch.float8_e4m3fnuz), layer_with(), (TRITON, TRITON))
    assert problem == "KV stored as torch.float8_e4m3fnuz: set --kv-cache-dtype bfloat16"
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    (problem,) = kv_pool_problems(pool_of(torch.float32), layer_with(), (TRITON, TRITON))
    assert problem.startswith("a KV cache in layout 'hnd'")
    assert "unset SGLANG_USE_HND_KVCACHE" in problem
