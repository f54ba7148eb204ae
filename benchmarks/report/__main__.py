"""``python -m benchmarks.report``: read results, write one page as Markdown and as HTML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.report.page import ReportError, build, html
from benchmarks.serving.quality import RESULTS


def main(
    results: Annotated[Path, typer.Option(help="Folder of result files (.json).")] = RESULTS,
    out: Annotated[
        Path | None, typer.Option(help="Where the page goes (.md; .html and plots beside it).")
    ] = None,
) -> None:
    """Put all benchmark results of a folder on one page, quality beside speed."""
    page = out or results / "report.md"
    console = Console()
    try:
        sections, left_out = build(results, page)
    except ReportError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    page.write_text(sections, encoding="utf-8")
    page.with_suffix(".html").write_text(html(sections, page.parent), encoding="utf-8")
    console.print(f"{page}, {page.with_suffix('.html')}")
    for path in left_out:
        console.print(
            f"[dim]not in it: {path} (another kind of file, or written before results said what they are)"
        )


if __name__ == "__main__":
    typer.run(main)
