"""The layout of spans whose heads hold different numbers of tokens, against loops over heads and tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grkv_sglang.attention.ragged import RaggedRegion, ordinary_ranges, pack_heads, unpack_heads
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
