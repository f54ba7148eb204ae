"""Which positions of a span are probed for queries, and what each query is for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grkv_sglang.core.profiles import Profile, QueryKind


@dataclass(frozen=True)
class QueryPlan:
    """The positions whose queries one compression needs.

    Attributes:
        positions: [m] int64 on the CPU, ascending and unique, relative to the span's start.
        score: [m] bool, the queries that the selection sees.
        fit: [m] bool, the queries that the regression fits (none when no step runs). May overlap
            `score`.
        held_out: [m] bool, disjoint from both; they only measure quality.
    """

    positions: Tensor
    score: Tensor
    fit: Tensor
    held_out: Tensor


def stratum_midpoints(n_tokens: int, n_strata: int) -> list[int]:
    """The middle position of each of `n_strata` equal strata of `0 .. n_tokens - 1`, ascending.

    Distinct as long as `n_strata <= n_tokens`.
    """
    return [(2 * stratum + 1) * n_tokens // (2 * n_strata) for stratum in range(n_strata)]


def queries_needed(profile: Profile) -> int:
    """The shortest span, in tokens, whose positions hold the profile's queries without sharing."""
    window = profile.n_window if profile.uses("window") else 0
    strata = profile.n_strata if profile.uses("strata") else 0
    return window + strata + profile.n_held_out


def plan_queries(n_tokens: int, profile: Profile, *, first: int = 0) -> QueryPlan:
    """Choose the query positions for a span.

    A window is the last `n_window` positions; strata are the midpoints of `n_strata` equal strata.
    Held-out queries are midpoints of `n_held_out` strata of their own; one that falls on a position
    already taken moves to the nearest free one (the earlier of two equally near).

    Window and strata may share positions in a short span: the query is then used for both.

    Args:
        n_tokens: length of the span in tokens (for span over span: its candidates, see `first`).
        profile: names the kinds and numbers of queries.
        first: no query is taken before this position. Where the span's first candidates are the slots of
            older spans, which stand for no single token, this is their number.

    Raises:
        ValueError: fewer than `queries_needed(profile)` positions are left.
    """
    if first < 0:
        raise ValueError(f"expected first >= 0, got {first}")
    needed = queries_needed(profile)
    if n_tokens - first < needed:
        raise ValueError(
            f"expected a span of at least {needed} tokens to hold the queries of profile {profile.name!r}, "
            f"got {n_tokens - first}"
        )
    score = _positions(first, n_tokens, profile.score_queries, profile)
    fit = _positions(first, n_tokens, profile.fit_queries, profile) if profile.regresses else set()
    used = score | fit
    held_out: set[int] = set()
    for midpoint in stratum_midpoints(n_tokens - first, profile.n_held_out):
        held_out.add(_nearest_free(first + midpoint, used | held_out, range(first, n_tokens)))
    positions = sorted(used | held_out)

    def flags(chosen: set[int]) -> Tensor:
        return torch.tensor([position in chosen for position in positions], dtype=torch.bool)

    return QueryPlan(
        positions=torch.tensor(positions, dtype=torch.int64),
        score=flags(score),
        fit=flags(fit),
        held_out=flags(held_out),
    )


def _positions(first: int, end: int, kind: QueryKind, profile: Profile) -> set[int]:
    if kind == "window":
        return set(range(end - profile.n_window, end))
    return {first + midpoint for midpoint in stratum_midpoints(end - first, profile.n_strata)}


def _nearest_free(wanted: int, taken: set[int], allowed: range) -> int:
    return next(
        position
        for distance in range(len(allowed))
        for position in (wanted - distance, wanted + distance)
        if position in allowed and position not in taken
    )
