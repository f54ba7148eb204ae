"""Which positions of a span are probed for queries, and what each query is for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grkv_sglang.core.profiles import Profile
from grkv_sglang.core.selection import QueryKind, get_scorer


@dataclass(frozen=True)
class QueryPlan:
    """The positions whose queries one compression needs, and what each is for. A query may be for several.

    Attributes:
        positions: [m] int64 on the CPU, ascending and unique, relative to the span's start.
        score_window, score_strata: [m] bool, the queries that the selection sees.
        fit_window, fit_strata: [m] bool, the queries that the regression fits (none when no step runs).
        held_out: [m] bool, disjoint from all others; they only measure quality.
    """

    positions: Tensor
    score_window: Tensor
    score_strata: Tensor
    fit_window: Tensor
    fit_strata: Tensor
    held_out: Tensor

    def scoring(self, kind: QueryKind) -> Tensor:
        """[m] bool, the queries of this kind that the selection sees."""
        return self.score_window if kind == "window" else self.score_strata


def stratum_midpoints(n_tokens: int, n_strata: int) -> list[int]:
    """The middle position of each of `n_strata` equal strata of `0 .. n_tokens - 1`, ascending.

    Distinct as long as `n_strata <= n_tokens`.
    """
    return [(2 * stratum + 1) * n_tokens // (2 * n_strata) for stratum in range(n_strata)]


def queries_needed(profile: Profile) -> int:
    """The shortest span, in tokens, whose positions hold the profile's queries without sharing: with queries
    of a window of `n_window` tokens, to which a longer `window_tokens` gives way."""
    return _Counts.of(profile).needed


def plan_queries(n_tokens: int, profile: Profile, *, first: int = 0) -> QueryPlan:
    """Choose the query positions for a span.

    Window queries are evenly spaced over the span's last `window_tokens` positions (fewer in a span that has
    no room for them beside the other queries), the last one always among them; strata are the midpoints of
    equal strata. Held-out queries are midpoints of `n_held_out` strata of their own; one that falls on a
    position already taken moves to the nearest free one (the earlier of two equally near).

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
    counts = _Counts.of(profile, room=n_tokens - first)

    def window(count: int) -> set[int]:
        return {n_tokens - 1 - i * counts.window_tokens // count for i in range(count)}

    def strata(count: int) -> set[int]:
        return {first + midpoint for midpoint in stratum_midpoints(n_tokens - first, count)}

    chosen = {
        "score_window": window(counts.score_window),
        "score_strata": strata(counts.score_strata),
        "fit_window": window(counts.fit_window),
        "fit_strata": strata(counts.fit_strata),
    }
    used = set().union(*chosen.values())
    held_out: set[int] = set()
    for midpoint in stratum_midpoints(n_tokens - first, profile.n_held_out):
        held_out.add(_nearest_free(first + midpoint, used | held_out, range(first, n_tokens)))
    positions = sorted(used | held_out)

    def flags(members: set[int]) -> Tensor:
        return torch.tensor([position in members for position in positions], dtype=torch.bool)

    return QueryPlan(
        positions=torch.tensor(positions, dtype=torch.int64),
        held_out=flags(held_out),
        **{use: flags(members) for use, members in chosen.items()},
    )


@dataclass(frozen=True)
class _Counts:
    """How many probed queries each use takes; those of the window out of the last `window_tokens`."""

    window_tokens: int
    score_window: int
    score_strata: int
    fit_window: int
    fit_strata: int
    n_held_out: int

    @classmethod
    def of(cls, profile: Profile, room: int = 0) -> _Counts:
        """For a span with `room` positions, or the least that it may have."""
        kinds = get_scorer(profile.scorer).queries
        score_strata = profile.n_strata if "strata" in kinds else 0
        fit_strata = profile.fit_strata if profile.regresses else 0
        beside = _distinct(score_strata, fit_strata) + profile.n_held_out
        longest = profile.n_window if profile.window_tokens is None else profile.window_tokens
        window_tokens = min(longest, max(profile.n_window, 1, room - beside))
        n_queries = window_tokens
        if profile.window_queries is not None:
            n_queries = min(profile.window_queries, window_tokens)
        score_window = n_queries if "window" in kinds else 0
        fit_window = min(profile.fit_window, n_queries) if profile.regresses else 0
        return cls(
            window_tokens=window_tokens if score_window or fit_window else 0,
            score_window=score_window,
            score_strata=score_strata,
            fit_window=fit_window,
            fit_strata=fit_strata,
            n_held_out=profile.n_held_out,
        )

    @property
    def needed(self) -> int:
        """Positions that hold all without sharing."""
        return self.window_tokens + _distinct(self.score_strata, self.fit_strata) + self.n_held_out


def _distinct(score_strata: int, fit_strata: int) -> int:
    """The same number of strata is the same queries."""
    return score_strata + (fit_strata if fit_strata != score_strata else 0)


def _nearest_free(wanted: int, taken: set[int], allowed: range) -> int:
    return next(
        position
        for distance in range(len(allowed))
        for position in (wanted - distance, wanted + distance)
        if position in allowed and position not in taken
    )
