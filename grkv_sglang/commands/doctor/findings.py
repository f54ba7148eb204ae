"""What a check of `grkv doctor` comes back with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.markup import escape

Level = Literal["ok", "warning", "problem"]
STYLES: dict[Level, str] = {"ok": "green", "warning": "yellow", "problem": "red"}


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what was found, and unless it is fine what to do."""

    level: Level
    topic: str
    found: str
    todo: str = ""


def print_finding(finding: Finding, console: Console) -> None:
    """One finding on a line, what to do on the next."""
    style = STYLES[finding.level]
    line = f"[{style}]{finding.level:8}[/] [bold]{escape(finding.topic)}[/]: {escape(finding.found)}"
    console.print(line, highlight=False, soft_wrap=True)
    if finding.todo:
        console.print(f"         [dim]->[/] {escape(finding.todo)}", highlight=False, soft_wrap=True)
