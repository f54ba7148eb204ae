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


def plan_queries(n_tokens: int, profile: Profile) -> QueryPlan:
    """Choose the query positions for a span.

    A window is the last `n_window` positions; strata are the midpoints of `n_strata` equal strata.
    Held-out queries are midpoints of `n_held_out` strata of their own; one that falls on a position
    already taken moves to the nearest free one (the earlier of two equally near).

    Window and strata may share positions in a short span: the query is then used for both.

    Args:
        n_tokens: length of the span in tokens.
        profile: names the kinds and numbers of queries.

    Raises:
        ValueError: the span is shorter than `queries_needed(profile)`.
    """
    needed = queries_needed(profile)
    if n_tokens < needed:
        raise ValueError(
            f"expected a span of at least {needed} tokens to hold the queries of profile {profile.name!r}, "
            f"got {n_tokens}"
        )
    score = _positions(n_tokens, profile.score_queries, profile)
    fit = _positions(n_tokens, profile.fit_queries, profile) if profile.regresses else set()
    used = score | fit
    held_out: set[int] = set()
    for midpoint in stratum_midpoints(n_tokens, profile.n_held_out):
        held_out.add(_nearest_free(midpoint, used | held_out, n_tokens))
    positions = sorted(used | held_out)

    def flags(chosen: set[int]) -> Tensor:
        return torch.tensor([position in chosen for position in positions], dtype=torch.bool)

    return QueryPlan(
        positions=torch.tensor(positions, dtype=torch.int64),
        score=flags(score),
        fit=flags(fit),
        held_out=flags(held_out),
    )


def _positions(n_tokens: int, kind: QueryKind, profile: Profile) -> set[int]:
    if kind == "window":
        return set(range(n_tokens - profile.n_window, n_tokens))
    return set(stratum_midpoints(n_tokens, profile.n_strata))


def _nearest_free(wanted: int, taken: set[int], n_tokens: int) -> int:
    return next(
        position
        for distance in range(n_tokens)
        for position in (wanted - distance, wanted + distance)
        if 0 <= position < n_tokens and position not in taken
    )
