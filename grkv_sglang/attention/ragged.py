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

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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


def ordinary_ranges(first: int, end: int, regions: Iterable[RaggedRegion]) -> Iterator[tuple[int, int]]:
    """The columns of ``[first, end)`` outside `regions` (which ascend), as ranges that are not empty."""
    for region in regions:
        if first < region.first_column:
            yield first, region.first_column
        first = region.end_column
    if first < end:
        yield first, end
