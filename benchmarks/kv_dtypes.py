"""What a narrower KV pool costs, with and without compression: ``python -m benchmarks.kv_dtypes``.

Each document is prefilled once by the model in float32; its KV is then held in each dtype and compressed from
there, and the text that follows the document is read behind it. The loss is told from the full cache of the
same pool (what compression costs) and from the full float32 cache (what pool and compression cost together).
No server runs. Scales are 1, as in SGLang for a checkpoint that brings none.
"""

from __future__ import annotations

import json
import platform
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from benchmarks.fidelity.host import Compressed, Host
from benchmarks.fidelity.measures import deviation
from grkv_sglang.core import STORAGE_DTYPES, Storage, get_profile, slots_for_budget
from grkv_sglang.demo.documents import load_documents
from grkv_sglang.model import ensure_model


@dataclass(frozen=True)
class Row:
    """One document in one dtype at one budget; budget 1 is the full cache.

    Attributes:
        document, dtype, budget, slots: which, `slots` per KV head.
        quality: `1 - relative attention-output error` on held-out queries against the pool's own full cache;
            `quality_selected`: with the selected tokens as they were.
        kl: mean KL(full cache of the same pool || this) per token of the continuation, nats.
        kl_float32: the same from the full float32 cache.
        top1_float32: share of tokens at which both find the same token likeliest.
    """

    document: str
    dtype: str
    budget: float
    slots: int
    quality: float
    quality_selected: float
    kl: float
    kl_float32: float
    top1_float32: float


def measure(
    host: Host, name: str, ids: list[int], tokens: int, budgets: list[float], profile_name: str
) -> list[Row]:
    """All dtypes and budgets of a document; the continuation is ``ids[tokens:]``."""
    profile, continuation = get_profile(profile_name), ids[tokens:]
    came = torch.tensor(continuation[1:])

    def read(cache: Compressed) -> Tensor:
        return host.log_probs(cache, [continuation], [1])[0]

    rows, exact = [], None
    for dtype in STORAGE_DTYPES:  # float32 comes first
        host.storage = Storage(dtype)
        prefix = host.prefill(ids[:tokens])
        full = read(host.full(prefix))
        exact = full if exact is None else exact
        for budget in (1.0, *budgets):
            n_slots = slots_for_budget(tokens, share=budget, tokens=None)
            cache = host.full(prefix) if budget == 1 else host.compress(prefix, profile, n_slots)
            found = full if budget == 1 else read(cache)
            of_pool, of_float32 = deviation(full, found, came), deviation(exact, found, came)
            rows.append(
                Row(
                    document=name,
                    dtype=str(dtype).removeprefix("torch."),
                    budget=budget,
                    slots=n_slots,
                    quality=1 - cache.error_after,
                    quality_selected=1 - cache.error_before,
                    kl=float(of_pool.kl.mean()),
                    kl_float32=float(of_float32.kl.mean()),
                    top1_float32=float(of_float32.top1.mean()),
                )
            )
    return rows


def means(rows: list[Row]) -> list[Row]:
    """Over the documents."""
    counts = Counter((row.dtype, row.budget) for row in rows)
    found = []
    for (dtype, budget), count in counts.items():
        here = [row for row in rows if (row.dtype, row.budget) == (dtype, budget)]
        numbers = {
            field: sum(getattr(row, field) for row in here) / count
            for field in ("quality", "quality_selected", "kl", "kl_float32", "top1_float32")
        }
        found.append(Row(f"mean of {count}", dtype, budget, here[0].slots, **numbers))
    return found


def main(
    tokens: Annotated[int, typer.Option(help="Of the compressed documents.")] = 1024,
    continuation: Annotated[int, typer.Option(help="Tokens that are read behind a document.")] = 256,
    budgets: Annotated[str, typer.Option(help="Kept shares, comma-separated.")] = "0.1,0.3",
    profile: Annotated[str, typer.Option(help="Compression profile.")] = "default",
    model: Annotated[
        Path | None, typer.Option(help="Checkpoint folder; the demo's model unless given.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Quality and loss of compressed prefixes in KV pools of every dtype that is served."""
    host = Host(model or ensure_model())
    shares = [float(budget) for budget in budgets.split(",")]
    rows: list[Row] = []
    for document in track(load_documents(), "documents"):
        ids = list(host.tokenizer.encode(document.text))
        # Not the first page: contents and prefaces repeat themselves.
        start = min(1000, len(ids) - tokens - continuation)
        rows += measure(
            host, document.name, ids[start : start + tokens + continuation], tokens, shares, profile
        )
    table = Table("dtype", "budget", "quality", "selected", "KL to the pool's", "KL to float32's", "top-1")
    for row in means(rows):
        table.add_row(
            row.dtype, f"{row.budget:.0%}", f"{row.quality:.3f}", f"{row.quality_selected:.3f}",
            f"{row.kl:.4f}", f"{row.kl_float32:.4f}", f"{row.top1_float32:.1%}",
        )  # fmt: skip
    Console().print(table)
    if out is not None:
        figures = {
            "tokens": tokens,
            "continuation": continuation,
            "profile": profile,
            "torch": torch.__version__,
            "machine": platform.platform(),
            "rows": [asdict(row) for row in [*means(rows), *rows]],
        }
        out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
