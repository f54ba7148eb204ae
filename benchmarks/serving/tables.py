"""A table of text, shown in a terminal or written as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table as RichTable

WIDE = 8
"""More columns than this do not fit a terminal."""


@dataclass(frozen=True)
class Table:
    """Cells as text. `note` stands below: what is counted and how."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{self.title}: expected {len(self.columns)} cells, got {row}")


def markdown(tables: Sequence[Table], level: int = 3) -> str:
    """All tables, each under a heading."""
    parts = []
    for table in tables:
        head = f"| {' | '.join(table.columns)} |\n|{'---|' * len(table.columns)}"
        body = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in table.rows)
        note = f"\n\n{table.note}" if table.note else ""
        parts.append(f"{'#' * level} {table.title}\n\n{head}\n{body}{note}\n")
    return "\n".join(parts)


def rich_table(table: Table) -> RichTable:
    """For a terminal; a table of many columns is turned on its side."""
    turned = len(table.columns) > WIDE
    shown = RichTable(title=table.title, caption=table.note or None, show_header=not turned)
    head, body = list(table.columns), [list(row) for row in table.rows]
    lines = [list(cells) for cells in zip(head, *body, strict=True)] if turned else body
    for number in range(1 + len(body) if turned else len(head)):
        name = "" if turned else escape(head[number])
        shown.add_column(name, justify="left" if number == 0 else "right", overflow="fold")
    for line in lines:
        shown.add_row(*(escape(cell) for cell in line))
    return shown
