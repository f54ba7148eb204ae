"""Selected tokens out of the KV pool, new keys and values into it: all layers in one launch each.

A pool is a buffer per layer. A kernel reaches all of them by their addresses in one tensor on the device,
as SGLang's own pools keep them (``MHATokenToKVPool.k_data_ptrs``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from grkv_kernels.configs import tile
from grkv_kernels.dispatch import FLOATS, block_dim, check, check_head_dim, runs_reference

_ELEMENTS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True)
class LayerBuffers:
    """The keys, or the values, of all layers of a pool. Made by `of`, once for a pool.

    Attributes:
        buffers: L times [slots, Hkv, d], all of one dtype, shape and layout, each contiguous.
        data_ptrs: [L] int64 on the buffers' device, their addresses. They must not move.
    """

    buffers: tuple[Tensor, ...]
    data_ptrs: Tensor

    @classmethod
    def of(cls, buffers: Sequence[Tensor]) -> LayerBuffers:
        """From one buffer for each layer.

        Raises:
            ValueError: there is none, or a shape, dtype, device or layout does not fit.
        """
        if not buffers:
            raise ValueError("expected the buffers of one layer or more, got none")
        first = buffers[0]
        check("buffers[0]", first, ("slots", "Hkv", "d"), FLOATS, first.device)
        check_head_dim("buffers[0]", first)
        for layer, buffer in enumerate(buffers):
            check(f"buffers[{layer}]", buffer, tuple(first.shape), (first.dtype,), first.device)
        data_ptrs = torch.tensor([buffer.data_ptr() for buffer in buffers], device=first.device)
        return cls(tuple(buffers), data_ptrs)

    @property
    def dtype(self) -> torch.dtype:
        return self.buffers[0].dtype

    @property
    def device(self) -> torch.device:
        return self.buffers[0].device


def gather_tokens(
    pool: LayerBuffers, slots: Tensor, kept: Tensor, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The rows of selected tokens: `result[l, h, j] = buffers[l][slots[kept[l, h, j]], h]`.

    Args:
        pool: the keys or the values.
        slots: [n] int64, the slot of every token of a span; not empty unless `kept` is.
        kept: [L, Hkv, c] int64 tokens of the span, below n; -1 for none.
        dtype: of the result, float32, float16 or bfloat16.

    Returns:
        [L, Hkv, c, d] in `dtype`; 0 where `kept` is -1.

    Raises:
        ValueError: a shape, dtype, device or layout does not fit.
    """
    n_layers, (_, n_kv_heads, head_dim) = len(pool.buffers), pool.buffers[0].shape
    check("slots", slots, ("n",), (torch.int64,), pool.device)
    check("kept", kept, (n_layers, n_kv_heads, "c"), (torch.int64,), pool.device)
    if dtype not in FLOATS:
        raise ValueError(f"expected a dtype out of {', '.join(map(str, FLOATS))}, got {dtype}")
    if kept.numel() and not slots.numel():
        raise ValueError(f"expected slots for {kept.shape[2]} kept tokens, got none")
    if runs_reference(pool.device):
        return gather_tokens_reference(pool, slots, kept, dtype=dtype)
    rows = torch.empty((*kept.shape, head_dim), dtype=dtype, device=pool.device)
    if kept.numel():
        shape = tile("move", pool.device)
        _gather_kernel[(triton.cdiv(kept.shape[2], shape.rows), n_kv_heads, n_layers)](
            pool.data_ptrs,
            slots,
            kept,
            rows,
            n_kv_heads,
            kept.shape[2],
            ELEMENT=_ELEMENTS[pool.dtype],
            ROWS=shape.rows,
            HEAD_DIM=head_dim,
            BLOCK_DIM=block_dim(head_dim),
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )
    return rows


