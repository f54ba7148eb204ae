"""Asks a model all questions of all tasks and sums the scores up; the model is a function plugged in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.tasks.base import Question, Task, index_orders
from benchmarks.tasks.metrics import check_metric, score

Answer = Callable[[Task, list[Question]], list[str]]
"""Answers a task's questions in the given order, one after the other, about a context prepared once."""

TERCILES = ("first third", "middle third", "last third")
ALL = "all"


@dataclass(frozen=True)
class Scored:
    """One answer with its score, and where and when it was asked for."""

    task: str
    kind: str
    question: int
    """Index into the task's questions as written."""
    order: int
    """Which of the task's orders; 0 is the written one."""
    position: int
    """How many questions were asked in that order before this one."""
    depth: float | None
    """Fraction of the context in front of the answer; None: spread or not known."""
    metric: str
    prediction: str
    score: float
    """In [0, 1]."""


@dataclass(frozen=True)
class Row:
    """Mean score of one group of answers."""

    kind: str
    """A kind of task, or "all"."""
    by: str
    """"all", "position" or "depth"."""
    group: str
    """Position from 1 on, third of the context, or "all"."""
    mean: float
    """Mean score in [0, 1] over answers, not over tasks."""
    count: int
    """Number of answers."""


def evaluate(tasks: Iterable[Task], answer: Answer, *, orders: int = 1, seed: int = 0) -> list[Scored]:
    """Ask every task's questions in one or several orders and score the answers.

    Args:
        tasks: what is asked.
        answer: the model. It is called once per task and order, and prepares the context (and compresses it)
            at most once per call; nothing of an earlier call may change its answers.
        orders: orders of each task's questions; the first one is as written, the others are seeded.
        seed: of the orders.

    Raises:
        UnsupportedMetricError: a question has a metric that is not supported; raised before its task is
            asked.
        ValueError: another number of answers than of questions, or an unknown metric.
    """
    scored: list[Scored] = []
    for task in tasks:
        for question in task.questions:
            check_metric(question.metric)
        for number, order in enumerate(index_orders(len(task.questions), orders, seed)):
            questions = [task.questions[index] for index in order]
            predictions = answer(task, list(questions))
            if len(predictions) != len(questions):
                raise ValueError(f"task {task.id}: {len(questions)} questions, {len(predictions)} answers")
            scored.extend(
                Scored(
                    task=task.id,
                    kind=task.kind,
                    question=index,
                    order=number,
                    position=position,
                    depth=question.depth,
                    metric=question.metric,
                    prediction=prediction,
                    score=score(question, prediction),
                )
                for position, (index, question, prediction) in enumerate(
                    zip(order, questions, predictions, strict=True)
                )
            )
    return scored


def aggregate(scored: Sequence[Scored]) -> list[Row]:
    """Mean scores per kind and over all kinds: as a whole, per position, and per third of the context.

    Answers without a depth are left out of the thirds. Groups without an answer have no row.
    """
    kinds = [ALL, *sorted({s.kind for s in scored})]
    rows: list[Row] = []
    for kind in kinds:
        own = [s for s in scored if kind in (ALL, s.kind)]
        rows += _rows(kind, ALL, [(ALL, own)])
        positions = sorted({s.position for s in own})
        rows += _rows(
            kind, "position", [(str(p + 1), [s for s in own if s.position == p]) for p in positions]
        )
        rows += _rows(kind, "depth", [(t, [s for s in own if tercile(s.depth) == t]) for t in TERCILES])
    return rows


def tercile(depth: float | None) -> str | None:
    """The third of the context that a depth in [0, 1] lies in; None stays None."""
    return None if depth is None else TERCILES[min(int(depth * 3), 2)]


def format_table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table, scores times 100 with one decimal."""
    lines = ["| kind | by | group | mean score, % | answers |", "|---|---|---|---|---|"]
    lines += [f"| {r.kind} | {r.by} | {r.group} | {100 * r.mean:.1f} | {r.count} |" for r in rows]
    return "\n".join(lines)


def _rows(kind: str, by: str, groups: Iterable[tuple[str, Sequence[Scored]]]) -> list[Row]:
    return [Row(kind, by, group, fmean(s.score for s in own), len(own)) for group, own in groups if own]
