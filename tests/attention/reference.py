"""Attention as its definition says, for the backends' tests."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """[q, heads, dv] float64, one row and one head at a time.

    query [q, heads, d] of the last q of n tokens, keys [n, kv_heads, d], values [n, kv_heads, dv].
    """
    q, k, v = query.double(), keys.double(), values.double()
    group = q.shape[1] // k.shape[1]
    out = torch.empty(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    for i in range(q.shape[0]):
        visible = k.shape[0] - q.shape[0] + i + 1
        for h in range(q.shape[1]):
            weights = torch.softmax(k[:visible, h // group] @ q[i, h] * scale, 0)
            out[i, h] = weights @ v[:visible, h // group]
    return out
