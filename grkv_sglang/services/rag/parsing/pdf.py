"""PDF: the text of its pages, with where each page begins."""

from __future__ import annotations

import io
import re

from pypdf import PdfReader

from grkv_sglang.services.rag.parsing.base import (
    DocumentError,
    EmptyDocument,
    ParsedDocument,
    TooLargeDocument,
)
from grkv_sglang.services.rag.parsing.text import clean

MAX_PAGES = 3000
_HYPHEN = re.compile(r"(?<=[a-z])-\n(?=[a-z])")
"""A word divided at the end of a line."""


def parse_pdf(data: bytes, *, max_characters: int) -> ParsedDocument:
    """Raises DocumentError for a PDF that is broken, encrypted, of too many pages, or without text."""
    try:
        reader = PdfReader(io.BytesIO(data))
        # Many PDFs are encrypted with an empty password, only to forbid printing.
        locked = reader.is_encrypted and not reader.decrypt("")
        num_pages = 0 if locked else len(reader.pages)
    except Exception as error:  # pypdf raises errors of many kinds on broken files
        raise _broken(error) from error
    if locked:
        raise DocumentError("the PDF is encrypted; save it without a password and upload it again")
    if num_pages > MAX_PAGES:
        raise TooLargeDocument(
            f"the PDF has {num_pages:,} pages, more than the {MAX_PAGES:,} allowed; split it"
        )
    pages, length = [], 0
    for number in range(num_pages):
        try:
            raw = reader.pages[number].extract_text()
        except Exception as error:  # as above
            raise _broken(error, f", page {number + 1}") from error
        pages.append(_HYPHEN.sub("", clean(raw)))
        length += len(pages[-1])
        if length > max_characters:
            raise TooLargeDocument(
                f"the text has more than the {max_characters:,} characters allowed; split the PDF"
            )
    if not length:
        raise EmptyDocument(
            "there is no text in the PDF: are its pages scanned pictures? Run it through OCR and upload it "
            "again"
        )
    starts, position = [], 0
    for page in pages:
        starts.append(position)
        position += len(page) + (2 if page else 0)
    return ParsedDocument("pdf", "\n\n".join(page for page in pages if page), tuple(starts))


def _broken(error: Exception, where: str = "") -> DocumentError:
    detail = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
    return DocumentError(f"the PDF is broken{where} ({detail}); save it anew and upload it again")
