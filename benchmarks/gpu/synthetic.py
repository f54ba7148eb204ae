"""Keys, values and queries whose attention looks like a model's, out of random numbers.

Text goes through topics that come back: tokens of one topic have similar keys, and a query looks for its own
topic. Every query looks at a few tokens all over the text, too, and at the first ones, which are attention
sinks. Keys and queries are rotated as Llama 3 does it, so that some of this fades with the distance.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.setup import Setup
from grkv_sglang.core import RotaryTable, attend, group_rows, rotate_forward, slots_for_budget

_TOPICS = 64
_TOPIC_TOKENS = 128
_SINKS = 4
_SINK_STRENGTH = 3.0
_SALIENT_SHARE = 0.03
_SALIENT_STRENGTH = 0.5
_TOPIC_STRENGTH = 0.5
_NOISE = 0.5
_ROPE_BASE = 500_000
_BEHIND_TOKENS = 64
"""Room behind the span, for requests that follow it."""


@dataclass(frozen=True)
class Layer:
    """One layer of a span of n tokens.

    Attributes:
        keys, values: [n, Hkv, d] in the pool's dtype, as a pool's rows; keys are post-RoPE.
        rotary: for the span's positions and some behind it.
    """

    keys: Tensor
    values: Tensor
    rotary: RotaryTable
    _topics: Tensor
    _looked_for: Tensor
    _group: int
    _generator: torch.Generator

    def queries(self, positions: Tensor) -> Tensor:
        """[m, Hq, d] post-RoPE at `positions` [m] int64, in the pool's dtype; drawn anew by each call."""
        head = torch.arange(self._topics.shape[1], device=positions.device).repeat_interleave(self._group)
        content = (_TOPIC_STRENGTH * self._topics[_topic_of(positions)] + self._looked_for)[:, head]
        content += _NOISE * torch.randn(content.shape, generator=self._generator, device=content.device)
        return rotate_forward(content, positions, self.rotary).to(self.keys.dtype)


def make_layer(setup: Setup, n_tokens: int, dtype: torch.dtype) -> Layer:
    """A layer of the sizes of the setup; the same in every call."""
    sizes, device = setup.sizes, setup.device
    generator = setup.generator(n_tokens)
    shape = (sizes.kv_heads, sizes.head_dim)

    def draw(*leading: int) -> Tensor:
        return torch.randn(*leading, *shape, generator=generator, device=device)

    frequencies = _ROPE_BASE ** -torch.linspace(0, 1, sizes.head_dim // 2, dtype=torch.float64)
    angles = torch.outer(torch.arange(n_tokens + _BEHIND_TOKENS, dtype=torch.float64), frequencies)
    table = torch.cat([angles.cos(), angles.sin()], dim=1).float().to(device)
    rotary = RotaryTable(table, sizes.head_dim, is_neox=True)
    topics, looked_for = draw(_TOPICS), draw()
    positions = torch.arange(n_tokens, device=device)
    topic = _topic_of(positions)
    content = topics[topic] + _NOISE * draw(n_tokens)
    salient = torch.rand(n_tokens, generator=generator, device=device) < _SALIENT_SHARE
    content[salient] += _SALIENT_STRENGTH * looked_for
    content[:_SINKS] = _SINK_STRENGTH * looked_for
    keys = rotate_forward(content, positions, rotary).to(dtype)
    values = (draw(_TOPICS)[topic] + draw(n_tokens)).to(dtype)
    # What a model stores for its sinks is small.
    values[:_SINKS] *= 0.1
    return Layer(keys, values, rotary, topics, looked_for, sizes.group, generator)


def _topic_of(positions: Tensor) -> Tensor:
    """Each stretch of text has a topic, in an order that does not repeat soon."""
    stretch = positions // _TOPIC_TOKENS
    return (stretch * stretch + 7 * stretch) % _TOPICS


@dataclass(frozen=True)
class Regression:
    """What both steps of a regression take, for N query rows, c kept tokens of which f are free.

    Attributes:
        queries: [Hkv, N, d] float32.
        keys, values: [Hkv, c, d] float32; the first f tokens are free.
        weights: [Hkv, N, f] float32, of the free tokens.
        output, target: [Hkv, N, d] float32, attention over the kept tokens and over the whole span.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    weights: Tensor
    output: Tensor
    target: Tensor

    @property
    def n_free(self) -> int:
        return self.weights.shape[2]


FITTED_QUERIES = 44
"""Of profile `default`."""


def make_regression(setup: Setup, n_tokens: int, dtype: torch.dtype, *, share: float = 0.1) -> Regression:
    """A tenth of a span kept, of which nine tenths are free: evenly spaced tokens, each head its own."""
    layer = make_layer(setup, n_tokens, dtype)
    kv_heads, device = setup.sizes.kv_heads, setup.device
    n_slots = slots_for_budget(n_tokens, share=share, tokens=None)
    last = torch.full((FITTED_QUERIES,), n_tokens - 1, device=device)
    queries = group_rows(layer.queries(last).float(), kv_heads)
    keys, values = (tensor.transpose(0, 1).float() for tensor in (layer.keys, layer.values))
    target = attend(queries, keys, values, scale=setup.sizes.scale).output
    head = torch.arange(kv_heads, device=device).unsqueeze(1)
    kept = (torch.arange(n_slots, device=device) * n_tokens // n_slots + head) % n_tokens
    keys, values = keys[head, kept], values[head, kept]
    attention = attend(queries, keys, values, scale=setup.sizes.scale)
    weights = attention.weights[:, :, : n_slots * 9 // 10].contiguous()
    return Regression(queries, keys, values, weights, attention.output, target)
