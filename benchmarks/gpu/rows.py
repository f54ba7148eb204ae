"""What a run leaves: one row for each check, measurement and figure, and for whatever did not happen."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One output of one kernel, beside what it should be.

    Attributes:
        part, name, case: where in the run, which output, on what.
        against: what it was compared with.
        worst_error: see `compare.worst_error`; None where there is none (not finite, or an exception).
        tolerance: the largest error that passes.
        passed: `worst_error <= tolerance`.
        error: the exception in place of a result.
    """

    part: str
    name: str
    case: str
    against: str
    worst_error: float | None
    tolerance: float
    passed: bool
    error: str | None = None

    @property
    def failed(self) -> bool:
        return not self.passed

    def line(self) -> str:
        found = "no finite error" if self.worst_error is None else f"{self.worst_error:.1e}"
        verdict = "ok  " if self.passed else "FAIL"
        return (
            f"{verdict} {self.part}: {self.name} [{self.case}] against {self.against}: "
            f"{found}, allowed {self.tolerance:.1e}{f': {self.error}' if self.error else ''}"
        )


@dataclass(frozen=True)
class Measurement:
    """One action, timed.

    Attributes:
        part, name, case: where in the run, what, on what.
        median_ms, fastest_ms, slowest_ms: of `repeats`; NaN if it failed.
        bound_ms: the least that the bytes it has to move take at the measured bandwidth; None if not asked.
        peak_mib: device memory beyond what was there before; None on a CPU.
        error: the exception in place of times.
    """

    part: str
    name: str
    case: str
    median_ms: float
    fastest_ms: float
    slowest_ms: float
    repeats: int
    bound_ms: float | None = None
    peak_mib: float | None = None
    error: str | None = None

    @property
    def failed(self) -> bool:
        return self.error is not None

    @property
    def bound_share(self) -> float | None:
        """How near the bound it came: 1 is at it."""
        if self.bound_ms is None or not self.median_ms > 0:
            return None
        return self.bound_ms / self.median_ms

    def line(self) -> str:
        where = f"{self.part}: {self.name} [{self.case}]"
        if self.error is not None:
            return f"FAIL {where}: {self.error}"
        bound = "" if self.bound_share is None else f", {self.bound_share:.0%} of the byte bound"
        memory = "" if self.peak_mib is None else f", {self.peak_mib:.0f} MiB"
        return (
            f"time {where}: {self.median_ms:.3f} ms "
            f"({self.fastest_ms:.3f} to {self.slowest_ms:.3f}){bound}{memory}"
        )


@dataclass(frozen=True)
class Figure:
    """A number that follows from measurements."""

    part: str
    name: str
    case: str
    value: float
    unit: str

    @property
    def failed(self) -> bool:
        return False

    def line(self) -> str:
        return f"     {self.part}: {self.name} [{self.case}] = {self.value:.4g} {self.unit}"


@dataclass(frozen=True)
class Skipped:
    """What was left out, and what it would need."""

    part: str
    name: str
    needs: str

    @property
    def failed(self) -> bool:
        return False

    def line(self) -> str:
        return f"skip {self.part}: {self.name}, needs {self.needs}"


@dataclass(frozen=True)
class Aborted:
    """A part that ended before its last row."""

    part: str
    reason: str

    @property
    def failed(self) -> bool:
        return True

    def line(self) -> str:
        return f"FAIL {self.part} ended early: {self.reason}"


Row = Check | Measurement | Figure | Skipped | Aborted


def failed_measurement(part: str, name: str, case: str, error: str) -> Measurement:
    """What stands in place of times."""
    return Measurement(part, name, case, math.nan, math.nan, math.nan, 0, error=error)
