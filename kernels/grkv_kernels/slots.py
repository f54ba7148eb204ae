"""Write rows into slots of one KV buffer, or copy slots to slots."""

from __future__ import annotations

import torch
from torch import Tensor


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
    buffer[slots] = rows


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
    buffer[target] = buffer[source]


def _check(buffer: Tensor, slots: Tensor, name: str) -> None:
    if buffer.ndim != 3:
        raise ValueError(f"expected a buffer [slots, kv_heads, head_dim], got shape {tuple(buffer.shape)}")
    if slots.ndim != 1 or slots.dtype != torch.int64 or slots.device != buffer.device:
        raise ValueError(
            f"expected {name} [c] int64 on {buffer.device}, "
            f"got {tuple(slots.shape)} {slots.dtype} on {slots.device}"
        )
