"""A document is cut into sections, and a section into passages.

A *section* is put into a prompt and compressed: large, cut at headings where it can be. A *passage* is what
is embedded and searched: about a paragraph, overlapping its neighbours. Both are made of *atoms*, pieces of
the text that never need to be cut: sentences, or parts of very long ones. All of them are ranges of
characters, so that nothing is lost and every passage has a place in the document.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

MOST_ATOM_BYTES = 400


class Cut(IntEnum):
    """How good a place is for a cut."""

    ANYWHERE = 0
    SENTENCE = 1
    PARAGRAPH = 2
    HEADING = 3


@dataclass(frozen=True)
class Atom:
    """Characters ``[start, end)`` of a text, with the white space behind them; `cut` is that of its start."""

    start: int
    end: int
    cut: Cut


@dataclass(frozen=True)
class Section:
    """Characters ``[start, end)`` of a document; sections follow each other without gaps."""

    start: int
    end: int
    tokens: int
    """The sum of its atoms'."""
    heading: str | None
    """The last heading at its start or before."""


@dataclass(frozen=True)
class Passage:
    """Characters ``[start, end)`` of a document, inside one section."""

    start: int
    end: int


_PARAGRAPH = re.compile(r"\n[^\S\n]*\n\s*")
_SENTENCE = re.compile(r"[.!?…]+[\"'”’»)\]]*\s+|[。！？]+|\n(?=[ \t]*(?:[-*+•|]|\d+[.)])\s)")
"""The end of a sentence, or of a line before an item of a list or a row of a table."""
_MARKDOWN_HEADING = re.compile(r"^#{1,6}[ \t]+(\S.*)$", re.MULTILINE)
_CHAPTER_HEADING = re.compile(
    r"(?:\A|(?<=\n\n))((?:chapter|part|book|appendix|letter)[ \t]+[\w.]{1,12}\b[^\n]{0,60})(?=\n\s*\n)",
    re.IGNORECASE,
)
_WORD = re.compile(r"\S+")
_HEADING_CHARACTERS = 120


def split_sections(text: str, atoms: Sequence[Atom], tokens: Sequence[int], limit: int) -> list[Section]:
    """Sections of about equal size, of at most `limit` tokens; a text that fits is one section.

    Args:
        atoms: of the text (`find_atoms`).
        tokens: how many each atom has. Their sum bounds what the whole has, but for a few at the seams.

    Raises:
        ValueError: an atom has more than `limit` tokens.
    """
    if max(tokens, default=0) > limit:
        raise ValueError(f"an atom has {max(tokens)} tokens, more than a section's {limit}")
    headings = find_headings(text)
    places = [position for position, _ in headings]
    sections, first, left = [], 0, sum(tokens)
    while first < len(atoms):
        last = _section_end(atoms, tokens, first, left, limit)
        used = sum(tokens[first:last])
        start, end = atoms[first].start, atoms[last - 1].end
        before = bisect_right(places, start)
        sections.append(Section(start, end, used, headings[before - 1][1] if before else None))
        first, left = last, left - used
    return sections


def _section_end(atoms: Sequence[Atom], tokens: Sequence[int], first: int, left: int, limit: int) -> int:
    """Index behind the last atom of the section that begins with `first`.

    Where the rest needs k sections, each should have a k-th of it: a cut is looked for between half and one
    and a half of that, the best kind of place first, then the nearest. So no section is a small rest: all
    have a quarter of `limit` or more, but for an atom.
    """
    if left <= limit:
        return len(atoms)
    target = left / -(-left // limit)
    best, best_rank = first + 1, (-1, 0.0)
    used = 0
    for index in range(first, len(atoms)):
        used += tokens[index]
        if used > limit or (used > 1.5 * target and best_rank > (-1, 0.0)):
            break
        if index + 1 < len(atoms) and used >= target / 2:
            rank = (int(atoms[index + 1].cut), -abs(used - target))
            if rank > best_rank:
                best, best_rank = index + 1, rank
        elif used < target / 2:
            best = index + 1
    return best


def split_passages(
    text: str, atoms: Sequence[Atom], section: Section, *, words: int, overlap: int
) -> list[Passage]:
    """Passages of about `words` words that cover the section; neighbours share about `overlap` words."""
    own = [atom for atom in atoms if section.start <= atom.start < section.end]
    sizes = [_num_words(text[atom.start : atom.end]) for atom in own]
    passages: list[Passage] = []
    first = 0
    while first < len(own):
        last, size = first, 0
        while last < len(own) and (last == first or size + sizes[last] <= words):
            size += sizes[last]
            last += 1
        passages.append(Passage(own[first].start, own[last - 1].end))
        if last == len(own):
            break
        again, shared = last, 0
        while again - 1 > first and shared + sizes[again - 1] <= overlap:
            again -= 1
            shared += sizes[again]
        first = again
    return passages


def find_atoms(text: str, most_bytes: int = MOST_ATOM_BYTES) -> list[Atom]:
    """The text as atoms of at most `most_bytes` bytes of UTF-8, which bounds their tokens too: a byte-level
    tokenizer makes no more tokens than bytes."""
    cuts = {match.end(): Cut.SENTENCE for match in _SENTENCE.finditer(text)}
    cuts |= {match.end(): Cut.PARAGRAPH for match in _PARAGRAPH.finditer(text)}
    cuts |= {position: Cut.HEADING for position, _ in find_headings(text)}
    cuts.pop(len(text), None)
    cuts[0] = Cut.HEADING
    starts = _with_text(text, sorted(cuts))
    atoms = []
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        if start == end:
            continue
        pieces = _pieces(text, start, end, most_bytes)
        atoms.append(Atom(*pieces[0], cuts[start]))
        atoms.extend(Atom(*piece, Cut.ANYWHERE) for piece in pieces[1:])
    return atoms


def find_headings(text: str) -> list[tuple[int, str]]:
    """Where headings begin, and their words, in order."""
    found = {
        match.start(): match.group(1).strip(" #\t")[:_HEADING_CHARACTERS]
        for pattern in (_MARKDOWN_HEADING, _CHAPTER_HEADING)
        for match in pattern.finditer(text)
    }
    return sorted((position, words) for position, words in found.items() if words)


def _with_text(text: str, starts: list[int]) -> list[int]:
    """Starts behind which something else than white space comes before the next; the first always."""
    ends = [*starts[1:], len(text)]
    return [start for start, end in zip(starts, ends, strict=True) if start == 0 or text[start:end].strip()]


def _pieces(text: str, start: int, end: int, most_bytes: int) -> list[tuple[int, int]]:
    """``[start, end)`` in pieces of at most `most_bytes`, cut behind a white space where there is one."""
    pieces = []
    while len(text[start:end].encode()) > most_bytes:
        # Characters have one to four bytes: the longest prefix that fits, then back to a white space.
        fitting = len(
            text[start : min(end, start + most_bytes)].encode()[:most_bytes].decode(errors="ignore")
        )
        at = start + fitting
        space = max(text.rfind(" ", start, at), text.rfind("\n", start, at))
        if space > start + fitting // 2:
            at = space + 1
        pieces.append((start, at))
        start = at
    return [*pieces, (start, end)]


def _num_words(text: str) -> int:
    """Words, or where a script has no spaces, about as many as it would have."""
    return max(sum(1 for _ in _WORD.finditer(text)), len(text.encode()) // 12)
