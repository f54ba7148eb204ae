"""The layout of spans whose heads hold different numbers of tokens, against loops over heads and tokens."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grkv_sglang.attention.ragged import (
    OrdinaryRanges,
    RaggedRegion,
    ordinary_ranges,
    pack_heads,
    region_cells,
    unpack_heads,
)
from grkv_sglang.attention.rows import RowGaps


@st.composite
def head_counts(draw):
    """How many tokens each head holds: any numbers, none among them, that fill whole slots together."""
    n_heads = draw(st.integers(1, 5))
    counts = draw(st.lists(st.integers(0, 9), min_size=n_heads, max_size=n_heads))
    counts[draw(st.integers(0, n_heads - 1))] += -sum(counts) % n_heads
    return counts


@given(head_counts(), st.integers(0, 3), st.integers(1, 3))
def test_heads_are_packed_one_behind_the_other(counts, spare, dim):
    width, n_heads = max(counts) + spare, len(counts)
    rows = torch.full((width, n_heads, dim), torch.nan)
    expected: list[list[float]] = []
    for head, count in enumerate(counts):
        for token in range(count):
            rows[token, head] = torch.tensor([100.0 * head + token + i / 10 for i in range(dim)])
            expected.append(rows[token, head].tolist())
    packed = pack_heads(rows, torch.tensor(counts))
    assert packed.shape == (sum(counts) // n_heads, n_heads, dim)
    cells = [packed[slot, head].tolist() for slot in range(packed.shape[0]) for head in range(n_heads)]
    assert cells == expected
    unpacked = unpack_heads(packed, torch.tensor(counts))
    assert len(unpacked) == n_heads
    for head, count in enumerate(counts):
        assert torch.equal(unpacked[head], rows[:count, head])


def test_the_drawing():
    """Three heads with 5, 1 and 6 tokens in four slots."""
    rows = torch.arange(6).view(6, 1, 1) + 10 * torch.arange(3).view(1, 3, 1)
    packed = pack_heads(rows, torch.tensor([5, 1, 6]))
    assert packed[:, :, 0].tolist() == [[0, 1, 2], [3, 4, 10], [20, 21, 22], [23, 24, 25]]


def test_cells_that_fill_no_whole_slot_are_an_error():
    with pytest.raises(ValueError, match=r"whole slots of 2 heads, got \[2, 1\]"):
        pack_heads(torch.zeros(2, 2, 1), torch.tensor([2, 1]))
    with pytest.raises(ValueError, match=r"expected 6 cells in every layer, got \[6, 5\]"):
        RaggedRegion(0, 3, torch.tensor([[4, 2], [4, 1]]))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), max_size=4), st.integers(0, 5))
def test_all_columns_outside_the_regions(pieces, behind):
    """`pieces`: so many ordinary columns, then a region of so many."""
    first = 3
    regions: list[RaggedRegion] = []
    expected: list[int] = []
    at = first
    for ordinary, size in pieces:
        expected += range(at, at + ordinary)
        regions.append(RaggedRegion(at + ordinary, size, torch.tensor([[size]])))
        at += ordinary + size
    expected += range(at, at + behind)
    ranges = list(ordinary_ranges(first, at + behind, regions))
    assert [column for low, high in ranges for column in range(low, high)] == expected
    assert all(low < high for low, high in ranges)


def test_regions_stand_beside_the_gap_of_a_row_until_it_is_written_anew():
    gaps = RowGaps(4, "cpu")
    region = RaggedRegion(7, 1, torch.tensor([[2, 0]]))
    gaps.set(2, 5, (region,))
    gaps.set(3, 5)
    assert gaps.regions_of(2) == (region,)
    assert gaps.regions_of(1) == gaps.regions_of(3) == gaps.regions_of(0) == ()
    gaps.set(2, 5)  # the same gap, but of another request
    assert gaps.regions_of(2) == ()
    gaps.set(2, 5, (region,))
    gaps.clear()
    assert gaps.regions_of(2) == ()
    with pytest.raises(ValueError, match="padding row"):
        gaps.set(0, 0, (region,))


@st.composite
def batches(draw):
    """Rows of one server: a gap, then ordinary columns and regions in turns; some rows without any region."""
    n_layers, n_heads = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        gap = at = draw(st.integers(0, 3))
        regions = []
        for ordinary, size in draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), max_size=3)):
            counts = []
            for _ in range(n_layers):
                cuts = sorted(
                    draw(st.lists(st.integers(0, size * n_heads), min_size=n_heads - 1, max_size=n_heads - 1))
                )
                counts.append([b - a for a, b in pairwise([0, *cuts, size * n_heads])])
            regions.append(RaggedRegion(at + ordinary, size, torch.tensor(counts)))
            at += ordinary + size
        rows.append((gap, tuple(regions), at + draw(st.integers(0, 3))))
    return n_layers, n_heads, rows


@given(batches())
def test_cells_of_a_batch(batch):
    """Head by head and region by region against the drawing: cell j lies in slot j // Hkv of its region."""
    n_layers, n_heads, rows = batch
    regions = [of_row for _, of_row, _ in rows]
    if not any(regions):
        return
    table = torch.arange(100, 100 + len(rows) * 40).view(len(rows), 40).to(torch.int32).flip(0, 1)
    order = list(range(len(rows)))[::-1]
    found = region_cells(table, order, [regions[row] for row in order])
    assert len(found) == max(map(len, regions))
    for number, of_regions in enumerate(found):
        for layer in range(n_layers):
            indptr = of_regions.indptr[layer].tolist()
            assert (indptr[0], indptr[-1], len(indptr)) == (
                0,
                of_regions.cells.numel(),
                len(rows) * n_heads + 1,
            )
            for lane, row in enumerate(order):
                at = 0
                for head in range(n_heads):
                    got = of_regions.cells[indptr[lane * n_heads + head] : indptr[lane * n_heads + head + 1]]
                    want = []
                    if number < len(regions[row]):
                        region = regions[row][number]
                        for j in range(at, at + int(region.counts[layer, head])):
                            slot = int(table[row, region.first_column + j // n_heads])
                            want.append(slot * n_heads + j % n_heads)
                        at += len(want)
                    assert got.tolist() == want


@given(batches())
def test_ranges_of_a_batch(batch):
    _, _, rows = batch
    first = torch.tensor([gap for gap, _, _ in rows])
    lens = torch.tensor([end - gap for gap, _, end in rows])
    ranges = OrdinaryRanges.of(first, lens, [of_row for _, of_row, _ in rows])
    columns: list[list[int]] = [[] for _ in rows]
    for request, start, size in zip(ranges.request, ranges.first, ranges.lens, strict=True):
        columns[int(request)] += range(int(start), int(start) + int(size))
    expected = []
    for gap, of_row, end in rows:
        inside = {c for region in of_row for c in range(region.first_column, region.end_column)}
        expected.append([c for c in range(gap, end) if c not in inside])
    assert columns == expected
    assert [int(ranges.request[i]) for i in ranges.last] == list(range(len(rows)))
    assert int(ranges.last[-1]) == len(ranges.request) - 1
