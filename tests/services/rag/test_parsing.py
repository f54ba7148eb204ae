"""Uploads become text, or a refusal that says why."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grkv_sglang.services.rag.parsing import (
    DocumentError,
    EmptyDocument,
    TooLargeDocument,
    UnknownKind,
    kind_of,
    parse,
)
from tests.services.rag.files import TOPICS, pdf

LIMIT = 100_000


def read(name: str, data: bytes) -> str:
    return parse(name, data, max_characters=LIMIT).text


@pytest.mark.parametrize(
    ("name", "data", "kind"),
    [
        ("a.txt", b"text", "txt"),
        ("a.MD", b"# text", "md"),
        ("a.htm", b"<p>text", "html"),
        ("no-ending", b"  <!DOCTYPE html><p>text", "html"),
        ("no-ending", b"text", "txt"),
        ("wrongly-named.txt", b"%PDF-1.7 ...", "pdf"),
        ("with junk before.pdf", b"\n\njunk %PDF-1.4", "pdf"),
    ],
)
def test_kind(name, data, kind):
    assert kind_of(name, data) == kind


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xef\xbb\xbfGr\xc3\xbc\xc3\x9fe", "Grüße"),
        ("Grüße".encode("utf-16"), "Grüße"),
        ("Grüße".encode("utf-32"), "Grüße"),
        (b"one\r\ntwo\rthree", "one\ntwo\nthree"),
        (b"  page\fnext ", "page\n\nnext"),
        ("e\u0301".encode(), "é"),
    ],
    ids=["utf-8 mark", "utf-16", "utf-32", "line ends", "form feed", "composed"],
)
def test_text(data, text):
    assert read("a.txt", data) == text


def test_few_control_characters_are_dropped():
    assert read("a.txt", b"word " * 50 + b"\x07end") == "word " * 50 + "end"


@pytest.mark.parametrize(
    ("name", "data", "error", "words"),
    [
        ("a.txt", b"", EmptyDocument, "the file is empty"),
        ("a.txt", b" \n\t ", EmptyDocument, "the file is empty"),
        ("a.txt", "Grüße".encode("latin-1"), DocumentError, "not UTF-8 (byte 2)"),
        ("a.txt", b"\xff\xfea", DocumentError, "not utf-16, as it says"),
        ("a.txt", b"a\0b", UnknownKind, "binary, not text"),
        ("a.txt", b"\x01\x02\x03\x04abc", UnknownKind, "binary, not text"),
        ("a.txt", b"PK\x03\x04 a docx", UnknownKind, "neither text nor PDF"),
        ("a.docx", b"text", UnknownKind, "files ending in .docx are not read; txt, md, html and pdf are"),
        ("a.pdf", b"text", DocumentError, "named .pdf, but it is not a PDF"),
        ("a.pdf", b"%PDF-1.7\nrubbish", DocumentError, "the PDF is broken"),
        ("a.html", b"<script>only()</script><style>p {}</style>", EmptyDocument, "no text in the file"),
        ("a.html", b"<meta charset=utf-7-not><p>\xff", DocumentError, "not utf-7-not, as it says"),
        ("a.txt", b"a" * (LIMIT + 1), TooLargeDocument, "has 100,001 characters"),
    ],
)
def test_refusals(name, data, error, words):
    with pytest.raises(error) as raised:
        read(name, data)
    assert type(raised.value) is error
    assert words in str(raised.value)


def test_html_keeps_headings_and_lists_and_drops_scripts():
    page = b"""<!doctype html><html><head><title>Tab</title><style>p { color: red }</style></head><body>
    <nav>Home | About</nav>
    <h2>Wintering   <em>bees</em></h2>
    <p>The hive is
    kept dry.<br>Mice stay outside.</p><script>alert("no")</script>
    <ul><li>sugar</li><li>dough</li></ul>
    <table><tr><td>weight</td><td>12 kg</td></tr></table>
    <pre>  keep
    this</pre><p hidden>unseen</p><!-- nor this -->
    </body></html>"""
    text = read("a.html", page)
    assert text.startswith(
        "## Wintering bees\n\nThe hive is kept dry.\nMice stay outside.\n\n- sugar\n- dough"
    )
    assert "weight | 12 kg |" in text
    assert text.endswith("keep\n    this")
    for dropped in ("Tab", "color", "Home", "alert", "unseen", "nor this"):
        assert dropped not in text


def test_html_in_its_declared_encoding():
    assert read("a.html", '<meta charset="latin-1"><p>Grüße</p>'.encode("latin-1")) == "Grüße"


def test_html_nested_deeper_than_python_calls():
    assert read("a.html", b"<div>" * 5000 + b"deep" + b"</div>" * 5000) == "deep"


def test_pdf_knows_its_pages():
    document = parse("a.pdf", pdf([TOPICS["bread"], "", TOPICS["sailing"]]), max_characters=LIMIT)
    assert document.kind == "pdf"
    first, second, third = document.page_starts
    assert first == 0
    assert second == third  # nothing stands on the second page
    assert document.text[:third].startswith("The sourdough starter")
    assert document.text[third:].startswith("To reef the mainsail")


def test_pdf_joins_divided_words():
    document = parse("a.pdf", pdf(["a divi-\nded word"]), max_characters=LIMIT)
    assert document.text == "a divided word"


def test_pdf_with_a_password():
    with pytest.raises(DocumentError, match="the PDF is encrypted; save it without a password"):
        read("a.pdf", pdf(["secret"], password="word"))


def test_pdf_that_only_forbids_printing_is_read():
    assert read("a.pdf", pdf(["open to all"], password="")) == "open to all"


def test_pdf_of_pictures():
    with pytest.raises(EmptyDocument, match="are its pages scanned pictures"):
        read("a.pdf", pdf(["", ""]))


def test_pdf_cut_short():
    whole = pdf([TOPICS["bread"]] * 3)
    with pytest.raises(DocumentError) as raised:
        read("a.pdf", whole[: len(whole) // 8])
    assert str(raised.value).startswith("the PDF is broken") or isinstance(raised.value, EmptyDocument)


def test_pdf_with_more_text_than_allowed():
    with pytest.raises(TooLargeDocument, match="more than the 200 characters"):
        parse("a.pdf", pdf([TOPICS["bread"]]), max_characters=200)


@given(st.binary(max_size=300), st.sampled_from(["a.txt", "a.md", "a.html", "a.pdf", "a"]))
def test_any_bytes_are_text_or_refused(data, name):
    try:
        text = read(name, data)
    except DocumentError:
        return
    assert text == text.strip() != ""
    assert "\0" not in text
    assert "\r" not in text


WHOLE = pdf(["a page"])


@given(st.binary(max_size=200))
def test_a_damaged_pdf_is_text_or_refused(rubbish):
    with contextlib.suppress(DocumentError):
        assert read("a.pdf", WHOLE[:300] + rubbish + WHOLE[300 + len(rubbish) :])
