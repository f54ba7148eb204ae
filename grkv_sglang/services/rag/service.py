"""The parts of the service, put together, and what they do with documents."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from grkv_sglang.client import GrkvError
from grkv_sglang.services.common.web import ServiceError
from grkv_sglang.services.rag.answering import Answerer
from grkv_sglang.services.rag.embedding import Embedder
from grkv_sglang.services.rag.engine import Engine
from grkv_sglang.services.rag.index import PassageIndex
from grkv_sglang.services.rag.indexing import Indexer, new_document
from grkv_sglang.services.rag.parsing import DocumentError, parse
from grkv_sglang.services.rag.retrieval import Retriever
from grkv_sglang.services.rag.settings import RagSettings
from grkv_sglang.services.rag.store import Document, Store, StoreError, Tenant
from grkv_sglang.services.rag.views import Deleted
from grkv_sglang.services.rag.warmup import Warmer
from grkv_sglang.settings import ConfigError

logger = logging.getLogger(__name__)

EMBEDDING_FACT = "embedding_model"
_PARSED_AT_ONCE = 2


@dataclass(frozen=True)
class Parts:
    """What the service stands on; opened before it listens, so that what is wrong is told at once."""

    store: Store
    index: PassageIndex
    embedder: Embedder

    def close(self) -> None:
        self.index.close()
        self.store.close()


class RagService:
    """Everything that lives as long as the app; started by `running`."""

    def __init__(self, settings: RagSettings, parts: Parts) -> None:
        store, index, embedder = parts.store, parts.index, parts.embedder
        self.settings, self.store = settings, store
        self.engine = Engine(settings)
        self.indexer = Indexer(settings, store, index, embedder, self.engine)
        self.warmer = Warmer(settings, store, self.engine)
        self.answerer = Answerer(settings, store, Retriever(store, index, embedder), self.engine, self.warmer)
        self._index = index
        self._parsing = asyncio.Semaphore(_PARSED_AT_ONCE)

    async def add_document(self, tenant: Tenant, name: str, data: bytes) -> tuple[Document, bool]:
        """Read an upload and keep it; the document, and whether it is new.

        Raises:
            ServiceError: it cannot be read, or the tenant has too many documents.
        """
        async with self._parsing:
            try:
                parsed = await asyncio.to_thread(
                    parse, name, data, max_characters=self.settings.max_document_characters
                )
            except DocumentError as error:
                raise ServiceError(error.status, error.code, _sentence(error)) from error
        document = new_document(tenant.id, name, data, parsed)
        try:
            kept, is_new = await asyncio.to_thread(
                self.store.add_document, document, self.settings.max_documents
            )
        except StoreError as error:
            raise ServiceError(409, "too_many_documents", _sentence(error)) from error
        self.indexer.wake()
        return kept, is_new

    async def warm_again(self, tenant: Tenant, document_id: str) -> bool:
        """False where the tenant has no such document."""
        found = await asyncio.to_thread(self.store.warm_again, tenant.id, document_id)
        self.indexer.wake()
        self.warmer.wake()
        return found

    async def delete_document(self, tenant: Tenant, document_id: str) -> Deleted | None:
        """Delete vectors, rows and spans; None where the tenant has no such document."""
        if await asyncio.to_thread(self.store.document, tenant.id, document_id) is None:
            return None
        await asyncio.to_thread(self._index.delete_document, tenant.id, document_id)
        digests = await asyncio.to_thread(self.store.delete_document, tenant.id, document_id)
        try:
            deleted = await self.engine.delete_prefixes(tenant.cache_salt, digests)
        except GrkvError as error:
            logger.warning("spans of document %s were not deleted: %s", document_id, error)
            return Deleted(id=document_id, spans_deleted=None)
        return Deleted(id=document_id, spans_deleted=deleted)

    async def wake_warmer(self) -> None:
        """Until cancelled: whenever a document is indexed, its sections can be compressed."""
        while True:
            await self.indexer.on_indexed.wait()
            self.indexer.on_indexed.clear()
            self.warmer.wake()


@asynccontextmanager
async def running(settings: RagSettings, parts: Parts) -> AsyncIterator[RagService]:
    """The service with its background work; closes `parts` at its end."""
    service = RagService(settings, parts)
    tasks: list[asyncio.Task[None]] = []
    try:
        await asyncio.to_thread(parts.store.resume)
        tasks = [
            asyncio.create_task(service.indexer.run()),
            asyncio.create_task(service.wake_warmer()),
            *(asyncio.create_task(service.warmer.run()) for _ in range(settings.warmups)),
        ]
        yield service
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await service.engine.close()
        parts.close()


def open_parts(settings: RagSettings) -> Parts:
    """Blocks while the embedding model is loaded.

    Raises:
        ConfigError: a setting does not fit what is there: the engine's model, the index, the database.
    """
    check_context(settings)
    store = open_store(settings)
    known = store.fact(EMBEDDING_FACT)
    if known not in (None, settings.embedding_model):
        raise ConfigError(
            f"the documents were indexed with embedding_model {known}, not {settings.embedding_model}; set "
            "it back, or give another collection and run the admin command reindex"
        )
    embedder = Embedder(settings.embedding_model)
    index = PassageIndex(
        settings.collection,
        embedder.dimensions,
        path=settings.folder / "qdrant",
        url=settings.qdrant_url,
        api_key=settings.qdrant_api_key,
    )
    store.set_fact(EMBEDDING_FACT, settings.embedding_model)
    return Parts(store, index, embedder)


def open_store(settings: RagSettings) -> Store:
    """The database; the data folder is made where it is needed.

    Raises:
        ConfigError: it cannot be opened.
    """
    from sqlalchemy.exc import SQLAlchemyError

    try:
        settings.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return Store(settings.database)
    except (OSError, SQLAlchemyError, ImportError) as error:
        raise ConfigError(f"the database cannot be opened: {error}") from error


def check_context(settings: RagSettings) -> None:
    """Look whether sections fit into the model's context; an engine that is down is asked again later.

    Raises:
        ConfigError: they do not.
    """

    async def ask() -> int:
        engine = Engine(settings)
        try:
            return await engine.context_tokens()
        finally:
            await engine.close()

    try:
        context = asyncio.run(ask())
    except GrkvError as error:
        logger.warning("the engine is not reached yet, uploads wait for it: %s", error)
        return
    settings.check_context(context)


def _sentence(error: Exception) -> str:
    words = str(error)
    return f"{words[0].upper()}{words[1:]}."
