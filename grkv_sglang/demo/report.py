"""The demo's end: tables on the screen and a plot in a file."""

from __future__ import annotations

import statistics
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from grkv_sglang.demo.result import ENGINES, Agreement, DemoResult, DocumentResult, EngineRun

ANSWER_CHARACTERS = 60


def print_report(result: DemoResult, console: Console) -> None:
    """Every request, every document, then the summary in words."""
    console.print(_request_table(result))
    console.print(_document_table(result))
    for line in summary_lines(result):
        console.print(line, highlight=False)


def summary_lines(result: DemoResult) -> list[str]:
    """The figures of the run, one sentence each."""
    summary, identity, cost = result.summary, result.identity, result.no_long_prefix
    sentinels, checks = identity.sentinels, result.memory_checks
    census = "clean" if checks.census_ok else f"FAILED: {checks.census_last_error}"
    return [
        f"Documents hold {summary.compressed_share:.1%} of their full-size slots; a warm request waits "
        f"{summary.warm_ttft_ratio_grkv_off:.2f} times as long for its first token as on full-size KV "
        f"(median) and computed {summary.reprefilled_document_tokens_warm} document tokens again.",
        f"Compressing a document once took {summary.compress_s:.2f} s (median): "
        f"{summary.compress_share_of_grkv_cold_ttft:.1%} of its cold time to first token "
        f"({summary.compress_share_of_off_cold_ttft:.1%} of that without the plugin).",
        f"Identity, spans that keep every token: {_agrees(identity.versus_off)} equal to off, "
        f"{identity.served_from_span} served from a span; behind {sentinels.dummy_tokens} sentinels: "
        f"{_agrees(sentinels.versus_off)} equal, {sentinels.sentinel_rows} rows with sentinels.",
        f"Equal to stock: grkv {_agrees(identity.versus_stock)}, off {_agrees(identity.off_versus_stock)}; "
        f"stock with itself in batches: {_agrees(identity.stock_batched_versus_sequential)}.",
        f"Without long prefixes the plugin costs {cost.mean_cost:+.2%} (median {cost.median_cost:+.2%}, "
        f"95% bound {cost.upper_95:+.2%}, {cost.pairs} pairs).",
        f"Memory checks: {', '.join(checks.switches)}; census {census} ({checks.census_checks} checks).",
    ]


def save_plot(result: DemoResult, path: Path) -> None:
    """Slots per document and times to first token, as a PNG.

    Raises:
        OSError: the file cannot be written.
    """
    # Imported here, without pyplot: no window system is touched, and `grkv serve` never loads it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    slots, cold, warm = figure.subplots(1, 3)
    names = [document.name for document in result.documents]
    places = range(len(names))

    for shift, (label, values) in enumerate(
        {
            "full size": [d.full_slots for d in result.documents],
            "compressed": [d.compressed_slots for d in result.documents],
        }.items()
    ):
        bars = slots.bar([p + shift * 0.4 for p in places], values, 0.4, label=label)
        slots.bar_label(bars, fontsize=8)
    slots.set_xticks([p + 0.2 for p in places], names)
    slots.set_ylabel("KV slots")
    slots.set_title("slots held by a document")

    for axes, title, pick in (
        (cold, "cold request", lambda run: run.cold_ttft_s),
        (warm, "warm requests (median)", _warm_median),
    ):
        for shift, engine in enumerate(ENGINES):
            times_s = [pick(getattr(document, engine)) for document in result.documents]
            bars = axes.bar([p + shift * 0.27 for p in places], times_s, 0.27, label=engine)
            axes.bar_label(bars, fmt="%.2f", fontsize=8)
        axes.set_xticks([p + 0.27 for p in places], names)
        axes.set_ylabel("time to first token, s")
        axes.set_title(title)
    for axes in (slots, cold, warm):
        axes.margins(y=0.25)
        axes.legend(fontsize=8, ncols=3, loc="upper center")
        axes.tick_params(axis="x", labelsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _request_table(result: DemoResult) -> Table:
    table = Table(title="requests")
    for column in ("document", "request", "engine"):
        table.add_column(column)
    for column in ("TTFT s", "cached tokens", "document slots"):
        table.add_column(column, justify="right")
    table.add_column("answer", overflow="fold")
    for document in result.documents:
        for number in range(len(document.grkv.requests)):
            for engine in ENGINES:
                request = getattr(document, engine).requests[number]
                table.add_row(
                    document.name if number == 0 and engine == ENGINES[0] else "",
                    ("cold" if number == 0 else f"warm {number}") if engine == ENGINES[0] else "",
                    engine,
                    f"{request.ttft_s:.2f}",
                    str(request.cached_tokens),
                    str(request.document_slots),
                    escape(shorten(request.answer)),
                )
        table.add_section()
    return table


def _document_table(result: DemoResult) -> Table:
    table = Table(title="documents")
    table.add_column("document")
    for column in ("full slots", "compressed", "compress s", "quality", "span hits"):
        table.add_column(column, justify="right")
    for engine in ENGINES:
        table.add_column(f"warm TTFT s, {engine}", justify="right")
    for document in result.documents:
        table.add_row(
            document.name,
            str(document.full_slots),
            str(document.compressed_slots),
            f"{document.compress_s:.2f}",
            "-" if document.quality is None else f"{document.quality:.3f}",
            str(document.span_hits),
            *(f"{_warm_median(run):.2f}" for run in _runs(document)),
        )
    return table


def shorten(text: str, limit: int = ANSWER_CHARACTERS) -> str:
    """One line of at most `limit` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _runs(document: DocumentResult) -> tuple[EngineRun, ...]:
    return document.stock, document.off, document.grkv


def _warm_median(run: EngineRun) -> float:
    return statistics.median(run.warm_ttft_s)


def _agrees(agreement: Agreement) -> str:
    return f"{agreement.equal} of {agreement.prompts}"
