"""What is sent: documents cut out of a text, questions about them, and who is asked for when.

Everything follows from a seed, so that every engine gets the same requests in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Popularity = Literal["uniform", "zipf"]

QUOTE_TOKENS = 8
"""A question quotes so many tokens of its document."""

ASK_BEFORE = "\n\nQuestion: What is meant where the text says: "
ASK_AFTER = "?\nAnswer:"


class WorkloadError(ValueError):
    """The text does not give what was asked for; the message says what to change."""


@dataclass(frozen=True)
class Request:
    """One request: token ids, how many of them are the document, and when it comes.

    Attributes:
        number: position in its stream.
        document: which one.
        prompt: document, then question.
        document_tokens: leading tokens of the prompt that other requests share.
        arrival_s: seconds from the start of the stream; 0 for all where clients wait for their answers.
    """

    number: int
    document: int
    prompt: tuple[int, ...]
    document_tokens: int
    arrival_s: float = 0.0


def cut_documents(text: Sequence[int], count: int, tokens: int) -> list[tuple[int, ...]]:
    """`count` windows of `tokens` tokens, no two of which start with the same token.

    They start at equal distances, moved on to the next token that no earlier document starts with, and go on
    at the text's beginning where it ends. Windows overlap where the text is shorter than all of them
    together; they share no prefix, which is what a prefix cache looks at.

    Raises: WorkloadError: the text is shorter than one document, or has too few distinct tokens.
    """
    if len(text) < tokens:
        raise WorkloadError(f"a document of {tokens} tokens needs a longer text, this one has {len(text)}")
    twice = [*text, *text]
    seen: set[int] = set()
    documents = []
    for number in range(count):
        nominal = number * len(text) // count
        free = (s for s in range(nominal, nominal + len(text)) if twice[s] not in seen)
        start = next(free, None)
        if start is None:
            raise WorkloadError(
                f"{count} documents need as many distinct first tokens, the text has {len(set(text))}; "
                "give a folder of longer texts (--texts)"
            )
        start %= len(text)
        seen.add(twice[start])
        documents.append(tuple(twice[start : start + tokens]))
    return documents


def popularity(kind: Popularity, count: int, seed: int, exponent: float = 1.0) -> np.ndarray:
    """[count] probability of each document: equal, or ``1 / rank ** exponent`` with ranks dealt out by
    `seed`.

    Dealt out, so that a popular document is not also the first one that was filled in.
    """
    if kind == "uniform":
        return np.full(count, 1 / count)
    weights = 1 / np.arange(1, count + 1, dtype=np.float64) ** exponent
    dealt: np.ndarray = np.random.default_rng(seed).permutation(weights / weights.sum())
    return dealt


@dataclass(frozen=True)
class Questions:
    """Token ids around the quotation that makes a question one of its own."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Length of every question."""
        return len(self.before) + QUOTE_TOKENS + len(self.after)

    def about(self, document: Sequence[int], place: int) -> tuple[int, ...]:
        """A question about what stands at `place`."""
        return (*self.before, *document[place : place + QUOTE_TOKENS], *self.after)


def questions_of(tokenizer: Any) -> Questions:
    """The questions in a model's tokens."""

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    return Questions(ids(ASK_BEFORE), ids(ASK_AFTER))


def request_stream(
    documents: Sequence[Sequence[int]],
    probabilities: np.ndarray,
    count: int,
    questions: Questions,
    seed: int,
    rate: float | None = None,
) -> list[Request]:
    """Requests for documents drawn independently, each with a question of its own.

    Args:
        rate: mean arrivals per second, exponentially spaced; None: nobody waits for a time.
    """
    rng = np.random.default_rng(seed)
    chosen = rng.choice(len(documents), size=count, p=probabilities)
    places = [int(rng.integers(len(documents[d]) - QUOTE_TOKENS + 1)) for d in chosen]
    arrivals = np.zeros(count) if rate is None else np.cumsum(rng.exponential(1 / rate, size=count))
    return [
        _request(number, int(d), documents[d], questions.about(documents[d], place), float(arrival))
        for number, (d, place, arrival) in enumerate(zip(chosen, places, arrivals, strict=True))
    ]


def one_each(
    documents: Sequence[Sequence[int]], order: Sequence[int], questions: Questions, place: int
) -> list[Request]:
    """One request per document, in `order`; all quote the same place."""
    return [
        _request(number, d, documents[d], questions.about(documents[d], place), 0.0)
        for number, d in enumerate(order)
    ]


def _request(
    number: int, document: int, tokens: Sequence[int], question: Sequence[int], arrival_s: float
) -> Request:
    return Request(number, document, (*tokens, *question), len(tokens), arrival_s)


def blocks_of(requests: Sequence[Request], size: int) -> Iterator[list[Request]]:
    """Consecutive requests, `size` at a time; the last block may be shorter."""
    for start in range(0, len(requests), size):
        yield list(requests[start : start + size])


def last_of_each(requests: Sequence[Request]) -> list[Request]:
    """The last request for each document, the latest one first."""
    found: dict[int, Request] = {}
    for request in reversed(requests):
        found.setdefault(request.document, request)
    return list(found.values())
