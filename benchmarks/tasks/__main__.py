"""Scores of tasks with right answers, on compressed contexts: ``python -m benchmarks.tasks``.

A context is compressed once, before any question is known; then its questions are asked one after the other
in one conversation, in several orders: a cache that serves only the first question shows as a difference
between positions. Tasks are generated offline (RULER's kinds), or read from LongBench, RULER and SCBench.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.fidelity.cases import Chat
from benchmarks.fidelity.host import Compressed, Host, Prefix
from benchmarks.fidelity.methods import Method, parse_methods
from benchmarks.tasks.base import Question, Task
from benchmarks.tasks.datasets import load_longbench, load_ruler, load_scbench
from benchmarks.tasks.ruler import TASKS, Setting, generate
from benchmarks.tasks.run import Row, Scored, aggregate, evaluate
from grkv_sglang.core import slots_for_budget
from grkv_sglang.model import ensure_model

FULL = "full"
console = Console()


class Conversation:
    """Asks about one compressed context, question after question."""

    def __init__(self, host: Host, chat: Chat, cache: Compressed) -> None:
        self._host, self._chat, self._cache = host, chat, cache

    def ask(self, questions: list[Question]) -> list[str]:
        """Replies to the questions in this order, each with the earlier ones and their replies before it."""
        history: list[int] = []
        replies = []
        for index, question in enumerate(questions):
            # The first question goes on in the context's own message, the others are messages of their own.
            history += self._chat.suffix(question.text) if index == 0 else self._chat.turn(question.text)
            (reply,) = self._host.generate(self._cache, [history], question.max_new_tokens)
            history += reply
            replies.append(self._host.tokenizer.decode(reply))
        return replies


def main(
    tasks: Annotated[
        str, typer.Option(help=f"Generated kinds: {', '.join(TASKS)}; 'none' for none.")
    ] = ",".join(TASKS),
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            help="longbench:SUBSET=PATH, ruler:TASK=PATH or scbench:SUBSET=PATH; PATH is a file, "
            "folder or a hub repository; repeatable."
        ),
    ] = None,
    methods: Annotated[
        str, typer.Option(help="As for benchmarks.fidelity, and 'full'.")
    ] = "full,default,best",
    budgets: Annotated[str, typer.Option(help="Shares of the tokens kept.")] = "0.1,0.3",
    context: Annotated[int, typer.Option(help="Tokens of a generated context.")] = 2048,
    samples: Annotated[
        int, typer.Option(help="Generated contexts of each kind; most records of a data set.")
    ] = 2,
    orders: Annotated[int, typer.Option(help="Orders of the questions.")] = 2,
    texts: Annotated[Path | None, typer.Option(help="Folder of .txt for natural text.")] = None,
    seed: Annotated[int, typer.Option(help="Of tasks and orders.")] = 0,
    model: Annotated[Path | None, typer.Option(help="Hugging Face folder; default SmolLM2-135M.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    out: Annotated[Path | None, typer.Option("--json", help="Write rows and answers here.")] = None,
) -> None:
    """Score compressed contexts on tasks with right answers."""
    host = Host(model or ensure_model(), device=device, dtype=getattr(torch, dtype))
    chat = Chat(host.tokenizer)
    wanted = [*_generated(tasks, host, context, samples, texts, seed), *_loaded(dataset or [], samples)]
    wanted = [task for task in wanted if _fits(task, host)]
    named: list[Method | None] = []
    if FULL in methods.split(","):
        named.append(None)
    rest = ",".join(name for name in methods.split(",") if name != FULL)
    named += parse_methods(rest, None) if rest else []
    runs = [
        (method, budget)
        for method in named
        for budget in ([1.0] if method is None else [float(b) for b in budgets.split(",")])
    ]
    found: dict[str, list[Scored]] = {_title(method, budget): [] for method, budget in runs}
    for task in track(wanted, "tasks", console=console):
        prefix = host.prefill([*chat.header, *chat.encode(task.prefix)])
        for method, budget in runs:
            cache = _cache(host, prefix, method, budget, task.id)
            conversation = Conversation(host, chat, cache)
            found[_title(method, budget)] += evaluate(
                [task], partial(_answer, conversation), orders=orders, seed=seed
            )
    tables = {title: aggregate(scored) for title, scored in found.items()}
    console.print(comparison(tables))
    if out is not None:
        out.write_text(
            json.dumps(
                {
                    "context": context, "samples": samples, "orders": orders, "seed": seed,
                    "rows": {title: [asdict(row) for row in rows] for title, rows in tables.items()},
                    "answers": {title: [asdict(s) for s in scored] for title, scored in found.items()},
                },
                indent=1,
            )
            + "\n"
        )  # fmt: skip
        out.with_suffix(".md").write_text(markdown(tables), encoding="utf-8")


def _answer(conversation: Conversation, task: Task, questions: list[Question]) -> list[str]:
    return conversation.ask(questions)


def comparison(tables: dict[str, list[Row]]) -> Table:
    """Mean score per kind, one column per method and budget; then by position of the question and depth."""
    table = Table("task", *tables, "answers", title="mean score, %")
    for label, cells, count in _lines(tables):
        table.add_row(label, *cells, str(count))
    return table


def markdown(tables: dict[str, list[Row]]) -> str:
    """The same for documents."""
    lines = ["| task | " + " | ".join(tables) + " | answers |", "|---|" + "---|" * (len(tables) + 1)]
    lines += [f"| {label} | {' | '.join(cells)} | {count} |" for label, cells, count in _lines(tables)]
    return "\n".join(lines) + "\n"


def _lines(tables: dict[str, list[Row]]) -> Iterator[tuple[str, list[str], int]]:
    first = next(iter(tables.values()))
    by_key = [{(row.kind, row.by, row.group): row for row in rows} for rows in tables.values()]
    for row in first:
        if row.by != "all" and row.kind != "all":
            continue
        key = (row.kind, row.by, row.group)
        label = row.kind if row.by == "all" else f"{row.kind}: {row.by} {row.group}"
        yield label, [f"{100 * rows[key].mean:.0f}" for rows in by_key], row.count


def _generated(
    kinds: str, host: Host, context: int, samples: int, texts: Path | None, seed: int
) -> Iterator[Task]:
    if kinds == "none":
        return
    chat = Chat(host.tokenizer)
    for kind in kinds.split(","):
        for sample in range(samples):
            yield generate(kind, Setting(context, seed + sample, lambda text: len(chat.encode(text)), texts))


def _loaded(datasets: list[str], samples: int) -> Iterator[Task]:
    loaders: dict[str, Any] = {"longbench": load_longbench, "ruler": load_ruler, "scbench": load_scbench}
    for text in datasets:
        name, _, rest = text.partition(":")
        subset, _, path = rest.partition("=")
        if name not in loaders or not subset or not path:
            raise typer.BadParameter(
                f"expected longbench:SUBSET=PATH, ruler:TASK=PATH or scbench:SUBSET=PATH, got {text!r}"
            )
        yield from loaders[name](path, subset)[:samples]


def _fits(task: Task, host: Host) -> bool:
    longest = len(task.prefix) // 2
    if longest < host.max_position:
        return True
    if len(host.tokenizer.encode(task.prefix)) < host.max_position - 512:
        return True
    console.print(f"[yellow]{task.id} is longer than the model's {host.max_position} positions: left out")
    return False


def _cache(host: Host, prefix: Prefix, method: Method | None, budget: float, task_id: str) -> Compressed:
    if method is None:
        return host.full(prefix)
    n_slots = slots_for_budget(prefix.n_tokens, share=budget, tokens=None)
    return method.compress(host, prefix, task_id, budget, n_slots)


def _title(method: Method | None, budget: float) -> str:
    return FULL if method is None else f"{method.name} {budget:g}"


if __name__ == "__main__":
    typer.run(main)
