"""The documents of the fidelity benchmark: real text and code, questions, planted facts, filler.

Everything follows from the files, the tokenizer and the seed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Kind = Literal["prose", "code", "filler"]

PROSE_SUFFIXES = (".txt", ".md")
CODE_SUFFIXES = (".py", ".c", ".h", ".cc", ".cpp", ".js", ".ts", ".go", ".rs", ".java")

_PLACES = (
    "harbour", "library", "observatory", "windmill", "lighthouse", "cellar", "garden", "chapel", "station",
    "archive", "workshop", "tower", "bakery", "museum", "stable", "greenhouse",
)  # fmt: skip
_FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
    "The river runs past the mill and the road follows it. "
)
_LEAST_BYTES = 30_000
_MARK = "qzuserqz"
_PLANTED = "access code"


@dataclass(frozen=True)
class Fact:
    """Planted in the document: `question` asks for it, the reply starts with `cue`, then `value`."""

    question: str
    cue: str
    value: str
    depth: float
    """Where in the document, 0 to 1."""


@dataclass(frozen=True)
class Case:
    """One document and what is asked behind it. Token ids throughout.

    Attributes:
        name: file and where in it.
        kind: prose, code, or filler sentences that hold nothing but planted facts.
        context: chat header and document; this is what gets compressed.
        continuation: the text that follows the document; empty for filler.
        questions: suffixes up to where the reply starts.
        facts: pairs of a suffix up to where the value starts, and the value.
        fact_depths: where each fact lies, 0 to 1.
    """

    name: str
    kind: Kind
    context: list[int]
    continuation: list[int]
    questions: list[list[int]]
    facts: list[tuple[list[int], list[int]]]
    fact_depths: list[float]


class Chat:
    """The chat template around a document and a question, in tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        header, self._footer, self._next = "", "\n\n", "\n\n"
        if getattr(tokenizer, "chat_template", None) is not None:
            user = {"role": "user", "content": _MARK}
            rendered = tokenizer.apply_chat_template(
                [user, {"role": "assistant", "content": _MARK}, user], tokenize=False
            )
            _, _, self._next, _ = rendered.split(_MARK)
            header, self._footer = tokenizer.apply_chat_template(
                [user], tokenize=False, add_generation_prompt=True
            ).split(_MARK)
        self.header = self.encode(header)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids)
        return text

    def suffix(self, question: str, cue: str = "") -> list[int]:
        """What follows a document: the question, the change of turns, the first words of the reply."""
        return self.encode(f"\n\n{question}{self._footer}{cue}")

    def turn(self, question: str) -> list[int]:
        """What follows a reply: the next message, the change of turns."""
        return self.encode(f"{self._next}{question.strip()}{self._footer}")


def text_files(
    folders: Sequence[Path], *, least_bytes: int = _LEAST_BYTES
) -> dict[Literal["prose", "code"], list[Path]]:
    """Files of the folders by kind, sorted, at least so many bytes each.

    Raises:
        ValueError: there are none.
    """
    found: dict[Literal["prose", "code"], list[Path]] = {"prose": [], "code": []}
    for folder in folders:
        for path in sorted(folder.iterdir()):
            if path.is_file() and path.stat().st_size >= least_bytes:
                if path.suffix in PROSE_SUFFIXES:
                    found["prose"].append(path)
                elif path.suffix in CODE_SUFFIXES:
                    found["code"].append(path)
    if not any(found.values()):
        raise ValueError(
            f"expected text or code files of {least_bytes:,} bytes or more in "
            f"{', '.join(map(str, folders))}, found none"
        )
    return found


