"""How much attention the last queries of a span pay to each of its tokens, without the weights of all heads.

The softmax weights of m queries of G heads over n tokens are m * G * n numbers per KV head. Two passes over
the keys leave only what is asked for: the first one each row's log-sum-exp (and its attention output), the
second one each token's sum of exponentials of `logit - log-sum-exp`. Both cost the logits; nothing of their
size is written.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from grkv_kernels.configs import tile
from grkv_kernels.dispatch import (
    FLOATS,
    INDICES,
    block_dim,
    check,
    check_head_dim,
    dot_precision,
    runs_reference,
)
from grkv_kernels.merge import merge_splits

_PART_TOKENS = 2048
"""How many tokens one program of the first pass goes through: a few query rows alone fill no device."""

_MOST_OUTPUTS = 32
"""How many parts of a row's output are in memory at most: of a long span, a part has more tokens."""


def window_scores(
    queries: Tensor,
    keys: Tensor,
    positions: Tensor,
    *,
    scale: float,
    n_window: int,
    pool_kernel: int,
    beside_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Mean causal attention of some queries to the tokens of a span, average-pooled: SnapKV's scores.

    Args:
        queries: [Hkv, m * G, d] float32, float16 or bfloat16; row i * G + g is query i under head g.
        keys: [Hkv, n, d] any of these dtypes, any strides with adjacent numbers of a head (a view of
            pool rows [n, Hkv, d] will do).
        positions: [m] int32 or int64; query i sees the tokens up to this one. -1 sees none.
        scale: factor on the logits.
        n_window: how many tokens at the end keep their mean as it is; the pool covers the others alone,
            with zeros beyond both ends, which count.
        pool_kernel: odd width of the pool.
        beside_lse: [Hkv, m * G] float32 natural log-sum-exp of the logits of further keys (ancestors), which
            take their share of the softmax; -inf for none.

    Returns:
        scores [Hkv, n] float32; lse [Hkv, m * G] float32, joint over span and ancestors, -inf for a row that
        sees neither.

    Raises:
        ValueError: a shape, dtype, device or layout does not fit, the head size is over 128, or the pool's
            width is not odd.

    Source: SnapKV, arXiv 2404.14469; mean over the group as in GRKV, arXiv 2605.31105.
    """
    n_kv_heads, n_rows, n_tokens = _check(queries, keys, positions)
    device = queries.device
    if beside_lse is not None:
        check("beside_lse", beside_lse, (n_kv_heads, n_rows), (torch.float32,), device)
    if pool_kernel < 1 or pool_kernel % 2 == 0:
        raise ValueError(f"expected an odd pool_kernel of at least 1, got {pool_kernel}")
    if not 0 <= n_window <= n_tokens:
        raise ValueError(f"expected n_window between 0 and {n_tokens} tokens, got {n_window}")
    if runs_reference(device):
        means, lse = mean_weights_reference(queries, keys, positions, scale=scale, beside_lse=beside_lse)
    else:
        lse, _ = _row_statistics(queries, keys, None, positions, scale, beside_lse)
        means = _mean_weights(queries, keys, positions, scale, lse)
    return _pooled_before(means, n_tokens - n_window, pool_kernel), lse


def window_attention(
    queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Causal attention of some queries: each token's mean weight, and the outputs.

    Args:
        queries, keys, positions, scale: as for `window_scores`.
        values: [Hkv, n, dv], as the keys.

    Returns:
        means [Hkv, n] float32, of a token's weights over all query rows; output [Hkv, m * G, dv] float32, 0
        for a row that sees no token.

    Raises:
        ValueError: a shape, dtype, device or layout does not fit, or a head size is over 128.
    """
    n_kv_heads, _, n_tokens = _check(queries, keys, positions)
    check("values", values, (n_kv_heads, n_tokens, "dv"), FLOATS, queries.device, contiguous=False)
    check_head_dim("values", values)
    if runs_reference(queries.device):
        return window_attention_reference(queries, keys, values, positions, scale=scale)
    lse, output = _row_statistics(queries, keys, values, positions, scale, None)
    assert output is not None
    return _mean_weights(queries, keys, positions, scale, lse), output


def window_attention_reference(
    queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor, *, scale: float
) -> tuple[Tensor, Tensor]:
    """`window_attention` in torch."""
    weights, _ = _weights(queries, keys, positions, scale, None)
    return weights.mean(dim=1), torch.bmm(weights, values.float())


def _check(queries: Tensor, keys: Tensor, positions: Tensor) -> tuple[int, int, int]:
    """Hkv, m * G and n. Raises ValueError where something does not fit."""
    device = queries.device
    check("queries", queries, ("Hkv", "m * G", "d"), FLOATS, device)
    check_head_dim("queries", queries)
    n_kv_heads, n_rows, head_dim = queries.shape
    check("keys", keys, (n_kv_heads, "n", head_dim), FLOATS, device, contiguous=False)
    check("positions", positions, ("m",), INDICES, device)
    n_queries = positions.numel()
    if n_queries == 0 or n_rows == 0 or n_rows % n_queries:
        raise ValueError(f"expected some query rows, a multiple of {n_queries} positions, got {n_rows}")
    return n_kv_heads, n_rows, keys.shape[1]


def mean_weights_reference(
    queries: Tensor, keys: Tensor, positions: Tensor, *, scale: float, beside_lse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`window_scores` before the pool in torch: [Hkv, n] means over the query rows, [Hkv, m * G] lse."""
    weights, lse = _weights(queries, keys, positions, scale, beside_lse)
    return weights.mean(dim=1), lse


def _weights(
    queries: Tensor, keys: Tensor, positions: Tensor, scale: float, beside_lse: Tensor | None
) -> tuple[Tensor, Tensor]:
    """In torch: [Hkv, m * G, n] softmax weights, [Hkv, m * G] lse."""
    group = queries.shape[1] // positions.numel()
    token = torch.arange(keys.shape[1], device=keys.device)
    visible = token <= positions.repeat_interleave(group)[:, None]
    logits = torch.bmm(queries.float(), keys.float().transpose(1, 2)) * scale
    logits = logits.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(logits, dim=-1)
    if beside_lse is not None:
        lse = torch.logaddexp(lse, beside_lse)
    weights = torch.where(visible, (logits - lse.unsqueeze(-1)).exp(), 0.0)
    return weights, lse


def _row_statistics(
    queries: Tensor,
    keys: Tensor,
    values: Tensor | None,
    positions: Tensor,
    scale: float,
    beside_lse: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """[Hkv, m * G] joint lse; with values [Hkv, m * G, dv] outputs, which know nothing of ancestors."""
    device = queries.device
    n_kv_heads, n_rows, head_dim = queries.shape
    n_tokens = keys.shape[1]
    with_output = values is not None
    part_tokens = _PART_TOKENS
    if with_output:
        part_tokens *= max(1, triton.cdiv(n_tokens, _PART_TOKENS * _MOST_OUTPUTS))
    n_parts = triton.cdiv(n_tokens, part_tokens)
    # One more for the ancestors.
    lses = torch.full((n_parts + 1, n_kv_heads, n_rows), -torch.inf, dtype=torch.float32, device=device)
    if beside_lse is not None:
        lses[n_parts] = beside_lse
    # Without outputs only pointers are expected.
    seen = keys if values is None else values
    value_dim = seen.shape[2]
    outputs = lses
    if with_output:
        outputs = lses.new_empty((n_parts, n_kv_heads, n_rows, value_dim))
    if n_parts and n_kv_heads:
        shape = tile("row_output" if with_output else "row_lse", device)
        _row_lse_kernel[(n_kv_heads, triton.cdiv(n_rows, shape.rows), n_parts)](
            queries,
            keys,
            seen,
            positions,
            lses,
            outputs,
            keys.stride(0),
            keys.stride(1),
            seen.stride(0),
            seen.stride(1),
            n_kv_heads,
            n_rows,
            n_tokens,
            part_tokens,
            scale * math.log2(math.e),
            WITH_OUTPUT=with_output,
            GROUP=n_rows // positions.numel(),
            ROWS=shape.rows,
            TOKENS=shape.tokens,
            HEAD_DIM=head_dim,
            BLOCK_DIM=block_dim(head_dim),
            VALUE_DIM=value_dim,
            VALUE_BLOCK=block_dim(value_dim),
            PRECISION=dot_precision(queries, keys, seen),
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )
    if not with_output:
        return torch.logsumexp(lses, dim=0), None
    if not n_parts:
        return lses[0], lses.new_zeros((n_kv_heads, n_rows, value_dim))
    output, lse = merge_splits(outputs, lses[:n_parts], torch.float32)
    return lse, output


def _mean_weights(queries: Tensor, keys: Tensor, positions: Tensor, scale: float, lse: Tensor) -> Tensor:
    """[Hkv, n] means over the query rows, whose joint log-sum-exps are known."""
    device = queries.device
    n_kv_heads, n_rows, head_dim = queries.shape
    n_tokens = keys.shape[1]
    means = torch.empty((n_kv_heads, n_tokens), dtype=torch.float32, device=device)
    if n_tokens == 0 or n_kv_heads == 0:
        return means
    shape = tile("column_mean", device)
    _column_mean_kernel[(n_kv_heads, triton.cdiv(n_tokens, shape.tokens))](
        queries,
        keys,
        positions,
        lse,
        means,
        keys.stride(0),
        keys.stride(1),
        n_rows,
        n_tokens,
        scale,
        GROUP=n_rows // positions.numel(),
        ROWS=shape.rows,
        TOKENS=shape.tokens,
        HEAD_DIM=head_dim,
        BLOCK_DIM=block_dim(head_dim),
        PRECISION=dot_precision(queries, keys),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    return means


def _pooled_before(means: Tensor, n_before: int, pool_kernel: int) -> Tensor:
    """[Hkv, n]: the first `n_before` tokens average-pooled among themselves."""
    if n_before == 0:
        return means
    pooled = torch.nn.functional.avg_pool1d(
        means[:, :n_before], pool_kernel, stride=1, padding=pool_kernel // 2
    )
    return torch.cat((pooled, means[:, n_before:]), dim=1)


@triton.jit
def _row_lse_kernel(
    queries: tl.tensor,  # [heads, rows, HEAD_DIM]
    keys: tl.tensor,  # [heads, tokens, HEAD_DIM], strided
    values: tl.tensor,  # [heads, tokens, VALUE_DIM], strided; not read unless WITH_OUTPUT
    positions: tl.tensor,  # [rows / GROUP]
    lses: tl.tensor,  # [parts, heads, rows] float32
    outputs: tl.tensor,  # [parts, heads, rows, VALUE_DIM] float32, not written unless WITH_OUTPUT
    key_stride_head: tl.tensor,
    key_stride_token: tl.tensor,
    value_stride_head: tl.tensor,
    value_stride_token: tl.tensor,
    n_heads: tl.tensor,
    n_rows: tl.tensor,
    n_tokens: tl.tensor,
    part_tokens: tl.tensor,
    scale_log2: tl.tensor,  # factor that makes logits to the base 2
    WITH_OUTPUT: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One program: ROWS query rows of a head over `part_tokens` tokens."""
    head, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, BLOCK_DIM)
    is_row, is_dim = row < n_rows, dim < HEAD_DIM
    q = tl.load(
        queries + (head * n_rows + row)[:, None] * HEAD_DIM + dim[None, :],
        mask=is_row[:, None] & is_dim[None, :],
        other=0.0,
    ).to(tl.float32)
    last_seen = tl.load(positions + row // GROUP, mask=is_row, other=-1)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    value_dim = tl.arange(0, VALUE_BLOCK)
    attended = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)
    start = part * part_tokens
    for first in range(start, tl.minimum(start + part_tokens, n_tokens), TOKENS):
        token = first + tl.arange(0, TOKENS)
        is_token = token < n_tokens
        k = tl.load(
            keys + head * key_stride_head + token.to(tl.int64)[:, None] * key_stride_token + dim[None, :],
            mask=is_token[:, None] & is_dim[None, :],
            other=0.0,
        ).to(tl.float32)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        visible = is_token[None, :] & (token[None, :] <= last_seen[:, None])
        logits = tl.where(visible, logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        # A stand-in for a row that has seen nothing yet: -inf - -inf would be NaN.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        kept = tl.exp2(top - shift)
        weights = tl.exp2(logits - shift[:, None])
        total = total * kept + tl.sum(weights, 1)
        if WITH_OUTPUT:
            v = tl.load(
                values
                + head * value_stride_head
                + token.to(tl.int64)[:, None] * value_stride_token
                + value_dim[None, :],
                mask=is_token[:, None] & (value_dim < VALUE_DIM)[None, :],
                other=0.0,
            ).to(tl.float32)
            attended = attended * kept[:, None] + tl.dot(weights, v, input_precision=PRECISION)
        top = new_top
    LN_2: tl.constexpr = 0.6931471805599453
    # `top` is -inf for a row that sees nothing.
    lse = (top + tl.log2(tl.where(total > 0, total, 1.0))) * LN_2
    at = (part * n_heads + head) * n_rows + row
    tl.store(lses + at, lse, mask=is_row)
    if WITH_OUTPUT:
        # Zero for a row that sees nothing; the merge does not look at it.
        tl.store(
            outputs + at[:, None] * VALUE_DIM + value_dim[None, :],
            attended / tl.where(total > 0, total, 1.0)[:, None],
            mask=is_row[:, None] & (value_dim < VALUE_DIM)[None, :],
        )


@triton.jit
def _column_mean_kernel(
    queries: tl.tensor,  # [heads, rows, HEAD_DIM]
    keys: tl.tensor,  # [heads, tokens, HEAD_DIM], strided
    positions: tl.tensor,  # [rows / GROUP]
    lse: tl.tensor,  # [heads, rows] float32, joint
    means: tl.tensor,  # [heads, tokens] float32
    key_stride_head: tl.tensor,
    key_stride_token: tl.tensor,
    n_rows: tl.tensor,
    n_tokens: tl.tensor,
    scale: tl.tensor,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One program: TOKENS tokens of a head, all of its query rows."""
    head = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    dim = tl.arange(0, BLOCK_DIM)
    is_token, is_dim = token < n_tokens, dim < HEAD_DIM
    k = tl.load(
        keys + head * key_stride_head + token.to(tl.int64)[:, None] * key_stride_token + dim[None, :],
        mask=is_token[:, None] & is_dim[None, :],
        other=0.0,
    ).to(tl.float32)
    total = tl.zeros([TOKENS], tl.float32)
    for first in range(0, n_rows, ROWS):
        row = first + tl.arange(0, ROWS)
        is_row = row < n_rows
        q = tl.load(
            queries + (head * n_rows + row)[:, None] * HEAD_DIM + dim[None, :],
            mask=is_row[:, None] & is_dim[None, :],
            other=0.0,
        ).to(tl.float32)
        last_seen = tl.load(positions + row // GROUP, mask=is_row, other=-1)
        # A row that sees any token has a finite log-sum-exp, and others see none.
        row_lse = tl.load(lse + head * n_rows + row, mask=is_row, other=0.0)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        weights = tl.exp(logits - row_lse[:, None])
        total += tl.sum(tl.where(token[None, :] <= last_seen[:, None], weights, 0.0), 0)
    tl.store(means + head * n_tokens + token, total / n_rows, mask=is_token)
