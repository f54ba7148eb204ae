"""The row layout, exactly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grkv_sglang.attention.rows import RowGaps, physical_slots, prefix_row


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
