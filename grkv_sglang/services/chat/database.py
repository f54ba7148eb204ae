"""What is kept of users and conversations, and the connection to where it is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from sqlalchemy import (
    CheckConstraint,
    Engine,
    ForeignKey,
    Index,
    String,
    Text,
    UniqueConstraint,
    create_engine,
    event,
    inspect,
    select,
    text,
)
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, OperationalError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

from grkv_sglang.settings import ConfigError

SCHEMA_VERSION = 1

TurnState = Literal["answering", "done", "stopped", "interrupted", "failed"]
"""Of a turn's answer: being made; whole; ended by the user; broken off, by the engine or by the end of this
server; not begun, with `Turn.problem_message` saying why."""


class Base(DeclarativeBase):
    """Times are seconds since the epoch, UTC."""


class Schema(Base):
    """One row: the version of these tables."""

    __tablename__ = "chat_schema"

    version: Mapped[int] = mapped_column(primary_key=True)


class User(Base):
    __tablename__ = "chat_users"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(64))
    name_key: Mapped[str] = mapped_column(String(256), unique=True)
    """The name without case: "Ada" and "ada" are one user."""
    password_hash: Mapped[str] = mapped_column(String(256))
    cache_salt: Mapped[str] = mapped_column(String(64))
    """The user's namespace in the engine: nothing of another user's is served from the cache. Secret."""
    created_s: Mapped[float]


class SignIn(Base):
    __tablename__ = "chat_sign_ins"

    token_sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("chat_users.id", ondelete="CASCADE"), index=True)
    expires_s: Mapped[float]


class Conversation(Base):
    __tablename__ = "chat_conversations"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("chat_users.id", ondelete="CASCADE"), index=True)
    title: Mapped[str] = mapped_column(String(200))
    system_message: Mapped[str] = mapped_column(Text)
    """Kept with the conversation: another one would change its prefix, and no span would serve it."""
    covered_tokens: Mapped[int] = mapped_column(default=0)
    """So far the prompt is in spans, or will be once its last request's compression is done."""
    created_s: Mapped[float]
    updated_s: Mapped[float]

    turns: Mapped[list[Turn]] = relationship(
        order_by="Turn.position", cascade="all, delete-orphan", passive_deletes=True
    )


class Turn(Base):
    """A question and its answer."""

    __tablename__ = "chat_turns"
    __table_args__ = (
        UniqueConstraint("conversation_id", "position"),
        # Two tabs that send at once: one of them gets an error.
        Index(
            "chat_one_answer_at_a_time",
            "conversation_id",
            unique=True,
            sqlite_where=text("state = 'answering'"),
            postgresql_where=text("state = 'answering'"),
        ),
        CheckConstraint("state IN ('answering', 'done', 'stopped', 'interrupted', 'failed')"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    conversation_id: Mapped[str] = mapped_column(
        ForeignKey("chat_conversations.id", ondelete="CASCADE"), index=True
    )
    position: Mapped[int]
    question: Mapped[str] = mapped_column(Text)
    answer: Mapped[str] = mapped_column(Text, default="")
    state: Mapped[str] = mapped_column(String(16), default="answering")
    created_s: Mapped[float]

    problem_code: Mapped[str | None] = mapped_column(String(32))
    problem_message: Mapped[str | None] = mapped_column(Text)
    finish_reason: Mapped[str | None] = mapped_column(String(32))

    # What the engine told, in tokens; None where the answer did not come to its end.
    prompt_tokens: Mapped[int | None]
    completion_tokens: Mapped[int | None]
    cached_tokens: Mapped[int | None]
    span_tokens: Mapped[int | None]
    span_slots: Mapped[int | None]
    quality: Mapped[float | None]
    ttft_s: Mapped[float | None]
    marked_tokens: Mapped[int | None]
    """The prefix that this request asked to compress."""


def open_database(url: str) -> Engine:
    """The database with its tables, which are made if they are not there.

    Raises:
        ConfigError: it cannot be reached or is of another version; the message says what to do.
    """
    try:
        parsed = make_url(url)
        engine = create_engine(parsed, pool_pre_ping=True)
    except (ArgumentError, ModuleNotFoundError) as error:
        raise ConfigError(f"database_url: {error}") from error
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _set_up_sqlite)
        if parsed.database and parsed.database != ":memory:":
            path = Path(parsed.database)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                # Passwords' hashes and everybody's conversations: for this user of the machine only.
                path.touch(mode=0o600)
            except OSError as error:
                raise ConfigError(f"database_url: cannot write {path}: {error}") from error
    try:
        _make_tables(engine)
    except OperationalError as error:
        shown = parsed.render_as_string(hide_password=True)
        raise ConfigError(f"database_url: cannot open {shown}: {error.orig}") from error
    return engine


def _make_tables(engine: Engine) -> None:
    fresh = not inspect(engine).has_table(Schema.__tablename__)
    Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        if fresh:
            session.add(Schema(version=SCHEMA_VERSION))
            return
        found = session.scalar(select(Schema.version))
    if found != SCHEMA_VERSION:
        raise ConfigError(
            f"database_url: the database is of version {found}, this program's is {SCHEMA_VERSION}: "
            "use the release of grkv_sglang that made it, or another database"
        )


def _set_up_sqlite(connection: Any, _: Any) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = NORMAL")
    cursor.execute("PRAGMA busy_timeout = 10000")
    cursor.close()
