"""Read rows out of slots of one KV buffer, write them, or copy slots to slots; bit for bit in any dtype.

Numbers of eight bits move as bytes: not every release of torch indexes 8-bit floats on every device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def read_slots(buffer: Tensor, slots: Tensor) -> Tensor:
    """``buffer[slots]``, [c, kv_heads, head_dim] in the buffer's dtype.

    Args:
        buffer: [num_slots, kv_heads, head_dim], the keys or values of one layer.
        slots: [c] int32 or int64, on the buffer's device.

    Raises:
        ValueError: a shape, dtype or device does not fit.
    """
    _check(buffer, slots, "slots", (torch.int32, torch.int64))
    # Nine times faster than indexing on a CPU.
    return bits(buffer).index_select(0, slots).view(buffer.dtype)


def write_slots(buffer: Tensor, slots: Tensor, rows: Tensor) -> None:
    """``buffer[slots] = rows``.

    Args:
        buffer: [num_slots, kv_heads, head_dim], the keys or values of one layer.
        slots: [c] int64, unique, on the buffer's device.
        rows: [c, kv_heads, head_dim] in the buffer's dtype.

    Raises:
        ValueError: a shape, dtype or device does not fit.
    """
    _check(buffer, slots, "slots")
    expected = (slots.numel(), *buffer.shape[1:])
    if tuple(rows.shape) != expected or rows.dtype != buffer.dtype:
        raise ValueError(f"expected rows {expected} {buffer.dtype}, got {tuple(rows.shape)} {rows.dtype}")
    bits(buffer)[slots] = bits(rows)


def copy_slots(buffer: Tensor, source: Tensor, target: Tensor) -> None:
    """``buffer[target] = buffer[source]``; the two sets of slots must not overlap.

    Args:
        buffer: [num_slots, kv_heads, head_dim], the keys or values of one layer.
        source, target: [c] int64 on the buffer's device.

    Raises:
        ValueError: a shape, dtype or device does not fit.
    """
    _check(buffer, source, "source")
    _check(buffer, target, "target")
    if source.numel() != target.numel():
        raise ValueError(f"expected as many targets as sources, got {target.numel()} and {source.numel()}")
    stored = bits(buffer)
    stored[target] = stored[source]


def bits(tensor: Tensor) -> Tensor:
    """The same memory, in a dtype that can be indexed and padded: numbers of eight bits as bytes."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _check(buffer: Tensor, slots: Tensor, name: str, dtypes: Sequence[torch.dtype] = (torch.int64,)) -> None:
    if buffer.ndim != 3:
        raise ValueError(f"expected a buffer [slots, kv_heads, head_dim], got shape {tuple(buffer.shape)}")
    if slots.ndim != 1 or slots.dtype not in dtypes or slots.device != buffer.device:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"expected {name} [c] {wanted} on {buffer.device}, "
            f"got {tuple(slots.shape)} {slots.dtype} on {slots.device}"
        )
