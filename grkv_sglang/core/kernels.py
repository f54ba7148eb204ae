"""Where the core calls kernels: attention of a window, and the products of the regression.

What has the size of the softmax weights then stays in a GPU's registers. Where there are no kernels the same
is done in torch, in place where it can be: on a CPU faster than the kernels' own references, which repeat
what parts and iterations share, and in float64 too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from grkv_kernels import key_jvp, key_vjp, ridged_gram, transposed_product, window_attention
from grkv_kernels.dispatch import has_kernels
from torch import Tensor

Product = Callable[[Tensor], Tensor]


class Jacobian(NamedTuple):
    """Of attention outputs in the free keys, as the two products with it.

    Attributes:
        product: dK [H, f, d] -> J dK [H, N, dv].
        transposed: u [H, N, dv] -> J^T u [H, f, d].
    """

    product: Product
    transposed: Product


def window_mean_and_output(
    rows: Tensor, keys: Tensor, values: Tensor, positions: Tensor, *, n_tokens: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of a window's query rows in a kernel: the mean of their weights over the span, and outputs.

    Args:
        rows: [Hkv, m * G, d], any float dtype.
        keys, values: [Hkv, p + n, ...] of what lies before the span, all visible, and then of the span.
        positions: [m] int64, where the queries are in the span, ascending.
        n_tokens: n.
        scale: factor on the logits.

    Returns:
        mean [Hkv, n] float32, output [Hkv, m * G, dv] float32.
    """
    n_before = keys.shape[1] - n_tokens
    last_seen = positions.to(keys.device) + n_before
    mean, output = window_attention(rows.contiguous(), keys, values, last_seen, scale=scale)
    return mean[:, n_before:].contiguous(), output


def sum_over_rows(weights: Tensor) -> Tensor:
    """[Hkv, n] of [Hkv, N, n]. As a product: sums over a dimension that is not the last are slow on a CPU."""
    return torch.bmm(weights.new_ones(len(weights), 1, weights.shape[1]), weights).squeeze(1)


def gram_with_ridge(weights: Tensor, ridge: float) -> Tensor:
    """`X X^T + ridge I`, [H, N, N] of X [H, N, f]."""
    if has_kernels(weights.device):
        return ridged_gram(weights, ridge=ridge)
    gram = torch.bmm(weights, weights.transpose(1, 2))
    gram.diagonal(dim1=-2, dim2=-1).add_(ridge)
    return gram


def transposed_times(weights: Tensor, u: Tensor) -> Tensor:
    """`X^T u`, [H, f, dv] of X [H, N, f] and u [H, N, dv]."""
    if has_kernels(weights.device, u.shape[2]):
        # A solver returns columns.
        return transposed_product(weights, u.contiguous())
    return torch.bmm(weights.transpose(1, 2), u)


def jacobian(queries: Tensor, weights: Tensor, values: Tensor, output: Tensor, scale: float) -> Jacobian:
    """The Jacobian at these softmax weights, never formed:

        (J dK)_i  = scale * sum_s a_is (q_i . dk_s) (v_s - o_i)
        (J^T u)_s = scale * sum_i a_is ((v_s - o_i) . u_i) q_i

    Args:
        queries: q, [H, N, d].
        weights: a, [H, N, f].
        values: v, [H, f, dv].
        output: o, [H, N, dv].
        scale: factor on the logits.
    """
    if has_kernels(weights.device, queries.shape[2], values.shape[2]):
        given = queries.contiguous(), weights, values.contiguous(), output.contiguous()
        return Jacobian(
            lambda delta: key_jvp(*given, delta.contiguous(), scale=scale),
            lambda u: key_vjp(*given, u.contiguous(), scale=scale),
        )
    scaled = weights * scale
    values_t = values.transpose(1, 2).contiguous()

    def product(delta: Tensor) -> Tensor:
        pushed = torch.bmm(queries, delta.transpose(1, 2)).mul_(scaled)
        return torch.bmm(pushed, values).sub_(pushed.sum(dim=-1, keepdim=True) * output)

    def transposed(u: Tensor) -> Tensor:
        pulled = torch.bmm(u, values_t).sub_((output * u).sum(dim=-1, keepdim=True)).mul_(scaled)
        return torch.bmm(pulled.transpose(1, 2), queries)

    return Jacobian(product, transposed)
