"""What a task is: a context that can be compressed alone, and questions that come after it."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Question:
    """What follows a context in the prompt, and what counts as a right answer.

    Raises:
        ValueError: no text, no answer, a depth outside [0, 1], or no new tokens.
    """

    text: str
    """Everything after the context, with the separator in front: the prompt is ``task.prefix + text``."""
    answers: tuple[str, ...]
    """Right answers; the metric says whether all of them are wanted or any."""
    metric: str
    """A name of ``metrics.METRICS``."""
    depth: float | None
    """Where the answer is: the fraction of the context's characters before it. None: spread or not known."""
    max_new_tokens: int
    """Tokens that the answer may take."""
    answer_prefix: str = ""
    """How the answer could begin, for base models that are led into it. The metrics do not need it."""
    classes: tuple[str, ...] = ()
    """All classes of a classification task; empty for any other."""

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise ValueError("a question needs a text")
        if not self.answers:
            raise ValueError(f"question {self.text!r} has no answer")
        if self.depth is not None and not 0.0 <= self.depth <= 1.0:
            raise ValueError(f"depth is a fraction of the context, got {self.depth}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be positive, got {self.max_new_tokens}")


@dataclass(frozen=True)
class Task:
    """One context and the questions asked about it.

    Raises:
        ValueError: there is no question.
    """

    id: str
    kind: str
    context: str
    questions: tuple[Question, ...]
    instruction: str
    """What stands in front of the context, with the separator behind it."""

    def __post_init__(self) -> None:
        if not self.questions:
            raise ValueError(f"task {self.id} has no question")

    @property
    def prefix(self) -> str:
        """What all questions share and what is compressed: instruction and context."""
        return self.instruction + self.context

    def prompt(self, question: Question) -> str:
        """The whole prompt of one question, without a chat template."""
        return self.prefix + question.text


def question_orders(task: Task, count: int, seed: int) -> list[tuple[Question, ...]]:
    """The task's questions in several orders, the first one as written.

    Among the first ``len(task.questions)`` orders no question takes the same position twice, and every
    further block of as many orders has that property too: a cache that serves only the first question then
    shows as a difference between positions, whatever the questions are.

    Args:
        task: whose questions.
        count: number of orders.
        seed: the same seed gives the same orders.

    Raises:
        ValueError: ``count`` is not positive.
    """
    return [
        tuple(task.questions[i] for i in order) for order in index_orders(len(task.questions), count, seed)
    ]


def index_orders(size: int, count: int, seed: int) -> list[tuple[int, ...]]:
    """Seeded orders of ``range(size)`` in blocks of Latin squares; the first order is ascending.

    Raises:
        ValueError: ``size`` or ``count`` is not positive.
    """
    if size < 1 or count < 1:
        raise ValueError(f"orders need at least one item and one order, got {size} and {count}")
    rng = random.Random(seed)
    orders: list[tuple[int, ...]] = []
    while len(orders) < count:
        shifts = rng.sample(range(size), size)
        # The first block is unscrambled, so that its first row is ascending.
        items = _inverse(shifts) if not orders else rng.sample(range(size), size)
        orders.extend(tuple(items[(row + shift) % size] for shift in shifts) for row in range(size))
    return orders[:count]


def choose(options: dict[str, T], name: str, what: str) -> T:
    """The option of that name.

    Raises:
        ValueError: there is none; the message lists the valid names.
    """
    if name not in options:
        raise ValueError(f"unknown {what} {name!r}; valid: {', '.join(sorted(options))}")
    return options[name]


def locate(context: str, answers: Iterable[str]) -> float | None:
    """Depth of the one answer that occurs exactly once in the context; None when that is not so.

    Answers of fewer than four characters are not searched for: they occur by chance.
    """
    found = [a for a in answers if len(a) >= 4 and a in context]
    if len(found) != 1 or context.count(found[0]) != 1:
        return None
    return context.index(found[0]) / len(context)


def _inverse(permutation: list[int]) -> list[int]:
    inverse = [0] * len(permutation)
    for position, value in enumerate(permutation):
        inverse[value] = position
    return inverse
