"""The layout of a request's row in ``req_to_token``; the only place that does its arithmetic.

Everything in SGLang outside attention counts logical tokens. A request whose prefix has `n` logical
tokens in `p` KV slots (p < n behind a span) gets this row, `gap = n - p`::

    column   0 ........ gap-1 | gap ............ n-1 | n ............ seq_len-1
    content  0 0 0 ...      0 | p prefix slots       | one slot per later token
             sentinels          right-aligned          written by SGLang as always

Attention reads ``row[gap:seq_len]``, that is ``seq_len - gap`` keys. The last query still sees the last
key, so causal alignment holds; attention over a prefix does not depend on the order of its slots, so
several spans on one path need one gap only. Keys were stored after RoPE at their true positions, and
later tokens get their true positions, so nothing else changes.
"""

from __future__ import annotations

import torch
from torch import Tensor

SENTINEL_SLOT = 0
"""Slot 0 of SGLang's KV pool is a dummy that is never allocated."""


class RowGaps:
    """Gap of every row of ``req_to_token``, in tokens.

    Created by the attention backend (which SGLang builds first), written by the radix cache when it
    allocates a row, read by the attention backend in every forward pass. Row 0 is SGLang's padding row
    (padded lanes of a captured graph point at it): its gap is always 0.
    """

    def __init__(self, num_rows: int, device: torch.device | str) -> None:
        self.tensor = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def set(self, row: int, gap_tokens: int) -> None:
        if row == 0:
            raise ValueError("row 0 is the padding row; its gap stays 0")
        if gap_tokens < 0:
            raise ValueError(f"a gap is a number of tokens >= 0, got {gap_tokens}")
        self.tensor[row] = gap_tokens

    def of(self, rows: Tensor) -> Tensor:
        """Gaps of the given rows, [batch] int64 on the pool's device."""
        return self.tensor[rows]

    def clear(self) -> None:
        self.tensor.zero_()


def prefix_row(slots: Tensor, logical_tokens: int) -> Tensor:
    """Columns ``[0, logical_tokens)`` of a row for a prefix stored in `slots` ([p] int64, p <= n)."""
    gap = logical_tokens - slots.numel()
    if gap < 0:
        raise ValueError(f"a prefix of {logical_tokens} tokens cannot hold {slots.numel()} slots")
    if gap == 0:
        return slots
    return torch.cat([slots.new_full((gap,), SENTINEL_SLOT), slots])


def physical_slots(row: Tensor) -> Tensor:
    """The real slots among a row's or a node's columns, in order."""
    return row[row != SENTINEL_SLOT]
