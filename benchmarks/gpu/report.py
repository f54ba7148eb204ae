"""The rows as JSON, and as Markdown tables."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.rows import Aborted, Check, Figure, Measurement, Row, Skipped

JSON_NAME, MARKDOWN_NAME = "gpu.json", "gpu.md"

_GROUPS: dict[str, type[Row]] = {
    "checks": Check,
    "measurements": Measurement,
    "figures": Figure,
    "skipped": Skipped,
    "aborted": Aborted,
}


def as_json(run: dict[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """`run` (machine, settings), the number of failures, the rows by kind; null for what is not finite."""
    grouped = {
        name: [_finite(asdict(row)) for row in rows if isinstance(row, kind)]
        for name, kind in _GROUPS.items()
    }
    return {**run, "failed": sum(row.failed for row in rows), **grouped}


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }


def as_markdown(run: dict[str, Any], rows: Sequence[Row]) -> str:
    """A table for each kind of row."""
    machine = run["machine"]
    parts = [
        f"# {machine['card'] or 'CPU'}, torch {machine['torch']}, Triton {machine['triton']}",
        f"Kernels: {run['settings']['kernels']}. Failed: {sum(row.failed for row in rows)}.",
    ]
    checks = [r for r in rows if isinstance(r, Check)]
    parts += _table(
        "Correctness",
        ("check", "on", "against", "worst error", "allowed", ""),
        (
            (r.name, r.case, r.against, _number(r.worst_error, ".1e"), f"{r.tolerance:.1e}",
             "ok" if r.passed else f"**FAILED** {r.error or ''}")
            for r in checks
        ),
    )  # fmt: skip
    parts += _table(
        "Times",
        ("part", "what", "on", "median ms", "fastest", "slowest", "of the byte bound", "MiB"),
        (
            (r.part, r.name, r.case, f"**FAILED** {r.error}" if r.error else f"{r.median_ms:.3f}",
             f"{r.fastest_ms:.3f}", f"{r.slowest_ms:.3f}", _number(r.bound_share, ".0%"),
             _number(r.peak_mib, ".0f"))
            for r in rows
            if isinstance(r, Measurement)
        ),
    )  # fmt: skip
    parts += _table(
        "Figures",
        ("part", "what", "on", "value", "unit"),
        ((r.part, r.name, r.case, f"{r.value:.4g}", r.unit) for r in rows if isinstance(r, Figure)),
    )
    parts += _table(
        "Left out",
        ("part", "what", "needs"),
        ((r.part, r.name, r.needs) for r in rows if isinstance(r, Skipped)),
    )
    parts += _table(
        "Ended early", ("part", "reason"), ((r.part, r.reason) for r in rows if isinstance(r, Aborted))
    )
    return "\n\n".join(parts) + "\n"


def write(folder: Path, run: dict[str, Any], rows: Sequence[Row]) -> None:
    """Both files, whole; called after every row, so that a run that is cut off leaves what it had."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / JSON_NAME).write_text(json.dumps(as_json(run, rows), indent=1) + "\n", encoding="utf-8")
    (folder / MARKDOWN_NAME).write_text(as_markdown(run, rows), encoding="utf-8")


def _number(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)


def _table(title: str, columns: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    """Title and table; nothing without lines."""
    body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    if not body:
        return []
    head = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return [f"## {title}", "\n".join((*head, *body))]
