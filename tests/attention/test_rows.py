"""The row layout, exactly."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grkv_sglang.attention.rows import (
    RowGaps,
    attach_row_gaps,
    host_lens,
    physical_slots,
    prefix_row,
    row_gaps_of,
)


@given(st.lists(st.integers(1, 10_000), max_size=40), st.integers(0, 40))
def test_prefix_row_is_sentinels_then_slots(slots, gap):
    row = prefix_row(torch.tensor(slots, dtype=torch.int64), len(slots) + gap)
    assert row.tolist() == [0] * gap + slots
    assert physical_slots(row).tolist() == slots


def test_more_slots_than_tokens_is_an_error():
    with pytest.raises(ValueError, match="2 tokens cannot hold 3 slots"):
        prefix_row(torch.tensor([1, 2, 3]), 2)


def test_gaps_by_row_and_the_padding_row():
    gaps = RowGaps(4, "cpu")
    gaps.set(3, 17)
    assert gaps.of(torch.tensor([3, 1, 3])).tolist() == [17, 0, 17]
    with pytest.raises(ValueError, match="padding row"):
        gaps.set(0, 1)
    with pytest.raises(ValueError, match=">= 0"):
        gaps.set(1, -1)
    gaps.clear()
    assert gaps.tensor.tolist() == [0, 0, 0, 0]


def plan():
    return SimpleNamespace()


def test_the_host_knows_what_the_device_knows():
    gaps = RowGaps(5, "cpu")
    for row, gap in [(1, 4), (3, 17), (1, 0), (2, 9), (3, 17)]:
        gaps.set(row, gap)
    assert gaps.host.tolist() == gaps.tensor.tolist() == [0, 0, 9, 17, 0]
    gaps.clear()
    assert gaps.host.tolist() == gaps.tensor.tolist() == [0] * 5


def test_read_range():
    gaps = RowGaps(4, "cpu")
    gaps.set(1, 5)
    gaps.set(2, 8)
    # Row 0 is padding; row 2 is borrowed with fewer tokens than its last request's gap.
    first, lens = gaps.read_range(torch.tensor([1, 0, 2, 3]), torch.tensor([9, 1, 3, 7], dtype=torch.int32))
    assert (first.tolist(), lens.tolist()) == ([5, 0, 3, 0], [4, 1, 0, 7])
    assert first.dtype == lens.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lengths_on_the_host(dtype):
    gaps = RowGaps(4, "cpu")
    gaps.set(2, 5)
    batch = plan()
    lens = torch.tensor([9, 4, 1, 1], dtype=dtype)  # two requests, two padded lanes
    assert host_lens(batch, lens) is None
    gaps.note_batch(batch, torch.tensor([2, 3]), lens[:2])
    gaps.set(2, 0)  # the row's next request: this batch keeps its own
    got = host_lens(batch, lens)
    assert got is not None
    assert (got.tolist(), got.dtype) == ([4, 4, 1, 1], dtype)
    assert lens.tolist() == [9, 4, 1, 1]
    assert host_lens(batch, None) is None


def test_a_gap_that_leaves_nothing_to_read_is_an_error():
    gaps = RowGaps(4, "cpu")
    gaps.set(2, 5)
    with pytest.raises(RuntimeError, match=r"gaps \[5\] of rows \[2\] leave nothing of \[5\] tokens"):
        gaps.note_batch(plan(), torch.tensor([2]), torch.tensor([5]))
    gaps.note_batch(plan(), torch.tensor([2]), torch.tensor([6]))
    gaps.note_batch(plan(), torch.tensor([2]), None)


def test_all_backends_of_a_pool_share_its_gaps():
    pool = SimpleNamespace(req_to_token=torch.zeros(7, 3))
    assert row_gaps_of(pool) is None
    gaps = attach_row_gaps(pool, "cpu")
    assert gaps.tensor.shape == gaps.host.shape == (7,)
    assert attach_row_gaps(pool, "cpu") is gaps is row_gaps_of(pool)
