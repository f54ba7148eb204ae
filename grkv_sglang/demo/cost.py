"""The demo's statistics: how much longer one server takes than another, from paired times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import t as student_t


@dataclass(frozen=True)
class RelativeCost:
    """Relative extra time (0.01 is one per cent), from paired measurements."""

    mean: float
    median: float
    upper_95: float
    """One-sided upper 95% bound of the mean."""


def relative_cost(times_s: Sequence[float], reference_s: Sequence[float]) -> RelativeCost:
    """Cost of `times_s` over `reference_s`, pair by pair: Student's t on the logarithm of the ratios.

    The logarithm because a ratio and its inverse should weigh the same.

    Raises:
        ValueError: fewer than two pairs, lists of different lengths, or a time that is not positive.
    """
    if len(times_s) != len(reference_s) or len(times_s) < 2:
        raise ValueError(f"need two or more pairs, got {len(times_s)} and {len(reference_s)} times")
    if min(*times_s, *reference_s) <= 0:
        raise ValueError("times must be positive")
    logs = [math.log(time / reference) for time, reference in zip(times_s, reference_s, strict=True)]
    mean = statistics.fmean(logs)
    standard_error = statistics.stdev(logs) / math.sqrt(len(logs))
    upper = mean + float(student_t.ppf(0.95, len(logs) - 1)) * standard_error
    return RelativeCost(math.expm1(mean), math.expm1(statistics.median(logs)), math.expm1(upper))
