"""Tables and plots of the fidelity benchmark, and paired comparisons over documents."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from rich.table import Table

from benchmarks.fidelity.run import Row

matplotlib.use("Agg")
from matplotlib import pyplot as plt

MEASURES = ("continuation", "answers", "needles")
RESAMPLES = 2000


@dataclass(frozen=True)
class Ratio:
    """Mean of one method over mean of another on the same documents, with a 95% bootstrap interval."""

    ratio: float
    low: float
    high: float
    documents: int

    def __str__(self) -> str:
        return f"{self.ratio:.2f} ({self.low:.2f}–{self.high:.2f})"


def values_by_case(
    rows: Iterable[Row], method: str, budget: float, measure: str, value: Callable[[Row], float]
) -> dict[tuple[str, int], float]:
    """(case, length) -> value."""
    return {
        (row.case, row.context_tokens): value(row)
        for row in rows
        if (row.method, row.budget, row.measure) == (method, budget, measure) and row.kind != "filler"
    }


def paired_ratio(first: dict[tuple[str, int], float], second: dict[tuple[str, int], float]) -> Ratio:
    """`mean(first) / mean(second)` over the documents that both have, a NaN being none.

    Raises:
        ValueError: they share no document.
    """
    shared = sorted(
        key for key in set(first) & set(second) if not (math.isnan(first[key]) or math.isnan(second[key]))
    )
    if not shared:
        raise ValueError("expected two methods measured on common documents, got none")

    def ratio(keys: Sequence[tuple[str, int]]) -> float:
        bottom = sum(second[key] for key in keys)
        return sum(first[key] for key in keys) / bottom if bottom else float("inf")

    rng = random.Random(0)
    ratios = sorted(ratio(rng.choices(shared, k=len(shared))) for _ in range(RESAMPLES))
    return Ratio(
        ratio(shared),
        ratios[int(0.025 * RESAMPLES)],
        ratios[int(0.975 * RESAMPLES) - 1],
        len(shared),
    )


@dataclass(frozen=True)
class Summary:
    """Means over documents of one method at one budget; filler documents count for `filler_exact` only."""

    method: str
    budget: float
    kl: dict[str, float]
    kl_p90: dict[str, float]
    top1: dict[str, float]
    nll_increase: dict[str, float]
    exact: float
    exact_full: float
    filler_exact: float
    filler_exact_full: float
    attention_error: float
    compress_share: float
    """Selection and regression as a share of the prefill."""
    pass_share: float
    documents: int


def summarise(rows: Sequence[Row]) -> list[Summary]:
    """One summary per method and budget, in the order of their first row."""
    order = list(dict.fromkeys((row.method, row.budget) for row in rows))
    by_key: dict[tuple[str, float], list[Row]] = {key: [] for key in order}
    for row in rows:
        by_key[row.method, row.budget].append(row)
    return [_summary(key, members) for key, members in by_key.items()]


def _summary(key: tuple[str, float], rows: list[Row]) -> Summary:
    text = [row for row in rows if row.kind != "filler"]
    filler = [row for row in rows if row.kind == "filler"]

    def means(value: Callable[[Row], float]) -> dict[str, float]:
        return {measure: _mean(value(row) for row in text if row.measure == measure) for measure in MEASURES}

    once = {(row.case, row.context_tokens): row for row in text}.values()
    return Summary(
        *key,
        kl=means(lambda row: row.kl),
        kl_p90=means(lambda row: row.kl_p90),
        top1=means(lambda row: row.top1),
        nll_increase=means(lambda row: row.nll_increase),
        exact=_mean(row.exact for row in text if row.measure == "needles"),
        exact_full=_mean(row.exact_full for row in text if row.measure == "needles"),
        filler_exact=_mean(row.exact for row in filler),
        filler_exact_full=_mean(row.exact_full for row in filler),
        attention_error=_mean(row.attention_error for row in once),
        compress_share=_ratio(sum(r.compress_s for r in once), sum(r.prefill_s for r in once)),
        pass_share=_ratio(sum(r.pass_s for r in once), sum(r.prefill_s for r in once)),
        documents=len(once),
    )


def _mean(values: Iterable[float]) -> float:
    known = [value for value in values if value == value]
    return statistics.fmean(known) if known else float("nan")


def _ratio(top: float, bottom: float) -> float:
    return top / bottom if bottom else float("nan")


HEADER = (
    "method", "budget", "KL cont.", "p90", "top-1", "ΔNLL", "KL answers", "p90", "top-1", "ΔNLL",
    "needles text", "filler", "attn. error", "compress / prefill", "passes / prefill",
)  # fmt: skip


def cells(summary: Summary) -> list[str]:
    """A row of the table."""

    def number(value: float, digits: int) -> str:
        return "–" if value != value else f"{value:.{digits}f}"

    row = [summary.method, f"{summary.budget:g}"]
    for measure in ("continuation", "answers"):
        row += [
            number(summary.kl[measure], 4),
            number(summary.kl_p90[measure], 3),
            number(summary.top1[measure], 3),
            number(summary.nll_increase[measure], 3),
        ]
    return [
        *row,
        number(summary.exact, 2),
        number(summary.filler_exact, 2),
        number(summary.attention_error, 3),
        number(summary.compress_share, 2),
        number(summary.pass_share, 2),
    ]


def rich_table(summaries: Sequence[Summary], title: str) -> Table:
    """For the terminal."""
    table = Table(*HEADER, title=title)
    for summary in summaries:
        table.add_row(*cells(summary))
    return table


def markdown_table(summaries: Sequence[Summary]) -> str:
    """For documents."""
    lines = ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    lines += ["| " + " | ".join(cells(summary)) + " |" for summary in summaries]
    return "\n".join(lines) + "\n"


def plot(summaries: Sequence[Summary], path: Path, title: str) -> None:
    """KL and top-1 agreement over the budget, for both measures."""
    methods = list(dict.fromkeys(summary.method for summary in summaries))
    figure, axes = plt.subplots(2, 2, figsize=(13, 9), sharex=True)
    panels = [("continuation", "kl"), ("answers", "kl"), ("continuation", "top1"), ("answers", "top1")]
    colours = plt.get_cmap("tab20")
    for axis, (measure, field) in zip(axes.flat, panels, strict=True):
        for index, method in enumerate(methods):
            points = [(s.budget, getattr(s, field)[measure]) for s in summaries if s.method == method]
            points.sort()
            axis.plot(
                [x for x, _ in points], [y for _, y in points], label=method, color=colours(index % 20),
                marker="o", markersize=3, linestyle="--" if method.startswith("peer:") else "-",
            )  # fmt: skip
        axis.set_title(f"{measure}: {'KL(full || compressed), nats' if field == 'kl' else 'top-1 agreement'}")
        axis.grid(alpha=0.3)
        if field == "kl":
            axis.set_yscale("log")
    for axis in axes[1]:
        axis.set_xlabel("budget: share of the tokens kept")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)