def build_cases(
    folders: Sequence[Path],
    tokenizer: Any,
    *,
    documents: int,
    filler_documents: int,
    context_tokens: int,
    continuation_tokens: int,
    n_questions: int,
    facts_per_document: int,
    seed: int,
) -> list[Case]:
    """`documents` excerpts, prose and code in turn where there are both, then `filler_documents`.

    Raises:
        ValueError: the files do not hold that many excerpts of that length.
    """
    chat = Chat(tokenizer)
    # An excerpt starts somewhere in what is left before its longest possible end, see `_document_case`.
    files = text_files(folders, least_bytes=max(_LEAST_BYTES, 9 * (context_tokens + continuation_tokens)))
    kinds: list[Literal["prose", "code"]] = [
        kind for kind in ("prose", "code") for _ in range(2 if kind == "prose" else 1) if files[kind]
    ]
    cases: list[Case] = []
    for index in range(documents):
        kind = kinds[index % len(kinds)]
        rng = random.Random(f"{seed}/{index}/{context_tokens}")
        pool = files[kind]
        # Every file once before any is used again, in an order that the seed decides.
        order = random.Random(f"{seed}/{kind}").sample(range(len(pool)), len(pool))
        used = sum(1 for i in range(index) if kinds[i % len(kinds)] == kind)
        cases.append(
            _document_case(
                pool[order[used % len(pool)]], kind, chat, rng, context_tokens, continuation_tokens,
                n_questions, facts_per_document,
            )
        )  # fmt: skip
    for index in range(filler_documents):
        rng = random.Random(f"{seed}/filler/{index}/{context_tokens}")
        cases.append(_filler_case(f"filler-{index}", chat, rng, context_tokens))
    return cases


def _document_case(
    path: Path,
    kind: Literal["prose", "code"],
    chat: Chat,
    rng: random.Random,
    context_tokens: int,
    continuation_tokens: int,
    n_questions: int,
    n_facts: int,
) -> Case:
    text = path.read_text(encoding="utf-8")
    paragraphs = [match.end() for match in re.finditer(r"\n\s*\n", text)]
    wanted = context_tokens - len(chat.header)
    # A token is at most some eight characters of English; starts that leave too little are not drawn.
    starts = [p for p in paragraphs if len(text) - p > 8 * (context_tokens + continuation_tokens)]
    if not starts:
        raise ValueError(f"expected {path} to hold more than {context_tokens} tokens")
    start = rng.choice(starts)
    window = text[start : start + 12 * (context_tokens + continuation_tokens)]
    facts = [_fact(rng, place, kind) for place in rng.sample(_PLACES, n_facts)]
    # Facts go in front of paragraphs, in their document's first 90 %, found by characters, then tokenised.
    breaks = [m.end() for m in re.finditer(r"\n\s*\n", window)]
    pieces: list[str] = []
    last = 0
    for (sentence, _), at in zip(facts, _spread(rng, n_facts, wanted, chat, window, breaks), strict=True):
        pieces += [window[last:at], sentence]
        last = at
    pieces.append(window[last:])
    ids = chat.encode("".join(pieces))
    document = ids[:wanted]
    continuation = ids[wanted : wanted + continuation_tokens]
    if len(document) < wanted or len(continuation) < continuation_tokens:
        raise ValueError(f"expected {path} to hold {wanted + continuation_tokens} tokens behind {start}")
    excerpt = chat.decode(document)
    places = [excerpt.find(sentence.strip()) for sentence, _ in facts]
    if -1 in places:
        raise ValueError(f"expected a context that holds {n_facts} facts, got one of {context_tokens} tokens")
    questions = prose_questions(excerpt, rng) if kind == "prose" else code_questions(excerpt, rng)
    depths = [place / len(excerpt) for place in places]
    return Case(
        name=f"{path.name}@{start}",
        kind=kind,
        context=[*chat.header, *document],
        continuation=continuation,
        questions=[chat.suffix(question) for question in questions[:n_questions]],
        facts=[(chat.suffix(fact.question, fact.cue), chat.encode(fact.value)) for _, fact in facts],
        fact_depths=depths,
    )


