"""Passages in Qdrant, embedded or on a server.

A search sees one tenant's passages only: the tenant is part of the query, not of what is done with
its result.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from qdrant_client import QdrantClient, models

from grkv_sglang.settings import ConfigError

_BATCH_POINTS = 256


@dataclass(frozen=True)
class IndexedPassage:
    """A passage and where it is: characters ``[start, end)`` of its document."""

    tenant_id: str
    document_id: str
    section_id: str
    start: int
    end: int


@dataclass(frozen=True)
class Hit:
    """A passage that a search found; `score` is the cosine of the angle to the question, 1 at most."""

    passage: IndexedPassage
    score: float


class PassageIndex:
    """Qdrant's collection of passages. Blocks: call it in a worker thread.

    Args:
        path: folder of an embedded Qdrant; used by one process at a time.
        url: of a Qdrant server, instead of `path`.
        dimensions: of the vectors.

    Raises:
        ConfigError: Qdrant is not reached, the folder is in use, or the collection holds other vectors.
    """

    def __init__(
        self, collection: str, dimensions: int, *, path: Path | None = None, url: str | None = None,
        api_key: str | None = None,
    ) -> None:  # fmt: skip
        self._collection = collection
        # The embedded Qdrant keeps its data in plain Python objects: one caller at a time.
        self._lock: AbstractContextManager[object] = threading.Lock() if url is None else nullcontext()
        try:
            if url is None:
                self._client = QdrantClient(path=str(path), force_disable_check_same_thread=True)
            else:
                self._client = QdrantClient(url=url, api_key=api_key)
            self._prepare(dimensions, server=url is not None)
        except ConfigError:
            self.close()
            raise
        except Exception as error:  # its clients raise errors of several libraries
            where = f"the Qdrant server at {url}" if url else f"the vectors in {path}"
            raise ConfigError(f"{where} cannot be opened: {error}") from error

    def _prepare(self, dimensions: int, *, server: bool) -> None:
        if not self._client.collection_exists(self._collection):
            self._client.create_collection(
                self._collection,
                vectors_config=models.VectorParams(size=dimensions, distance=models.Distance.COSINE),
            )
            if server:  # the embedded one looks at every point anyway
                tenant = models.KeywordIndexParams(type=models.KeywordIndexType.KEYWORD, is_tenant=True)
                self._client.create_payload_index(self._collection, "tenant_id", tenant)
                self._client.create_payload_index(
                    self._collection, "document_id", models.PayloadSchemaType.KEYWORD
                )
        held = self._client.get_collection(self._collection).config.params.vectors
        size = held.size if isinstance(held, models.VectorParams) else None
        if size != dimensions:
            raise ConfigError(
                f"the collection {self._collection} holds vectors of {size} dimensions, the embedding model "
                f"makes {dimensions}; give another collection and run the admin command reindex"
            )

    def close(self) -> None:
        if hasattr(self, "_client"):
            self._client.close()

    def add(self, passages: Sequence[IndexedPassage], vectors: NDArray[np.float32]) -> None:
        """Store passages with vectors ``[len(passages), dimensions]``; the same passage twice is one."""
        points = [
            models.PointStruct(id=_point_id(passage), vector=vector.tolist(), payload=vars(passage))
            for passage, vector in zip(passages, vectors, strict=True)
        ]
        for start in range(0, len(points), _BATCH_POINTS):
            with self._lock:
                self._client.upsert(self._collection, points[start : start + _BATCH_POINTS], wait=True)

    def search(
        self, tenant_id: str, vector: NDArray[np.float32], limit: int, document_ids: Sequence[str] = ()
    ) -> list[Hit]:
        """The tenant's passages nearest to `vector` ``[dimensions]``, best first; only of `document_ids`
        where there are some."""
        with self._lock:
            found = self._client.query_points(
                self._collection,
                query=vector.tolist(),
                query_filter=_filter(tenant_id, document_ids),
                limit=limit,
                with_payload=True,
            )
        return [Hit(IndexedPassage(**point.payload or {}), point.score) for point in found.points]

    def delete_document(self, tenant_id: str, document_id: str) -> None:
        with self._lock:
            self._client.delete(
                self._collection, models.FilterSelector(filter=_filter(tenant_id, [document_id])), wait=True
            )

    def count(self) -> int:
        """Passages of all tenants."""
        with self._lock:
            return self._client.count(self._collection).count


def _filter(tenant_id: str, document_ids: Sequence[str]) -> models.Filter:
    must: list[models.Condition] = [
        models.FieldCondition(key="tenant_id", match=models.MatchValue(value=tenant_id))
    ]
    if document_ids:
        must.append(models.FieldCondition(key="document_id", match=models.MatchAny(any=list(document_ids))))
    return models.Filter(must=must)


def _point_id(passage: IndexedPassage) -> str:
    return str(uuid.uuid5(uuid.UUID(passage.section_id), f"{passage.start}-{passage.end}"))
