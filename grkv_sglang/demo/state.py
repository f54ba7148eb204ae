"""What the plugin reports at ``GET /server_info`` under ``internal_states[0]["grkv"]``, as typed models.

The shape is the plugin's; a field that is missing here is an error, a new one is ignored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from pydantic import BaseModel


class PoolState(BaseModel):
    """KV slots of the pool; exact and span slots are those held by the radix tree."""

    total_slots: int
    free_slots: int
    exact_slots: int
    span_slots: int


class Counters(BaseModel):
    """Counts since the server started."""

    compressions_started: int
    compressions_done: int
    compressions_failed: dict[str, int]
    compressions_skipped: dict[str, int]
    span_hits: dict[str, int]
    span_tokens_served: int
    twins_freed: int
    spans_evicted: int


class SpanState(BaseModel):
    """One span of the tree. Times in seconds; errors are the regression's loss before and after."""

    start_tokens: int
    end_tokens: int
    tokens: int
    slots: int
    budget: float
    profile: str
    quality: float | None
    error_before: float | None
    error_after: float | None
    hits: int
    probe_s: float
    pass_s: float
    select_s: float
    regress_s: float
    copy_s: float
    compress_s: float
    twin_freed: bool
    tokens_sha256: str


class CensusState(BaseModel):
    """Result of the check that every KV slot has exactly one owner."""

    ok: bool
    checks: int
    last_error: str | None


class GrkvState(BaseModel):
    """The plugin's state as one scheduler reports it."""

    pool: PoolState
    counters: Counters
    spans: list[SpanState]
    census: CensusState


def tokens_sha256(ids: Sequence[int]) -> str:
    """How the plugin names the tokens from the root to a span's end: SHA-256 of int64 little-endian ids."""
    return hashlib.sha256(np.asarray(ids, dtype="<i8").tobytes()).hexdigest()


def spans_of(state: GrkvState, prefix: Sequence[int]) -> list[SpanState]:
    """Spans that lie on the path of `prefix`, in order of their position."""
    on_path = [
        span
        for span in state.spans
        if span.end_tokens <= len(prefix) and tokens_sha256(prefix[: span.end_tokens]) == span.tokens_sha256
    ]
    return sorted(on_path, key=lambda span: span.start_tokens)
