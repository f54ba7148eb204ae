"""Contexts of the shipped texts with the questions that ship for them."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.tasks.base import Question
from benchmarks.tasks.haystack import Haystack, noise, read_texts

QUESTIONS = Path(__file__).parent / "questions"
NEAR = 300
"""Characters between an anchor and its answer, at most."""
FEWEST_QUESTIONS = 3
_TRIES = 64


@dataclass(frozen=True)
class ShippedQuestion:
    """A question about one text; they are compared with whitespace collapsed."""

    file: str
    title: str
    anchor: str
    """A phrase that occurs once in the text; the answer is within ``NEAR`` characters of it."""
    question: str
    answers: tuple[str, ...]
    """Short answers in the text's own words."""
    aliases: tuple[str, ...] = ()
    """Other spellings that are accepted, such as digits; they need not occur in the text."""

    def find(self, text: str) -> int | None:
        """Where the anchor is in a text with collapsed whitespace; None where anchor or answer is missing."""
        if text.count(self.anchor) != 1:
            return None
        at = text.index(self.anchor)
        near = text[max(at - NEAR, 0) : at + len(self.anchor) + NEAR].lower()
        return at if any(answer.lower() in near for answer in self.answers) else None


def load_questions(folder: Path = QUESTIONS) -> list[ShippedQuestion]:
    """All shipped questions, sorted by text.

    Raises:
        ValueError: a file is malformed; the message names it.
    """
    loaded: list[ShippedQuestion] = []
    for path in sorted(folder.glob("*.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            loaded.extend(
                ShippedQuestion(
                    data["file"],
                    data["title"],
                    entry["anchor"],
                    entry["question"],
                    tuple(entry["answers"]),
                    tuple(entry.get("aliases", ())),
                )
                for entry in data["questions"]
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: not a file of questions: {error!r}") from error
    return loaded


def build_qa(
    rng: random.Random,
    texts: Path | None,
    fit: Callable[[Callable[[int], str]], str],
    most_questions: int,
) -> tuple[str, list[Question]]:
    """A context of whole or cut texts, and questions answered in it, at depths spread over it.

    Args:
        rng: which text comes first, and where in it the context begins.
        texts: folder of ``.txt`` files; None: those that ship with the demo. At least one must be a text that
            questions ship for.
        fit: cuts what a builder makes (of so many words) to the wanted length.
        most_questions: the questions taken, if the context answers so many; never fewer than three.

    Raises:
        ValueError: no questions ship for any of the texts, or the context is too short for three of them.
    """
    available = read_texts(texts)
    questions = [q for q in load_questions() if q.file in available]
    if not questions:
        known = ", ".join(sorted({q.file for q in load_questions()}))
        raise ValueError(f"no questions ship for {', '.join(available)}; they do for {known}")
    names = rng.sample(sorted(available), len(available))
    paragraphs = [p for name in names for p in _paragraphs(available[name])]
    filler = Haystack(noise(rng))
    for _ in range(_TRIES):
        start = rng.randrange(len(paragraphs))
        rotated = paragraphs[start:] + paragraphs[:start]
        context = fit(partial(_take, rotated, filler))
        found = [(at / len(context), q) for q in questions if (at := q.find(context)) is not None]
        if len(found) >= FEWEST_QUESTIONS:
            chosen = _evenly(sorted(found, key=lambda f: f[0]), most_questions)
            return context, [_question(q, depth) for depth, q in chosen]
    raise ValueError(
        f"the context is too short: it never answers {FEWEST_QUESTIONS} of the shipped questions"
    )


def _paragraphs(text: str) -> list[str]:
    return [" ".join(p.split()) for p in text.split("\n\n") if p.strip()]


def _take(paragraphs: Sequence[str], filler: Haystack, words: int) -> str:
    """The first so many words; beyond the last paragraph, filler in equal parts between the paragraphs."""
    taken: list[str] = []
    left = words
    for paragraph in paragraphs:
        if left <= 0:
            return "\n\n".join(taken)
        split = paragraph.split(" ")
        taken.append(" ".join(split[:left]))
        left -= len(split)
    if left <= 0:
        return "\n\n".join(taken)
    gaps = len(taken)
    sizes = [(gap + 1) * left // gaps - gap * left // gaps for gap in range(gaps)]
    between = [" ".join(filler.take(size)) for size in sizes]
    return "\n\n".join(part for part in itertools.chain(*zip(taken, between, strict=True)) if part)


def _evenly(items: Sequence[tuple[float, ShippedQuestion]], most: int) -> list[tuple[float, ShippedQuestion]]:
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _question(shipped: ShippedQuestion, depth: float) -> Question:
    return Question(
        f'\n\nThis is about the text "{shipped.title}". {shipped.question} Answer in a few words.',
        shipped.answers + shipped.aliases,
        "string_match_part",
        depth=depth,
        max_new_tokens=32,
        answer_prefix=" Answer:",
    )
