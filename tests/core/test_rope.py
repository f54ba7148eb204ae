from __future__ import annotations

import pytest
import torch

from grkv_sglang.core import RotaryTable, rotate_forward
from grkv_sglang.core.rope import mean_rotation

from .reference import random, rotary_table, rotated

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(("d", "rotary_dim"), [(8, 8), (10, 6), (12, 2)])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_equals_rotating_the_raw_vector_further(
    is_neox: bool, d: int, rotary_dim: int, dtype: torch.dtype
) -> None:
    raw = random(5, 3, d, seed=0)
    at, delta = torch.tensor([0, 1, 17, 200, 300]), torch.tensor([311, 0, 5, 100, 11])
    before = rotated(raw, at, rotary_dim, is_neox=is_neox).to(dtype)
    after = rotate_forward(before, delta, rotary_table(rotary_dim, is_neox=is_neox))
    expected = rotated(raw, at + delta, rotary_dim, is_neox=is_neox)
    assert after.dtype == dtype
    torch.testing.assert_close(after.double(), expected, rtol=0, atol=TOLERANCE[dtype] * 3)


@pytest.mark.parametrize("factor", [0.5, 1.2718])
def test_an_attention_scaling_in_the_table_is_divided_out(factor: float) -> None:
    raw = random(4, 2, 8, seed=1)
    at, delta = torch.tensor([3, 0, 40, 9]), torch.tensor([7, 0, 200, 31])
    # The model multiplied the query by the factor once, when it rotated it to its own position.
    before = rotated(raw, at, 8, is_neox=True) * factor
    after = rotate_forward(before, delta, rotary_table(8, is_neox=True, factor=factor))
    torch.testing.assert_close(after, rotated(raw, at + delta, 8, is_neox=True) * factor)


def test_a_16_bit_table_keeps_lengths() -> None:
    table = rotary_table(8, is_neox=False)
    coarse = RotaryTable(table.cos_sin.bfloat16(), 8, False)
    queries = random(6, 2, 8, seed=2)
    after = rotate_forward(queries, torch.tensor([1, 5, 77, 123, 300, 511]), coarse)
    torch.testing.assert_close(after.norm(dim=-1), queries.norm(dim=-1), rtol=1e-12, atol=0)


def test_the_input_is_not_changed() -> None:
    queries = random(2, 1, 4, seed=3)
    kept = queries.clone()
    rotate_forward(queries, torch.tensor([3, 4]), rotary_table(4, is_neox=True))
    assert torch.equal(queries, kept)


def test_errors() -> None:
    table = rotary_table(8, is_neox=True, n_positions=10)
    queries = random(2, 1, 8, seed=4)
    with pytest.raises(ValueError, match=r"between 0 and 9 .* got 0 to 10"):
        rotate_forward(queries, torch.tensor([0, 10]), table)
    with pytest.raises(ValueError, match="got -1 to 0"):
        rotate_forward(queries, torch.tensor([-1, 0]), table)
    with pytest.raises(ValueError, match=r"delta \[m\]"):
        rotate_forward(queries, torch.tensor([0]), table)
    with pytest.raises(ValueError, match="head size 4, got 8"):
        rotate_forward(queries[..., :4], torch.tensor([0, 1]), table)
    with pytest.raises(ValueError, match="even rotary_dim"):
        RotaryTable(table.cos_sin, 7, True)
    with pytest.raises(ValueError, match=r"\[max_position, 6\], got \[10, 8\]"):
        RotaryTable(table.cos_sin, 6, True)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(("d", "rotary_dim"), [(8, 8), (10, 6)])
def test_mean_rotation_is_the_mean_of_rotations(is_neox: bool, d: int, rotary_dim: int) -> None:
    raw, at = random(5, 3, d, seed=5), torch.tensor([0, 1, 17, 200, 300])
    before = rotated(raw, at, rotary_dim, is_neox=is_neox)
    table = rotary_table(rotary_dim, is_neox=is_neox, factor=1.3)
    steps = [rotated(raw, at + step, rotary_dim, is_neox=is_neox) for step in range(1, 42)]
    expected = torch.stack(steps).mean(dim=0)
    torch.testing.assert_close(mean_rotation(before, table, n_positions=41), expected)
    single = mean_rotation(before.float(), table, n_positions=41)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), expected, rtol=0, atol=1e-5)
    # Any shape in front, and the input stays.
    flat = before.reshape(15, d).clone()
    torch.testing.assert_close(mean_rotation(flat, table, n_positions=41), expected.reshape(15, d))
    assert torch.equal(flat, before.reshape(15, d))


def test_mean_rotation_ends_with_the_table() -> None:
    queries = random(2, 1, 8, seed=6)
    short = rotary_table(8, is_neox=True, n_positions=10)
    torch.testing.assert_close(
        mean_rotation(queries, short, n_positions=512),
        mean_rotation(queries, rotary_table(8, is_neox=True), n_positions=9),
    )
    with pytest.raises(ValueError, match="2 positions or more, got 1"):
        mean_rotation(queries, rotary_table(8, is_neox=True, n_positions=1), n_positions=512)
