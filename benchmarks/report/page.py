"""The page: what was measured where, speed with the quality that it costs, plots."""

from __future__ import annotations

import base64
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token
from pydantic import ValidationError

from benchmarks import hot_paths, overhead, shared_decode
from benchmarks.serving.all import BENCHMARKS
from benchmarks.serving.options import Benchmark
from benchmarks.serving.quality import FILES, Quality
from benchmarks.serving.record import Environment, Result
from benchmarks.serving.tables import Table, markdown

KNOWN: dict[str, Benchmark[Any]] = {
    **BENCHMARKS,
    **{module.BENCHMARK.name: module.BENCHMARK for module in (overhead, hot_paths, shared_decode)},
}
GAP = "inter-token-gap"

INTRODUCTION = """# Benchmarks

What the plugin gains over SGLang as it is, and at what loss. `stock` is SGLang untouched, `off` our
attention backend with SGLang's cache (on a CPU the fair reference: SGLang's torch backend computes the whole
prefix's rows again at every cache hit), `grkv` the plugin with the budget behind it. Within a section all
servers ran on one machine with the same model, pool and requests, in turns. A speed at a budget is worth
what the budget's fidelity in the same row says: KL divergence (nats per token) and top-1 agreement with the
full cache.
"""

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-size: .85rem; display: block; overflow-x: auto; }
td, th { border: 1px solid #c8c8c8; padding: .25rem .5rem; text-align: right; }
td:first-child, th:first-child { text-align: left; }
th, code { background: #f2f2f2; }
img { max-width: 100%; }
"""


class ReportError(ValueError):
    """There is nothing to report, or a file is damaged; the message says which."""


def build(results: Path, page: Path) -> tuple[str, list[Path]]:
    """The page as Markdown; plots are written beside it.

    Args:
        results: folder of result files.
        page: where the Markdown will stand; plots go into a folder named after it.

    Returns:
        The text, and the files of the folder that are no results of these benchmarks.

    Raises:
        ReportError: there is no result, or one does not have its benchmark's shape.
    """
    quality = Quality.load(results)
    found: list[tuple[str, Path, dict[str, Any]]] = []
    left_out = []
    for path in sorted(results.glob("*.json")):
        content = _content(path)
        name = content.get("benchmark") if isinstance(content, dict) else None
        if name in KNOWN or name == GAP:
            found.append((name, path, content))
        elif path.name not in FILES:
            left_out.append(path)
    if not found:
        raise ReportError(f"{results}: no results; run `python -m benchmarks.serving --help`")
    order = [*KNOWN, GAP]
    found.sort(key=lambda item: order.index(item[0]))
    plots = page.with_suffix("")
    parts = [INTRODUCTION, _quality_section(quality)]
    for name, path, content in found:
        if name == GAP:
            parts.append(_gap_section(path, content))
        else:
            parts.append(_section(name, path, content, quality, plots))
    return "\n".join(parts), left_out


def _content(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ReportError(f"{path} is no JSON: {error}") from error


def _section(name: str, path: Path, content: dict[str, Any], quality: Quality, plots: Path) -> str:
    """One benchmark: where, with what settings, tables, plot."""
    benchmark = KNOWN[name]
    try:
        result: Result = benchmark.result.model_validate(content)
    except ValidationError as error:
        raise ReportError(f"{path} is no result of {name}: {error}") from error
    plots.mkdir(parents=True, exist_ok=True)
    picture = plots / f"{path.stem}.png"
    benchmark.figure(result).savefig(picture, dpi=110)
    return "\n".join(
        [
            f"## {benchmark.title}\n",
            f"`{path.name}`; complete: {', '.join(result.done) or 'nothing yet'}.\n",
            environments_text(result.environments),
            f"Settings: {_settings_text(result.settings.model_dump(mode='json'))}.\n",
            markdown(benchmark.tables(result, quality.for_model(result.settings.model))),
            f"![{benchmark.title}]({plots.name}/{picture.name})\n",
        ]
    )


def _gap_section(path: Path, content: dict[str, Any]) -> str:
    """The inter-token gap, whose file has figures of its own."""
    events = content["events"]

    def row(label: str, gaps: Sequence[float]) -> tuple[str, str, str]:
        return label, f"{statistics.median(gaps):.2f}", f"{max(gaps):.2f}"

    rows = [row("nothing else", [event["steady_gap_s"] for event in events])]
    for kind in dict.fromkeys(event["kind"] for event in events):
        rows.append(row(kind, [event["gap_s"] for event in events if event["kind"] == kind]))
    table = Table(
        "Largest gap between two tokens of a running request",
        ("beside", "median, s", "worst, s"),
        tuple(rows),
        f"{content['streams']} running requests, document of {content['tokens']:,} tokens, chunk "
        f"{content['chunk_tokens']} tokens.",
    )
    environments = [Environment.model_validate(e) for e in content["environments"]]
    parts = ["## Inter-token gap\n", f"`{path.name}`.\n", environments_text(environments), markdown([table])]
    return "\n".join(parts)


def environments_text(environments: Sequence[Environment]) -> str:
    """Machine, versions and commit of every run of a result."""
    lines = []
    for e in environments:
        changed = " with local changes" if e.modified else ""
        commit = f"commit {e.commit[:12]}{changed}" if e.commit else "no commit"
        versions = ", ".join(f"{name} {version}" for name, version in e.versions.items())
        lines.append(
            f"- {e.started}, {commit}: {e.processor}, {e.cores} cores, {e.memory_gib:g} GiB, device "
            f"{e.device}, {e.platform}, Python {e.python}, {versions}"
        )
    return "\n".join(lines) + "\n"


def _settings_text(settings: dict[str, Any]) -> str:
    shown = {name: value for name, value in settings.items() if value is not None}
    # Of folders the name: where they lie is of that machine.
    shown |= {name: Path(shown[name]).name for name in ("model", "texts") if name in shown}
    return ", ".join(
        f"{name} {', '.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in shown.items()
    )


def _quality_section(quality: Quality) -> str:
    """Fidelity of the profile by budget: what every speed row below repeats."""
    rows = tuple(
        (
            profile,
            f"{budget:g}",
            f"{found.context_tokens:,}",
            str(found.documents),
            f"{found.kl_continuation:.3f}",
            f"{found.kl_answers:.3f}",
            f"{found.top1_continuation:.2f}",
            f"{found.top1_answers:.2f}",
        )
        for profile, budget, found in quality.rows(("default", "best"))
    )
    if not rows:
        return "## Quality\n\nNo results of `python -m benchmarks.fidelity` here.\n"
    columns = (
        "profile", "budget", "tokens", "documents", "KL text", "KL answers", "top-1 text", "top-1 answers",
    )  # fmt: skip
    table = Table(f"Fidelity against the full cache, {quality.model}", columns, rows)
    return "\n".join(["## Quality\n", markdown([table])])


def html(text: str, folder: Path) -> str:
    """The page with its plots inside, to be opened or sent as one file.

    Args:
        text: what `build` returned.
        folder: where the plots' relative paths begin.

    Raises:
        OSError: a plot is missing.
    """
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(text)
    _each(tokens, lambda token: _embed(token, folder))
    body = parser.renderer.render(tokens, parser.options, {})
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Benchmarks</title>'
        f"<style>{STYLE}</style></head><body>\n{body}</body></html>\n"
    )


def _each(tokens: Sequence[Token], action: Callable[[Token], None]) -> None:
    for token in tokens:
        action(token)
        _each(token.children or [], action)


def _embed(token: Token, folder: Path) -> None:
    if token.type == "image":
        data = (folder / str(token.attrs["src"])).read_bytes()
        token.attrSet("src", f"data:image/png;base64,{base64.b64encode(data).decode()}")
