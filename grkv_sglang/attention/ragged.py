"""Where the KV heads of a layer keep their tokens when they keep different numbers of them.

A *cell* is one KV head's row in one slot: the keys or values of one layer, [slots, Hkv, d], seen as
[slots * Hkv, d]. A span with budgets per head owns c slots, as every span of its size, and so c * Hkv cells
of each layer. Its heads keep c * Hkv tokens together in every layer, but each layer shares them out in its
own way, so the heads' cells follow each other, whatever slots they come to lie in::

    Hkv = 3, c = 4; in this layer head 0 keeps 5 tokens, head 1 one, head 2 six

    slot           s0            s1            s2            s3
    cell's head    0  0  0   |   0  0  1   |   2  2  2   |   2  2  2

No cell is empty and no slot belongs to a head. Which columns of a request's row hold such slots, and how
many cells belong to each head, is what attention must know beside the row (`rows.RowGaps`): the other columns
hold one token for every head, as always.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RaggedRegion:
    """Columns of a row that hold the slots of a span with budgets per head.

    Raises:
        ValueError: a layer's heads do not fill the slots exactly.
    """

    first_column: int
    num_slots: int
    counts: Tensor
    """[layers, Hkv] int64 on the host, cells of each head; every layer's sum is ``num_slots * Hkv``."""

    def __post_init__(self) -> None:
        totals = self.counts.sum(dim=1)
        if bool((totals != self.num_slots * self.counts.shape[1]).any()):
            raise ValueError(
                f"expected {self.num_slots * self.counts.shape[1]} cells in every layer, "
                f"got {totals.tolist()}"
            )

    @property
    def end_column(self) -> int:
        return self.first_column + self.num_slots


def pack_heads(rows: Tensor, counts: Tensor) -> Tensor:
    """Lay the kept rows of a layer out as the cells of as few slots.

    Args:
        rows: [w, Hkv, d]; head h's are the first ``counts[h]`` of ``rows[:, h]``, the rest is not looked at.
        counts: [Hkv] int64, each at most w.

    Returns:
        [c, Hkv, d], what to write to the span's c slots; c is the sum of `counts` divided by Hkv.

    Raises:
        ValueError: the sum is no multiple of Hkv.
    """
    width, n_kv_heads, dim = rows.shape
    if int(counts.sum()) % n_kv_heads:
        raise ValueError(f"expected cells for whole slots of {n_kv_heads} heads, got {counts.tolist()}")
    held = counts.new_tensor(range(width)) < counts.unsqueeze(1)
    return rows.transpose(0, 1)[held.to(rows.device)].view(-1, n_kv_heads, dim)


def unpack_heads(rows: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
    """The inverse: of rows [c, Hkv, d], the contents of a span's slots, each head's [counts[h], d]."""
    return rows.reshape(-1, rows.shape[-1]).split(counts.tolist())


def pad_heads(rows: Sequence[tuple[Tensor, ...]]) -> Tensor:
    """What heads hold of several regions, side by side.

    Args:
        rows: by region, what `unpack_heads` gives.

    Returns:
        [w, Hkv, d] with w the most rows of one head; zeros behind a head's last one.
    """
    by_head = [torch.cat(of_head) for of_head in zip(*rows, strict=True)]
    padded: Tensor = torch.nn.utils.rnn.pad_sequence(by_head)
    return padded


def ordinary_ranges(first: int, end: int, regions: Iterable[RaggedRegion]) -> Iterator[tuple[int, int]]:
    """The columns of ``[first, end)`` outside `regions` (which ascend), as ranges that are not empty."""
    for region in regions:
        if first < region.first_column:
            yield first, region.first_column
        first = region.end_column
    if first < end:
        yield first, end


@dataclass(frozen=True)
class RegionCells:
    """The cells of one region of each request of a batch, for ``grkv_kernels.ragged_attention``.

    Attributes:
        cells: [all of them] int64, request by request, as they lie in the regions.
        indptr: [layers, B * Hkv + 1] int32: head h of request b has those from `indptr[b * Hkv + h]` on. None
            where a request has no such region.
    """

    cells: Tensor
    indptr: Tensor


def region_cells(
    req_to_token: Tensor, rows: Sequence[int], regions: Sequence[tuple[RaggedRegion, ...]]
) -> list[RegionCells]:
    """The regions of a batch: all first ones, all second ones, and so on.

    Args:
        req_to_token: [rows, columns], SGLang's table.
        rows: of the requests.
        regions: of the requests, one at least.
    """
    n_layers, n_kv_heads = next(iter(r for of_row in regions for r in of_row)).counts.shape
    device = req_to_token.device
    head = torch.arange(n_kv_heads, device=device)
    found = []
    for number in range(max(map(len, regions))):
        slots, counts = [], []
        for row, of_row in zip(rows, regions, strict=True):
            if number < len(of_row):
                region = of_row[number]
                slots.append(req_to_token[row, region.first_column : region.end_column])
                counts.append(region.counts)
            else:
                counts.append(torch.zeros(n_layers, n_kv_heads, dtype=torch.int64))
        cells = (torch.cat(slots).long().unsqueeze(1) * n_kv_heads + head).flatten()
        ends = torch.cat(counts, dim=1).cumsum(dim=1)
        indptr = torch.nn.functional.pad(ends, (1, 0)).to(torch.int32)
        found.append(RegionCells(cells, indptr.to(device)))
    return found


@dataclass(frozen=True)
class OrdinaryRanges:
    """The columns of a batch's rows outside their regions, range by range. All [ranges] on one device.

    Attributes:
        request: int64, which of the batch.
        first, lens: int64, first column and number of columns, which may be 0.
        last: [B] int64, each request's last range.
    """

    request: Tensor
    first: Tensor
    lens: Tensor
    last: Tensor

    @classmethod
    def of(cls, first: Tensor, lens: Tensor, regions: Sequence[tuple[RaggedRegion, ...]]) -> OrdinaryRanges:
        """Of ``[first, first + lens)`` [B] of each row; waits for nothing on their device."""
        request: list[int] = []
        starts: list[int] = []
        ends: list[int] = []
        last = []
        own = -1  # where the row itself begins or ends, which is known on the device
        for index, of_row in enumerate(regions):
            request += [index] * (len(of_row) + 1)
            starts += [own, *(region.end_column for region in of_row)]
            ends += [*(region.first_column for region in of_row), own]
            last.append(len(request) - 1)
        device = first.device
        requests, start, end = (torch.tensor(numbers, device=device) for numbers in (request, starts, ends))
        start = torch.where(start == own, first[requests], start)
        end = torch.where(end == own, (first + lens)[requests], end)
        # Rows of live requests reach beyond their regions; one that SGLang borrows for a warm-up may not.
        sizes = (end - start).clamp(min=0)
        return cls(requests, start, sizes, torch.tensor(last, device=device))
