"""How each kernel is cut and compiled on each architecture: fixed, so that nothing is tuned while serving.

Chosen so that nothing spills and everything fits at head size 128 (``tests/kernels/test_compile.py`` compiles
for 8.0, 9.0 and 10.0). Not measured on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Kernel = Literal[
    "decode", "extend", "row_lse", "row_output", "column_mean", "move", "gram", "product", "jvp", "vjp"
]  # fmt: skip
Capability = tuple[int, int]


@dataclass(frozen=True)
class Tile:
    """What one program holds at a time.

    Attributes:
        rows: query rows; a power of two, at least 16 where they enter a matrix product.
        tokens: tokens or cells; likewise.
        num_warps: warps of 32 threads.
        num_stages: how many loads of a loop are under way at once, paid for in shared memory.
    """

    rows: int
    tokens: int
    num_warps: int
    num_stages: int


# Shared memory stays below the 99 KiB of the small cards (8.6, 8.9, 12.0), which take these tiles too.
# 16 rows hold the group of a GQA head while decoding.
_AMPERE: dict[Kernel, Tile] = {
    "decode": Tile(rows=16, tokens=64, num_warps=4, num_stages=2),
    "extend": Tile(rows=64, tokens=32, num_warps=4, num_stages=2),
    "row_lse": Tile(rows=32, tokens=64, num_warps=8, num_stages=2),
    "row_output": Tile(rows=32, tokens=32, num_warps=8, num_stages=2),
    "column_mean": Tile(rows=32, tokens=64, num_warps=8, num_stages=2),
    "move": Tile(rows=32, tokens=1, num_warps=4, num_stages=1),
    "gram": Tile(rows=64, tokens=16, num_warps=4, num_stages=2),
    "product": Tile(rows=32, tokens=64, num_warps=8, num_stages=2),
    "jvp": Tile(rows=32, tokens=32, num_warps=8, num_stages=2),
    "vjp": Tile(rows=32, tokens=32, num_warps=8, num_stages=2),
}

# 64 rows or more are what the matrix instructions of these two take.
_HOPPER: dict[Kernel, Tile] = _AMPERE | {
    "row_lse": Tile(rows=64, tokens=64, num_warps=4, num_stages=2),
    "column_mean": Tile(rows=64, tokens=64, num_warps=4, num_stages=2),
    "gram": Tile(rows=64, tokens=32, num_warps=4, num_stages=2),
    "product": Tile(rows=32, tokens=64, num_warps=4, num_stages=2),
}
_BLACKWELL: dict[Kernel, Tile] = _AMPERE | {
    "row_lse": Tile(rows=64, tokens=64, num_warps=8, num_stages=2),
    "column_mean": Tile(rows=64, tokens=64, num_warps=8, num_stages=2),
    "gram": Tile(rows=64, tokens=32, num_warps=8, num_stages=2),
    "product": Tile(rows=32, tokens=64, num_warps=4, num_stages=2),
}

TILES: dict[Capability, dict[Kernel, Tile]] = {
    (8, 0): _AMPERE,
    (9, 0): _HOPPER,
    (10, 0): _BLACKWELL,
    # Workstation Blackwell has Ampere's kind of matrix instructions and as little shared memory as its small
    # cards. Its decode kernel spills one register.
    (12, 0): _AMPERE,
}

# About twice as many programs as the largest card of the architecture has multiprocessors (108, 132,
# 148, 188).
_PROGRAMS: dict[Capability, int] = {(8, 0): 216, (9, 0): 264, (10, 0): 296, (12, 0): 376}


def tile(kernel: Kernel, device: torch.device) -> Tile:
    """The tile of a kernel on a device.

    Raises:
        ValueError: a GPU older than sm_80.
    """
    return TILES[_architecture(device)][kernel]


def programs(device: torch.device) -> int:
    """How many programs fill a device."""
    return _PROGRAMS[_architecture(device)]


def _architecture(device: torch.device) -> Capability:
    """The newest architecture of the table that a device is not older than."""
    oldest = min(TILES)
    # Only the interpreter brings a CPU here.
    capability = oldest if device.type == "cpu" else torch.cuda.get_device_capability(device)
    if capability < oldest:
        raise ValueError(f"expected a GPU of capability 8.0 or newer, got {capability[0]}.{capability[1]}")
    return max(known for known in TILES if known <= capability)
