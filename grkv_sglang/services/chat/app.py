"""The chat server as a FastAPI application: its routes under ``/api``, and its page."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool

from grkv_sglang import __version__
from grkv_sglang.services.chat import views
from grkv_sglang.services.chat.answers import Answers, Running
from grkv_sglang.services.chat.database import open_database
from grkv_sglang.services.chat.passwords import (
    MAX_PASSWORD_CHARACTERS,
    MIN_PASSWORD_CHARACTERS,
    GuessLimit,
)
from grkv_sglang.services.chat.settings import ChatSettings, default_database_url
from grkv_sglang.services.chat.store import Account, Store, TurnToAnswer, name_key
from grkv_sglang.services.common import STATIC_DIR
from grkv_sglang.services.common.events import HEADERS, MEDIA_TYPE, event
from grkv_sglang.services.common.web import ServiceError, protect

logger = logging.getLogger(__name__)

COOKIE = "grkv_chat"
PAGE_DIR = Path(__file__).parent / "static"

GUESSES_PER_NAME, GUESSES_PER_ADDRESS, GUESS_WINDOW_S = 5, 20, 300.0


def _no_controls(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must not hold control characters")
    return text


def _no_nul(text: str) -> str:
    # PostgreSQL cannot keep it, and nobody types it.
    if "\0" in text:
        raise ValueError("must not hold NUL characters")
    return text


_Name = Annotated[
    str,
    StringConstraints(strip_whitespace=True, min_length=1, max_length=64),
    AfterValidator(_no_controls),
]
_Title = Annotated[
    str,
    StringConstraints(strip_whitespace=True, min_length=1, max_length=200),
    AfterValidator(_no_controls),
]


class Credentials(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: _Name
    password: str = Field(min_length=1, max_length=MAX_PASSWORD_CHARACTERS, repr=False)


class Title(BaseModel):
    model_config = ConfigDict(extra="forbid")

    title: _Title


class Question(BaseModel):
    """Its length is checked against the settings, by the route."""

    model_config = ConfigDict(extra="forbid")

    text: Annotated[str, AfterValidator(_no_nul)]


class SessionView(BaseModel):
    """What a page needs before and after signing in."""

    user: str | None
    registration_open: bool
    min_password_characters: int = MIN_PASSWORD_CHARACTERS
    max_message_characters: int


class _State:
    """What the routes share."""

    def __init__(self, settings: ChatSettings) -> None:
        self.settings = settings
        self.store = Store(open_database(settings.database_url or default_database_url()))
        self.answers = Answers(self.store, settings)
        self.guesses_by_name = GuessLimit(GUESSES_PER_NAME, GUESS_WINDOW_S)
        self.guesses_by_address = GuessLimit(GUESSES_PER_ADDRESS, GUESS_WINDOW_S)


def _state(request: Request) -> _State:
    state: _State = request.app.state.chat
    return state


State = Annotated[_State, Depends(_state)]


def _maybe_account(request: Request, state: State) -> Account | None:
    token = request.cookies.get(COOKIE)
    return state.store.signed_in(token) if token else None


def _account(account: Annotated[Account | None, Depends(_maybe_account)]) -> Account:
    if account is None:
        raise ServiceError(401, "not_signed_in", "You are not signed in, or your sign-in has expired.")
    return account


User = Annotated[Account, Depends(_account)]


def create_app(settings: ChatSettings) -> FastAPI:
    """The application; its database is opened here.

    Raises:
        ConfigError: the database cannot be opened.
    """
    state = _State(settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        interrupted = await run_in_threadpool(state.store.mark_interrupted)
        if interrupted:
            logger.warning("%d answers were cut off when the server ended; marked", interrupted)
        yield
        await state.answers.close()
        state.store.close()

    # The documentation pages of FastAPI load scripts from elsewhere.
    app = FastAPI(title="grkv chat", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.chat = state
    app.include_router(_accounts)
    app.include_router(_conversations)
    app.include_router(_pages)
    app.mount("/static/common", StaticFiles(directory=STATIC_DIR), name="common")
    app.mount("/static", StaticFiles(directory=PAGE_DIR), name="static")
    protect(app, engine_url=settings.engine_url, max_body_bytes=settings.max_body_bytes)
    return app


# -- accounts --------------------------------------------------------------------------------------

_accounts = APIRouter(prefix="/api")


@_accounts.get("/session")
def session(state: State, account: Annotated[Account | None, Depends(_maybe_account)]) -> SessionView:
    """Who is signed in, and what a page must know of the settings."""
    return SessionView(
        user=account.name if account else None,
        registration_open=state.settings.registration_open,
        max_message_characters=state.settings.max_message_characters,
    )


@_accounts.post("/register", status_code=201)
def register(request: Request, state: State, body: Credentials) -> Response:
    """Make an account and sign in to it."""
    if not state.settings.registration_open:
        raise ServiceError(403, "registration_closed", "This server makes no new accounts.")
    if len(body.password) < MIN_PASSWORD_CHARACTERS:
        raise ServiceError(
            422, "invalid", f"password: must have at least {MIN_PASSWORD_CHARACTERS} characters"
        )
    account = state.store.register(body.name, body.password)
    return _signed_in(request, state, account, 201)


@_accounts.post("/sign-in")
def sign_in(request: Request, state: State, body: Credentials) -> Response:
    """Check name and password; too many wrong ones have to wait."""
    address = request.client.host if request.client else ""
    # By both, so that nobody can lock a user out from elsewhere.
    name = f"{address} {name_key(body.name)}"
    wait_s = max(state.guesses_by_name.wait_s(name), state.guesses_by_address.wait_s(address))
    if wait_s > 0:
        raise ServiceError(
            429,
            "too_many_attempts",
            f"Too many failed sign-ins. Try again in {int(wait_s / 60) + 1} minutes.",
            headers={"Retry-After": str(int(wait_s) + 1)},
        )
    account = state.store.check_password(body.name, body.password)
    if account is None:
        state.guesses_by_name.failed(name)
        state.guesses_by_address.failed(address)
        raise ServiceError(401, "wrong_password", "Name or password is wrong.")
    state.guesses_by_name.succeeded(name)
    return _signed_in(request, state, account, 200)


@_accounts.post("/sign-out", status_code=204)
def sign_out(request: Request, state: State) -> Response:
    """End this sign-in, here and in the database."""
    token = request.cookies.get(COOKIE)
    if token:
        state.store.sign_out(token)
    response = Response(status_code=204)
    response.delete_cookie(COOKIE)
    return response


def _signed_in(request: Request, state: _State, account: Account, status: int) -> Response:
    days = state.settings.session_days
    response = JSONResponse({"user": account.name}, status)
    response.set_cookie(
        COOKIE,
        state.store.sign_in(account.id, days),
        max_age=int(days * 86_400),
        httponly=True,
        samesite="lax",
        secure=request.url.scheme == "https",
    )
    return response


# -- conversations ---------------------------------------------------------------------------------

_conversations = APIRouter(prefix="/api/conversations")


@_conversations.get("")
def conversations(state: State, user: User) -> list[views.ConversationSummary]:
    """The user's, the latest first."""
    return state.store.conversations(user.id)


