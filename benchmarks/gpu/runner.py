"""Runs the parts so that none takes the others with it.

After an illegal access a process can do nothing more on its GPU, and a kernel can hang. So on a GPU the parts
run in a child process; if it ends early or says nothing for too long, its part is reported and a new child
takes up the rest. On a CPU they run here.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Generator, Iterator, Mapping
from multiprocessing.connection import Connection

from benchmarks.gpu.compare import one_line
from benchmarks.gpu.rows import Aborted, Row
from benchmarks.gpu.setup import Setup

SILENCE_S = 120.0
"""Longest wait for a row: all there is to compile for one takes seconds."""

Part = Callable[[Setup], Iterator[Row]]


def run_here(setup: Setup, parts: Mapping[str, Part]) -> Iterator[Row]:
    """All parts in this process; one that raises is reported, the others go on."""
    for name, part in parts.items():
        try:
            yield from part(setup)
        except Exception as error:  # noqa: BLE001 - the row says what it was
            yield Aborted(name, one_line(error))


def run_in_children(
    setup: Setup, parts: Mapping[str, Part], *, silence_s: float = SILENCE_S
) -> Iterator[Row]:
    """All parts in order, in as many child processes as it takes."""
    left = list(parts)
    while left:
        finished = yield from _run_in_child(setup, {name: parts[name] for name in left}, silence_s)
        left = left[finished:]


def _run_in_child(setup: Setup, parts: Mapping[str, Part], silence_s: float) -> Generator[Row, None, int]:
    """Rows until the child ends; returns how many parts are done with, the one that ended it included."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_work, args=(setup, parts, sender), daemon=True)
    child.start()
    # Ours; the child's own end is what has to close when it ends.
    sender.close()
    names = list(parts)
    finished = 0
    reason = None
    while finished < len(names):
        if not receiver.poll(silence_s):
            reason = f"no row for {silence_s:g} s"
            break
        try:
            row: Row | None = receiver.recv()
        except EOFError:
            child.join()
            reason = f"its process ended with exit status {child.exitcode}"
            break
        if row is None:
            finished += 1
        else:
            yield row
    if reason is not None:
        child.kill()
    child.join()
    if reason is not None:
        yield Aborted(names[finished], reason)
        finished += 1
    return finished


def _work(setup: Setup, parts: Mapping[str, Part], rows: Connection) -> None:
    """In the child: every row as it comes, None behind each part. An exception ends the process: it may be
    the device that failed, and then nothing else can be told apart."""
    for part in parts.values():
        for row in part(setup):
            rows.send(row)
        rows.send(None)
