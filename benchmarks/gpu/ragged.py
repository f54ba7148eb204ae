"""Batches whose KV heads hold different numbers of tokens, and their attention in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.setup import Setup

SHARES = (1.0, 0.2, 0.1)
"""What the three requests of a problem keep of their prefixes."""

_QUERY_STRENGTH = 3.0
"""Logits of this standard deviation: a few tokens get most of the attention."""

_NO_CELL = 2**30


@dataclass(frozen=True)
class Problem:
    """Arguments of `ragged_attention`.

    Attributes:
        queries: [T, Hq, d].
        keys, values: [cells of the pool, d]; NaN in each cell that no range names.
        cells: [at least indptr[-1]]; what lies behind is no cell.
        indptr: [B * Hkv + 1].
        q_indptr: [B + 1], None for one query each.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    cells: Tensor
    indptr: Tensor
    q_indptr: Tensor | None


def head_lengths(n_tokens: int, share: float, kv_heads: int) -> list[int]:
    """How many tokens each head keeps: all of them, or a share that grows from head to head; the second head
    of the smallest share keeps none."""
    if share == 1.0:
        return [n_tokens] * kv_heads
    lengths = [int(n_tokens * share * (0.5 + head / max(1, kv_heads - 1))) for head in range(kv_heads)]
    if share == min(SHARES):
        lengths[1] = 0
    return lengths


def make_problem(
    setup: Setup, n_tokens: int, dtype: torch.dtype, counts: Sequence[int] | None, *, salt: int = 0
) -> Problem:
    """Three requests of prefixes of `n_tokens`, in cells all over the pool; one query each, or `counts`."""
    sizes, device, generator = setup.sizes, setup.device, setup.generator(salt)
    # Both widths of an index are in use.
    index_dtype = torch.int64 if dtype == torch.float16 else torch.int32
    lengths = [n for share in SHARES for n in head_lengths(n_tokens, share, sizes.kv_heads)]
    total = sum(lengths)
    n_cells = (total // sizes.kv_heads + 3) * sizes.kv_heads
    order = torch.randperm(n_cells, generator=generator, device=device)
    keys, values = (
        torch.randn((n_cells, sizes.head_dim), generator=generator, device=device).to(dtype) for _ in range(2)
    )
    keys[order[total:]], values[order[total:]] = torch.nan, torch.nan
    behind = torch.full((3,), _NO_CELL, device=device)
    per_request = [1] * len(SHARES) if counts is None else list(counts)
    queries = torch.randn((sum(per_request), sizes.heads, sizes.head_dim), generator=generator, device=device)

    def indptr(numbers: Sequence[int]) -> Tensor:
        return torch.tensor([0, *numbers], device=device).cumsum(0).to(index_dtype)

    return Problem(
        queries=(_QUERY_STRENGTH * queries).to(dtype),
        keys=keys,
        values=values,
        cells=torch.cat((order[:total], behind)).to(index_dtype),
        indptr=indptr(lengths),
        q_indptr=None if counts is None else indptr(per_request),
    )


def exact_attention(setup: Setup, problem: Problem) -> list[Tensor]:
    """Output [T, Hq, d] and lse [T, Hq] in float64, one (request, KV head) after the other."""
    kv_heads, group, queries = setup.sizes.kv_heads, setup.sizes.group, problem.queries
    output = torch.zeros(queries.shape, dtype=torch.float64, device=setup.device)
    lse = torch.full(queries.shape[:2], -torch.inf, dtype=torch.float64, device=setup.device)
    ends = problem.indptr.tolist()
    n_requests = (len(ends) - 1) // kv_heads
    bounds = list(range(n_requests + 1)) if problem.q_indptr is None else problem.q_indptr.tolist()
    for request in range(n_requests):
        tokens = slice(bounds[request], bounds[request + 1])
        for kv_head in range(kv_heads):
            index, heads = request * kv_heads + kv_head, slice(kv_head * group, (kv_head + 1) * group)
            here = problem.cells[ends[index] : ends[index + 1]].long()
            if not len(here):
                continue
            logits = torch.einsum("tgd,sd->tgs", queries[tokens, heads].double(), problem.keys[here].double())
            logits *= setup.sizes.scale
            top = logits.amax(dim=-1, keepdim=True)
            exponentials = (logits - top).exp()
            total = exponentials.sum(dim=-1, keepdim=True)
            output[tokens, heads] = exponentials @ problem.values[here].double() / total
            lse[tokens, heads] = (total.log() + top).squeeze(-1)
    return [output, lse]
