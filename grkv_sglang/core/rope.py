"""Moving a post-RoPE query to a later position.

RoPE rotates each pair of components by `position * frequency`, so a query that was rotated to position
p reaches p + delta by one more rotation by delta, with the model's own frequencies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RotaryTable:
    """The cosines and sines of a model's rotary embedding.

    Attributes:
        cos_sin: [max_position, rotary_dim], any float dtype; row p holds the cosines of position p for
            each of the `rotary_dim / 2` frequencies, then the sines. All of it may carry one common
            factor, the attention scaling of YaRN and its relatives.
        rotary_dim: number of leading components of a head that are rotated.
        is_neox: True pairs component j with j + rotary_dim / 2, False pairs 2j with 2j + 1.

    Raises:
        ValueError: `rotary_dim` is odd, or `cos_sin` does not have that many columns.
    """

    cos_sin: Tensor
    rotary_dim: int
    is_neox: bool

    def __post_init__(self) -> None:
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(f"expected an even rotary_dim >= 2, got {self.rotary_dim}")
        if self.cos_sin.ndim != 2 or self.cos_sin.shape[1] != self.rotary_dim:
            raise ValueError(
                f"expected cos_sin of shape [max_position, {self.rotary_dim}], got {list(self.cos_sin.shape)}"
            )


def rotate_forward(queries: Tensor, delta: Tensor, table: RotaryTable) -> Tensor:
    """Rotate post-RoPE queries further by `delta` positions.

    Args:
        queries: [m, Hq, d], already rotated to their own positions.
        delta: [m] int64, how many positions further, 0 or more.
        table: the model's rotary table; components from `rotary_dim` on pass through.

    Returns:
        [m, Hq, d] in the dtype of `queries`, computed in float32 (float64 for float64 input). A factor
        that the table carries is divided out, because the queries got it once already: each pair
        `(cos, sin)` is scaled to unit length, which also removes the rounding of a 16-bit table.

    Raises:
        ValueError: shapes do not fit, or a delta is outside the table.
    """
    if queries.ndim != 3 or delta.shape != queries.shape[:1]:
        raise ValueError(
            f"expected queries [m, Hq, d] and delta [m], got {list(queries.shape)} and {list(delta.shape)}"
        )
    if table.rotary_dim > queries.shape[-1]:
        raise ValueError(f"expected rotary_dim <= head size {queries.shape[-1]}, got {table.rotary_dim}")
    n_positions = table.cos_sin.shape[0]
    if delta.numel() and not 0 <= int(delta.min()) <= int(delta.max()) < n_positions:
        raise ValueError(
            f"expected deltas between 0 and {n_positions - 1} (the rotary table's last position), "
            f"got {int(delta.min())} to {int(delta.max())}"
        )
    work = torch.float64 if queries.dtype == torch.float64 else torch.float32
    # [m, 1, rotary_dim / 2] each
    cos, sin = (part.unsqueeze(1).to(queries.device) for part in _cos_sin(table, delta, work))
    return _turned(queries.to(work, copy=True), cos, sin, table).to(queries.dtype)


def mean_rotation(queries: Tensor, table: RotaryTable, *, n_positions: int) -> Tensor:
    """The mean of post-RoPE queries rotated further by 1, 2, .. `n_positions` positions.

    Args:
        queries: [..., d].
        table: the model's rotary table; components from `rotary_dim` on pass through. If it ends before
            `n_positions`, so does the mean.
        n_positions: how many, at least 1.

    Returns:
        [..., d] in the dtype of `queries`, computed like `rotate_forward`. Shorter than the queries, the more
        so the higher the frequency.

    Raises:
        ValueError: the table has fewer than two positions.
    """
    last = min(n_positions, table.cos_sin.shape[0] - 1)
    if last < 1:
        raise ValueError(f"expected a rotary table of 2 positions or more, got {table.cos_sin.shape[0]}")
    work = torch.float64 if queries.dtype == torch.float64 else torch.float32
    delta = torch.arange(1, last + 1)
    cos, sin = (part.mean(dim=0).to(queries.device) for part in _cos_sin(table, delta, work))
    return _turned(queries.to(work, copy=True), cos, sin, table).to(queries.dtype)


def _cos_sin(table: RotaryTable, delta: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of `delta` [m] without the table's factor, [m, rotary_dim / 2] each."""
    cos, sin = table.cos_sin[delta.to(table.cos_sin.device)].to(dtype).chunk(2, dim=-1)
    length = torch.hypot(cos, sin)
    return cos / length, sin / length


def _turned(queries: Tensor, cos: Tensor, sin: Tensor, table: RotaryTable) -> Tensor:
    """`queries` [..., d] with every pair multiplied by `cos + i sin`, in place."""
    pairs = queries[..., : table.rotary_dim]
    if table.is_neox:
        first, second = pairs.chunk(2, dim=-1)
    else:
        first, second = pairs[..., 0::2], pairs[..., 1::2]
    turned_first = first * cos - second * sin
    turned_second = second * cos + first * sin
    # `first` and `second` are views of `queries`
    first.copy_(turned_first)
    second.copy_(turned_second)
    return queries
