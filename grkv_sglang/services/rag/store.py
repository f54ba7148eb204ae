"""What the service remembers: tenants, their keys, documents and sections, in SQLite or PostgreSQL.

Every method that a request leads to takes the tenant's id and looks for rows of that tenant only.
"""

from __future__ import annotations

import hashlib
import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar, Literal

from sqlalchemy import (
    JSON,
    DateTime,
    ForeignKey,
    String,
    Text,
    UniqueConstraint,
    create_engine,
    event,
    func,
    select,
    update,
)
from sqlalchemy.engine import Engine, make_url
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

DocumentStatus = Literal["received", "indexing", "indexed", "failed"]
SectionStatus = Literal["queued", "compressing", "ready", "exact", "failed"]
"""`exact`: too short to be compressed, served from exact KV."""

_KEY_PREFIX = "grkvrag_"
_HINT_CHARACTERS = len(_KEY_PREFIX) + 6


class Base(DeclarativeBase):
    """All tables."""

    type_annotation_map: ClassVar[dict[Any, Any]] = {datetime: DateTime(timezone=True)}


def _new_id() -> str:
    return uuid.uuid4().hex


def _now() -> datetime:
    return datetime.now(UTC)


class Tenant(Base):
    """A group of users that shares documents, and the compressed KV of their sections."""

    __tablename__ = "tenants"

    id: Mapped[str] = mapped_column(primary_key=True, default=_new_id)
    name: Mapped[str] = mapped_column(unique=True)
    cache_salt: Mapped[str] = mapped_column(default=lambda: secrets.token_urlsafe(32))
    """The tenant's namespace in the engine's tree. Secret: who knows it can be served from its spans."""
    created_at: Mapped[datetime] = mapped_column(default=_now)


class ApiKey(Base):
    """A key is kept as its SHA-256 only: keys are random, so that nothing slower is needed."""

    __tablename__ = "api_keys"

    id: Mapped[int] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), index=True)
    digest: Mapped[str] = mapped_column(unique=True)
    hint: Mapped[str]
    """Its first characters, to tell keys apart."""
    created_at: Mapped[datetime] = mapped_column(default=_now)
    revoked_at: Mapped[datetime | None]


class Document(Base):
    """One upload."""

    __tablename__ = "documents"
    __table_args__ = (UniqueConstraint("tenant_id", "content_sha256"),)

    id: Mapped[str] = mapped_column(primary_key=True, default=_new_id)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), index=True)
    name: Mapped[str]
    kind: Mapped[str]
    content_sha256: Mapped[str]
    """Of the uploaded bytes."""
    num_bytes: Mapped[int]
    text: Mapped[str] = mapped_column(Text, deferred=True)
    num_characters: Mapped[int]
    page_starts: Mapped[list[int]] = mapped_column(JSON)
    status: Mapped[DocumentStatus] = mapped_column(String, default="received")
    problem: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(default=_now)


class Section(Base):
    """A part of a document that is put into prompts and compressed."""

    __tablename__ = "sections"
    __table_args__ = (UniqueConstraint("document_id", "number"),)

    id: Mapped[str] = mapped_column(primary_key=True, default=_new_id)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), index=True)
    document_id: Mapped[str] = mapped_column(ForeignKey("documents.id", ondelete="CASCADE"), index=True)
    number: Mapped[int]
    """From 0, in the order of the text."""
    start: Mapped[int]
    end: Mapped[int]
    """Characters ``[start, end)`` of the document's text."""
    text: Mapped[str] = mapped_column(Text, deferred=True)
    heading: Mapped[str | None]
    tokens: Mapped[int]
    status: Mapped[SectionStatus] = mapped_column(String, default="queued", index=True)
    problem: Mapped[str | None]
    tries: Mapped[int] = mapped_column(default=0)
    """Attempts to compress it since it was last asked for."""
    prefix_tokens: Mapped[int | None]
    """Of the compressed prefix: instructions and section."""
    prefix_slots: Mapped[int | None]
    quality: Mapped[float | None]


