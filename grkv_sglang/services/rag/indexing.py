"""Uploads become searchable: cut, embedded and put into the index, one document after the other."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence

from grkv_sglang.client import GrkvApiError, GrkvError
from grkv_sglang.services.common.engine import problem_of
from grkv_sglang.services.rag.embedding import Embedder
from grkv_sglang.services.rag.engine import Engine
from grkv_sglang.services.rag.index import IndexedPassage, PassageIndex
from grkv_sglang.services.rag.parsing import ParsedDocument
from grkv_sglang.services.rag.settings import RagSettings
from grkv_sglang.services.rag.splitting import (
    MOST_ATOM_BYTES,
    Atom,
    find_atoms,
    split_passages,
    split_sections,
)
from grkv_sglang.services.rag.store import Document, NewSection, Store
from grkv_sglang.settings import ConfigError

logger = logging.getLogger(__name__)

_EMBEDDED_AT_ONCE = 64
_NAME_CHARACTERS = 200


class Indexer:
    """Works through documents that wait for their index; `wake` it when there is a new one.

    Cutting needs the engine's tokenizer: while the engine is down, documents wait.
    """

    def __init__(
        self, settings: RagSettings, store: Store, index: PassageIndex, embedder: Embedder, engine: Engine
    ) -> None:
        self._settings, self._store, self._index = settings, store, index
        self._embedder, self._engine = embedder, engine
        self._wake = asyncio.Event()
        self.on_indexed = asyncio.Event()
        """Set whenever a document has become searchable."""

    def wake(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._wake.clear()
            document = await asyncio.to_thread(self._store.take_document)
            if document is None:
                await self._wake.wait()
                continue
            try:
                await self._index_document(document)
            except GrkvError as error:
                if isinstance(error, GrkvApiError) and error.status < 500:
                    await self._fail(document, problem_of(error, self._engine.url).message)
                    continue
                problem = problem_of(error, self._engine.url, kept="the document is kept").message
                await asyncio.to_thread(self._store.set_document_status, document.id, "received", problem)
                await asyncio.sleep(self._settings.retry_s)
            except ConfigError as error:
                await self._fail(document, str(error))
            except Exception:  # a document that cannot be indexed must not stop the others
                logger.exception("document %s was not indexed", document.id)
                await self._fail(document, "the document was not indexed; the service's log says why")

    async def _index_document(self, document: Document) -> None:
        settings = self._settings
        settings.check_context(await self._engine.context_tokens(fresh=True))
        text = await asyncio.to_thread(self._store.document_text, document.id)
        if text is None:
            return
        atoms = await asyncio.to_thread(find_atoms, text, min(MOST_ATOM_BYTES, settings.section_tokens))
        tokens = await self._engine.count_tokens([text[atom.start : atom.end] for atom in atoms])
        await asyncio.to_thread(self._store_index, document, text, atoms, tokens)
        self.on_indexed.set()

    async def _fail(self, document: Document, problem: str) -> None:
        await asyncio.to_thread(self._store.set_document_status, document.id, "failed", problem)

    def _store_index(
        self, document: Document, text: str, atoms: Sequence[Atom], tokens: Sequence[int]
    ) -> None:
        settings = self._settings
        sections = split_sections(text, atoms, tokens, settings.section_tokens)
        self._index.delete_document(document.tenant_id, document.id)  # of an earlier attempt
        rows = self._store.add_sections(
            document,
            [NewSection(s.start, s.end, text[s.start : s.end], s.heading, s.tokens) for s in sections],
        )
        passages = [
            IndexedPassage(document.tenant_id, document.id, row.id, passage.start, passage.end)
            for section, row in zip(sections, rows, strict=bool(rows))
            for passage in split_passages(
                text, atoms, section, words=settings.passage_words, overlap=settings.passage_overlap_words
            )
        ]
        for start in range(0, len(passages), _EMBEDDED_AT_ONCE):
            batch = passages[start : start + _EMBEDDED_AT_ONCE]
            self._index.add(batch, self._embedder.embed([text[p.start : p.end] for p in batch]))
        if not self._store.set_document_status(document.id, "indexed"):
            self._index.delete_document(document.tenant_id, document.id)  # deleted meanwhile


def new_document(tenant_id: str, name: str, data: bytes, parsed: ParsedDocument) -> Document:
    """The row of an upload."""
    return Document(
        tenant_id=tenant_id,
        name=clean_name(name),
        kind=parsed.kind,
        content_sha256=hashlib.sha256(data).hexdigest(),
        num_bytes=len(data),
        text=parsed.text,
        num_characters=len(parsed.text),
        page_starts=list(parsed.page_starts),
        status="received",
    )


def clean_name(name: str) -> str:
    """A file's name as one short line: names come from outside, and go into prompts and pages."""
    last = name.replace("\\", "/").rsplit("/", 1)[-1]
    return "".join(c for c in last if c.isprintable()).strip()[-_NAME_CHARACTERS:] or "document"
