"""What the API takes and gives."""

from __future__ import annotations

from bisect import bisect_right
from datetime import UTC, datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from grkv_sglang.client import Served, Usage
from grkv_sglang.services.rag.store import Document, Section, SectionStatus


class SectionView(BaseModel):
    """A section and what became of its compression."""

    number: int = Field(description="From 1, in the order of the text.")
    heading: str | None
    tokens: int
    first_page: int | None
    last_page: int | None
    status: SectionStatus
    problem: str | None
    prefix_tokens: int | None = Field(
        description="Tokens of the compressed prefix: instructions and section."
    )
    prefix_slots: int | None = Field(description="KV slots that hold them.")
    quality: float | None


class DocumentView(BaseModel):
    """A document, and how far it is."""

    id: str
    name: str
    kind: str
    num_bytes: int
    num_characters: int
    num_pages: int | None
    created_at: datetime
    status: Literal["waiting", "indexing", "compressing", "ready", "failed"] = Field(
        description="It can be asked about from `compressing` on."
    )
    problem: str | None
    num_sections: int
    num_finished: int = Field(description="Sections that are compressed, or too short for it.")
    tokens: int
    prefix_tokens: int = Field(description="Of all compressed prefixes.")
    prefix_slots: int
    quality: float | None = Field(description="The worst of its sections'.")
    sections: list[SectionView] | None = Field(None, description="Only where one document is asked for.")


class DocumentList(BaseModel):
    documents: list[DocumentView]


class Deleted(BaseModel):
    """What a deletion reached."""

    id: str
    spans_deleted: int | None = Field(
        description="Spans of the engine; null where it was not reached, and they go when they are unused."
    )


class Me(BaseModel):
    """Who a key belongs to, and what the service takes."""

    tenant: str
    accepted: list[str]
    max_upload_bytes: int
    max_question_characters: int
    sections_per_answer: int


class QuestionIn(BaseModel):
    """A question."""

    model_config = ConfigDict(extra="forbid")

    question: str = Field(min_length=1)
    document_ids: list[str] = Field(
        default_factory=list, max_length=100, description="Answer from these only; all unless given."
    )
    sections: int | None = Field(None, ge=1, le=8, description="Sections in the prompt.")
    max_tokens: int | None = Field(None, ge=1, description="Most tokens of the answer.")
    stream: bool = Field(True, description="Server-sent events, or one JSON at the end.")


class PassageView(BaseModel):
    """A passage that matched the question."""

    text: str
    first_page: int | None
    last_page: int | None
    score: float = Field(description="Cosine similarity to the question.")


class Source(BaseModel):
    """A section that was put into the prompt, with what matched."""

    number: int = Field(description="By which the answer cites it.")
    document_id: str
    document: str
    section: int = Field(description="From 1.")
    num_sections: int
    heading: str | None
    first_page: int | None
    last_page: int | None
    score: float
    passages: list[PassageView]


class Answer(BaseModel):
    """An answer, its sources and what served its prompt."""

    text: str
    html: str
    finish_reason: str | None
    cited: list[int] = Field(description="Numbers of sources that the answer names.")
    sources: list[Source]
    usage: Usage
    served: Served | None = Field(description="Null where the engine does not tell.")
    ttft_s: float = Field(description="From the question's arrival to the first word, search included.")
    total_s: float


def document_view(document: Document, sections: list[Section], *, detailed: bool = False) -> DocumentView:
    finished = [section for section in sections if section.status in ("ready", "exact")]
    failed = next((section for section in sections if section.status == "failed"), None)
    waiting = next((s for s in sections if s.status in ("queued", "compressing")), None)
    status: Literal["waiting", "indexing", "compressing", "ready", "failed"]
    problem = document.problem
    if document.status == "failed":
        status = "failed"
    elif document.status != "indexed":
        status = "waiting" if document.status == "received" else "indexing"
    elif waiting is not None:
        status, problem = "compressing", next((s.problem for s in sections if s.problem), None)
    elif failed is not None:
        status, problem = "failed", f"not compressed: {failed.problem}"
    else:
        status = "ready"
    return DocumentView(
        id=document.id,
        name=document.name,
        kind=document.kind,
        num_bytes=document.num_bytes,
        num_characters=document.num_characters,
        num_pages=len(document.page_starts) or None,
        created_at=document.created_at.replace(tzinfo=document.created_at.tzinfo or UTC),
        status=status,
        problem=problem,
        num_sections=len(sections),
        num_finished=len(finished),
        tokens=sum(section.tokens for section in sections),
        prefix_tokens=sum(section.prefix_tokens or 0 for section in finished),
        prefix_slots=sum(section.prefix_slots or 0 for section in finished),
        quality=min((s.quality for s in finished if s.quality is not None), default=None),
        sections=[section_view(document, section) for section in sections] if detailed else None,
    )


def section_view(document: Document, section: Section) -> SectionView:
    return SectionView(
        number=section.number + 1,
        heading=section.heading,
        tokens=section.tokens,
        first_page=page_at(document.page_starts, section.start),
        last_page=page_at(document.page_starts, section.end - 1),
        status=section.status,
        problem=section.problem,
        prefix_tokens=section.prefix_tokens,
        prefix_slots=section.prefix_slots,
        quality=section.quality,
    )


def page_at(page_starts: list[int], position: int) -> int | None:
    """Page, from 1, of a character of a document; None where there are no pages."""
    return bisect_right(page_starts, position) if page_starts else None