def gather_tokens_reference(
    pool: LayerBuffers, slots: Tensor, kept: Tensor, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """`gather_tokens` in torch, a layer at a time."""
    head = torch.arange(kept.shape[1], device=kept.device).unsqueeze(1)
    rows = torch.empty((*kept.shape, pool.buffers[0].shape[2]), dtype=dtype, device=pool.device)
    for layer, buffer in enumerate(pool.buffers):
        gathered = buffer[slots[kept[layer].clamp_min(0)], head]
        rows[layer] = torch.where((kept[layer] < 0).unsqueeze(-1), 0, gathered).to(dtype)
    return rows


def scatter_tokens(pool: LayerBuffers, slots: Tensor, rows: Tensor) -> None:
    """New rows into slots, converted to the pool's dtype: `buffers[l][slots[j], h] = rows[l, h, j]`.

    Args:
        pool: the keys or the values.
        slots: [c] int64, unique; the same in all layers.
        rows: [L, Hkv, c, d] float32, float16 or bfloat16.

    Raises:
        ValueError: a shape, dtype, device or layout does not fit.
    """
    n_layers, (_, n_kv_heads, head_dim) = len(pool.buffers), pool.buffers[0].shape
    check("slots", slots, ("c",), (torch.int64,), pool.device)
    check("rows", rows, (n_layers, n_kv_heads, slots.numel(), head_dim), FLOATS, pool.device)
    if runs_reference(pool.device):
        scatter_tokens_reference(pool, slots, rows)
    elif rows.numel():
        shape = tile("move", pool.device)
        _scatter_kernel[(triton.cdiv(slots.numel(), shape.rows), n_kv_heads, n_layers)](
            pool.data_ptrs,
            slots,
            rows,
            n_kv_heads,
            slots.numel(),
            ELEMENT=_ELEMENTS[pool.dtype],
            ROWS=shape.rows,
            HEAD_DIM=head_dim,
            BLOCK_DIM=block_dim(head_dim),
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )


def scatter_tokens_reference(pool: LayerBuffers, slots: Tensor, rows: Tensor) -> None:
    """`scatter_tokens` in torch, a layer at a time."""
    for layer, buffer in enumerate(pool.buffers):
        buffer[slots] = rows[layer].transpose(0, 1).to(buffer.dtype)


@triton.jit
def _gather_kernel(
    data_ptrs: tl.tensor,  # [layers] addresses of [slots, n_heads, HEAD_DIM] ELEMENT
    slots: tl.tensor,  # [tokens]
    kept: tl.tensor,  # [layers, n_heads, n_kept]
    rows: tl.tensor,  # [layers, n_heads, n_kept, HEAD_DIM]
    n_heads: tl.tensor,
    n_kept: tl.tensor,
    ELEMENT: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    """One program: ROWS kept tokens of one head of one layer."""
    head, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    buffer = tl.load(data_ptrs + layer).to(tl.pointer_type(ELEMENT))
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, BLOCK_DIM)
    inside = index < n_kept
    at = (layer * n_heads + head) * n_kept + index
    token = tl.load(kept + at, mask=inside, other=-1)
    slot = tl.load(slots + token, mask=token >= 0, other=0)
    row = tl.load(
        buffer + (slot * n_heads + head)[:, None] * HEAD_DIM + dim[None, :],
        mask=(token >= 0)[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )
    tl.store(
        rows + at[:, None] * HEAD_DIM + dim[None, :], row, mask=inside[:, None] & (dim < HEAD_DIM)[None, :]
    )


@triton.jit
def _scatter_kernel(
    data_ptrs: tl.tensor,  # [layers] addresses of [slots, n_heads, HEAD_DIM] ELEMENT
    slots: tl.tensor,  # [n_rows]
    rows: tl.tensor,  # [layers, n_heads, n_rows, HEAD_DIM]
    n_heads: tl.tensor,
    n_rows: tl.tensor,
    ELEMENT: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    """One program: ROWS rows of one head of one layer."""
    head, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    buffer = tl.load(data_ptrs + layer).to(tl.pointer_type(ELEMENT))
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, BLOCK_DIM)
    inside = (index < n_rows)[:, None] & (dim < HEAD_DIM)[None, :]
    slot = tl.load(slots + index, mask=index < n_rows, other=0)
    at = (layer * n_heads + head) * n_rows + index
    row = tl.load(rows + at[:, None] * HEAD_DIM + dim[None, :], mask=inside, other=0.0)
    tl.store(
        buffer + (slot * n_heads + head)[:, None] * HEAD_DIM + dim[None, :], row.to(ELEMENT), mask=inside
    )
