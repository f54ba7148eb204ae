"""What can be stored, against every number of the format in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from grkv_sglang.core import STORAGE_DTYPES, Storage

from .reference import random

NARROW = [dtype for dtype in STORAGE_DTYPES if dtype.itemsize < 4]
SCALES = [1.0, 0.037, 2.5, 3e-5]


def name(value: object) -> str:
    return str(value).removeprefix("torch.")


def numbers_of(dtype: torch.dtype) -> Tensor:
    """Every finite number of a narrow dtype, ascending, float64."""
    bits = 8 * dtype.itemsize
    codes = torch.arange(2**bits).to(torch.uint8 if bits == 8 else torch.uint16)
    numbers = codes.view(dtype).double()
    return numbers[numbers.isfinite()].unique()


def nearest(numbers: Tensor, wanted: Tensor) -> Tensor:
    """[n] the member of `numbers` [k] nearest to each of `wanted` [n]; ties as they come."""
    above = torch.searchsorted(numbers, wanted).clamp(1, len(numbers) - 1)
    low, high = numbers[above - 1], numbers[above]
    return torch.where((wanted - low).abs() <= (wanted - high).abs(), low, high)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", NARROW, ids=name)
def test_every_number_comes_back_bit_for_bit(dtype: torch.dtype, scale: float) -> None:
    storage, numbers = Storage(dtype, scale), numbers_of(dtype)
    if dtype == torch.bfloat16:  # whose range is float32's: nothing is left for a scale at its ends
        numbers = numbers[(numbers == 0) | ((numbers.abs() > 1e-30) & (numbers.abs() < 1e30))]
    stored = numbers.to(dtype)
    loaded = storage.load(stored)
    assert loaded.dtype == torch.float32
    torch.testing.assert_close(loaded.double(), numbers * scale, rtol=2e-7, atol=0)
    assert torch.equal(storage.store(loaded).double(), numbers)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", NARROW, ids=name)
def test_the_nearest_number_is_stored(dtype: torch.dtype, scale: float) -> None:
    storage, numbers = Storage(dtype, scale), numbers_of(dtype)
    wanted = (random(4000, seed=1) * 10 ** random(4000, seed=2)).float()
    wanted = wanted[wanted.abs() < 0.99 * float(numbers.max()) * scale]
    got = storage.rounded(wanted)
    assert got.dtype == torch.float32
    error = (got.double() - wanted.double()).abs()
    least = (nearest(numbers * scale, wanted.double()) - wanted.double()).abs()
    # At a tie float32's own rounding may decide.
    assert (error <= least * (1 + 1e-5) + 1e-6 * wanted.double().abs()).all()
    assert (error > 0).any()


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", [d for d in NARROW if d.itemsize == 1], ids=name)
def test_eight_bits_saturate(dtype: torch.dtype, scale: float) -> None:
    storage, largest = Storage(dtype, scale), torch.finfo(dtype).max
    exact = torch.tensor([3.0, 1.01, -1.01, -1e20], dtype=torch.float64) * largest * scale
    assert storage.store(exact).double().tolist() == [largest, largest, -largest, -largest]
    # What went wrong is not hidden behind a large number.
    assert storage.store(torch.tensor([math.inf, -math.inf, math.nan])).float().isnan().all()


def test_sixteen_bits_overflow() -> None:
    assert Storage(torch.float16).store(torch.tensor([1e6, -1e6])).tolist() == [math.inf, -math.inf]


def test_float32_is_left_alone() -> None:
    exact = random(50, seed=3).float()
    assert Storage(torch.float32).store(exact) is exact
    assert Storage(torch.float32).load(exact) is exact


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_a_scale_that_is_none(scale: float) -> None:
    with pytest.raises(ValueError, match="expected a finite scale > 0"):
        Storage(torch.float8_e4m3fn, scale)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fnuz], ids=name)
def test_another_dtype(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"expected a storage dtype .*got {dtype}"):
        Storage(dtype)
