"""What tensor-parallel ranks must agree on: the outcome of a compression, and the time.

All ranks run the same scheduler steps on the same requests, so every decision that counts tokens is the same
on all of them. A rank's own heads decide how good a span is and whether a layer came out finite, and each
machine has its own clock: these two are exchanged, at points that all ranks reach together.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch


class Ranks:
    """The tensor-parallel group of this scheduler, over the CPU."""

    def __init__(self, group: Any = None, size: int = 1) -> None:
        self._group = group
        self.size = size

    def sum(self, values: Sequence[float]) -> list[float]:
        """`values` summed over all ranks. Every rank must call it, with as many values."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        torch.distributed.all_reduce(total, group=self._group)
        return total.tolist()

    def now_s(self) -> float:
        """The first rank's monotonic clock, in seconds. Every rank must call it."""
        now = time.monotonic()
        if self.size == 1:
            return now
        shared = torch.tensor([now], dtype=torch.float64)
        torch.distributed.broadcast(shared, group=self._group, group_src=0)
        return float(shared)