class MarkedPrefix(Base):
    """A prefix of this tenant that the engine was asked to compress, for its deletion.

    A document behind another one in a prompt has KV of its own there; its deletion must reach that too.
    """

    __tablename__ = "marked_prefixes"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), primary_key=True)
    tokens_sha256: Mapped[str] = mapped_column(primary_key=True)
    document_ids: Mapped[list[str]] = mapped_column(JSON)


class Fact(Base):
    """What was true when the data was made, such as the embedding model."""

    __tablename__ = "facts"

    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[str]


class StoreError(ValueError):
    """A command on tenants or keys is wrong; the message says why."""


@dataclass(frozen=True)
class NewSection:
    """A section before it has a row."""

    start: int
    end: int
    text: str
    heading: str | None
    tokens: int


@dataclass(frozen=True)
class WarmJob:
    """A section to compress, with what its prompt is made of."""

    section_id: str
    tenant_id: str
    document_id: str
    cache_salt: str
    document_name: str
    heading: str | None
    text: str
    tries: int


class Store:
    """The database. Methods block: call them in a worker thread."""

    def __init__(self, url: str) -> None:
        self._engine = _connect(url)
        Base.metadata.create_all(self._engine)
        self._session = sessionmaker(self._engine, expire_on_commit=False)

    def close(self) -> None:
        self._engine.dispose()

    # -- tenants and keys ----------------------------------------------------------------------------

    def add_tenant(self, name: str) -> str:
        """A new tenant; returns its first key, which is shown once.

        Raises:
            StoreError: the name is taken or empty.
        """
        if not name.strip():
            raise StoreError("a tenant needs a name")
        try:
            with self._session.begin() as session:
                tenant = Tenant(name=name)
                session.add(tenant)
                session.flush()
                return _new_key(session, tenant.id)
        except IntegrityError as error:
            raise StoreError(f"there is a tenant {name!r} already") from error

    def add_key(self, tenant_name: str) -> str:
        """A further key of a tenant. Raises StoreError for an unknown one."""
        with self._session.begin() as session:
            tenant = session.scalar(select(Tenant).where(Tenant.name == tenant_name))
            if tenant is None:
                raise StoreError(f"there is no tenant {tenant_name!r}")
            return _new_key(session, tenant.id)

    def revoke_key(self, key_id: int) -> None:
        """Raises StoreError where there is no such key that still works."""
        with self._session.begin() as session:
            key = session.get(ApiKey, key_id)
            if key is None or key.revoked_at is not None:
                raise StoreError(f"there is no working key {key_id}")
            key.revoked_at = _now()

    def list_tenants(self) -> list[tuple[Tenant, int, list[ApiKey]]]:
        """Tenants by name, each with its number of documents and its keys."""
        with self._session() as session:
            rows = session.scalars(select(Tenant).order_by(Tenant.name)).all()
            return [
                (
                    tenant,
                    _count_documents(session, tenant.id),
                    list(session.scalars(select(ApiKey).filter_by(tenant_id=tenant.id).order_by(ApiKey.id))),
                )
                for tenant in rows
            ]

    def tenant_of_key(self, key: str) -> Tenant | None:
        """Whose key it is; None where it is nobody's any more."""
        with self._session() as session:
            return session.scalar(
                select(Tenant)
                .join(ApiKey, ApiKey.tenant_id == Tenant.id)
                .where(ApiKey.digest == _digest(key), ApiKey.revoked_at.is_(None))
            )

    # -- facts ---------------------------------------------------------------------------------------

    def fact(self, name: str) -> str | None:
        with self._session() as session:
            return session.scalar(select(Fact.value).where(Fact.name == name))

    def set_fact(self, name: str, value: str) -> None:
        with self._session.begin() as session:
            session.merge(Fact(name=name, value=value))

    # -- documents -----------------------------------------------------------------------------------

    def add_document(self, document: Document, most: int) -> tuple[Document, bool]:
        """The row, and whether it is new: the same bytes of the same tenant give the row that is there.

        Raises:
            StoreError: the tenant has `most` documents.
        """
        known = select(Document).where(
            Document.tenant_id == document.tenant_id, Document.content_sha256 == document.content_sha256
        )
        try:
            with self._session.begin() as session:
                if (found := session.scalar(known)) is not None:
                    return found, False
                if _count_documents(session, document.tenant_id) >= most:
                    raise StoreError(f"there are {most} documents already; delete one first")
                session.add(document)
            return document, True
        except IntegrityError:  # the same upload at the same moment
            with self._session() as session:
                return session.scalars(known).one(), False

    def list_documents(self, tenant_id: str) -> list[tuple[Document, list[Section]]]:
        """Newest first, each with its sections in order; their texts are not loaded."""
        with self._session() as session:
            documents = session.scalars(
                select(Document)
                .where(Document.tenant_id == tenant_id)
                .order_by(Document.created_at.desc(), Document.id)
            ).all()
            sections: dict[str, list[Section]] = {document.id: [] for document in documents}
            for section in session.scalars(
                select(Section).where(Section.tenant_id == tenant_id).order_by(Section.number)
            ):
                sections[section.document_id].append(section)
            return [(document, sections[document.id]) for document in documents]

    def document(self, tenant_id: str, document_id: str) -> tuple[Document, list[Section]] | None:
        """None where the tenant has no such document."""
        with self._session() as session:
            document = session.scalar(_owned(tenant_id, document_id))
            if document is None:
                return None
            return document, list(
                session.scalars(
                    select(Section)
                    .where(Section.document_id == document_id, Section.tenant_id == tenant_id)
                    .order_by(Section.number)
                )
            )

    def delete_document(self, tenant_id: str, document_id: str) -> list[str]:
        """Deletes its rows; returns the `tokens_sha256` of all prefixes that hold some of it."""
        with self._session.begin() as session:
            document = session.scalar(_owned(tenant_id, document_id))
            if document is not None:
                session.delete(document)
            prefixes = [
                prefix
                for prefix in session.scalars(select(MarkedPrefix).where(MarkedPrefix.tenant_id == tenant_id))
                if document_id in prefix.document_ids
            ]
            for prefix in prefixes:
                session.delete(prefix)
            return [prefix.tokens_sha256 for prefix in prefixes]

    def document_text(self, document_id: str) -> str | None:
        with self._session() as session:
            return session.scalar(select(Document.text).where(Document.id == document_id))

    # -- indexing ------------------------------------------------------------------------------------

    def take_document(self) -> Document | None:
        """The oldest document that waits for its index; it is `indexing` from now on."""
        with self._session.begin() as session:
            document = session.scalar(
                select(Document)
                .where(Document.status == "received")
                .order_by(Document.created_at, Document.id)
                .limit(1)
            )
            if document is None:
                return None
            taken = session.execute(
                update(Document)
                .where(Document.id == document.id, Document.status == "received")
                .values(status="indexing")
            )
            return document if _rows(taken) else None

    def add_sections(self, document: Document, sections: Sequence[NewSection]) -> list[Section]:
        """Replaces the document's sections; empty where the document was deleted meanwhile."""
        with self._session.begin() as session:
            if session.scalar(_owned(document.tenant_id, document.id)) is None:
                return []
            for old in session.scalars(select(Section).where(Section.document_id == document.id)):
                session.delete(old)
            session.flush()
            rows = [
                Section(
                    tenant_id=document.tenant_id, document_id=document.id, number=number,
                    **vars(section),
                )
                for number, section in enumerate(sections)
            ]  # fmt: skip
            session.add_all(rows)
            return rows

    def set_document_status(
        self, document_id: str, status: DocumentStatus, problem: str | None = None
    ) -> bool:
        """Whether the document is still there."""
        with self._session.begin() as session:
            result = session.execute(
                update(Document).where(Document.id == document_id).values(status=status, problem=problem)
            )
            return _rows(result) > 0

    def index_again(self) -> None:
        """Every document waits for its index: the vectors are gone, or of another model."""
        with self._session.begin() as session:
            session.execute(update(Document).values(status="received", problem=None))

    def resume(self) -> None:
        """What was in work when the service ended waits again."""
        with self._session.begin() as session:
            session.execute(update(Document).where(Document.status == "indexing").values(status="received"))
            session.execute(update(Section).where(Section.status == "compressing").values(status="queued"))

    # -- sections ------------------------------------------------------------------------------------

    def sections(self, tenant_id: str, section_ids: Sequence[str]) -> list[tuple[Document, Section, str]]:
        """Those of `section_ids` that are the tenant's, each with its document and its text, ordered by
        document and place: the same sections always come in the same order, so that prompts share them."""
        with self._session() as session:
            rows = session.execute(
                select(Document, Section, Section.text)
                .join(Document, Document.id == Section.document_id)
                .where(
                    Section.id.in_(section_ids),
                    Section.tenant_id == tenant_id,
                    Document.tenant_id == tenant_id,
                )
                .order_by(Document.id, Section.number)
            )
            return [(document, section, text) for document, section, text in rows]

    def num_sections(self, document_ids: Sequence[str]) -> dict[str, int]:
        """Of each document."""
        with self._session() as session:
            rows = session.execute(
                select(Section.document_id, func.count())
                .where(Section.document_id.in_(document_ids))
                .group_by(Section.document_id)
            )
            return {row[0]: row[1] for row in rows}

    def take_section(self) -> WarmJob | None:
        """The next section to compress; it is `compressing` from now on."""
        with self._session.begin() as session:
            row = session.execute(
                select(Section, Section.text, Document.name, Tenant.cache_salt)
                .join(Document, Document.id == Section.document_id)
                .join(Tenant, Tenant.id == Section.tenant_id)
                .where(Section.status == "queued", Document.status == "indexed")
                .order_by(Section.tries, Document.created_at, Document.id, Section.number)
                .limit(1)
            ).first()
            if row is None:
                return None
            section, text, name, cache_salt = row
            taken = session.execute(
                update(Section)
                .where(Section.id == section.id, Section.status == "queued")
                .values(status="compressing", problem=None, tries=Section.tries + 1)
            )
            if not _rows(taken):
                return None
            return WarmJob(
                section.id, section.tenant_id, section.document_id, cache_salt, name, section.heading, text,
                section.tries,
            )  # fmt: skip

    def set_section(self, section_id: str, status: str, **values: object) -> bool:
        """Sets a section's status and further columns; whether the section is still there."""
        with self._session.begin() as session:
            result = session.execute(
                update(Section).where(Section.id == section_id).values(status=status, **values)
            )
            return _rows(result) > 0

    def warm_again(self, tenant_id: str, document_id: str) -> bool:
        """Queues the document's sections that are not in work; False where there is no such document."""
        with self._session.begin() as session:
            document = session.scalar(_owned(tenant_id, document_id))
            if document is None:
                return False
            if document.status == "failed":
                document.status, document.problem = "received", None
            session.execute(
                update(Section)
                .where(Section.document_id == document_id, Section.status != "compressing")
                .values(status="queued", problem=None, tries=0)
            )
            return True

    def mark_prefix(self, tenant_id: str, tokens_sha256: str, document_ids: Sequence[str]) -> None:
        """Remember a prefix before the engine is asked to compress it."""
        with self._session.begin() as session:
            session.merge(
                MarkedPrefix(
                    tenant_id=tenant_id, tokens_sha256=tokens_sha256, document_ids=sorted(set(document_ids))
                )
            )


def _connect(url: str) -> Engine:
    engine = create_engine(url, pool_pre_ping=True)
    if make_url(url).get_backend_name() == "sqlite":

        @event.listens_for(engine, "connect")
        def _configure(connection: Any, _: Any) -> None:
            cursor = connection.cursor()
            cursor.execute("PRAGMA foreign_keys = ON")
            cursor.execute("PRAGMA journal_mode = WAL")
            cursor.execute("PRAGMA busy_timeout = 10000")
            cursor.close()

    return engine


def _owned(tenant_id: str, document_id: str) -> Any:
    return select(Document).where(Document.id == document_id, Document.tenant_id == tenant_id)


def _count_documents(session: Session, tenant_id: str) -> int:
    return session.scalar(select(func.count()).where(Document.tenant_id == tenant_id)) or 0


def _new_key(session: Session, tenant_id: str) -> str:
    key = _KEY_PREFIX + secrets.token_urlsafe(32)
    session.add(ApiKey(tenant_id=tenant_id, digest=_digest(key), hint=key[:_HINT_CHARACTERS]))
    return key


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _rows(result: Any) -> int:
    """Rows that a statement changed; SQLAlchemy types the count only on one kind of result."""
    count: int = result.rowcount
    return count
