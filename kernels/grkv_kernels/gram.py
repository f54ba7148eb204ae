"""The two products of a value step (GRKV, arXiv 2605.31105): `X X^T + ridge I` and `X^T u`, for all heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grkv_kernels.configs import tile
from grkv_kernels.dispatch import FLOATS, block_dim, check, check_head_dim, dot_precision, runs_reference


def ridged_gram(weights: Tensor, *, ridge: float) -> Tensor:
    """`X X^T + ridge I`.

    Args:
        weights: X, [H, N, f] float32, float16 or bfloat16, any strides with adjacent numbers of a row (a view
            of the first tokens of all weights will do).
        ridge: added to the diagonal.

    Returns:
        [H, N, N] float32, symmetric bit for bit.

    Raises:
        ValueError: a shape, dtype, device or layout does not fit.
    """
    check("weights", weights, ("H", "N", "f"), FLOATS, weights.device, contiguous=False)
    if runs_reference(weights.device):
        return ridged_gram_reference(weights, ridge=ridge)
    n_heads, n_rows, n_columns = weights.shape
    result = torch.empty((n_heads, n_rows, n_rows), dtype=torch.float32, device=weights.device)
    if result.numel():
        shape = tile("gram", weights.device)
        blocks = triton.cdiv(n_rows, shape.rows)
        _gram_kernel[(n_heads, blocks, blocks)](
            weights,
            result,
            weights.stride(0),
            weights.stride(1),
            n_rows,
            n_columns,
            ridge,
            ROWS=shape.rows,
            COLUMNS=shape.tokens,
            PRECISION=dot_precision(weights),
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )
    return result


def ridged_gram_reference(weights: Tensor, *, ridge: float) -> Tensor:
    """`ridged_gram` in torch."""
    result = torch.bmm(weights.float(), weights.float().transpose(1, 2))
    result.diagonal(dim1=-2, dim2=-1).add_(ridge)
    return result


def transposed_product(weights: Tensor, u: Tensor) -> Tensor:
    """`X^T u`.

    Args:
        weights: X, [H, N, f] as for `ridged_gram`.
        u: [H, N, dv] float32, float16 or bfloat16.

    Returns:
        [H, f, dv] float32; 0 if N is 0.

    Raises:
        ValueError: a shape, dtype, device or layout does not fit, or dv is over 128.
    """
    check("weights", weights, ("H", "N", "f"), FLOATS, weights.device, contiguous=False)
    n_heads, n_rows, n_columns = weights.shape
    check("u", u, (n_heads, n_rows, "dv"), FLOATS, weights.device)
    check_head_dim("u", u)
    if runs_reference(weights.device):
        return transposed_product_reference(weights, u)
    value_dim = u.shape[2]
    result = torch.empty((n_heads, n_columns, value_dim), dtype=torch.float32, device=weights.device)
    if result.numel():
        shape = tile("product", weights.device)
        _transposed_product_kernel[(n_heads, triton.cdiv(n_columns, shape.tokens))](
            weights,
            u,
            result,
            weights.stride(0),
            weights.stride(1),
            n_rows,
            n_columns,
            ROWS=shape.rows,
            COLUMNS=shape.tokens,
            VALUE_DIM=value_dim,
            VALUE_BLOCK=block_dim(value_dim),
            PRECISION=dot_precision(weights, u),
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )
    return result


def transposed_product_reference(weights: Tensor, u: Tensor) -> Tensor:
    """`transposed_product` in torch."""
    return torch.bmm(weights.float().transpose(1, 2), u.float())


@triton.jit
def _gram_kernel(
    weights: tl.tensor,  # [heads, rows, columns], strided
    result: tl.tensor,  # [heads, rows, rows] float32
    stride_head: tl.tensor,
    stride_row: tl.tensor,
    n_rows: tl.tensor,
    n_columns: tl.tensor,
    ridge: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One program: ROWS by ROWS numbers on or below the diagonal of a head, and their mirror image."""
    head = tl.program_id(0).to(tl.int64)
    if tl.program_id(2) <= tl.program_id(1):
        left = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        right = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
        is_left, is_right = left < n_rows, right < n_rows
        products = tl.zeros([ROWS, ROWS], tl.float32)
        for first in range(0, n_columns, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            is_column = column < n_columns
            a = tl.load(
                weights + head * stride_head + left.to(tl.int64)[:, None] * stride_row + column[None, :],
                mask=is_left[:, None] & is_column[None, :],
                other=0.0,
            ).to(tl.float32)
            b = tl.load(
                weights + head * stride_head + right.to(tl.int64)[:, None] * stride_row + column[None, :],
                mask=is_right[:, None] & is_column[None, :],
                other=0.0,
            ).to(tl.float32)
            products += tl.dot(a, tl.trans(b), input_precision=PRECISION)
        products += tl.where(left[:, None] == right[None, :], ridge, 0.0)
        # Each number is written by whoever computed it at or below the diagonal, also to its mirror image.
        below = is_left[:, None] & (left[:, None] >= right[None, :])
        to = result + head * n_rows * n_rows
        tl.store(to + left.to(tl.int64)[:, None] * n_rows + right[None, :], products, mask=below)
        tl.store(to + right.to(tl.int64)[None, :] * n_rows + left[:, None], products, mask=below)


@triton.jit
def _transposed_product_kernel(
    weights: tl.tensor,  # [heads, rows, columns], strided
    u: tl.tensor,  # [heads, rows, VALUE_DIM]
    result: tl.tensor,  # [heads, columns, VALUE_DIM] float32
    stride_head: tl.tensor,
    stride_row: tl.tensor,
    n_rows: tl.tensor,
    n_columns: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One program: COLUMNS rows of a head's result."""
    head = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    dim = tl.arange(0, VALUE_BLOCK)
    is_column = column < n_columns
    products = tl.zeros([COLUMNS, VALUE_BLOCK], tl.float32)
    for first in range(0, n_rows, ROWS):
        row = first + tl.arange(0, ROWS)
        is_row = row < n_rows
        at_row = head * n_rows + row
        transposed = tl.load(
            weights + head * stride_head + row.to(tl.int64)[None, :] * stride_row + column[:, None],
            mask=is_row[None, :] & is_column[:, None],
            other=0.0,
        ).to(tl.float32)
        right = tl.load(
            u + at_row[:, None] * VALUE_DIM + dim[None, :],
            mask=is_row[:, None] & (dim < VALUE_DIM)[None, :],
            other=0.0,
        ).to(tl.float32)
        products += tl.dot(transposed, right, input_precision=PRECISION)
    tl.store(
        result + (head * n_columns + column)[:, None] * VALUE_DIM + dim[None, :],
        products,
        mask=is_column[:, None] & (dim < VALUE_DIM)[None, :],
    )
