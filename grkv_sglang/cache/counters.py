"""What happened, by name: in the log and, through ``/server_info``, for anyone who asks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Counters:
    """Totals since start; a flush of the cache does not reset them."""

    compressions_started: int = 0
    compressions_done: int = 0
    compressions_failed: Counter[str] = field(default_factory=Counter)
    """By reason: the prefix stays exact and goes on serving."""
    compressions_skipped: Counter[str] = field(default_factory=Counter)
    """By reason: nothing had to be done, or nothing could be."""
    span_hits: Counter[str] = field(default_factory=Counter)
    """Requests served from at least one span, by match mode."""
    span_tokens_served: int = 0
    spans_made: Counter[str] = field(default_factory=Counter)
    """By trigger."""
    reprefilled_tokens: int = 0
    """Prefilled again although a span held them: the request asked for exact KV, or for better."""
    twins_freed: int = 0
    spans_superseded: int = 0
    spans_expired: int = 0
    spans_outdated: int = 0
    """Made unreachable by a weight update."""
    pins_refused: int = 0
    """Pins beyond the server's limit: the span is kept like any other."""
    deleted_slots: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {
            name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()
        }
