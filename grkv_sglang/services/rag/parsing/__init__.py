"""Uploaded bytes become text: what kind of document they are, and one module per kind."""

from __future__ import annotations

from pathlib import PurePosixPath

from grkv_sglang.services.rag.parsing.base import (
    DocumentError,
    EmptyDocument,
    Kind,
    ParsedDocument,
    TooLargeDocument,
    UnknownKind,
)

SUFFIXES: dict[str, Kind] = {
    ".txt": "txt",
    ".text": "txt",
    ".md": "md",
    ".markdown": "md",
    ".html": "html",
    ".htm": "html",
    ".xhtml": "html",
    ".pdf": "pdf",
}
ACCEPTED = "txt, md, html and pdf"

_PDF_MARK_REACH = 1024
"""Readers accept a PDF whose mark stands within its first so many bytes."""
_BINARY_MARKS = (
    b"PK\x03\x04",
    b"\x89PNG",
    b"\xff\xd8\xff",
    b"GIF8",
    b"\x7fELF",
    b"\x1f\x8b",
    b"\xd0\xcf\x11\xe0",
)


def parse(name: str, data: bytes, *, max_characters: int) -> ParsedDocument:
    """The text of an upload. Runs for seconds on large PDFs: call it in a worker thread.

    Args:
        name: the file's name; only its ending is looked at.
        max_characters: bound on the text.

    Raises:
        DocumentError: its subclasses say which kind of wrong it is, its message what to do.
    """
    if not data.strip():
        raise EmptyDocument("the file is empty")
    kind = kind_of(name, data)
    if kind == "pdf":
        from grkv_sglang.services.rag.parsing.pdf import parse_pdf

        document = parse_pdf(data, max_characters=max_characters)
    elif kind == "html":
        from grkv_sglang.services.rag.parsing.html import parse_html

        document = parse_html(data)
    else:
        from grkv_sglang.services.rag.parsing.text import parse_text

        document = parse_text(data, kind)
    if not document.text.strip():
        raise EmptyDocument("there is no text in the file")
    if len(document.text) > max_characters:
        raise TooLargeDocument(
            f"the text has {len(document.text):,} characters, more than the {max_characters:,} allowed; "
            "split it"
        )
    return document


def kind_of(name: str, data: bytes) -> Kind:
    """What an upload is, by its content first and its name's ending second.

    Raises:
        UnknownKind: neither tells, or the content is of a kind that is not read.
        DocumentError: the ending says PDF and the content does not.
    """
    suffix = PurePosixPath(name).suffix.lower()
    if b"%PDF-" in data[:_PDF_MARK_REACH]:
        return "pdf"
    if suffix == ".pdf":
        raise DocumentError("the file is named .pdf, but it is not a PDF")
    if data.startswith(_BINARY_MARKS):
        raise UnknownKind(f"the file is neither text nor PDF; {ACCEPTED} are read")
    if suffix in SUFFIXES:
        return SUFFIXES[suffix]
    if suffix:
        raise UnknownKind(f"files ending in {suffix[:20]} are not read; {ACCEPTED} are")
    head = data[:_PDF_MARK_REACH].lstrip().lower()
    return "html" if head.startswith((b"<!doctype html", b"<html")) else "txt"


__all__ = [
    "ACCEPTED",
    "SUFFIXES",
    "DocumentError",
    "EmptyDocument",
    "Kind",
    "ParsedDocument",
    "TooLargeDocument",
    "UnknownKind",
    "kind_of",
    "parse",
]
