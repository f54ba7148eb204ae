"""Users and their conversations in the database. Every method is one transaction; none knows of the engine.

Methods that take a `user_id` see only what is this user's: another's conversation does not exist for them.
"""

from __future__ import annotations

import secrets
import time
import unicodedata
from dataclasses import dataclass, field

from sqlalchemy import Engine, delete, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, sessionmaker

from grkv_sglang.client import Served, Usage
from grkv_sglang.services.chat import views
from grkv_sglang.services.chat.database import Conversation, SignIn, Turn, TurnState, User
from grkv_sglang.services.chat.history import covered_after
from grkv_sglang.services.chat.passwords import (
    NOBODY,
    check_password,
    hash_password,
    new_token,
    token_sha256,
)
from grkv_sglang.services.common.engine import Problem
from grkv_sglang.services.common.web import ServiceError

NEW_TITLE = "New conversation"
_TITLE_CHARACTERS = 60
_DAY_S = 86_400.0

_NO_SUCH = (404, "not_found", "There is no such conversation.")
_BUSY = (
    409,
    "busy",
    "This conversation is being answered already, perhaps in another tab. Wait for the answer or stop it.",
)


@dataclass(frozen=True)
class Account:
    """Who is signed in."""

    id: int
    name: str


@dataclass(frozen=True)
class TurnToAnswer:
    """What is needed to answer a turn.

    Attributes:
        answered: earlier turns that have an answer, whole or not: (question, answer).
        covered_tokens: see `Conversation.covered_tokens`.
    """

    turn_id: int
    conversation_id: str
    position: int
    system_message: str
    answered: list[tuple[str, str]]
    question: str
    cache_salt: str = field(repr=False)
    covered_tokens: int = 0


@dataclass(frozen=True)
class Outcome:
    """How an answer ended. `usage`, `served` and `ttft_s` are there where there is some of it; without its
    end they are what the engine had told until then."""

    state: TurnState
    answer: str
    problem: Problem | None = None
    finish_reason: str | None = None
    usage: Usage | None = None
    served: Served | None = None
    ttft_s: float | None = None
    marked_tokens: int | None = None


