"""What each attention backend multiplies cached keys and values by, and which pools of SGLang's we can read.

A checkpoint with a quantised KV cache brings a scale per layer for keys and one for values. SGLang divides by
them where it writes a pool that is narrower than the model (``MHATokenToKVPool.set_kv_buffer``); what its
backends do where they read differs, and compression has to see the KV that attention sees.

Written against SGLang 0.5.23: ``layers/radix_attention.py: RadixAttention`` (``k_scale``, ``k_scale_float``),
``layers/attention/triton_backend.py`` and ``flashinfer_backend.py: forward_decode``,
``layers/attention/torch_native_backend.py``, ``mem_cache/memory_pool.py: MHATokenToKVPool``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from grkv_sglang.config import FLASHINFER_ATTENTION, TORCH_ATTENTION, TRITON_ATTENTION
from grkv_sglang.core.storage import STORAGE_DTYPES


class KVScales(NamedTuple):
    """Factors on the stored keys and values of a layer."""

    key: float = 1.0
    value: float = 1.0


def attention_layers(model: torch.nn.Module) -> Iterator[Any]:
    """The model's ``RadixAttention`` modules."""
    from sglang.srt.layers.radix_attention import RadixAttention

    return (module for module in model.modules() if isinstance(module, RadixAttention))


def kv_scales(layer: Any, backend: str) -> KVScales:
    """What `backend`, one of ours by name, multiplies the cached KV of a ``RadixAttention`` layer by.

    Raises:
        KeyError: no backend of ours.
    """
    key, value = layer.k_scale_float, layer.v_scale_float
    if backend == TORCH_ATTENTION:
        return KVScales()  # it neither divides nor multiplies
    if backend == TRITON_ATTENTION:
        both = layer.k_scale is not None and layer.v_scale is not None
        return KVScales(key, value) if both else KVScales()
    if backend == FLASHINFER_ATTENTION:
        return KVScales(1.0 if key is None else key, 1.0 if value is None else value)
    raise KeyError(backend)


def kv_pool_problems(pool: Any, model: torch.nn.Module, backends: tuple[str, ...]) -> list[str]:
    """Why the KV of this pool cannot be compressed and read back, in sentences, each with the way out.

    Args:
        pool: the model's, an ``MHATokenToKVPool``.
        model: whose layers bring scales.
        backends: of prefill and decode, by name.
    """
    if pool.kv_cache_layout != "nhd":
        return [
            f"a KV cache in layout {pool.kv_cache_layout!r} (slots are not rows): "
            "unset SGLANG_USE_HND_KVCACHE and drop options that choose a layout"
        ]
    if pool.dtype not in STORAGE_DTYPES:
        return [f"KV stored as {pool.dtype}: set --kv-cache-dtype bfloat16"]
    problems = []
    layers = list(attention_layers(model))
    if any((layer.k_scale, layer.k_scale_float).count(None) == 1 for layer in layers):
        # SGLang 0.5.23 would divide by them where it writes and not multiply where it reads.
        problems.append(
            "KV scales of --quantization-param-path: drop it and use a checkpoint that brings its scales, or "
            "set --kv-cache-dtype bfloat16"
        )
    elif TORCH_ATTENTION in backends and pool.dtype.itemsize == 1:
        scaled = [kv_scales(layer, TRITON_ATTENTION) != KVScales() for layer in layers]
        if any(scaled):
            problems.append(
                f"the model's KV scales, which {TORCH_ATTENTION} ignores: set --kv-cache-dtype bfloat16, or "
                f"on a GPU --attention-backend {FLASHINFER_ATTENTION} or {TRITON_ATTENTION}"
            )
    return problems
