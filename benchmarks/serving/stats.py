"""Means and ratios with bootstrap intervals. Seeds are fixed: the same numbers give the same intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95% bootstrap interval (both ends of a two-sided one)."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        digits = 2 if self.value >= 0.1 else 3
        return f"{self.value:.{digits}f} ({self.low:.{digits}f}–{self.high:.{digits}f})"


def mean_interval(values: Sequence[float], seed: int = 0) -> Interval:
    """The mean, values resampled.

    Raises:
        ValueError: there are no values.
    """
    array = _array(values)
    picks = _picks(len(array), seed)
    return _interval(float(array.mean()), array[picks].mean(axis=1))


def ratio_of_means(above: Sequence[float], below: Sequence[float], seed: int = 0) -> Interval:
    """Mean of `above` over mean of `below`, each resampled by itself.

    Raises:
        ValueError: one of them is empty, or `below` has a negative value or only zeros.
    """
    top, bottom = _array(above), _positive(below)
    tops = top[_picks(len(top), seed)].mean(axis=1)
    bottoms = bottom[_picks(len(bottom), seed + 1)].mean(axis=1)
    return _interval(float(top.mean() / bottom.mean()), _divided(tops, bottoms))


def paired_ratio(above: Sequence[float], below: Sequence[float], seed: int = 0) -> Interval:
    """Mean of `above` over mean of `below`, pairs resampled together.

    Raises:
        ValueError: the lengths differ, they are empty, or `below` has a negative value or only zeros.
    """
    top, bottom = _array(above), _positive(below)
    if len(top) != len(bottom):
        raise ValueError(f"pairs need lists of one length, got {len(top)} and {len(bottom)}")
    picks = _picks(len(top), seed)
    return _interval(
        float(top.mean() / bottom.mean()), _divided(top[picks].mean(axis=1), bottom[picks].mean(axis=1))
    )


def paired_percentile_ratio(
    above: Sequence[float], below: Sequence[float], percent: float, seed: int = 0
) -> Interval:
    """A percentile of `above` over that of `below`, pairs resampled together.

    Raises:
        ValueError: as `paired_ratio`.
    """
    top, bottom = _array(above), _positive(below)
    if len(top) != len(bottom):
        raise ValueError(f"pairs need lists of one length, got {len(top)} and {len(bottom)}")
    picks = _picks(len(top), seed)
    ratios = _divided(
        np.percentile(top[picks], percent, axis=1), np.percentile(bottom[picks], percent, axis=1)
    )
    return _interval(float(np.percentile(top, percent) / np.percentile(bottom, percent)), ratios)


def percentile(values: Sequence[float], percent: float) -> float:
    """By linear interpolation, as numpy's default."""
    return float(np.percentile(_array(values), percent))


def _array(values: Sequence[float]) -> np.ndarray:
    if len(values) == 0:
        raise ValueError("expected at least one value, got none")
    return np.asarray(values, dtype=np.float64)


def _positive(values: Sequence[float]) -> np.ndarray:
    array = _array(values)
    if array.min() < 0 or array.max() == 0:
        raise ValueError(
            "a ratio needs values below that are not negative and not all 0, "
            f"got {array.min()} to {array.max()}"
        )
    return array


def _picks(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))


def _divided(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Infinite where a resample of mostly zeros has nothing below."""
    with np.errstate(divide="ignore"):
        return above / below


def _interval(value: float, resampled: np.ndarray) -> Interval:
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(resampled, [tail, 100 - tail])
    return Interval(value, float(low), float(high))