class Store:
    """Thread-safe: every call has a session of its own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._session = sessionmaker(engine, expire_on_commit=False)

    def close(self) -> None:
        self._engine.dispose()

    def ping(self) -> None:
        """Raises SQLAlchemy's OperationalError where the database cannot be reached."""
        with self._session() as session:
            session.execute(select(1))

    # -- users -------------------------------------------------------------------------------------

    def register(self, name: str, password: str) -> Account:
        """Raises ServiceError (409) where somebody has that name."""
        user = User(
            name=name,
            name_key=name_key(name),
            password_hash=hash_password(password),
            cache_salt=secrets.token_hex(16),
            created_s=time.time(),
        )
        try:
            with self._session.begin() as session:
                session.add(user)
        except IntegrityError as error:
            raise ServiceError(409, "name_taken", f"The name {name} is taken: choose another.") from error
        return Account(user.id, user.name)

    def check_password(self, name: str, password: str) -> Account | None:
        """The user, if name and password are right."""
        with self._session() as session:
            user = session.scalar(select(User).where(User.name_key == name_key(name)))
        right = check_password(password, user.password_hash if user else NOBODY)
        return Account(user.id, user.name) if user is not None and right else None

    def sign_in(self, user_id: int, days: float) -> str:
        """A new token for the user's cookie; expired ones are forgotten."""
        token = new_token()
        with self._session.begin() as session:
            session.execute(delete(SignIn).where(SignIn.expires_s < time.time()))
            session.add(
                SignIn(
                    token_sha256=token_sha256(token),
                    user_id=user_id,
                    expires_s=time.time() + days * _DAY_S,
                )
            )
        return token

    def signed_in(self, token: str) -> Account | None:
        with self._session() as session:
            user = session.scalar(
                select(User)
                .join(SignIn)
                .where(SignIn.token_sha256 == token_sha256(token), SignIn.expires_s > time.time())
            )
            return None if user is None else Account(user.id, user.name)

    def sign_out(self, token: str) -> None:
        with self._session.begin() as session:
            session.execute(delete(SignIn).where(SignIn.token_sha256 == token_sha256(token)))

    # -- conversations -----------------------------------------------------------------------------

    def conversations(self, user_id: int) -> list[views.ConversationSummary]:
        """The latest first."""
        with self._session() as session:
            found = session.scalars(
                select(Conversation)
                .where(Conversation.user_id == user_id)
                .order_by(Conversation.updated_s.desc())
            )
            return [views.summary(conversation) for conversation in found]

    def create_conversation(self, user_id: int, system_message: str) -> views.ConversationView:
        now = time.time()
        with self._session.begin() as session:
            conversation = Conversation(
                id=secrets.token_hex(16),
                user_id=user_id,
                title=NEW_TITLE,
                system_message=system_message,
                created_s=now,
                updated_s=now,
                turns=[],
            )
            session.add(conversation)
            session.flush()
            return views.conversation_view(conversation)

    def conversation(self, user_id: int, conversation_id: str) -> views.ConversationView:
        """Raises ServiceError (404)."""
        with self._session() as session:
            return views.conversation_view(_own(session, user_id, conversation_id))

    def check_owner(self, user_id: int, conversation_id: str) -> None:
        """Raises ServiceError (404) for a conversation that is not this user's."""
        with self._session() as session:
            _own(session, user_id, conversation_id)

    def rename(self, user_id: int, conversation_id: str, title: str) -> views.ConversationSummary:
        """Raises ServiceError (404)."""
        with self._session.begin() as session:
            conversation = _own(session, user_id, conversation_id)
            conversation.title = title
            return views.summary(conversation)

    def delete(self, user_id: int, conversation_id: str) -> None:
        """Raises ServiceError (404)."""
        with self._session.begin() as session:
            session.delete(_own(session, user_id, conversation_id))

    # -- turns -------------------------------------------------------------------------------------

    def begin_turn(self, user_id: int, conversation_id: str, question: str) -> TurnToAnswer:
        """Keep a question and the place of its answer.

        Raises ServiceError: 404, or 409 where an answer is being made.
        """
        try:
            with self._session.begin() as session:
                conversation = _own(session, user_id, conversation_id)
                if not conversation.turns:
                    conversation.title = title_of(question)
                conversation.updated_s = time.time()
                last = conversation.turns[-1].position if conversation.turns else 0
                turn = Turn(position=last + 1, question=question, answer="", created_s=time.time())
                turn.state = "answering"
                conversation.turns.append(turn)
                session.flush()
                return _to_answer(session, conversation, turn)
        except IntegrityError as error:  # the index on turns that are being answered
            raise ServiceError(*_BUSY) from error

    def begin_again(self, user_id: int, conversation_id: str) -> TurnToAnswer:
        """The last question once more; what there is of its answer is dropped.

        Raises ServiceError: 404, or 409 where an answer is being made, or where there is none to make again.
        """
        with self._session.begin() as session:
            conversation = _own(session, user_id, conversation_id)
            if not conversation.turns:
                raise ServiceError(409, "nothing_to_repeat", "There is no question yet: send one.")
            turn = conversation.turns[-1]
            conversation.updated_s = time.time()
            # In one statement, so that of two requests one finds that it came too late: the index lets a turn
            # that is being answered be answered again.
            taken = session.execute(
                update(Turn)
                .where(Turn.id == turn.id, Turn.state != "answering")
                .values(state="answering", answer="", **dict.fromkeys(_OUTCOME_COLUMNS))
                .returning(Turn.id)
            )
            if taken.first() is None:
                raise ServiceError(*_BUSY)
            session.refresh(turn)
            return _to_answer(session, conversation, turn)

    def keep_progress(self, turn_id: int, answer: str) -> None:
        """Keep what there is of an answer that is being made, for the case that this server dies."""
        with self._session.begin() as session:
            session.execute(
                update(Turn).where(Turn.id == turn_id, Turn.state == "answering").values(answer=answer)
            )

    def end_turn(self, turn_id: int, outcome: Outcome) -> None:
        """Keep how an answer ended. Does nothing where its conversation was deleted."""
        with self._session.begin() as session:
            turn = session.get(Turn, turn_id)
            if turn is None:
                return
            turn.state, turn.answer = outcome.state, outcome.answer
            turn.finish_reason = outcome.finish_reason
            turn.problem_code = outcome.problem.code if outcome.problem else None
            turn.problem_message = outcome.problem.message if outcome.problem else None
            turn.ttft_s = outcome.ttft_s
            if outcome.usage is None:
                return
            turn.prompt_tokens = outcome.usage.prompt_tokens
            turn.completion_tokens = outcome.usage.completion_tokens
            turn.cached_tokens = outcome.usage.cached_tokens
            turn.marked_tokens = outcome.marked_tokens
            if outcome.served is not None:
                turn.span_tokens = outcome.served.span_tokens
                turn.span_slots = outcome.served.span_slots
                turn.quality = outcome.served.quality
            conversation = session.get_one(Conversation, turn.conversation_id)
            conversation.covered_tokens = covered_after(
                conversation.covered_tokens, outcome.marked_tokens, outcome.served
            )

    def mark_interrupted(self) -> int:
        """At the start: answers that an earlier server was making when it ended. Returns how many."""
        with self._session.begin() as session:
            marked = session.execute(
                update(Turn)
                .where(Turn.state == "answering")
                .values(
                    state="interrupted",
                    problem_code="server_restarted",
                    problem_message="The chat server was restarted while it answered.",
                )
                .returning(Turn.id)
            )
            return len(marked.all())


_OUTCOME_COLUMNS = (
    *("problem_code", "problem_message", "finish_reason", "prompt_tokens", "completion_tokens"),
    *("cached_tokens", "span_tokens", "span_slots", "quality", "ttft_s", "marked_tokens"),
)


def name_key(name: str) -> str:
    """Equal for names that look the same but for case."""
    return unicodedata.normalize("NFKC", name).casefold()


def title_of(question: str) -> str:
    """A conversation's first title: the beginning of its first question."""
    line = " ".join(question.split())
    return line if len(line) <= _TITLE_CHARACTERS else line[: _TITLE_CHARACTERS - 1].rstrip() + "…"


def _own(session: Session, user_id: int, conversation_id: str) -> Conversation:
    conversation = session.get(Conversation, conversation_id)
    if conversation is None or conversation.user_id != user_id:
        raise ServiceError(*_NO_SUCH)
    return conversation


def _to_answer(session: Session, conversation: Conversation, turn: Turn) -> TurnToAnswer:
    user = session.get_one(User, conversation.user_id)
    return TurnToAnswer(
        turn_id=turn.id,
        conversation_id=conversation.id,
        position=turn.position,
        system_message=conversation.system_message,
        # A question without any answer was never read by the model and does not count; so there is never a
        # question behind a question, which many chat templates refuse.
        answered=[(t.question, t.answer) for t in conversation.turns if t is not turn and t.answer],
        question=turn.question,
        cache_salt=user.cache_salt,
        covered_tokens=conversation.covered_tokens,
    )
