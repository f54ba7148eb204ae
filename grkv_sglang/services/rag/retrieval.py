"""From a question to the sections that may answer it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grkv_sglang.services.rag.embedding import Embedder
from grkv_sglang.services.rag.index import Hit, PassageIndex
from grkv_sglang.services.rag.store import Document, Section, Store

PASSAGES_SEARCHED = 24
_PASSAGES_SHOWN = 3


@dataclass(frozen=True)
class FoundSection:
    """A section for the prompt. `hits` are its passages that matched, best first; `score` is the best's."""

    document: Document
    section: Section
    text: str
    hits: tuple[Hit, ...]

    @property
    def score(self) -> float:
        return self.hits[0].score

    def quote(self, hit: Hit) -> str:
        """The passage's text."""
        passage, start = hit.passage, self.section.start
        return self.text[passage.start - start : passage.end - start].strip()


class Retriever:
    """Search by passages, results by section. Blocks: call it in a worker thread."""

    def __init__(self, store: Store, index: PassageIndex, embedder: Embedder) -> None:
        self._store, self._index, self._embedder = store, index, embedder

    def find(
        self, tenant_id: str, question: str, most: int, document_ids: Sequence[str] = ()
    ) -> list[FoundSection]:
        """The best `most` sections, in the order of documents and places (`Store.sections`), whatever their
        scores. Empty where the tenant has no passage."""
        vector = self._embedder.embed([question])[0]
        hits = self._index.search(tenant_id, vector, PASSAGES_SEARCHED, document_ids)
        by_section: dict[str, list[Hit]] = {}
        for hit in hits:  # best first, so each section's first hit is its best
            by_section.setdefault(hit.passage.section_id, []).append(hit)
        best = list(by_section)[:most]
        return [
            FoundSection(document, section, text, tuple(by_section[section.id][:_PASSAGES_SHOWN]))
            for document, section, text in self._store.sections(tenant_id, best)
        ]
