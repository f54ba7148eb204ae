"""Attention over a prefix whose KV heads hold different numbers of tokens.

A *cell* is one KV head's row in one slot of a pool: the pool [slots, Hkv, d] viewed as [slots * Hkv, d].
Every (request, KV head) has a range of cells of its own, so that heads pack without waste, wherever their
cells lie. A query token sees all of the ranges of its request: a prefix has no causal mask. The result comes
with its log-sum-exp and is merged with the attention over the tokens behind the prefix
(``merge.merge_states``).

The ranges are split, the parts are computed side by side and merged (flash decoding). How far is decided from
the shapes alone; lengths are read on the device only, so a launch can be captured in a CUDA graph.
"""

from __future__ import annotations

import itertools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from grkv_kernels.configs import programs, tile
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

MAX_SPLITS = 32


def ragged_attention(
    queries: Tensor,
    key_cells: Tensor,
    value_cells: Tensor,
    cells: Tensor,
    cells_indptr: Tensor,
    *,
    n_kv_heads: int,
    scale: float,
    q_indptr: Tensor | None = None,
    max_queries: int = 1,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of the query tokens of B requests, each over the cells of its request.

    Args:
        queries: [T, Hq, d] float32, float16 or bfloat16; query head h reads KV head h // (Hq / Hkv).
        key_cells: [slots * Hkv, d], the keys of one layer of the pool, any of these dtypes.
        value_cells: [slots * Hkv, dv], likewise.
        cells: [at least cells_indptr[-1]] int32 or int64, rows of `key_cells` and `value_cells`.
        cells_indptr: [B * Hkv + 1] int32 or int64, ascending from 0. KV head h of request b holds
            `cells[cells_indptr[b * Hkv + h] : cells_indptr[b * Hkv + h + 1]]`, which may be empty.
        n_kv_heads: Hkv.
        scale: factor on the logits.
        q_indptr: [B + 1] int32 or int64, ascending from 0 to T: request b's query tokens are
            `q_indptr[b]` up to `q_indptr[b + 1]`. None: one for each request (decoding).
        max_queries: the most query tokens of one request. With fewer, tokens would be left out.
        num_splits: into how many parts a range is split at most; None: as many as fill the device.

    Returns:
        output [T, Hq, dv] in the dtype of the queries; lse [T, Hq] float32, natural. 0 and -inf for a head
        without cells.

    Raises:
        ValueError: a shape, dtype, device or layout does not fit, or a head size is over 128.

    Source: the log-sum-exp bookkeeping of FlashAttention-2 (arXiv 2307.08691) and its split over the keys
    (Flash-Decoding).
    """
    device = queries.device
    check("queries", queries, ("T", "Hq", "d"), FLOATS, device)
    check_head_dim("queries", queries)
    n_tokens, n_heads, head_dim = queries.shape
    if n_kv_heads < 1 or n_heads % n_kv_heads:
        raise ValueError(f"expected a multiple of {n_kv_heads} query heads, got {n_heads}")
    group = n_heads // n_kv_heads
    check("key_cells", key_cells, ("slots * Hkv", head_dim), FLOATS, device)
    check("value_cells", value_cells, (key_cells.shape[0], "dv"), FLOATS, device)
    check_head_dim("value_cells", value_cells)
    check("cells", cells, ("cells",), INDICES, device)
    n_requests = n_tokens
    if q_indptr is not None:
        check("q_indptr", q_indptr, ("B + 1",), INDICES, device)
        n_requests = q_indptr.numel() - 1
    elif max_queries != 1:
        raise ValueError(f"expected max_queries 1 without q_indptr, got {max_queries}")
    n_ranges = n_requests * n_kv_heads
    check("cells_indptr", cells_indptr, (n_ranges + 1,), INDICES, device)
    if num_splits is not None and num_splits < 1:
        raise ValueError(f"expected at least one split, got {num_splits}")
    if runs_reference(device):
        return ragged_attention_reference(
            queries,
            key_cells,
            value_cells,
            cells,
            cells_indptr,
            n_kv_heads=n_kv_heads,
            scale=scale,
            q_indptr=q_indptr,
        )

    shape = tile("decode" if max_queries * group <= 16 else "extend", device)
    row_blocks = triton.cdiv(max_queries * group, shape.rows)
    if num_splits is None:
        num_splits = min(MAX_SPLITS, max(1, programs(device) // max(1, n_ranges * row_blocks)))
    value_dim = value_cells.shape[1]
    # A single part is the result already, and needs no merge.
    partial = queries.new_empty(
        (num_splits, n_tokens, n_heads, value_dim), dtype=torch.float32 if num_splits > 1 else queries.dtype
    )
    partial_lse = queries.new_empty((num_splits, n_tokens, n_heads), dtype=torch.float32)
    if n_tokens and n_ranges:
        _partial_kernel[(n_ranges, num_splits, row_blocks)](
            queries,
            key_cells,
            value_cells,
            cells,
            cells_indptr,
            # Never read without, but a pointer is expected.
            cells_indptr if q_indptr is None else q_indptr,
            partial,
            partial_lse,
            scale * math.log2(math.e),
            n_tokens,
            num_splits,
            n_kv_heads,
            GROUP=group,
            ONE_QUERY=q_indptr is None,
            ROWS=shape.rows,
            TOKENS=shape.tokens,
            KEY_DIM=head_dim,
            KEY_BLOCK=block_dim(head_dim),
            VALUE_DIM=value_dim,
            VALUE_BLOCK=block_dim(value_dim),
            PRECISION=dot_precision(queries, key_cells, value_cells),
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )
    if num_splits == 1:
        return partial[0], partial_lse[0]
    return merge_splits(partial, partial_lse, queries.dtype)


def ragged_attention_reference(
    queries: Tensor,
    key_cells: Tensor,
    value_cells: Tensor,
    cells: Tensor,
    cells_indptr: Tensor,
    *,
    n_kv_heads: int,
    scale: float,
    q_indptr: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`ragged_attention` in torch, one (request, KV head) after the other."""
    n_tokens, n_heads, _ = queries.shape
    group = n_heads // n_kv_heads
    output = queries.new_zeros((n_tokens, n_heads, value_cells.shape[1]))
    lse = queries.new_full((n_tokens, n_heads), -torch.inf, dtype=torch.float32)
    ends = cells_indptr.tolist()
    bounds = list(range(n_tokens + 1)) if q_indptr is None else q_indptr.tolist()
    for index, (start, end) in enumerate(itertools.pairwise(ends)):
        request, kv_head = divmod(index, n_kv_heads)
        if start == end:
            continue
        here = cells[start:end].long()
        tokens = slice(bounds[request], bounds[request + 1])
        heads = slice(kv_head * group, (kv_head + 1) * group)
        logits = queries[tokens, heads].float() @ key_cells[here].float().t() * scale
        lse[tokens, heads] = torch.logsumexp(logits, dim=-1)
        attended = torch.softmax(logits, dim=-1) @ value_cells[here].float()
        output[tokens, heads] = attended.to(output.dtype)
    return output, lse


# They change from batch to batch: one kernel for all values, so that nothing is compiled while serving.
@triton.jit(do_not_specialize=["n_tokens", "num_splits"])
def _partial_kernel(
    queries: tl.tensor,  # [n_tokens, n_kv_heads * GROUP, KEY_DIM]
    key_cells: tl.tensor,  # [cells of the pool, KEY_DIM]
    value_cells: tl.tensor,  # [cells of the pool, VALUE_DIM]
    cells: tl.tensor,  # [cells in use]
    cells_indptr: tl.tensor,  # [requests * n_kv_heads + 1]
    q_indptr: tl.tensor,  # [requests + 1], not read if ONE_QUERY
    partial: tl.tensor,  # [num_splits, n_tokens, n_kv_heads * GROUP, VALUE_DIM]
    partial_lse: tl.tensor,  # [num_splits, n_tokens, n_kv_heads * GROUP] float32
    scale_log2: tl.tensor,  # factor that makes logits to the base 2
    n_tokens: tl.tensor,
    num_splits: tl.tensor,
    n_kv_heads: tl.tensor,
    GROUP: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One program: ROWS of a range's query rows (row i * GROUP + g is token i under head g) over one part of
    the range's cells."""
    request = tl.program_id(0) // n_kv_heads
    kv_head = tl.program_id(0) % n_kv_heads
    split = tl.program_id(1)
    if ONE_QUERY:
        first_query = request
        n_queries = 1
    else:
        first_query = tl.load(q_indptr + request).to(tl.int32)
        n_queries = tl.load(q_indptr + request + 1).to(tl.int32) - first_query
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    is_row = row < n_queries * GROUP
    # Where the row is among all tokens and heads.
    at = (first_query + row // GROUP).to(tl.int64) * (n_kv_heads * GROUP) + kv_head * GROUP + row % GROUP

    start = tl.load(cells_indptr + tl.program_id(0)).to(tl.int64)
    end = tl.load(cells_indptr + tl.program_id(0) + 1).to(tl.int64)
    # Whole tiles, so that a short range is one part and not many half-empty ones.
    part = tl.cdiv(tl.cdiv(end - start, num_splits), TOKENS) * TOKENS
    start = start + split * part
    end = tl.minimum(end, start + part)
    # Requests with fewer query tokens than others leave blocks without a row.
    end = tl.where(tl.program_id(2) * ROWS < n_queries * GROUP, end, start)

    key_dim = tl.arange(0, KEY_BLOCK)
    value_dim = tl.arange(0, VALUE_BLOCK)
    q = tl.load(
        queries + at[:, None] * KEY_DIM + key_dim[None, :],
        mask=is_row[:, None] & (key_dim < KEY_DIM)[None, :],
        other=0.0,
    ).to(tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    attended = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)
    for first in range(start, end, TOKENS):
        index = first + tl.arange(0, TOKENS)
        inside = index < end
        cell = tl.load(cells + index, mask=inside, other=0).to(tl.int64)
        k = tl.load(
            key_cells + cell[:, None] * KEY_DIM + key_dim[None, :],
            mask=inside[:, None] & (key_dim < KEY_DIM)[None, :],
            other=0.0,
        ).to(tl.float32)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        logits = tl.where(inside[None, :], logits, float("-inf"))
        # Finite: the first cell of a tile is always inside.
        new_top = tl.maximum(top, tl.max(logits, 1))
        kept = tl.exp2(top - new_top)
        weights = tl.exp2(logits - new_top[:, None])
        v = tl.load(
            value_cells + cell[:, None] * VALUE_DIM + value_dim[None, :],
            mask=inside[:, None] & (value_dim < VALUE_DIM)[None, :],
            other=0.0,
        ).to(tl.float32)
        attended = attended * kept[:, None] + tl.dot(weights, v, input_precision=PRECISION)
        total = total * kept + tl.sum(weights, 1)
        top = new_top

    has_cells = start < end
    LN_2: tl.constexpr = 0.6931471805599453
    total = tl.where(has_cells, total, 1.0)
    # Without cells, `top` is -inf.
    lse = (top + tl.log2(total)) * LN_2
    at += split.to(tl.int64) * n_tokens * (n_kv_heads * GROUP)
    tl.store(partial_lse + at, lse, mask=is_row)
    # The merge does not look at parts without cells, the caller of a single part does.
    tl.store(
        partial + at[:, None] * VALUE_DIM + value_dim[None, :],
        attended / total[:, None],
        mask=(is_row & (has_cells | (num_splits == 1)))[:, None] & (value_dim < VALUE_DIM)[None, :],
    )
