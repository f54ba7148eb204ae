"""What the plugin reports at ``GET /grkv/state`` (and ``GET /server_info`` under
``internal_states[0]["grkv"]``), as typed models.

The shape is the plugin's; a field that is missing here is an error, a new one is ignored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel


class PoolState(BaseModel):
    """KV slots of the pool; exact and span slots are those held by the radix tree."""

    total_slots: int
    free_slots: int
    exact_slots: int
    span_slots: int
    in_work_slots: int
    """Allocated for a span that is being made."""
    pinned_slots: int


class Counters(BaseModel):
    """Counts since the server started; dictionaries count by reason, match mode or trigger."""

    compressions_started: int
    compressions_done: int
    compressions_failed: dict[str, int]
    compressions_skipped: dict[str, int]
    span_hits: dict[str, int]
    span_tokens_served: int
    spans_made: dict[str, int]
    reprefilled_tokens: int
    twins_freed: int
    spans_superseded: int
    spans_expired: int
    spans_outdated: int
    pins_refused: int
    deleted_slots: int
    spans_evicted: int
    jobs_waiting: int
    """Now: compressions queued or in work."""


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
    age_s: float
    pinned: bool
    ttl_s: float | None
    reason: str
    """The trigger that made it."""
    generation: int
    """How often its oldest KV was compressed again."""
    namespace: str | None
    """See `namespace_name`; None without `cache_salt`, `extra_key` and adapter."""
    tokens_sha256: str


class CensusState(BaseModel):
    """Result of the check that every KV slot has exactly one owner."""

    ok: bool
    checks: int
    last_error: str | None


class GrkvState(BaseModel):
    """The plugin's state as one scheduler reports it. `spans` lists the latest of `num_spans`."""

    config: dict[str, Any]
    pool: PoolState
    counters: Counters
    num_spans: int
    spans: list[SpanState]
    census: CensusState


def tokens_sha256(ids: Sequence[int]) -> str:
    """How the plugin names the tokens from the root to a span's end: SHA-256 of int64 little-endian ids."""
    return hashlib.sha256(np.asarray(ids, dtype="<i8").tobytes()).hexdigest()


def namespace_name(cache_salt: str | None, extra_key: str | None = None) -> str | None:
    """How the plugin names a namespace, whose parts may be secrets: a short hash; None without any part."""
    if cache_salt is None and extra_key is None:
        return None
    return hashlib.sha256(repr((extra_key, cache_salt)).encode()).hexdigest()[:12]


def spans_of(state: GrkvState, prefix: Sequence[int]) -> list[SpanState]:
    """Spans that lie on the path of `prefix`, of any namespace, in order of their position."""
    digests: dict[int, str] = {}
    on_path = []
    for span in state.spans:
        if span.end_tokens > len(prefix):
            continue
        if span.end_tokens not in digests:
            digests[span.end_tokens] = tokens_sha256(prefix[: span.end_tokens])
        if digests[span.end_tokens] == span.tokens_sha256:
            on_path.append(span)
    return sorted(on_path, key=lambda span: span.start_tokens)
