"""When decoding over shared slots pays: ``python -m benchmarks.shared_decode``.

One layer's decode step in ``grkv_torch``, of requests that all read the same slots and a few of their own:
with the attention over the shared slots computed together, and one by one. The two take turns, so that drift
of the machine falls on both; a ratio is that of the medians. ``attention/shared.py`` has its
`LEAST_SAVED_SLOTS` from here.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import typer
from matplotlib.figure import Figure
from pydantic import Field, field_validator
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

from benchmarks.serving.options import Benchmark, Run, Settings, command_of, split
from benchmarks.serving.plots import new_figure
from benchmarks.serving.progress import progress_bar
from benchmarks.serving.quality import Quality
from benchmarks.serving.record import Frozen, Result
from benchmarks.serving.tables import Table
from grkv_sglang.attention import shared
from grkv_sglang.attention.torch_backend import GrkvTorchAttnBackend

NAME = "shared-decode"
HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
"""SmolLM2-135M's."""
BUFFERS = 8
"""Layers that take turns, as in a model: no layer's KV stays in the processor's cache."""


def decode_step(members: int, shared_slots: int, own_slots: int) -> Callable[[bool], float]:
    """A step of such a batch, in seconds per layer; the argument says whether slots are read together."""
    per_request = shared_slots + own_slots
    pool = ReqToTokenPool(members, per_request, "cpu", False)
    slots = shared_slots + members * own_slots
    kv = MHATokenToKVPool(slots, 1, torch.float32, KV_HEADS, HEAD_DIM, BUFFERS, "cpu", False)
    for layer in range(BUFFERS):
        for buffer in kv.get_kv_buffer(layer):
            buffer.normal_()
    everywhere = (torch.randperm(slots) + 1).to(torch.int32)
    of_all, rest = everywhere[:shared_slots], everywhere[shared_slots:].view(members, own_slots)
    rows = torch.arange(1, members + 1)
    pool.req_to_token[rows] = torch.cat([of_all.expand(members, -1), rest], dim=1)
    backend = GrkvTorchAttnBackend(SimpleNamespace(device="cpu", req_to_token_pool=pool, token_to_kv_pool=kv))
    batch = SimpleNamespace(
        req_pool_indices=rows,
        seq_lens=torch.full((members,), per_request),
        out_cache_loc=rest[:, -1].long(),
        encoder_lens=None,
    )
    layers = [RadixAttention(HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, layer) for layer in range(BUFFERS)]
    query = torch.randn(members, HEADS * HEAD_DIM)
    k, v = torch.randn(2, members, KV_HEADS, HEAD_DIM)

    def step(together: bool) -> float:
        least = shared.LEAST_SAVED_SLOTS["cpu"]
        shared.LEAST_SAVED_SLOTS["cpu"] = 1 if together else 10**9
        started = time.perf_counter()
        backend.init_forward_metadata(batch)
        for layer in layers:
            backend.forward_decode(query, k, v, layer, batch)
        elapsed_s = time.perf_counter() - started
        shared.LEAST_SAVED_SLOTS["cpu"] = least
        return elapsed_s / BUFFERS

    return step


class SharedDecodeSettings(Settings):
    """Quick mode. Of the common settings only the seed is looked at: no model runs."""

    members: tuple[int, ...] = Field((2, 4, 8), description="Requests that decode together.")
    slots: tuple[int, ...] = Field((64, 128, 256, 512, 1024, 4096), description="Slots that they share.")
    own_slots: int = Field(40, ge=1, description="Slots of each request's own.")
    repeats: int = Field(30, ge=1, description="Pairs of steps, besides two to warm up.")

    @field_validator("members", "slots", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return split(value)


class FullSharedDecodeSettings(SharedDecodeSettings):
    """Full mode."""

    members: tuple[int, ...] = (2, 4, 8, 16, 32)
    slots: tuple[int, ...] = (64, 128, 256, 512, 1024, 4096, 16384)


class Row(Frozen):
    """A decode step, medians in milliseconds per layer."""

    members: int
    slots: int
    together_ms: float
    apart_ms: float

    @property
    def saved_slots(self) -> int:
        """Reads spared."""
        return (self.members - 1) * self.slots

    @property
    def ratio(self) -> float:
        """Together over one by one."""
        return self.together_ms / self.apart_ms


class SharedDecodeResult(Result):
    """One part per batch."""

    settings: SharedDecodeSettings
    rows: list[Row] = Field(default_factory=list)


def run(run: Run[SharedDecodeResult]) -> None:
    """Time decode steps of requests that share slots, with these slots read together and one by one."""
    result, settings = run.result, run.result.settings
    torch.manual_seed(settings.seed)
    cases = list(itertools.product(settings.members, settings.slots))
    with progress_bar(run.console) as progress:
        for members, slots in progress.track(cases, description="decode steps"):
            part = f"{members} requests, {slots} slots"
            if part in result.done:
                continue
            step = decode_step(members, slots, settings.own_slots)
            pairs = [(step(True), step(False)) for _ in range(settings.repeats + 2)][2:]
            together, apart = (1000 * statistics.median(times) for times in zip(*pairs, strict=True))
            result.rows.append(Row(members=members, slots=slots, together_ms=together, apart_ms=apart))
            result.done.append(part)
            run.save()


def tables(result: SharedDecodeResult, quality: Quality) -> list[Table]:
    """Every batch; attention is the same either way, so that no quality stands beside it."""
    settings = result.settings
    return [
        Table(
            "One layer's decode step, attention over shared slots together",
            ("requests", "shared slots", "reads spared, slots", "together, ms", "one by one, ms", "ratio"),
            tuple(
                (
                    str(row.members), f"{row.slots:,}", f"{row.saved_slots:,}",
                    f"{row.together_ms:.2f}", f"{row.apart_ms:.2f}", f"{row.ratio:.2f}",
                )
                for row in result.rows
            ),
            f"Medians of {settings.repeats} pairs, {settings.own_slots} slots of each request's own; "
            f"{HEADS} heads, {KV_HEADS} KV heads, head size {HEAD_DIM}, fp32.",
        )
    ]  # fmt: skip


def figure(result: SharedDecodeResult) -> Figure:
    """The ratio against the shared slots, one line per number of requests."""
    figure = new_figure(6, 3.6)
    axes = figure.subplots()
    for members in result.settings.members:
        some = [row for row in result.rows if row.members == members]
        axes.plot([row.slots for row in some], [row.ratio for row in some], "o-", label=f"{members} requests")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("shared slots")
    axes.set_ylabel("step, together / one by one")
    axes.legend()
    return figure


BENCHMARK = Benchmark(
    name=NAME,
    title="Shared-prefix decoding",
    settings=SharedDecodeSettings,
    full=FullSharedDecodeSettings,
    result=SharedDecodeResult,
    run=run,
    tables=tables,
    figure=figure,
)

if __name__ == "__main__":
    typer.run(command_of(BENCHMARK))
