"""How long running requests wait while a document is compressed: ``python -m benchmarks.inter_token_gap``.

Eight requests decode. Into that come, in turn, an ordinary 512-token prefill chunk and the compression of a
4,000-token document whose exact KV is in the cache already. For each, the largest gap between two tokens of
any of the eight. The two are interleaved, so that drift of the machine falls on both alike.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import httpx
import matplotlib
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoTokenizer

from benchmarks.serving.client import generate_body, stream_events
from benchmarks.serving.record import environment
from benchmarks.texts import shipped_tokens
from grkv_sglang.model import ensure_model
from grkv_sglang.serving import ServerSpec, detect_device, running_server

matplotlib.use("Agg")
from matplotlib import pyplot as plt

STREAMS = 8
CHUNK_TOKENS = 512
STEADY_S = 3.0
"""Undisturbed decoding before and after each event."""


@dataclass(frozen=True)
class Event:
    """One disturbance. `gap_s`: the largest time between two tokens of one stream around it."""

    kind: str
    start_s: float
    end_s: float
    gap_s: float
    steady_gap_s: float


class Decoding:
    """Streams of one server and the times at which their tokens came."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self.arrivals: list[list[float]] = [[] for _ in range(STREAMS)]
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, prompts: list[list[int]], new_tokens: int) -> None:
        self._tasks = [
            asyncio.create_task(self._read(i, prompt, new_tokens)) for i, prompt in enumerate(prompts)
        ]
        while not all(len(times) > 3 for times in self.arrivals):
            await asyncio.sleep(0.1)

    async def _read(self, index: int, prompt: list[int], new_tokens: int) -> None:
        async for arrived_s, _ in stream_events(self._http, generate_body(prompt, new_tokens)):
            self.arrivals[index].append(arrived_s)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def largest_gap_s(self, start: float, end: float) -> float:
        """Between two tokens of one stream, the later of which came in ``[start, end]``."""
        return max(
            after - before
            for times in self.arrivals
            for before, after in pairwise(times)
            if start <= after <= end
        )


async def _generate(http: httpx.AsyncClient, prompt: list[int], options: dict[str, Any]) -> None:
    params = {"temperature": 0, "max_new_tokens": 1, "custom_params": {"grkv": options}}
    response = await http.post("/generate", json={"input_ids": prompt, "sampling_params": params})
    response.raise_for_status()


async def _compressions(http: httpx.AsyncClient) -> int:
    info = (await http.get("/grkv/state")).json()[0]
    return int(info["counters"]["compressions_done"])


def _window(text: list[int], number: int, tokens: int) -> list[int]:
    """Tokens of the text, from another place for every number, the first token telling them apart."""
    start = 997 * number % len(text)
    return [number, *(text[start:] + text)[: tokens - 1]]


async def _measure(base_url: str, text: list[int], tokens: int, repeats: int) -> tuple[list[Event], Decoding]:
    events: list[Event] = []
    async with httpx.AsyncClient(base_url=base_url, timeout=600) as http:
        for i in track(range(repeats), "prefilling the documents"):
            await _generate(http, [*_window(text, i, tokens), 7], {"mode": "exact"})
        decoding = Decoding(http)
        prompts = [text[500 * i : 500 * i + 40] for i in range(STREAMS)]
        await decoding.start(prompts, 8000)
        for i in track(range(repeats), "events"):
            for kind in ("prefill chunk", "compression"):
                quiet = time.perf_counter()
                await asyncio.sleep(STEADY_S)
                started = time.perf_counter()
                if kind == "prefill chunk":
                    await _generate(http, _window(text, 100 + i, CHUNK_TOKENS), {"mode": "exact"})
                else:
                    done = await _compressions(http)
                    # Served from the exact KV; the work begins when it is gone.
                    prompt = [*_window(text, i, tokens), 9, 9]
                    await _generate(http, prompt, {"prefix_end_tokens": tokens})
                    while await _compressions(http) == done:
                        await asyncio.sleep(0.05)
                await asyncio.sleep(1.0)  # the gap ends with the next token
                ended = time.perf_counter()
                events.append(
                    Event(
                        kind,
                        started,
                        ended,
                        decoding.largest_gap_s(started, ended),
                        decoding.largest_gap_s(quiet, started),
                    )
                )
        await decoding.stop()
    return events, decoding


def main(
    tokens: Annotated[int, typer.Option(help="Tokens of a document.")] = 4000,
    repeats: Annotated[int, typer.Option(help="Events of each kind.")] = 5,
    json_path: Annotated[Path | None, typer.Option("--json", help="Where the result goes.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Where the plot goes (.png).")] = None,
) -> None:
    """Measure on a server of its own."""
    console = Console()
    model = ensure_model()
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = shipped_tokens(tokenizer)
    with tempfile.TemporaryDirectory(prefix="grkv-gap-") as folder:
        spec = ServerSpec(
            model_path=model,
            engine="grkv",
            log_path=Path(folder) / "server.log",
            max_total_tokens=65536,
            chunked_prefill_size=CHUNK_TOKENS,
            grkv_config={"triggers": "explicit"},
            device=detect_device(),
        )
        with running_server(spec, console) as server:
            events, decoding = asyncio.run(_measure(server.base_url, text, tokens, repeats))
    median = {
        kind: statistics.median(event.gap_s for event in events if event.kind == kind)
        for kind in ("prefill chunk", "compression")
    }
    result = {
        "benchmark": "inter-token-gap",
        "environments": [environment(detect_device()).model_dump()],
        "tokens": tokens,
        "streams": STREAMS,
        "chunk_tokens": CHUNK_TOKENS,
        "steady_gap_s": statistics.median(event.steady_gap_s for event in events),
        "prefill_chunk_gap_s": median["prefill chunk"],
        "compression_gap_s": median["compression"],
        "ratio": median["compression"] / median["prefill chunk"],
        "ratio_of_the_worst": max(e.gap_s for e in events if e.kind == "compression")
        / max(e.gap_s for e in events if e.kind == "prefill chunk"),
        "events": [asdict(event) for event in events],
    }
    table = Table("event", "largest gap, median (s)", "worst (s)", title=f"{STREAMS} running decodes")
    table.add_row("none", f"{result['steady_gap_s']:.3f}", f"{max(e.steady_gap_s for e in events):.3f}")
    for kind, value in median.items():
        table.add_row(kind, f"{value:.3f}", f"{max(e.gap_s for e in events if e.kind == kind):.3f}")
    console.print(table)
    console.print(f"compression against prefill chunk: {result['ratio']:.2f} (medians)")
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=2) + "\n")
    if plot is not None:
        _plot(events, decoding, plot)


def _plot(events: list[Event], decoding: Decoding, path: Path) -> None:
    """Gap before each token over time, events shaded."""
    figure, axes = plt.subplots(figsize=(9, 3.5))
    zero = events[0].start_s
    for times in decoding.arrivals:
        gaps = [after - before for before, after in pairwise(times)]
        axes.plot([t - zero for t in times[1:]], gaps, ".", markersize=2, color="black")
    for event in events:
        color = "tab:orange" if event.kind == "compression" else "tab:blue"
        axes.axvspan(event.start_s - zero, event.end_s - zero, alpha=0.25, color=color, label=event.kind)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(dict(zip(labels, handles, strict=True)).values(), dict.fromkeys(labels))
    axes.set_xlabel("seconds")
    axes.set_ylabel("gap before a token (s)")
    axes.set_xlim(-STEADY_S, events[-1].end_s - zero + 1)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    typer.run(main)
