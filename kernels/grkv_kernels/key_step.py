"""The two products of a key step with the Jacobian of attention outputs in the retained keys.

With softmax weights a, queries q, values v and outputs o (GRKV, arXiv 2605.31105):

    (J dK)_i  = scale * sum_s a_is (q_i . dk_s) (v_s - o_i)
    (J^T u)_s = scale * sum_i a_is ((v_s - o_i) . u_i) q_i

As matrix products each has an intermediate of the weights' size [H, N, f], which would be written and read
again in every iteration of the solver. Here a tile of it lives in registers; only the weights are read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grkv_kernels.configs import tile
from grkv_kernels.dispatch import FLOATS, block_dim, check, check_head_dim, dot_precision, runs_reference

_PART_TOKENS = 512
"""How many tokens one program of the JVP goes through: its query rows alone fill no device."""


def key_jvp(
    queries: Tensor, weights: Tensor, values: Tensor, output: Tensor, delta: Tensor, *, scale: float
) -> Tensor:
    """`J dK`: how the outputs move with the keys.

    Args:
        queries: q, [H, N, d] float32, float16 or bfloat16.
        weights: a, [H, N, f] softmax weights of the f tokens whose keys move, any of these dtypes and any
            strides with adjacent numbers of a row (a view of the first tokens of all weights will do).
        values: v, [H, f, dv], likewise.
        output: o, [H, N, dv], likewise; over these and any other tokens.
        delta: dK, [H, f, d], likewise.
        scale: factor on the logits.

    Returns:
        [H, N, dv] float32; 0 if f is 0.

    Raises:
        ValueError: a shape, dtype, device or layout does not fit, or a head size is over 128.
    """
    _check(queries, weights, values, output)
    n_heads, n_rows, head_dim = queries.shape
    n_free, value_dim = values.shape[1:]
    check("delta", delta, (n_heads, n_free, head_dim), FLOATS, queries.device)
    if runs_reference(queries.device):
        return key_jvp_reference(queries, weights, values, output, delta, scale=scale)
    # Summed at the end and in this order, so that the result does not depend on which program is first.
    n_parts = triton.cdiv(n_free, _PART_TOKENS)
    parts = torch.empty((n_parts, *output.shape), dtype=torch.float32, device=queries.device)
    if parts.numel():
        shape = tile("jvp", queries.device)
        _jvp_kernel[(n_heads, triton.cdiv(n_rows, shape.rows), n_parts)](
            queries,
            weights,
            values,
            output,
            delta,
            parts,
            weights.stride(0),
            weights.stride(1),
            n_heads,
            n_rows,
            n_free,
            scale,
            PART_TOKENS=_PART_TOKENS,
            ROWS=shape.rows,
            TOKENS=shape.tokens,
            KEY_DIM=head_dim,
            KEY_BLOCK=block_dim(head_dim),
            VALUE_DIM=value_dim,
            VALUE_BLOCK=block_dim(value_dim),
            PRECISION=dot_precision(queries, weights, values, delta),
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )
    return parts.sum(dim=0)


def key_jvp_reference(
    queries: Tensor, weights: Tensor, values: Tensor, output: Tensor, delta: Tensor, *, scale: float
) -> Tensor:
    """`key_jvp` in torch."""
    pushed = torch.bmm(queries.float(), delta.float().transpose(1, 2)) * weights.float() * scale
    return torch.bmm(pushed, values.float()) - pushed.sum(dim=-1, keepdim=True) * output.float()


def key_vjp(
    queries: Tensor, weights: Tensor, values: Tensor, output: Tensor, u: Tensor, *, scale: float
) -> Tensor:
    """`J^T u`: what each key contributes to a direction of the outputs.

    Args:
        queries, weights, values, output, scale: as in `key_jvp`.
        u: [H, N, dv] float32, float16 or bfloat16.

    Returns:
        [H, f, d] float32; 0 if N is 0.

    Raises:
        ValueError: a shape, dtype, device or layout does not fit, or a head size is over 128.
    """
    _check(queries, weights, values, output)
    n_heads, n_rows, head_dim = queries.shape
    n_free, value_dim = values.shape[1:]
    check("u", u, tuple(output.shape), FLOATS, queries.device)
    if runs_reference(queries.device):
        return key_vjp_reference(queries, weights, values, output, u, scale=scale)
    result = torch.empty((n_heads, n_free, head_dim), dtype=torch.float32, device=queries.device)
    if result.numel():
        shape = tile("vjp", queries.device)
        _vjp_kernel[(n_heads, triton.cdiv(n_free, shape.tokens))](
            queries,
            weights,
            values,
            u,
            (output.float() * u.float()).sum(dim=-1),
            result,
            weights.stride(0),
            weights.stride(1),
            n_rows,
            n_free,
            scale,
            ROWS=shape.rows,
            TOKENS=shape.tokens,
            KEY_DIM=head_dim,
            KEY_BLOCK=block_dim(head_dim),
            VALUE_DIM=value_dim,
            VALUE_BLOCK=block_dim(value_dim),
            PRECISION=dot_precision(queries, weights, values, u),
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )
    return result


def key_vjp_reference(
    queries: Tensor, weights: Tensor, values: Tensor, output: Tensor, u: Tensor, *, scale: float
) -> Tensor:
    """`key_vjp` in torch."""
    along = (output.float() * u.float()).sum(dim=-1, keepdim=True)
    pulled = (torch.bmm(u.float(), values.float().transpose(1, 2)) - along) * weights.float() * scale
    return torch.bmm(pulled.transpose(1, 2), queries.float())


def _check(queries: Tensor, weights: Tensor, values: Tensor, output: Tensor) -> None:
    device = queries.device
    check("queries", queries, ("H", "N", "d"), FLOATS, device)
    check_head_dim("queries", queries)
    n_heads, n_rows, _ = queries.shape
    check("weights", weights, (n_heads, n_rows, "f"), FLOATS, device, contiguous=False)
    check("values", values, (n_heads, weights.shape[2], "dv"), FLOATS, device)
    check_head_dim("values", values)
    check("output", output, (n_heads, n_rows, values.shape[2]), FLOATS, device)


@triton.jit
def _jvp_kernel(
    queries: tl.tensor,  # [heads, rows, KEY_DIM]
    weights: tl.tensor,  # [heads, rows, tokens], strided
    values: tl.tensor,  # [heads, tokens, VALUE_DIM]
    output: tl.tensor,  # [heads, rows, VALUE_DIM]
    delta: tl.tensor,  # [heads, tokens, KEY_DIM]
    parts: tl.tensor,  # [parts, heads, rows, VALUE_DIM] float32
    weight_stride_head: tl.tensor,
    weight_stride_row: tl.tensor,
    n_heads: tl.tensor,
    n_rows: tl.tensor,
    n_tokens: tl.tensor,
    scale: tl.tensor,
    PART_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One program: ROWS query rows of a head over PART_TOKENS tokens."""
    head, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    key_dim, value_dim = tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK)
    is_row = row < n_rows
    at_row = head * n_rows + row
    row_values = is_row[:, None] & (value_dim < VALUE_DIM)[None, :]
    q = tl.load(
        queries + at_row[:, None] * KEY_DIM + key_dim[None, :],
        mask=is_row[:, None] & (key_dim < KEY_DIM)[None, :],
        other=0.0,
    ).to(tl.float32)
    moved = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    start = part * PART_TOKENS
    for first in range(start, tl.minimum(start + PART_TOKENS, n_tokens), TOKENS):
        token = first + tl.arange(0, TOKENS)
        is_token = token < n_tokens
        at_token = head * n_tokens + token
        dk = tl.load(
            delta + at_token[:, None] * KEY_DIM + key_dim[None, :],
            mask=is_token[:, None] & (key_dim < KEY_DIM)[None, :],
            other=0.0,
        ).to(tl.float32)
        a = tl.load(
            weights
            + head * weight_stride_head
            + row.to(tl.int64)[:, None] * weight_stride_row
            + token[None, :],
            mask=is_row[:, None] & is_token[None, :],
            other=0.0,
        ).to(tl.float32)
        pushed = tl.dot(q, tl.trans(dk), input_precision=PRECISION) * a * scale
        total += tl.sum(pushed, 1)
        v = tl.load(
            values + at_token[:, None] * VALUE_DIM + value_dim[None, :],
            mask=is_token[:, None] & (value_dim < VALUE_DIM)[None, :],
            other=0.0,
        ).to(tl.float32)
        moved += tl.dot(pushed, v, input_precision=PRECISION)
    o = tl.load(output + at_row[:, None] * VALUE_DIM + value_dim[None, :], mask=row_values, other=0.0).to(
        tl.float32
    )
    at = part.to(tl.int64) * n_heads * n_rows + at_row
    tl.store(
        parts + at[:, None] * VALUE_DIM + value_dim[None, :], moved - total[:, None] * o, mask=row_values
    )


