"""Which sources an answer names."""

from __future__ import annotations

import re

_MARKER = re.compile(r"\[(\d{1,3}(?:\s*,\s*\d{1,3})*)\]")


def cited_numbers(text: str, num_sources: int) -> list[int]:
    """Numbers of sources that `text` names, as ``[1]`` or ``[1, 2]``, ascending; others are not counted: a
    model may invent them."""
    named = {int(number) for match in _MARKER.finditer(text) for number in match.group(1).split(",")}
    return sorted(number for number in named if 1 <= number <= num_sources)
