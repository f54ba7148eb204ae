"""Times of actions: medians, after warming up, with the card's L2 cache emptied before each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.compare import one_line
from benchmarks.gpu.rows import Measurement, Row, Skipped, failed_measurement
from benchmarks.gpu.setup import Setup

Action = Callable[[], object]

_LEAST_FLUSH_BYTES = 2**27


@dataclass(frozen=True)
class Step:
    """Something to time; `graph` and `bound_ms` as in `measure`."""

    name: str
    action: Action
    graph: bool = False
    bound_ms: float | None = None


def timed(
    setup: Setup, part: str, case: str, steps: Iterable[Step], medians_ms: dict[str, float]
) -> Iterator[Row]:
    """A row for each step, and into `medians_ms` the median of each that ran. What the budget has no time for
    is skipped."""
    for step in steps:
        if setup.out_of_time():
            yield Skipped(part, f"{step.name} [{case}]", "time to begin within --budget-s")
            continue
        row = measure(setup, part, step.name, case, step.action, graph=step.graph, bound_ms=step.bound_ms)
        if not row.failed:
            medians_ms[step.name] = row.median_ms
        yield row


def measure(
    setup: Setup,
    part: str,
    name: str,
    case: str,
    action: Action,
    *,
    graph: bool = False,
    bound_ms: float | None = None,
) -> Measurement:
    """Time an action `setup.sizes.repeats` times.

    Args:
        setup: device and repeats.
        part, name, case: of the row.
        action: what to time; its result is dropped.
        graph: capture it in a CUDA graph and time the replays, as a decode step runs in a server, so that the
            host's time per launch is left out. It must not wait for the device. Ignored on a CPU.
        bound_ms: what the row is compared with.

    Raises:
        RuntimeError: the device no longer answers.
    """
    if graph and setup.on_gpu:
        case = f"{case}, graph replays"
    try:
        times_ms, peak_mib = _on_gpu(setup, action, graph) if setup.on_gpu else (_on_cpu(setup, action), None)
        row = Measurement(
            part, name, case, statistics.median(times_ms), min(times_ms), max(times_ms), len(times_ms),
            bound_ms, peak_mib,
        )  # fmt: skip
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises is its row's failure
        row = failed_measurement(part, name, case, one_line(error))
    # Outside of what is caught: a lost context ends the part.
    setup.synchronize()
    return row


def copy_bandwidth(setup: Setup, part: str) -> tuple[Measurement, float]:
    """The row of a large copy within the device, and bytes per second, those read plus those written.

    Raises:
        RuntimeError: the copy failed.
    """
    n_bytes = setup.sizes.copy_bytes
    source = torch.randint(-128, 127, (n_bytes,), dtype=torch.int8, device=setup.device)
    target = torch.empty_like(source)
    row = measure(setup, part, "copy", f"{n_bytes / 2**20:.3g} MiB", lambda: target.copy_(source))
    if row.error is not None:
        raise RuntimeError(f"no bandwidth, so no byte bounds: {row.error}")
    return row, 2 * n_bytes / (row.median_ms / 1e3)


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """Matrix products of float32 numbers at "highest" (float32) or "high" (TF32) precision."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _on_cpu(setup: Setup, action: Action) -> list[float]:
    times_ms = []
    for _ in range(setup.sizes.warmups):
        action()
    for _ in range(setup.sizes.repeats):
        started = time.perf_counter()
        action()
        times_ms.append((time.perf_counter() - started) * 1e3)
    return times_ms


def _on_gpu(setup: Setup, action: Action, graph: bool) -> tuple[list[float], float]:
    for _ in range(setup.sizes.warmups):
        action()
    torch.cuda.synchronize(setup.device)
    torch.cuda.reset_peak_memory_stats(setup.device)
    before = torch.cuda.memory_allocated(setup.device)
    action()
    torch.cuda.synchronize(setup.device)
    peak_mib = (torch.cuda.max_memory_allocated(setup.device) - before) / 2**20
    run = _captured(action) if graph else action
    flush = _larger_than_l2(setup)
    events = []
    for _ in range(setup.sizes.repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # Keeps the card busy while the host launches the action, too.
        flush.zero_()
        start.record()
        run()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize(setup.device)
    return [start.elapsed_time(end) for start, end in events], peak_mib


def _captured(action: Action) -> Action:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()

    def replay() -> None:
        graph.replay()

    return replay


def _larger_than_l2(setup: Setup) -> Tensor:
    l2_bytes = torch.cuda.get_device_properties(setup.device).L2_cache_size
    return torch.empty(max(4 * l2_bytes, _LEAST_FLUSH_BYTES), dtype=torch.int8, device=setup.device)
