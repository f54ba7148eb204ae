"""What the example programs share: reading a document, waiting for an answer, a table of what served it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from grkv_sglang.client import Served
from grkv_sglang.demo.documents import load_documents


@dataclass(frozen=True)
class Answer:
    """One generated variable of a program, and what its prompt was served from."""

    label: str
    text: str
    prompt_tokens: int
    cached_tokens: int
    served: Served | None
    """None where the server does not run the plugin."""
    seconds: float


def answer_of(state: Any, name: str, label: str) -> Answer:
    """Wait for the variable `name` of a program's state.

    Raises:
        RuntimeError: the program failed on the server; the message is the server's.
    """
    state.sync()
    if state.error() is not None:
        raise RuntimeError(f"{label}: {state.error()}")
    meta = state.get_meta_info(name)
    served = meta.get("grkv")
    return Answer(
        label,
        " ".join(state[name].split()),
        meta["prompt_tokens"],
        meta["cached_tokens"],
        Served.model_validate(served[0]) if served else None,
        meta["e2e_latency"],
    )


def read_document(path: Path | None, words: int) -> str:
    """The first `words` words of a file, or of a text that ships with the package; 0: all of it."""
    text = load_documents()[1].text if path is None else path.read_text(encoding="utf-8")
    if words == 0:
        return text
    end = 0
    for word in text.split()[:words]:
        end = text.index(word, end) + len(word)
    return text[:end]


def show(answers: list[Answer], title: str) -> None:
    """Print a table: one line per request, and their sum."""
    table = Table(title=title)
    table.add_column("request", overflow="fold")
    table.add_column("answer", overflow="fold")
    for name in ("prompt", "computed", "exact", "from spans", "slots", "seconds"):
        table.add_column(name, justify="right")
    for a in answers:
        kinds = (a.served.exact_tokens, a.served.span_tokens, a.served.span_slots) if a.served else "---"
        cells = (a.prompt_tokens, a.prompt_tokens - a.cached_tokens, *kinds)
        table.add_row(a.label, a.text, *(str(cell) for cell in cells), f"{a.seconds:.1f}")
    console = Console()
    console.print(table)
    prompts, cached = sum(a.prompt_tokens for a in answers), sum(a.cached_tokens for a in answers)
    tokens = sum(a.served.span_tokens for a in answers if a.served)
    slots = sum(a.served.span_slots for a in answers if a.served)
    console.print(
        f"{cached:,} of {prompts:,} prompt tokens were not computed again; {tokens:,} of them were read from "
        f"{slots:,} slots of compressed prefixes."
    )
