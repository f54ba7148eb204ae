"""Haystacks of sentences, and cutting a text to a number of tokens."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from benchmarks.tasks.words import NOISE

CountTokens = Callable[[str], int]

DEFAULT_TEXTS = Path(__file__).parents[2] / "grkv_sglang" / "demo" / "texts"

TOLERANCE = 0.02
"""How far below its target a text may end, as a fraction of the target."""
_CLOSE_ENOUGH = 0.004  # where the search stops: every step costs one tokenization of the whole text
_MOST_WORDS = 2**24


def fit(build: Callable[[int], str], count_tokens: CountTokens, target_tokens: int) -> str:
    """The longest text of ``build(size)`` that does not exceed the target, or one hardly shorter.

    Args:
        build: gives a text that grows with its argument, and the same text for the same argument.
        count_tokens: the number of tokens of a text.
        target_tokens: the most tokens that the text may have.

    Raises:
        ValueError: no size gives between 98 % and 100 % of the target.
    """
    enough = int(target_tokens * (1 - _CLOSE_ENOUGH))
    low, high = 0, 64
    best = build(low)
    tokens_low = count_tokens(best)
    if tokens_low > target_tokens:
        raise ValueError(f"{target_tokens} tokens are too few: this task needs at least {tokens_low}")
    while (tokens_high := count_tokens(text := build(high))) <= target_tokens:
        low, tokens_low, best = high, tokens_high, text
        high *= 2
        if high > _MOST_WORDS:
            raise ValueError(f"the text does not grow to {target_tokens} tokens; it ends at {tokens_low}")
    while tokens_low < enough and high - low > 1:
        # Tokens grow almost linearly with the size; a step inside the bracket is safe where they do not.
        share = (target_tokens - tokens_low) / (tokens_high - tokens_low)
        size = min(max(low + int((high - low) * share), low + 1), high - 1)
        tokens = count_tokens(text := build(size))
        if tokens <= target_tokens:
            low, tokens_low, best = size, tokens, text
        else:
            high, tokens_high = size, tokens
    if tokens_low < target_tokens * (1 - TOLERANCE):
        raise ValueError(
            f"cannot hit {target_tokens} tokens within {TOLERANCE:.0%}: the nearest below is {tokens_low}"
        )
    return best


class Haystack:
    """A sequence of sentences of which any number of words can be taken; the last sentence may be cut."""

    def __init__(self, sentences: Iterable[str]) -> None:
        self._source = iter(sentences)
        self._sentences: list[list[str]] = []

    def take(self, words: int) -> list[str]:
        """The sentences of the first so many words; fewer if the source ends."""
        taken: list[str] = []
        for index in itertools.count():
            if words <= 0 or not self._reach(index):
                return taken
            sentence = self._sentences[index]
            taken.append(" ".join(sentence[:words]))
            words -= len(sentence)
        return taken

    def _reach(self, index: int) -> bool:
        while len(self._sentences) <= index:
            sentence = next(self._source, None)
            if sentence is None:
                return False
            self._sentences.append(sentence.split())
        return True


def noise(rng: random.Random) -> Iterator[str]:
    """The same few sentences for ever, beginning with any of them."""
    start = rng.randrange(len(NOISE))
    return itertools.cycle(NOISE[start:] + NOISE[:start])


def natural(rng: random.Random, texts: Path | None) -> Iterator[str]:
    """The sentences of a folder's texts, beginning anywhere, and again from the start where they end.

    Raises:
        ValueError: the folder has no text.
    """
    sentences = [s for text in read_texts(texts).values() for s in split_sentences(text)]
    start = rng.randrange(len(sentences))
    return itertools.cycle(sentences[start:] + sentences[:start])


def read_texts(folder: Path | None) -> dict[str, str]:
    """The ``.txt`` files of a folder, by file name; None stands for the three books that ship with the demo.

    Raises:
        ValueError: there is no such file, or all of them are empty.
    """
    folder = folder or DEFAULT_TEXTS
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt"))}
    texts = {name: text for name, text in texts.items() if text.strip()}
    if not texts:
        raise ValueError(f"{folder} has no .txt file with text in it")
    return texts


def split_sentences(text: str) -> list[str]:
    """Sentences of a text with single spaces in them; a line without an end mark runs into the next one."""
    joined = " ".join(text.split())
    return [s.strip() for s in re.findall(r".+?(?:[.!?][\"')\]]*(?=\s|$)|$)", joined) if s.strip()]


def insert(sentences: list[str], needles: Iterable[tuple[float, str]]) -> str:
    """Put needles between sentences and join all of it with spaces.

    Args:
        sentences: the haystack.
        needles: depth and sentence of each; a depth in [0, 1) is a fraction of the haystack's sentences.
            Needles that fall on the same place stay in their order. Nothing goes behind the last sentence, as
            it may be cut.
    """
    last = max(len(sentences) - 1, 0)
    at: dict[int, list[str]] = {}
    for depth, needle in needles:
        at.setdefault(min(int(depth * len(sentences)), last), []).append(needle)
    parts: list[str] = []
    for index, sentence in enumerate(sentences):
        parts.extend(at.pop(index, ()))
        parts.append(sentence)
    for left in at.values():  # no sentences at all
        parts.extend(left)
    return " ".join(parts)


def spread(rng: random.Random, count: int) -> list[float]:
    """So many depths in [0, 1), ascending, one in each equal part, so that no part is left out."""
    return [(i + rng.random()) / count for i in range(count)]
