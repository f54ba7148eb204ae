"""Ranges of token positions that a request wants kept as they are: "0-120,800-830"."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges of positions in the prompt: ascending, disjoint, not empty."""

_RANGE = re.compile(r"\s*(\d+)\s*-\s*(\d+)\s*")


def parse_ranges(text: str) -> Ranges:
    """Ranges out of "start-end" pairs joined by commas, ends exclusive.

    Raises:
        ValueError: no such pairs, or an empty one.
    """
    pairs = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"expected ranges such as '0-120,800-830', got {part!r}")
        start, end = int(match[1]), int(match[2])
        if start >= end:
            raise ValueError(f"expected a range whose end lies behind its start, got {part!r}")
        pairs.append((start, end))
    return joined(pairs)


def joined(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """The same positions as disjoint ranges that do not touch, ascending."""
    result: list[tuple[int, int]] = []
    for start, end in sorted(pairs):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(result[-1][1], end)
        else:
            result.append((start, end))
    return tuple(result)


def within(ranges: Sequence[tuple[int, int]], start: int, end: int) -> Ranges:
    """The parts of `ranges` inside ``[start, end)``."""
    cut = ((max(low, start), min(high, end)) for low, high in ranges)
    return tuple((low, high) for low, high in cut if low < high)


def size(ranges: Sequence[tuple[int, int]]) -> int:
    """Number of positions."""
    return sum(end - start for start, end in ranges)


def covers(outer: Ranges, inner: Ranges) -> bool:
    """Whether every position of `inner` is one of `outer`."""
    return all(any(low <= start and end <= high for low, high in outer) for start, end in inner)
