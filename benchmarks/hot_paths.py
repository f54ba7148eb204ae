"""Where the time of a compression and of a warm request goes: ``python -m benchmarks.hot_paths``.

py-spy samples the scheduler's process, in which model, cache and core run, while documents that are cached
exactly are compressed, and again while requests are answered from the spans. A sample counts for the
innermost function on its stack that is ours or the model's (`OWNERS`): time in torch belongs to who called
it. Samples of a phase that pass through none of its files (`PHASES`) are left out: waiting, the scheduler's
own loop, HTTP.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import typer
from matplotlib.figure import Figure
from pydantic import Field
from transformers import AutoTokenizer

from benchmarks.serving.client import ServingError
from benchmarks.serving.options import Benchmark, Run, Settings, command_of, end_servers_on_sigterm
from benchmarks.serving.plots import new_figure
from benchmarks.serving.progress import progress_bar
from benchmarks.serving.quality import Quality
from benchmarks.serving.record import Frozen, Result
from benchmarks.serving.tables import Table
from benchmarks.texts import text_tokens
from grkv_sglang.demo.client import SglangClient
from grkv_sglang.serving import ServerSpec, detect_device, running_server

NAME = "hot-paths"
SHOWN_FUNCTIONS = 12
SAMPLER_STARTS_S = 60.0

PHASES = {
    "compression": ("grkv_sglang/cache/work.py",),
    "warm request": ("sglang/srt/model_executor/model_runner.py", "grkv_sglang/cache/grkv_cache.py"),
}
"""Phase -> files, one of which a sample has on its stack to count."""

OWNERS = ("grkv_sglang/", "grkv_kernels/", "sglang/srt/models/", "sglang/srt/layers/")
"""Folders whose functions are told apart."""

FRAME = re.compile(r"^(?P<function>.+) \((?P<path>[^()]*?)(?::\d+)?\)$")


class HotPathsSettings(Settings):
    """Quick mode."""

    chunk_tokens: int = Field(8192, ge=1, description="Tokens of a prefill chunk.")
    tokens: int = Field(4096, ge=1, description="Tokens of a document.")
    documents: int = Field(4, ge=1, description="Documents, besides one to warm up.")
    budget: float = Field(0.1, gt=0, le=1, description="Share of the tokens kept.")
    profile: str = Field("default", description="How prefixes are compressed.")
    requests: int = Field(6, ge=1, description="Warm requests per document.")
    output_tokens: int = Field(16, ge=1, description="Tokens of a warm request's answer.")
    samples_per_s: int = Field(200, ge=1, description="How often a stack is looked at.")


class FullHotPathsSettings(HotPathsSettings):
    """Full mode."""

    tokens: int = 8000
    documents: int = 8
    requests: int = 24


class Row(Frozen):
    """Samples of one function in one phase; `function` as ``file: name``."""

    phase: str
    function: str
    samples: int


class HotPathsResult(Result):
    """One part per phase."""

    settings: HotPathsSettings
    rows: list[Row] = Field(default_factory=list)

    def of(self, phase: str) -> list[Row]:
        """Most samples first."""
        return sorted((row for row in self.rows if row.phase == phase), key=lambda row: -row.samples)


def profile_of(stacks: str, entries: Sequence[str]) -> Counter[str]:
    """Samples by function.

    Args:
        stacks: py-spy's raw format: a line per stack, frames from outermost to innermost as
            ``function (path:line)`` with semicolons between them, then the number of its samples.
        entries: a stack counts if the path of one of its frames ends with one of these.
    """
    found: Counter[str] = Counter()
    for line in stacks.splitlines():
        text, _, count = line.rpartition(" ")
        frames = [match for frame in text.split(";") if (match := FRAME.match(frame))]
        if not any(frame["path"].endswith(tuple(entries)) for frame in frames):
            continue
        owned = [f for f in frames if any(owner in f["path"] for owner in OWNERS)]
        if owned:
            found[f"{_short(owned[-1]['path'])}: {owned[-1]['function']}"] += int(count)
    return found


def _short(path: str) -> str:
    """From the package on."""
    start = max(path.rfind(name) for name in ("grkv_sglang/", "grkv_kernels/", "sglang/srt/"))
    return path[start:]


def scheduler_of(server_pid: int) -> int:
    """Process id of the server's scheduler.

    Raises:
        ServingError: the server has none.
    """
    for process in psutil.Process(server_pid).children(recursive=True):
        if "scheduler" in process.name() or any("scheduler" in part for part in process.cmdline()):
            return process.pid
    raise ServingError(f"process {server_pid} has no child that is named a scheduler")


@contextmanager
def sampled(pid: int, path: Path, samples_per_s: int) -> Iterator[None]:
    """Sample a process for the length of a `with` block; its stacks are in `path` afterwards.

    Raises:
        ServingError: there is no py-spy, or it may not look into the process.
    """
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        raise ServingError("py-spy is not installed: pip install py-spy")
    command = [program, "record", "--pid", str(pid), "--rate", str(samples_per_s), "--format", "raw"]
    # A sampler that stops the process makes its threads wait for each other five times longer.
    command += ["--nonblocking", "--full-filenames"]
    log = path.with_suffix(".log")
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen([*command, "--output", str(path)], stdout=output, stderr=output)
    try:
        _wait_until_sampling(process, log)
        yield
    finally:
        process.send_signal(signal.SIGINT)  # it writes what it has and ends
        process.wait()
    if not path.exists():
        raise ServingError(f"py-spy wrote nothing: {log.read_text(encoding='utf-8')[-400:]}")


def _wait_until_sampling(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + SAMPLER_STARTS_S
    while "Sampling process" not in log.read_text(encoding="utf-8"):
        if process.poll() is not None or time.monotonic() > deadline:
            raise ServingError(
                f"py-spy did not start (it needs the right to trace processes: root, or ptrace_scope 0): "
                f"{log.read_text(encoding='utf-8')[-400:]}"
            )
        time.sleep(0.1)


def run(run: Run[HotPathsResult]) -> None:
    """Where the time of a compression and of a warm request goes, by function."""
    result = run.result
    settings = result.settings
    if all(phase in result.done for phase in PHASES):
        return
    result.rows.clear()
    result.done.clear()
    tokenizer = AutoTokenizer.from_pretrained(settings.model_path())
    text = text_tokens(tokenizer, settings.texts)
    count = settings.documents + 1
    documents = [[number, *(text[997 * number :] + text)[: settings.tokens - 1]] for number in range(count)]
    spec = ServerSpec(
        model_path=settings.model_path(),
        engine="grkv",
        log_path=run.log_folder / "server.log",
        max_total_tokens=(count + 1) * settings.tokens,
        chunked_prefill_size=settings.chunk_tokens,
        grkv_config={"triggers": "explicit", "budget": settings.budget},
        random_seed=settings.seed,
        device=detect_device(),
        dtype=settings.dtype,
    )
    compress = {"prefix_end_tokens": settings.tokens, "profile": settings.profile}
    with (
        running_server(spec, run.console) as server,
        SglangClient(server.base_url) as client,
        progress_bar(run.console) as progress,
        tempfile.TemporaryDirectory() as folder,
    ):
        pid = scheduler_of(server.pid)

        def compressed(document: list[int]) -> None:
            client.stream([*document, 9, 9], 1, options=compress)
            client.wait_for_span(document)

        def answered(document: list[int], number: int) -> None:
            client.stream([*document, 9, 9, 9 + number], settings.output_tokens)

        for document in progress.track(documents, description="prefill"):
            client.stream([*document, 7], 1, options={"mode": "exact"})
        compressed(documents[0])  # caches and allocators warm up
        answered(documents[0], 0)
        work: dict[str, list[Callable[[], None]]] = {
            "compression": [partial(compressed, document) for document in documents[1:]],
            "warm request": [
                partial(answered, document, number)
                for number in range(1, settings.requests + 1)
                for document in documents[1:]
            ],
        }
        for phase, calls in work.items():
            stacks = Path(folder) / "stacks.txt"
            with sampled(pid, stacks, settings.samples_per_s):
                for call in progress.track(calls, description=phase):
                    call()
            profile = profile_of(stacks.read_text(encoding="utf-8"), PHASES[phase])
            stacks.unlink()
            if not profile:
                raise ServingError(f"no sample of {phase} passed through {PHASES[phase]}")
            result.rows += [
                Row(phase=phase, function=function, samples=n) for function, n in profile.most_common()
            ]
            result.done.append(phase)
            run.save()


def tables(result: HotPathsResult, quality: Quality) -> list[Table]:
    """The functions with the most samples, one table per phase."""
    settings = result.settings
    per = {
        "compression": (settings.documents, "compression"),
        "warm request": (settings.documents * settings.requests, "request"),
    }
    found = []
    for phase in result.done:
        rows = result.of(phase)
        total = sum(row.samples for row in rows)
        times, unit = per[phase]
        ms = 1000 / settings.samples_per_s / times
        shown = [
            (f"`{row.function}`", f"{row.samples / total:.1%}", f"{row.samples * ms:,.1f}")
            for row in rows[:SHOWN_FUNCTIONS]
        ]
        left = sum(row.samples for row in rows[SHOWN_FUNCTIONS:])
        shown.append(("all others", f"{left / total:.1%}", f"{left * ms:,.1f}"))
        found.append(
            Table(
                f"Time of a {phase}, {settings.tokens:,} tokens",
                ("function", "share", f"ms per {unit}"),
                tuple(shown),
                f"{total:,} samples at {settings.samples_per_s} per second; {total * ms:,.0f} ms per {unit}. "
                "Time in torch counts for the function that called it.",
            )
        )
    return found


def figure(result: HotPathsResult) -> Figure:
    """Shares of the functions with the most samples, one panel per phase."""
    figure = new_figure(11, 4.2)
    panels = figure.subplots(1, len(PHASES), squeeze=False)[0]
    for panel, phase in zip(panels, PHASES, strict=True):
        rows = result.of(phase)
        total = sum(row.samples for row in rows) or 1
        shown = rows[:SHOWN_FUNCTIONS][::-1]
        names = [row.function.rpartition("/")[2] for row in shown]
        panel.barh(names, [100 * row.samples / total for row in shown])
        panel.tick_params(axis="y", labelsize=7)
        panel.set_xlabel(f"% of a {phase}")
    return figure


BENCHMARK = Benchmark(
    name=NAME,
    title="Hot paths",
    settings=HotPathsSettings,
    full=FullHotPathsSettings,
    result=HotPathsResult,
    run=run,
    tables=tables,
    figure=figure,
)

if __name__ == "__main__":
    end_servers_on_sigterm()
    typer.run(command_of(BENCHMARK))