@_conversations.post("", status_code=201)
def create(state: State, user: User) -> views.ConversationView:
    return state.store.create_conversation(user.id, state.settings.system_message)


@_conversations.get("/{conversation_id}")
def conversation(state: State, user: User, conversation_id: str) -> views.ConversationView:
    return state.store.conversation(user.id, conversation_id)


@_conversations.patch("/{conversation_id}")
def rename(state: State, user: User, conversation_id: str, body: Title) -> views.ConversationSummary:
    return state.store.rename(user.id, conversation_id, body.title)


@_conversations.delete("/{conversation_id}", status_code=204)
async def delete(state: State, user: User, conversation_id: str) -> None:
    """Delete it with its turns; an answer in the making is stopped before."""
    await run_in_threadpool(state.store.check_owner, user.id, conversation_id)
    await state.answers.stop(conversation_id)
    await run_in_threadpool(state.store.delete, user.id, conversation_id)


@_conversations.post("/{conversation_id}/messages")
async def send(state: State, user: User, conversation_id: str, body: Question) -> StreamingResponse:
    """Keep a message and answer it: a stream of events.

    ``turn`` first (the message is kept), then ``answer`` (its HTML so far) until ``end`` (the whole
    conversation, with the answer's state and what went wrong, if anything did).
    """
    most = state.settings.max_message_characters
    if not body.text.strip():
        raise ServiceError(422, "invalid", "The message is empty.")
    if len(body.text) > most:
        raise ServiceError(
            413, "too_large", f"The message has {len(body.text):,} characters; at most {most:,} are taken."
        )
    turn = await run_in_threadpool(state.store.begin_turn, user.id, conversation_id, body.text)
    return _streamed(state, user, state.answers.start(turn))


@_conversations.post("/{conversation_id}/retry")
async def retry(state: State, user: User, conversation_id: str) -> StreamingResponse:
    """Answer the last message again: a stream as of `send`."""
    turn = await run_in_threadpool(state.store.begin_again, user.id, conversation_id)
    return _streamed(state, user, state.answers.start(turn))


@_conversations.get("/{conversation_id}/stream", response_model=None)
async def stream(state: State, user: User, conversation_id: str) -> Response:
    """The answer that is being made, as of `send`; 204 where there is none."""
    await run_in_threadpool(state.store.check_owner, user.id, conversation_id)
    run = state.answers.find(conversation_id)
    return Response(status_code=204) if run is None else _streamed(state, user, run)


@_conversations.post("/{conversation_id}/stop", status_code=204)
async def stop(state: State, user: User, conversation_id: str) -> None:
    """End the answer; what there is of it is kept."""
    await run_in_threadpool(state.store.check_owner, user.id, conversation_id)
    await state.answers.stop(conversation_id)


def _streamed(state: _State, user: Account, run: Running) -> StreamingResponse:
    return StreamingResponse(_events(state, user, run), media_type=MEDIA_TYPE, headers=HEADERS)


async def _events(state: _State, user: Account, run: Running) -> AsyncIterator[bytes]:
    turn: TurnToAnswer = run.turn
    yield event("turn", {"position": turn.position, "question": turn.question})
    async for data in state.answers.follow(run):
        yield data
    try:
        ended = await run_in_threadpool(state.store.conversation, user.id, turn.conversation_id)
    except ServiceError:  # deleted meanwhile
        return
    yield event("end", ended.model_dump())


# -- page and health -------------------------------------------------------------------------------

_pages = APIRouter()


@_pages.get("/", include_in_schema=False)
def page() -> FileResponse:
    return FileResponse(PAGE_DIR / "index.html")


@_pages.get("/healthz")
async def healthz(state: State) -> Response:
    """Whether database and engine answer; 503 where one does not."""

    async def database_is_up() -> bool:
        try:
            await run_in_threadpool(state.store.ping)
        except SQLAlchemyError as error:
            logger.warning("database: %s", error)
            return False
        return True

    database, engine = await asyncio.gather(database_is_up(), state.answers.engine_is_up())
    up = {"database": database, "engine": engine}
    words = {name: "ok" if value else "down" for name, value in up.items()}
    return JSONResponse(words, 200 if all(up.values()) else 503)
