"""All tables of docs/quality.md: ``python -m benchmarks.fidelity.study``.

Runs the fidelity benchmark for every table (what is in the JSON files already is not run again) and compares,
paired over documents: a selection with and without the regression, `best` and `default` with kvpress, and
`default` with one part taken out or changed at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.fidelity.__main__ import Options, benchmark, default_texts, load_rows
from benchmarks.fidelity.methods import Method, parse_methods
from benchmarks.fidelity.report import Ratio, markdown_table, paired_ratio, plot, summarise, values_by_case
from benchmarks.fidelity.run import Row
from benchmarks.peers import PEERS
from grkv_sglang.model import ensure_model

console = Console()

PRIMARY = "default,best"
PARTS = ("main", "peers", "pairs", "controls", "ablation", "others")
PAIRS = ("question_mass~snapkv_onward~snapkv_onward", "snapkv", "expected_attention", "kvzip")
"""Selections that are measured with and without the regression of `default`; the first is its own."""
OTHERS = (
    "paper", "release", "adakv", "critical_adakv", "pyramidkv", "kvzip_per_head", "h2o", "kvzip+snapkv",
    "merge:cam", "merge:d2o", "merge:asymkv",
)  # fmt: skip
BEST_COPY = "best[value_step=false;key_step=false]"
ABLATION = {
    "value step only": "default[key_step=false]",
    "key step only": "default[value_step=false]",
    "no guard": "default[guard=false]",
    "guard on a quarter held out": "default[guard_share=0.25]",
    "no caps": "default[cap_k=none;cap_v=none]",
    "caps four times as wide": "default[cap_k=0.1;cap_v=0.4]",
    "ridge 0.1": "default[lambda_k=0.1;lambda_v=0.1]",
    "ridge 0.001": "default[lambda_k=0.001;lambda_v=0.001]",
    "no fixed share": "default[fixed_share=0.0]",
    "16 iterations of the key step": "default[cg_iterations=16]",
    "scores not carried on": "default[scorer=question_mass~snapkv~snapkv]",
    "selects by the last 32 queries": "default[window_tokens=32]",
    "selects by the last 128 queries": "default[window_tokens=128]",
    "selects by 64 of the last 128 queries": "default[window_tokens=128;window_queries=64]",
    "fits the window only": "default[fit_questions=0]",
    "fits the requests only": "default[fit_window=0]",
    "fits 24 strata only": "default[fit_window=0;fit_questions=0;fit_strata=24]",
    "fits 24 strata too": "default[fit_strata=24]",
}
WIDE_PEERS = ("snapkv", "criticalkv", "expected_attention", "kvzip_even")
"""Measured at every budget; the others at the smallest."""
EVEN_PEERS = tuple(name for name, peer in PEERS.items() if peer.storage == "even")
CHEAP_PEERS = tuple(name for name in EVEN_PEERS if not PEERS[name].extra_prefill)
MEASURES = ("continuation", "answers")


def runs(selections: Path, wanted: Sequence[str]) -> list[tuple[Method, float]]:
    """What is measured: every method at its budgets, the parts in the order of `PARTS`."""
    wide, narrow = (0.1, 0.2, 0.3, 0.5), (0.1, 0.3)
    pairs = ",".join(f"{name},{name}/grkv" for name in PAIRS[1:])
    rest = ",".join(f"peer:{name}" for name in PEERS if name not in WIDE_PEERS)
    tables: dict[str, list[tuple[str, tuple[float, ...]]]] = {
        "main": [(PRIMARY, wide), (f"copy,{BEST_COPY}", narrow)],
        "peers": [(",".join(f"peer:{name}" for name in WIDE_PEERS), wide)],
        "pairs": [(pairs, narrow)],
        "controls": [(rest, (0.1,))],
        "ablation": [(",".join(ABLATION.values()), (0.1,))],
        "others": [(",".join(OTHERS), (0.1,))],
    }
    return [
        (method, budget)
        for part in PARTS
        if part in wanted
        for text, budgets in tables[part]
        for method in parse_methods(text, selections)
        for budget in budgets
    ]


def study(
    out: Annotated[Path, typer.Option(help="Folder for JSON files and tables.")] = Path("benchmarks/results"),
    texts: Annotated[list[Path] | None, typer.Option(help="As for benchmarks.fidelity.")] = None,
    contexts: Annotated[str, typer.Option(help="Tokens of the spans.")] = "2048,4096",
    documents: Annotated[int, typer.Option(help="Excerpts per length.")] = 12,
    filler: Annotated[int, typer.Option(help="Filler documents per length.")] = 12,
    part: Annotated[str, typer.Option("--parts", help=f"Out of {', '.join(PARTS)}.")] = ",".join(PARTS),
    first: Annotated[int | None, typer.Option(help="Only the first so many documents, no filler.")] = None,
    report_only: Annotated[bool, typer.Option("--report-only", help="Tables of what is there.")] = False,
    peer_folder: Annotated[Path | None, typer.Option(help="Where kvpress's selections are kept.")] = None,
) -> None:
    """Run what is missing, then write the tables."""
    for context in contexts.split(","):
        path = out / f"fidelity-{context}.json"
        options = Options(
            texts=texts or default_texts(), contexts=[int(context)], continuation=128, documents=documents,
            filler=filler, questions=6, answer_tokens=40, facts=2, seed=0, model=ensure_model(), device="cpu",
            dtype="float32", out=path, peer_folder=peer_folder, served=False,
        )  # fmt: skip
        if not report_only:
            wanted = runs(options.selections, part.split(","))
            ours = [(m, b) for m, b in wanted if m.name in PRIMARY.split(",")]
            benchmark(options, wanted, filler_runs=ours, first=first)
        rows = load_rows(path, None)
        text = "\n".join(report(rows, context))
        (out / f"quality-{context}.md").write_text(text, encoding="utf-8")
        shown = [s for s in summarise(rows) if s.method in PRIMARY or s.method.startswith("peer:")]
        plot(shown, out / f"quality-{context}.png", f"{options.model.name}, spans of {context} tokens")
        console.print(text, markup=False)


def report(rows: Sequence[Row], context: str) -> Iterator[str]:
    """All tables of one span length as Markdown."""
    names = {row.method for row in rows}
    documents = {row.case for row in rows if row.kind != "filler"}
    yield f"## {context} tokens, {len(documents)} documents\n"
    yield "### All methods\n"
    yield markdown_table(summarise(rows))
    yield "### The same selection with and without the regression: ratio of mean KL (95% interval)\n"
    pairs = [(PAIRS[0], "copy", "default"), ("best's", BEST_COPY, "best")]
    pairs += [(name, name, f"{name}/grkv") for name in PAIRS[1:]]
    yield ratio_table(
        rows,
        [(label, after, before) for label, before, after in pairs if {before, after} <= names],
        (0.1, 0.3),
    )
    yield "### `default` with one part changed, against `default`: ratio of mean KL (95% interval)\n"
    yield ratio_table(
        rows, [(label, name, "default") for label, name in ABLATION.items() if name in names], (0.1,)
    )
    for ours, theirs in (("best", EVEN_PEERS), ("default", CHEAP_PEERS)):
        present = [f"peer:{name}" for name in theirs if f"peer:{name}" in names]
        if ours in names and present:
            yield f"### `{ours}` against kvpress's methods that a server can store: ratio of mean KL\n"
            yield ratio_table(rows, [(name, ours, name) for name in present], (0.1, 0.2, 0.3, 0.5))


def ratio_table(
    rows: Sequence[Row], compared: Sequence[tuple[str, str, str]], budgets: Sequence[float]
) -> str:
    """Lines of (label, first method, second method): mean KL of the first over that of the second."""
    columns = [(measure, budget) for measure in MEASURES for budget in budgets]
    lines = ["| | " + " | ".join(f"{m} {b:g}" for m, b in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for label, first, second in compared:
        cells = [_ratio(rows, first, second, budget, measure) for measure, budget in columns]
        lines.append(f"| {label} | " + " | ".join("–" if c is None else str(c) for c in cells) + " |")
    return "\n".join(lines) + "\n"


def _ratio(rows: Sequence[Row], first: str, second: str, budget: float, measure: str) -> Ratio | None:
    ours, theirs = (
        values_by_case(rows, method, budget, measure, lambda row: row.kl) for method in (first, second)
    )
    return paired_ratio(ours, theirs) if set(ours) & set(theirs) else None


if __name__ == "__main__":
    typer.run(study)
