"""What a parser gives, and how it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

Kind = Literal["txt", "md", "html", "pdf"]


@dataclass(frozen=True)
class ParsedDocument:
    """A document's text: UTF-8 without control characters, lines ended by ``\\n``, headings as ``# Heading``.

    Attributes:
        page_starts: where each page begins in `text`, in characters; empty where there are no pages.
    """

    kind: Kind
    text: str
    page_starts: tuple[int, ...] = ()


class DocumentError(ValueError):
    """An upload cannot be read; the message is for the person who sent it.

    Attributes:
        status: of the HTTP answer.
        code: for programs.
    """

    status: ClassVar[int] = 422
    code: ClassVar[str] = "unreadable_document"


class EmptyDocument(DocumentError):
    code = "empty_document"


class UnknownKind(DocumentError):
    status = 415
    code = "unknown_kind"


class TooLargeDocument(DocumentError):
    status = 413
    code = "document_too_large"
