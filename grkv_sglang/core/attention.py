"""Attention of a few queries over many keys, batched over KV heads, and its joining over key sets.

Shapes used throughout the core, for one layer with Hkv KV heads and Hq = Hkv * G query heads:

    keys, values   [Hkv, n, d], [Hkv, n, dv]
    query rows     [Hkv, N, d] with N = m * G; row i * G + g is query i under head g of the group, so
                   that a range of queries is a range of rows

Attention over two disjoint key sets is the mean of the two outputs, weighted by the exponentials of
their log-sum-exps; that is how ancestors (cached tokens before the span) enter without their keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

WEIGHTS_AT_ONCE = {"cpu": 2**20, "cuda": 2**26}
"""Softmax weights that exist at a time where they are reduced, by kind of device. On a CPU a tensor of 4 MiB
stays near the cores; one of 8 MiB takes a third longer per weight, one of 32 MiB is returned to the system
and zeroed anew for every layer."""


@dataclass(frozen=True)
class Partial:
    """Attention over one of several key sets.

    Attributes:
        output: [Hkv, N, dv]; zero for a row that sees no key.
        lse: [Hkv, N] natural-log sum of exponentials of the logits; -inf for a row that sees no key.
    """

    output: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Attention(Partial):
    """Attention over a key set, jointly with whatever was attended `beside` it.

    Attributes:
        weights: [Hkv, N, n] joint softmax weights of the keys. A row sums to the share that this key
            set has of the joint softmax: to 1 when nothing is beside it, to 0 when it sees no key.
    """

    weights: Tensor


def group_rows(queries: Tensor, n_kv_heads: int) -> Tensor:
    """[m, Hq, d] -> query rows [Hkv, m * G, d]; query head h belongs to KV head h // G."""
    m, n_heads, d = queries.shape
    if n_heads % n_kv_heads:
        raise ValueError(f"expected a multiple of {n_kv_heads} query heads, got {n_heads}")
    group = n_heads // n_kv_heads
    return queries.reshape(m, n_kv_heads, group, d).transpose(0, 1).reshape(n_kv_heads, m * group, d)


def by_token(rows: Tensor, group: int) -> Tensor:
    """Rows [Hkv, m * G, dv] -> [m, Hq, dv], the inverse of `group_rows`."""
    return rows.unflatten(1, (-1, group)).transpose(0, 1).flatten(1, 2)


def blocks(
    n_heads: int, n_rows: int, n_keys: int, *, multiple: int, device: torch.device
) -> Iterator[tuple[slice, slice]]:
    """KV heads and query rows to attend with at a time, so that about `WEIGHTS_AT_ONCE` weights exist.

    Rows are split where one head alone has too many, in multiples of `multiple`: the rows of one query.
    """
    at_once = WEIGHTS_AT_ONCE[device.type]
    rows = min(max(1, n_rows), max(1, at_once // max(1, n_keys * multiple)) * multiple)
    heads = max(1, at_once // max(1, rows * n_keys)) if rows >= n_rows else 1
    for head in range(0, n_heads, heads):
        for row in range(0, n_rows, rows):
            yield slice(head, min(head + heads, n_heads)), slice(row, min(row + rows, n_rows))


def join(first: Partial, second: Partial) -> Partial:
    """Attention over the union of two disjoint key sets. No NaN where a row sees no key in one or both."""
    lse = torch.logaddexp(first.lse, second.lse)
    output = _share(first.lse, lse) * first.output + _share(second.lse, lse) * second.output
    return Partial(output=output, lse=lse)


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    visible: Tensor | None = None,
    beside: Partial | None = None,
) -> Attention:
    """Softmax attention in the dtype of the inputs (float32 in serving, float64 in tests).

    Args:
        queries: [Hkv, N, d] query rows.
        keys: [Hkv, n, d].
        values: [Hkv, n, dv].
        scale: factor on the logits.
        visible: bool, which query may see which key: [m, n], or [Hkv, m, n] where heads hold different
            keys ([Hkv, 1, n]: the same for every query); None when all is visible. Every head of a group
            sees the same.
        beside: attention of the same rows over a disjoint key set, to be joined in.

    Returns:
        weights [Hkv, N, n], output [Hkv, N, dv] and lse [Hkv, N], all of the joint softmax.
    """
    logits = torch.bmm(queries * scale, keys.transpose(1, 2))
    if visible is not None:
        n_queries = visible.shape[-2]
        by_query = logits.view(logits.shape[0], n_queries, -1, logits.shape[-1])
        by_query.masked_fill_(~visible.unsqueeze(-2), -torch.inf)
    # The largest logit; any finite stand-in will do for a row that sees nothing, which keeps its
    # exponentials at exactly 0 instead of exp(-inf + inf).
    top = logits.amax(dim=-1, keepdim=True)
    sees_any = top != -torch.inf
    top = torch.where(sees_any, top, 0.0)
    # In place: this is the largest tensor of a compression.
    weights = logits.sub_(top).exp_()
    lse = (weights.sum(dim=-1, keepdim=True).log() + top).squeeze(-1)
    joint_lse = lse if beside is None else torch.logaddexp(lse, beside.lse)
    weights.mul_(torch.where(sees_any, (top - joint_lse.unsqueeze(-1)).exp(), 0.0))
    output = torch.bmm(weights, values)
    if beside is not None:
        output += _share(beside.lse, joint_lse) * beside.output
    return Attention(output=output, lse=joint_lse, weights=weights)


def _share(lse: Tensor, joint_lse: Tensor) -> Tensor:
    """[Hkv, N, 1]: how much of the joint softmax belongs to the set with this `lse`."""
    share = torch.where(lse == -torch.inf, 0.0, (lse - joint_lse).exp())
    return share.unsqueeze(-1)
