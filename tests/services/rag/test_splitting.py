"""Nothing of a document is lost when it is cut, and no piece is too large."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from grkv_sglang.services.rag.splitting import (
    Atom,
    Cut,
    find_atoms,
    find_headings,
    split_passages,
    split_sections,
)

PIECES = [
    "word",
    "a longer word",
    " ",
    "\n",
    "\n\n",
    ". ",
    "? ",
    "# Head\n\n",
    "- item\n",
    "语言模型",
    "🙂",
    "x" * 90,
]
texts = st.one_of(
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=200).map("".join), st.text(min_size=1)
)
texts = texts.map(str.strip).filter(bool)


def tokens_of(text: str, atoms: list[Atom]) -> list[int]:
    """As a tokenizer of about three bytes per token."""
    return [-(-len(text[atom.start : atom.end].encode()) // 3) for atom in atoms]


def covers(ranges, start: int, end: int) -> bool:
    starts, ends = [r.start for r in ranges], [r.end for r in ranges]
    return starts[0] == start and ends[-1] == end and starts[1:] == ends[:-1]


@given(texts, st.integers(8, 200))
@example("a" * 1000, 8)
@example("🙂" * 100, 8)
def test_atoms_cover_the_text_and_are_small(text, most_bytes):
    atoms = find_atoms(text, most_bytes)
    assert covers(atoms, 0, len(text))
    assert all(atom.start < atom.end for atom in atoms)
    assert max(len(text[atom.start : atom.end].encode()) for atom in atoms) <= most_bytes


@given(texts, st.integers(30, 300))
def test_sections_cover_the_text_within_the_limit(text, limit):
    atoms = find_atoms(text, 60)
    tokens = tokens_of(text, atoms)
    sections = split_sections(text, atoms, tokens, limit)
    assert covers(sections, 0, len(text))
    assert sum(section.tokens for section in sections) == sum(tokens)
    assert max(section.tokens for section in sections) <= limit
    if sum(tokens) <= limit:
        assert len(sections) == 1
    else:
        assert min(section.tokens for section in sections) >= limit / 4 - max(tokens)


@given(texts, st.integers(20, 60), st.integers(0, 10))
def test_passages_cover_their_section_and_overlap(text, words, overlap):
    atoms = find_atoms(text, 60)
    for section in split_sections(text, atoms, tokens_of(text, atoms), 100):
        passages = split_passages(text, atoms, section, words=words, overlap=overlap)
        assert passages[0].start == section.start
        assert passages[-1].end == section.end
        for before, after in pairwise(passages):
            assert before.start < after.start <= before.end < after.end
        # Of one passage alone an atom may have more words than are asked for.
        assert all(
            len(text[p.start : p.end].split()) <= words or sum(p.start <= a.start < p.end for a in atoms) == 1
            for p in passages
        )


def test_passages_share_about_the_overlap():
    text = " ".join(f"Sentence number {n} has six words." for n in range(100))
    atoms = find_atoms(text)
    (section,) = split_sections(text, atoms, tokens_of(text, atoms), 10_000)
    passages = split_passages(text, atoms, section, words=60, overlap=12)
    for before, after in pairwise(passages):
        assert len(text[after.start : before.end].split()) == 12
    assert len(text[passages[0].start : passages[0].end].split()) == 60


def test_cuts_are_found_by_kind():
    text = "# One\n\nFirst. Second?\n\nThird.\n- item\n\n## Two\n\nEnd."
    assert [(text[a.start : a.end].strip(), a.cut) for a in find_atoms(text)] == [
        ("# One", Cut.HEADING),
        ("First.", Cut.PARAGRAPH),
        ("Second?", Cut.SENTENCE),
        ("Third.", Cut.PARAGRAPH),
        ("- item", Cut.SENTENCE),
        ("## Two", Cut.HEADING),
        ("End.", Cut.PARAGRAPH),
    ]


def test_lines_of_prose_are_not_cut():
    text = "A sentence that goes\nover two lines. Another one."
    assert [text[a.start : a.end] for a in find_atoms(text)] == [
        "A sentence that goes\nover two lines. ",
        "Another one.",
    ]


def test_sections_begin_at_headings_where_they_can():
    chapter = "Some words of a chapter. " * 40
    text = "\n\n".join(f"## Chapter {n}\n\n{chapter.strip()}" for n in range(1, 5))
    atoms = find_atoms(text)
    tokens = tokens_of(text, atoms)
    sections = split_sections(text, atoms, tokens, sum(tokens) // 2 + 100)
    assert [section.heading for section in sections] == ["Chapter 1", "Chapter 3"]
    assert text[sections[1].start :].startswith("## Chapter 3")


def test_a_section_inside_a_chapter_has_its_heading():
    text = "# Long\n\n" + "One sentence of it. " * 100
    atoms = find_atoms(text.strip())
    sections = split_sections(text.strip(), atoms, tokens_of(text.strip(), atoms), 300)
    assert len(sections) == 3
    assert {section.heading for section in sections} == {"Long"}


def test_headings():
    text = (
        "CHAPTER VII. A Mad Tea-Party\n\nText.\n\n### Notes ###\n\nchapter 3 is mentioned\nin a line.\n\n#tag"
    )
    assert find_headings(text) == [(0, "CHAPTER VII. A Mad Tea-Party"), (37, "Notes")]