@triton.jit
def _vjp_kernel(
    queries: tl.tensor,  # [heads, rows, KEY_DIM]
    weights: tl.tensor,  # [heads, rows, tokens], strided
    values: tl.tensor,  # [heads, tokens, VALUE_DIM]
    u: tl.tensor,  # [heads, rows, VALUE_DIM]
    along: tl.tensor,  # [heads, rows] float32, o . u
    result: tl.tensor,  # [heads, tokens, KEY_DIM] float32
    weight_stride_head: tl.tensor,
    weight_stride_row: tl.tensor,
    n_rows: tl.tensor,
    n_tokens: tl.tensor,
    scale: tl.tensor,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One program: TOKENS tokens of a head, all of its query rows."""
    head = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    key_dim, value_dim = tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK)
    is_token = token < n_tokens
    at_token = head * n_tokens + token
    v = tl.load(
        values + at_token[:, None] * VALUE_DIM + value_dim[None, :],
        mask=is_token[:, None] & (value_dim < VALUE_DIM)[None, :],
        other=0.0,
    ).to(tl.float32)
    pulled_back = tl.zeros([TOKENS, KEY_BLOCK], tl.float32)
    for first in range(0, n_rows, ROWS):
        row = first + tl.arange(0, ROWS)
        is_row = row < n_rows
        at_row = head * n_rows + row
        direction = tl.load(
            u + at_row[:, None] * VALUE_DIM + value_dim[None, :],
            mask=is_row[:, None] & (value_dim < VALUE_DIM)[None, :],
            other=0.0,
        ).to(tl.float32)
        a = tl.load(
            weights
            + head * weight_stride_head
            + row.to(tl.int64)[None, :] * weight_stride_row
            + token[:, None],
            mask=is_row[None, :] & is_token[:, None],
            other=0.0,
        ).to(tl.float32)
        output_part = tl.load(along + at_row, mask=is_row, other=0.0)
        pulled = tl.dot(v, tl.trans(direction), input_precision=PRECISION) - output_part[None, :]
        q = tl.load(
            queries + at_row[:, None] * KEY_DIM + key_dim[None, :],
            mask=is_row[:, None] & (key_dim < KEY_DIM)[None, :],
            other=0.0,
        ).to(tl.float32)
        pulled_back += tl.dot(pulled * a * scale, q, input_precision=PRECISION)
    tl.store(
        result + at_token[:, None] * KEY_DIM + key_dim[None, :],
        pulled_back,
        mask=is_token[:, None] & (key_dim < KEY_DIM)[None, :],
    )
