"""What a compression costs beside the prefill of the same tokens: ``python -m benchmarks.overhead``.

For every length, as often as asked for: a text that the server has not seen is prefilled and kept exact, then
a request for the same prefix has it compressed. Lengths and profiles take turns, so that drift of the machine
falls on all alike; every share is that of one text's own prefill.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoTokenizer

from benchmarks.texts import shipped_tokens
from grkv_sglang.demo.client import SglangClient
from grkv_sglang.model import ensure_model
from grkv_sglang.serving import ServerSpec, detect_device, running_server

matplotlib.use("Agg")
from matplotlib import pyplot as plt

PARTS = ("probe", "pass", "select", "regress", "copy")


@dataclass(frozen=True)
class Row:
    """One text. `prefill_s`: until its first token; `compress_s` in all, `parts_s` of it by `PARTS`."""

    profile: str
    tokens: int
    prefill_s: float
    compress_s: float
    parts_s: dict[str, float]

    @property
    def share(self) -> float:
        return self.compress_s / self.prefill_s


def measure(
    client: SglangClient, text: Sequence[int], lengths: Sequence[int], profiles: Sequence[str], repeats: int
) -> list[Row]:
    """All rows, the first round of each length and profile left out: caches and allocators warm up in it."""
    rows: list[Row] = []
    plan = [(n, p) for _ in range(repeats + 1) for n in lengths for p in profiles]
    for number, (tokens, profile) in enumerate(track(plan, "texts")):
        client.flush_cache()
        start = 997 * number % len(text)
        prefix = [*text[start:], *text][:tokens]
        cold = client.stream([*prefix, 7], 1, options={"mode": "exact"})
        client.stream([*prefix, 9, 9], 1, options={"prefix_end_tokens": tokens, "profile": profile})
        span = client.wait_for_span(prefix)
        parts = {part: float(getattr(span, f"{part}_s")) for part in PARTS}
        rows.append(Row(profile, tokens, cold.ttft_s, span.compress_s, parts))
    return rows[len(lengths) * len(profiles) :]


def summarise(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Medians by profile and length, shares of the prefill."""
    found = []
    for profile, tokens in dict.fromkeys((row.profile, row.tokens) for row in rows):
        members = [row for row in rows if (row.profile, row.tokens) == (profile, tokens)]
        shares = sorted(row.share for row in members)
        found.append(
            {
                "profile": profile,
                "tokens": tokens,
                "texts": len(members),
                "prefill_s": statistics.median(row.prefill_s for row in members),
                "compress_s": statistics.median(row.compress_s for row in members),
                "share": statistics.median(shares),
                "share_min": shares[0],
                "share_max": shares[-1],
                "parts": {
                    part: statistics.median(row.parts_s[part] / row.prefill_s for row in members)
                    for part in PARTS
                },
            }
        )
    return found


def main(
    lengths: Annotated[str, typer.Option(help="Tokens of the prefixes.")] = "1536,4096,8000",
    profiles: Annotated[str, typer.Option(help="Profiles.")] = "default",
    budget: Annotated[float, typer.Option(help="Share of the tokens kept.")] = 0.1,
    repeats: Annotated[int, typer.Option(help="Texts per length and profile, besides one to warm up.")] = 5,
    json_path: Annotated[Path | None, typer.Option("--json", help="Where the result goes.")] = None,
) -> None:
    """Measure on a server of its own."""
    console = Console()
    model = ensure_model()
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = shipped_tokens(tokenizer)
    wanted = [int(length) for length in lengths.split(",")]
    with tempfile.TemporaryDirectory(prefix="grkv-overhead-") as folder:
        spec = ServerSpec(
            model_path=model,
            engine="grkv",
            log_path=Path(folder) / "server.log",
            max_total_tokens=3 * max(wanted),
            grkv_config={"triggers": "explicit", "budget": budget},
            device=detect_device(),
        )
        with running_server(spec, console) as server, SglangClient(server.base_url) as client:
            rows = measure(client, text, wanted, profiles.split(","), repeats)
    summary = summarise(rows)
    table = Table("profile", "tokens", "prefill (s)", "compress (s)", "share", *PARTS)
    for line in summary:
        table.add_row(
            line["profile"], f"{line['tokens']}", f"{line['prefill_s']:.2f}", f"{line['compress_s']:.2f}",
            f"{line['share']:.1%} ({line['share_min']:.1%}–{line['share_max']:.1%})",
            *(f"{line['parts'][part]:.1%}" for part in PARTS),
        )  # fmt: skip
    console.print(table)
    if json_path is not None:
        result = {
            "model": model.name,
            "budget": budget,
            "summary": summary,
            "rows": [asdict(r) for r in rows],
        }
        json_path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        _plot(summary, json_path.with_suffix(".png"))


def _plot(summary: Sequence[dict[str, Any]], path: Path) -> None:
    """Stacked shares of the prefill."""
    figure, axes = plt.subplots(figsize=(7, 3.5))
    labels = [f"{line['profile']}\n{line['tokens']}" for line in summary]
    bottom = [0.0] * len(summary)
    for part in PARTS:
        heights = [line["parts"][part] for line in summary]
        axes.bar(labels, heights, bottom=bottom, label=part)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axes.set_ylabel("share of the prefill")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    typer.run(main)
