"""A kernel's outputs beside what they should be: one row each, whatever happens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.rows import Check
from benchmarks.gpu.setup import Setup

Outputs = Callable[[], Sequence[Tensor]]


@dataclass(frozen=True)
class Case:
    """One launch.

    Attributes:
        name: which kernel.
        case: on what.
        tolerances: of each output, by name, in order.
        actual: computes the outputs.
        expected: computes what they should be, by who says so.
    """

    name: str
    case: str
    tolerances: Mapping[str, float]
    actual: Outputs
    expected: Mapping[str, Outputs]


def rows_of(setup: Setup, part: str, case: Case) -> Iterator[Check]:
    """Run a case and everything it is compared with.

    Raises:
        RuntimeError: the device no longer answers, so that nothing can be computed in this process.
    """
    actual, error = _attempt(setup, case.actual)
    for against, compute in case.expected.items():
        expected: Sequence[Tensor] = ()
        failure = error
        if failure is None:
            expected, failure = _attempt(setup, compute)
        for index, (output, tolerance) in enumerate(case.tolerances.items()):
            worst, problem = math.nan, failure
            if problem is None:
                a, e = actual[index], expected[index]
                if a.shape == e.shape:
                    worst = worst_error(a, e)
                else:
                    problem = f"expected an output {list(e.shape)}, got {list(a.shape)}"
            yield Check(
                part, f"{case.name}: {output}", case.case, against,
                worst if math.isfinite(worst) else None, tolerance, worst <= tolerance, problem,
            )  # fmt: skip
    # Outside of what is caught: a lost context ends the part.
    setup.synchronize()


def _attempt(setup: Setup, compute: Outputs) -> tuple[Sequence[Tensor], str | None]:
    try:
        outputs = compute()
        setup.synchronize()
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises is its row's failure
        return (), one_line(error)
    return outputs, None


def one_line(error: BaseException) -> str:
    """An exception for a table."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def worst_error(actual: Tensor, expected: Tensor) -> float:
    """The largest `|a - e| / (|e| + mean |e|)`: relative, but not to numbers near 0. NaN if any number is.

    Equal infinities are no error, others an infinite one or NaN. Both tensors have one shape.
    """
    finite = expected.isfinite()
    floor = torch.where(finite, expected, 0).abs().sum(dtype=torch.float64) / finite.sum().clamp(min=1)
    worst = torch.zeros((), dtype=torch.float64, device=actual.device)
    # One at a time: in float64, all at once could be most of a card's memory.
    for a, e in zip(actual, expected, strict=True):
        if not a.numel():
            continue
        difference = (a.double() - e.double()).abs() / (e.double().abs() + floor)
        worst = torch.maximum(worst, torch.where(a.double() == e.double(), 0.0, difference).max())
    return float(worst)
