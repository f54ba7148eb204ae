"""When decoding over shared slots pays: ``python -m benchmarks.shared_decode``.

One layer's decode step in ``grkv_torch``, of requests that all read the same slots and a few of their own:
with the attention over the shared slots computed together, and one by one. The two take turns, so that drift
of the machine falls on both; a ratio is that of the medians. ``attention/shared.py`` has its
`LEAST_SAVED_SLOTS` from here.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

from benchmarks.serving.plots import new_figure
from benchmarks.serving.record import environment
from benchmarks.serving.tables import Table, markdown, rich_table
from grkv_sglang.attention import shared
from grkv_sglang.attention.torch_backend import GrkvTorchAttnBackend
from grkv_sglang.serving import detect_device

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
        least, shared.LEAST_SAVED_SLOTS = shared.LEAST_SAVED_SLOTS, 1 if together else 10**9
        started = time.perf_counter()
        backend.init_forward_metadata(batch)
        for layer in layers:
            backend.forward_decode(query, k, v, layer, batch)
        elapsed_s = time.perf_counter() - started
        shared.LEAST_SAVED_SLOTS = least
        return elapsed_s / BUFFERS

    return step


def main(
    members: Annotated[str, typer.Option(help="Requests that decode together, comma-separated.")] = "2,4,8",
    slots: Annotated[
        str, typer.Option(help="Slots that they share, comma-separated.")
    ] = "64,128,256,512,1024,4096",
    own_slots: Annotated[int, typer.Option(help="Slots of each request's own.")] = 40,
    repeats: Annotated[int, typer.Option(help="Pairs of steps, besides two to warm up.")] = 30,
    json_path: Annotated[Path | None, typer.Option("--json", help="Where the result goes.")] = None,
) -> None:
    """Time decode steps with and without sharing."""
    rows: list[dict[str, Any]] = []
    cases = [(int(m), int(s)) for m in members.split(",") for s in slots.split(",")]
    for n_members, n_slots in track(cases, "decode steps"):
        step = decode_step(n_members, n_slots, own_slots)
        pairs = [(step(True), step(False)) for _ in range(repeats + 2)][2:]
        together, apart = (statistics.median(times) for times in zip(*pairs, strict=True))
        rows.append(
            {
                "members": n_members, "slots": n_slots, "saved_slots": (n_members - 1) * n_slots,
                "together_ms": 1000 * together, "apart_ms": 1000 * apart, "ratio": together / apart,
            }
        )  # fmt: skip
    table = Table(
        "One layer's decode step, attention over shared slots together",
        ("requests", "shared slots", "reads spared, slots", "together, ms", "one by one, ms", "ratio"),
        tuple(
            (
                str(row["members"]), f"{row['slots']:,}", f"{row['saved_slots']:,}",
                f"{row['together_ms']:.2f}", f"{row['apart_ms']:.2f}", f"{row['ratio']:.2f}",
            )
            for row in rows
        ),
        f"Medians of {repeats} pairs, {own_slots} slots of each request's own; {HEADS} heads, {KV_HEADS} KV "
        f"heads, head size {HEAD_DIM}, fp32.",
    )  # fmt: skip
    Console().print(rich_table(table))
    if json_path is not None:
        result = {
            "environments": [environment(detect_device()).model_dump()], "own_slots": own_slots,
            "repeats": repeats, "rows": rows,
        }  # fmt: skip
        json_path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        json_path.with_suffix(".md").write_text(markdown([table]), encoding="utf-8")
        figure = new_figure(6, 3.6)
        axes = figure.subplots()
        for count in dict.fromkeys(row["members"] for row in rows):
            some = [row for row in rows if row["members"] == count]
            slots_of, ratios = ([row[name] for row in some] for name in ("slots", "ratio"))
            axes.plot(slots_of, ratios, "o-", label=f"{count} requests")
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("shared slots")
        axes.set_ylabel("step, together / one by one")
        axes.legend()
        figure.savefig(json_path.with_suffix(".png"), dpi=120)


if __name__ == "__main__":
    typer.run(main)
