"""Float64 references and random problems for the core's tests."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grkv_sglang.core import RotaryTable
from grkv_sglang.core.selection import PassStatistics


def random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    """Normal float64 numbers that depend on the seed only."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def pass_statistics(n_kv_heads: int, n: int, *, seed: int) -> PassStatistics:
    """Positive float64 numbers, three that have nothing to do with each other."""
    return PassStatistics(*random(3, n_kv_heads, n, seed=seed).exp())


def rope_frequencies(rotary_dim: int, base: float = 100.0) -> Tensor:
    return base ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)


def rotary_table(
    rotary_dim: int, *, is_neox: bool, n_positions: int = 512, factor: float = 1.0
) -> RotaryTable:
    angles = torch.arange(n_positions, dtype=torch.float64)[:, None] * rope_frequencies(rotary_dim)
    return RotaryTable(torch.cat((angles.cos(), angles.sin()), dim=1) * factor, rotary_dim, is_neox)


def rotated(raw: Tensor, positions: Tensor, rotary_dim: int, *, is_neox: bool) -> Tensor:
    """RoPE of [m, H, d] by multiplication of complex numbers, one frequency at a time."""
    result = raw.clone()
    for j, frequency in enumerate(rope_frequencies(rotary_dim)):
        a, b = (j, j + rotary_dim // 2) if is_neox else (2 * j, 2 * j + 1)
        turn = torch.polar(torch.ones_like(positions, dtype=torch.float64), positions * frequency)
        pair = torch.complex(raw[..., a], raw[..., b]) * turn[:, None]
        result[..., a], result[..., b] = pair.real, pair.imag
    return result


def naive_attention(
    queries: Tensor, keys: Tensor, values: Tensor, *, scale: float, last_seen: list[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Attention by loops: queries [m, Hq, d] over keys [n, Hkv, d].

    `last_seen[i]` is the last token that query i sees (all when None). Returns output [m, Hq, dv] and
    weights [m, Hq, n], in float64. A query that sees nothing gets zeros.
    """
    (m, n_heads, _), (n, n_kv_heads, _) = queries.shape, keys.shape
    group = n_heads // n_kv_heads
    output = torch.zeros(m, n_heads, values.shape[-1], dtype=torch.float64)
    weights = torch.zeros(m, n_heads, n, dtype=torch.float64)
    for i in range(m):
        n_seen = n if last_seen is None else last_seen[i] + 1
        for h in range(n_heads):
            logits = [
                float(queries[i, h].double() @ keys[s, h // group].double()) * scale for s in range(n_seen)
            ]
            top = max(logits, default=0.0)
            exponentials = [math.exp(logit - top) for logit in logits]
            for s, exponential in enumerate(exponentials):
                weights[i, h, s] = exponential / sum(exponentials)
                output[i, h] += weights[i, h, s] * values[s, h // group].double()
    return output, weights
