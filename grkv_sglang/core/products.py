"""The products of the regression with the softmax weights [H, N, f], its largest tensor.

The one place where the core calls kernels: on a GPU, what has the weights' size then stays in registers.
Elsewhere the same in torch, in place where it can be: on a CPU faster than the kernels' own references, which
repeat what the iterations of a key step share, and in float64 too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from grkv_kernels import key_jvp, key_vjp, ridged_gram, transposed_product
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
