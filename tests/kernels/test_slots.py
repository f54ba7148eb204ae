"""Slot movement against loops, in place, on odd shapes; launchers say what they expected."""

from __future__ import annotations

import pytest
import torch
from grkv_kernels import copy_slots, read_slots, write_slots

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
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
        assert same(buffer[slot], rows[at[0]] if at else before[slot])
    for indices in (slots, slots.int()):
        read = read_slots(buffer, indices)
        assert (read.dtype, read.shape) == (dtype, rows.shape)
        assert same(read, rows)
        assert read.numel() == 0 or read.data_ptr() != buffer.data_ptr()
    half = count // 2
    written = buffer.clone()
    copy_slots(buffer, slots[:half], slots[half : 2 * half])
    for source, target in zip(slots[:half].tolist(), slots[half : 2 * half].tolist(), strict=True):
        assert same(buffer[target], written[source])
        assert same(buffer[source], written[source])


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.float(), right.float())  # which every 8-bit number is exactly


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_all_bits_of_eight_move(dtype):
    """Not a number among them: codes, not what they stand for."""
    codes = torch.arange(256, dtype=torch.uint8).view(16, 2, 8)
    buffer = torch.zeros(40, 2, 8, dtype=torch.uint8).view(dtype)
    slots = torch.arange(20, 36)
    write_slots(buffer, slots, codes.view(dtype))
    assert torch.equal(read_slots(buffer, slots).view(torch.uint8), codes)
    copy_slots(buffer, slots, torch.arange(16))
    assert torch.equal(buffer[:16].view(torch.uint8), codes)


def test_shapes_are_checked():
    buffer = torch.zeros(8, 2, 4)
    slots = torch.tensor([1, 2])
    with pytest.raises(ValueError, match=r"expected rows \(2, 2, 4\) torch.float32, got \(2, 4\)"):
        write_slots(buffer, slots, torch.zeros(2, 4))
    with pytest.raises(ValueError, match="expected rows"):
        write_slots(buffer, slots, torch.zeros(2, 2, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"expected slots \[c\] int64 on cpu"):
        write_slots(buffer, slots.int(), torch.zeros(2, 2, 4))
    with pytest.raises(ValueError, match=r"expected slots \[c\] int32 or int64 on cpu"):
        read_slots(buffer, slots.short())
    with pytest.raises(ValueError, match=r"expected a buffer \[slots, kv_heads, head_dim\]"):
        write_slots(buffer[0], slots, torch.zeros(2, 4))
    with pytest.raises(ValueError, match="as many targets as sources, got 1 and 2"):
        copy_slots(buffer, slots, slots[:1])