def _spread(
    rng: random.Random, n_facts: int, wanted: int, chat: Chat, window: str, breaks: list[int]
) -> list[int]:
    """Ascending places in `window` for facts, one in each of equal stretches of the document."""
    end = len(chat.decode(chat.encode(window)[: int(0.9 * wanted)]))
    places = []
    for index in range(n_facts):
        low, high = end * index // n_facts, end * (index + 1) // n_facts
        inside = [b for b in breaks if low <= b < high] or [low]
        places.append(rng.choice(inside))
    return places


def _fact(rng: random.Random, place: str, kind: Kind) -> tuple[str, Fact]:
    """A sentence to plant, and how it is asked for."""
    value = str(rng.randrange(10_000, 100_000))
    sentence = f"The {_PLANTED} of the {place} is {value}."
    planted = f"# {sentence}\n" if kind == "code" else f"{sentence}\n\n"
    question = f"What is the access code of the {place}?"
    return planted, Fact(question, f"The access code of the {place} is", f" {value}", 0.0)


def _filler_case(name: str, chat: Chat, rng: random.Random, context_tokens: int) -> Case:
    """Repeated filler sentences with one fact somewhere. (Among four facts even the full cache of a small
    model finds the right one in a third of the cases only, which leaves little to lose.)"""
    wanted = context_tokens - len(chat.header)
    sentence, fact = _fact(rng, rng.choice(_PLACES), "filler")
    planted = chat.encode(sentence.replace("\n\n", " "))
    filler = chat.encode(_FILLER)
    n_units = (wanted - len(planted)) // len(filler)
    if n_units < 1:
        raise ValueError(
            f"expected a context that holds a fact between filler, got one of {context_tokens} tokens"
        )
    at = rng.randrange(n_units)
    document = [*filler * at, *planted, *filler * (n_units - at + 1)][:wanted]
    return Case(
        name=name,
        kind="filler",
        context=[*chat.header, *document],
        continuation=[],
        questions=[],
        facts=[(chat.suffix(fact.question, fact.cue), chat.encode(fact.value))],
        fact_depths=[at / n_units],
    )


def prose_questions(text: str, rng: random.Random) -> list[str]:
    """Six questions about a piece of prose: general ones, and some about drawn words of it."""
    sentences = [s.strip() for s in re.split(r"(?<=[.!?])\s+", text) if 40 <= len(s.strip()) <= 240]
    sentences = [s for s in sentences if _PLANTED not in s]
    phrases = [" ".join(s.split()[:7]) for s in _drawn(rng, sentences, 3, "sentences")]
    names = sorted(set(re.findall(r"(?<=[a-z,;] )[A-Z][a-z]{3,}", text))) or ["the narrator"]
    name = rng.choice(names)
    return [
        "What happens in this text? Answer in two sentences.",
        f'What follows after the words "{phrases[0]}"?',
        f"What do we learn about {name}?",
        f'Explain this in your own words: "{phrases[1]}"',
        "Which people and places are mentioned?",
        f'Quote the whole sentence that begins with "{phrases[2]}".',
    ]


def code_questions(text: str, rng: random.Random) -> list[str]:
    """Six questions about a piece of source code."""
    names = sorted(set(re.findall(r"(?:def|class|func|function)\s+(\w+)", text))) or ["main"]
    lines = [line.strip() for line in text.splitlines() if 15 <= len(line.strip()) <= 80]
    lines = [line for line in lines if _PLANTED not in line]
    first, second = rng.choice(names), rng.choice(names)
    after, also = _drawn(rng, lines, 2, "lines")
    return [
        "What does this code do? Answer in two sentences.",
        f"What does `{first}` do?",
        f"Which arguments does `{second}` take?",
        f"Which line comes right after `{after}`?",
        "Which functions and classes are defined here?",
        f"Explain this line: `{also}`",
    ]


def _drawn(rng: random.Random, found: Sequence[str], count: int, what: str) -> list[str]:
    if len(found) < count:
        raise ValueError(f"expected text of at least {count} {what} to ask about, found {len(found)}")
    return rng.sample(found, count)
