"""Attention over disjoint sets of keys, joined by their log-sum-exps. All logarithms are natural."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grkv_kernels.dispatch import FLOATS, block_dim, check, check_head_dim, runs_reference


def merge_states(output_a: Tensor, lse_a: Tensor, output_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, A and B.

    Args:
        output_a, output_b: [T, Hq, dv] float32, float16 or bfloat16, both of one dtype.
        lse_a, lse_b: [T, Hq] float32 log-sum-exps of the logits; -inf where a set is empty. What stands in
            the output there is not looked at.

    Returns:
        output [T, Hq, dv] in the dtype of the inputs, and lse [T, Hq] float32. Where both sets are empty the
        output is 0 and the lse -inf.

    Raises:
        ValueError: a shape, dtype, device or layout does not fit, or the head size is over 128.
    """
    device = output_a.device
    check("output_a", output_a, ("T", "Hq", "dv"), FLOATS, device)
    check_head_dim("output_a", output_a)
    shape = tuple(output_a.shape)
    check("output_b", output_b, shape, (output_a.dtype,), device)
    check("lse_a", lse_a, shape[:2], (torch.float32,), device)
    check("lse_b", lse_b, shape[:2], (torch.float32,), device)
    if runs_reference(device):
        return merge_states_reference(output_a, lse_a, output_b, lse_b)
    output, lse = torch.empty_like(output_a), torch.empty_like(lse_a)
    if lse.numel():
        _merge_states_kernel[(lse.numel(),)](
            output_a,
            lse_a,
            output_b,
            lse_b,
            output,
            lse,
            HEAD_DIM=shape[2],
            BLOCK_DIM=block_dim(shape[2]),
            num_warps=1,
        )
    return output, lse


def merge_states_reference(
    output_a: Tensor, lse_a: Tensor, output_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """`merge_states` in torch."""
    outputs, lses = torch.stack((output_a, output_b)), torch.stack((lse_a, lse_b))
    return merge_splits_reference(outputs.float(), lses, output_a.dtype)


def merge_splits(partial: Tensor, partial_lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Attention over the union of S disjoint sets of keys.

    Args:
        partial: [S, T, Hq, dv] float32.
        partial_lse: [S, T, Hq] float32; -inf where a set is empty. What stands in `partial` there is not
            looked at: it need not have been written.
        dtype: of the output.

    Returns:
        output [T, Hq, dv] in `dtype`, lse [T, Hq] float32; 0 and -inf where all sets are empty.

    Raises:
        ValueError: a shape, dtype, device or layout does not fit, or the head size is over 128.
    """
    device = partial.device
    check("partial", partial, ("S", "T", "Hq", "dv"), (torch.float32,), device)
    check_head_dim("partial", partial)
    check("partial_lse", partial_lse, tuple(partial.shape[:3]), (torch.float32,), device)
    if partial.shape[0] == 0:
        raise ValueError("expected one split or more, got none")
    if dtype not in FLOATS:
        raise ValueError(f"expected a dtype out of {', '.join(map(str, FLOATS))}, got {dtype}")
    if runs_reference(device):
        return merge_splits_reference(partial, partial_lse, dtype)
    n_splits, n_tokens, n_heads, head_dim = partial.shape
    output = partial.new_empty((n_tokens, n_heads, head_dim), dtype=dtype)
    lse = partial.new_empty((n_tokens, n_heads))
    if lse.numel():
        _merge_splits_kernel[(lse.numel(),)](
            partial,
            partial_lse,
            output,
            lse,
            n_splits,
            lse.numel(),
            BLOCK_SPLITS=triton.next_power_of_2(n_splits),
            HEAD_DIM=head_dim,
            BLOCK_DIM=block_dim(head_dim),
            num_warps=4,
        )
    return output, lse


def merge_splits_reference(partial: Tensor, partial_lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`merge_splits` in torch."""
    lse = torch.logsumexp(partial_lse, dim=0)
    # A softmax over nothing but -inf is NaN.
    share = torch.where(lse == -torch.inf, 0.0, torch.softmax(partial_lse, dim=0)).unsqueeze(-1)
    output = (share * torch.where(share > 0, partial, 0.0)).sum(dim=0)
    return output.to(dtype), lse


@triton.jit
def _merge_states_kernel(
    output_a: tl.tensor,  # [rows, HEAD_DIM]
    lse_a: tl.tensor,  # [rows]
    output_b: tl.tensor,  # [rows, HEAD_DIM]
    lse_b: tl.tensor,  # [rows]
    output: tl.tensor,  # [rows, HEAD_DIM]
    lse: tl.tensor,  # [rows]
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, BLOCK_DIM)
    at = row * HEAD_DIM + dim
    first, second = tl.load(lse_a + row), tl.load(lse_b + row)
    top = tl.maximum(first, second)
    # A stand-in where both are empty: -inf - -inf would be NaN.
    shift = tl.where(top == float("-inf"), 0.0, top)
    weight_a, weight_b = tl.exp(first - shift), tl.exp(second - shift)
    total = weight_a + weight_b
    any_keys = total > 0
    total = tl.where(any_keys, total, 1.0)
    # How much of each is looked at.
    width_a = tl.where(first > float("-inf"), HEAD_DIM, 0)
    width_b = tl.where(second > float("-inf"), HEAD_DIM, 0)
    a = tl.load(output_a + at, mask=dim < width_a, other=0.0).to(tl.float32)
    b = tl.load(output_b + at, mask=dim < width_b, other=0.0).to(tl.float32)
    tl.store(output + at, (weight_a * a + weight_b * b) / total, mask=dim < HEAD_DIM)
    tl.store(lse + row, tl.where(any_keys, tl.log(total) + shift, float("-inf")))


@triton.jit
def _merge_splits_kernel(
    partial: tl.tensor,  # [n_splits, rows, HEAD_DIM] float32
    partial_lse: tl.tensor,  # [n_splits, rows] float32
    output: tl.tensor,  # [rows, HEAD_DIM]
    lse: tl.tensor,  # [rows] float32
    n_splits: tl.tensor,
    n_rows: tl.tensor,
    BLOCK_SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    """One program per row, all of its splits at once."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK_SPLITS)
    dim = tl.arange(0, BLOCK_DIM)
    at = split.to(tl.int64) * n_rows + row
    lses = tl.load(partial_lse + at, mask=split < n_splits, other=float("-inf"))
    top = tl.max(lses, 0)
    # A stand-in where all are empty: -inf - -inf would be NaN.
    shift = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp(lses - shift)
    total = tl.sum(weights, 0)
    any_keys = total > 0
    total = tl.where(any_keys, total, 1.0)
    outputs = tl.load(
        partial + at[:, None] * HEAD_DIM + dim[None, :],
        mask=(weights > 0)[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )
    merged = tl.sum(weights[:, None] * outputs, 0) / total
    tl.store(output + row * HEAD_DIM + dim, merged, mask=dim < HEAD_DIM)
    tl.store(lse + row, tl.where(any_keys, tl.log(total) + shift, float("-inf")))
