"""Slot movement against loops, in place, on odd shapes; launchers say what they expected."""

from __future__ import annotations

import pytest
import torch
from grkv_kernels import copy_slots, write_slots


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_slots", "heads", "dim", "count"), [(7, 1, 3, 0), (7, 1, 3, 5), (33, 3, 64, 32)]
)
def test_write_and_copy(dtype, num_slots, heads, dim, count):
    buffer = torch.randn(num_slots, heads, dim).to(dtype)
    before = buffer.clone()
    slots = torch.randperm(num_slots)[:count]
    rows = torch.randn(count, heads, dim).to(dtype)
    write_slots(buffer, slots, rows)
    for slot in range(num_slots):
        at = (slots == slot).nonzero().flatten().tolist()
        assert torch.equal(buffer[slot], rows[at[0]] if at else before[slot])
    half = count // 2
    written = buffer.clone()
    copy_slots(buffer, slots[:half], slots[half : 2 * half])
    for source, target in zip(slots[:half].tolist(), slots[half : 2 * half].tolist(), strict=True):
        assert torch.equal(buffer[target], written[source])
        assert torch.equal(buffer[source], written[source])


def test_shapes_are_checked():
    buffer = torch.zeros(8, 2, 4)
    slots = torch.tensor([1, 2])
    with pytest.raises(ValueError, match=r"expected rows \(2, 2, 4\) torch.float32, got \(2, 4\)"):
        write_slots(buffer, slots, torch.zeros(2, 4))
    with pytest.raises(ValueError, match="expected rows"):
        write_slots(buffer, slots, torch.zeros(2, 2, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"expected slots \[c\] int64 on cpu"):
        write_slots(buffer, slots.int(), torch.zeros(2, 2, 4))
    with pytest.raises(ValueError, match=r"expected a buffer \[slots, kv_heads, head_dim\]"):
        write_slots(buffer[0], slots, torch.zeros(2, 4))
    with pytest.raises(ValueError, match="as many targets as sources, got 1 and 2"):
        copy_slots(buffer, slots, slots[:1])
