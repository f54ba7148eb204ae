"""The layout of a request's row in ``req_to_token``; the only place that does its arithmetic.

Written against SGLang 0.5.23.

Everything in SGLang outside attention counts logical tokens. A request whose prefix has `n` logical
tokens in `p` KV slots (p < n behind a span) gets this row, `gap = n - p`::

    column   0 ........ gap-1 | gap ............ n-1 | n ............ seq_len-1
    content  0 0 0 ...      0 | p prefix slots       | one slot per later token
             sentinels          right-aligned          written by SGLang as always

Attention reads ``row[gap:seq_len]``, that is ``seq_len - gap`` keys. The last query still sees the last
key, so causal alignment holds; attention over a prefix does not depend on the order of its slots, so
several spans on one path need one gap only. Keys were stored after RoPE at their true positions, and
later tokens get their true positions, so nothing else changes.

Where heads of a span keep different numbers of tokens, its slots hold other tokens for each head: `ragged`
draws that, and the row's regions of such slots stand beside its gap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grkv_sglang.attention.ragged import RaggedRegion

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

SENTINEL_SLOT = 0
"""Slot 0 of SGLang's KV pool is a dummy that is never allocated."""

ROW_GAPS = "grkv_row_gaps"
"""Attribute of SGLang's request pool that holds its RowGaps: the pool is what attention backends, the radix
cache and the batch hook all have."""

BATCH_GAPS = "grkv_batch_gaps"
"""Attribute of a batch's ``KVLocPlan`` that holds its gaps on the host: the plan is the one object of a
batch that SGLang hands to a backend unchanged both in eager mode and at graph replay."""


class RowGaps:
    """Gap of every row of ``req_to_token``, in tokens, on the device and on the host.

    Created by the attention backend (which SGLang builds first), written by the radix cache when it
    allocates a row, read by the attention backend in every forward pass. Row 0 is SGLang's padding row
    (padded lanes of a captured graph point at it): its gap is always 0.

    On a GPU the scheduler's stream writes it beside ``req_to_token`` and the forward stream reads it while
    it reads ``req_to_token`` for the same batch, so what orders the two for SGLang's table
    (``Scheduler._apply_war_barrier`` and the wait before a forward pass) orders them for this one.

    The host's copy is for plans that are made on the host; it is written together with the device's, on
    the scheduler's thread, and never read back from the device.

    Regions of slots whose heads hold tokens of their own are noted on the host alone, for the rows that have
    any.
    """

    def __init__(self, num_rows: int, device: torch.device | str) -> None:
        self.tensor = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.host = torch.zeros(num_rows, dtype=torch.int64)
        self._regions: dict[int, tuple[RaggedRegion, ...]] = {}

    def set(self, row: int, gap_tokens: int, regions: tuple[RaggedRegion, ...] = ()) -> None:
        """What a row that was just written reads: from `gap_tokens` on, with `regions`, which ascend."""
        if row == 0:
            raise ValueError("row 0 is the padding row; its gap stays 0")
        if gap_tokens < 0:
            raise ValueError(f"a gap is a number of tokens >= 0, got {gap_tokens}")
        if regions:
            self._regions[row] = regions
        else:
            self._regions.pop(row, None)
        if int(self.host[row]) == gap_tokens:
            return  # no kernel launch for a request without a gap
        self.host[row] = gap_tokens
        self.tensor[row] = gap_tokens

    def of(self, rows: Tensor) -> Tensor:
        """Gaps of the given rows, [batch] int64 on the pool's device."""
        return self.tensor[rows]

    @property
    def has_regions(self) -> bool:
        """Whether any row has."""
        return bool(self._regions)

    def regions_of(self, row: int) -> tuple[RaggedRegion, ...]:
        """Where the row's slots hold other tokens for each head, by column; nowhere in general."""
        return self._regions.get(row, ())

    def read_range(self, rows: Tensor, logical_lens: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads of each row's first `logical_lens` columns.

        Args:
            rows: [batch] row indices, on the pool's device.
            logical_lens: [batch] integers, on the pool's device.

        Returns:
            first column and number of columns, each [batch] int64; no device synchronisation.
        """
        # A row that no request owns keeps the gap of its last one, and SGLang's warm-up passes may borrow
        # it with a few tokens: never a negative length. For live rows `note_batch` checks the gap itself.
        start = torch.minimum(self.of(rows), logical_lens.to(torch.int64))
        return start, logical_lens - start

    def note_batch(self, plan: KVLocPlan, rows: Tensor, seq_lens: Tensor | None) -> None:
        """Leave the gaps of a batch of live requests on its `plan`, for `host_lens`.

        Args:
            plan: the batch's, made anew for every forward pass.
            rows, seq_lens: [batch] on the host; lengths are logical.

        Raises:
            RuntimeError: a gap leaves nothing of its request to read.
        """
        gaps = self.host[rows]
        if seq_lens is not None and bool(((gaps > 0) & (gaps >= seq_lens)).any()):
            raise RuntimeError(
                f"gaps {gaps.tolist()} of rows {rows.tolist()} leave nothing of {seq_lens.tolist()} tokens"
            )
        setattr(plan, BATCH_GAPS, gaps)

    def clear(self) -> None:
        self.tensor.zero_()
        self.host.zero_()
        self._regions.clear()


def attach_row_gaps(req_to_token_pool: ReqToTokenPool, device: torch.device | str) -> RowGaps:
    """The pool's gaps, created on first use: two backends (prefill and decode) must read the same ones."""
    gaps = row_gaps_of(req_to_token_pool)
    if gaps is None:
        gaps = RowGaps(req_to_token_pool.req_to_token.shape[0], device)
        setattr(req_to_token_pool, ROW_GAPS, gaps)
    return gaps


def row_gaps_of(req_to_token_pool: ReqToTokenPool) -> RowGaps | None:
    """The pool's gaps, or None where no backend of ours was built."""
    gaps = getattr(req_to_token_pool, ROW_GAPS, None)
    return gaps if isinstance(gaps, RowGaps) else None


def host_lens(plan: KVLocPlan, seq_lens: Tensor | None) -> Tensor | None:
    """Physical lengths of a batch on the host.

    Args:
        plan: the batch's, with its gaps if `RowGaps.note_batch` saw the batch.
        seq_lens: [lanes] logical lengths on the host, None where SGLang keeps none. Lanes beyond the
            batch's requests are padding, without a gap.

    Returns:
        [lanes] in the dtype of `seq_lens`; None if lengths or gaps are unknown on the host (SGLang's own
        warm-up and capture batches), for the caller to take them from the device.
    """
    gaps: Tensor | None = getattr(plan, BATCH_GAPS, None)
    if seq_lens is None or gaps is None:
        return None
    lens = seq_lens.clone()
    lens[: gaps.numel()] -= gaps.to(lens.dtype)
    return lens


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
