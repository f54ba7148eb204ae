"""Plain text and Markdown; decoding and cleaning for all kinds."""

from __future__ import annotations

import codecs
import re
import unicodedata
from typing import Literal

from grkv_sglang.services.rag.parsing.base import DocumentError, ParsedDocument, UnknownKind

_BYTE_ORDER_MARKS = (
    # UTF-32 first: its little-endian mark begins with UTF-16's.
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f\x80-\x84\x86-\x9f\ufdd0-\ufdef\ufffe\uffff]")
_MOST_CONTROL = 0.01
"""A larger share of control characters is not text."""


def parse_text(data: bytes, kind: Literal["txt", "md"]) -> ParsedDocument:
    """Raises DocumentError for bytes in an unknown encoding, and UnknownKind for what is no text."""
    return ParsedDocument(kind, clean(decode(data)))


def decode(data: bytes, declared: str | None = None) -> str:
    """Bytes by their byte-order mark, else as UTF-8, else as `declared`.

    An encoding is never guessed: a wrong guess would be indexed as rubbish that nobody sees.

    Raises:
        DocumentError: none of them fits.
        UnknownKind: the bytes are no text.
    """
    for mark, encoding in _BYTE_ORDER_MARKS:
        if data.startswith(mark):
            return _strict(data, encoding)
    if b"\0" in data:
        raise UnknownKind("the file is binary, not text")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        if declared is not None:
            return _strict(data, declared)
        raise DocumentError(
            f"the text is not UTF-8 (byte {error.start}); save it as UTF-8 and upload it again"
        ) from error


def clean(text: str) -> str:
    """One form for all texts: NFC, ``\\n`` at line ends, no control characters, nothing around it.

    Raises:
        UnknownKind: too many control characters for a text.
    """
    text = unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\r", "\n").replace("\f", "\n\n"))
    text, removed = _CONTROL.subn("", text)
    if removed > _MOST_CONTROL * (len(text) + removed):
        raise UnknownKind("the file is binary, not text")
    return text.strip()


def _strict(data: bytes, encoding: str) -> str:
    try:
        return data.decode(encoding)
    except (UnicodeDecodeError, LookupError) as error:
        raise DocumentError(
            f"the text is not {encoding}, as it says; save it as UTF-8 and upload it again"
        ) from error
