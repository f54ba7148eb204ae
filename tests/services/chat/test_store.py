"""Users, conversations and turns in the database: SQLite, and PostgreSQL where one is named."""

from __future__ import annotations

import re
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from grkv_sglang.client import Served, Usage
from grkv_sglang.services.chat.database import Schema, SignIn, Turn, TurnState, User, open_database
from grkv_sglang.services.chat.store import Account, Outcome, Store, title_of
from grkv_sglang.services.common.engine import Problem
from grkv_sglang.services.common.web import ServiceError
from grkv_sglang.settings import ConfigError
from tests.services.chat.conftest import PASSWORD

SERVED = Served(
    mode="prefer_compressed",
    exact_tokens=30,
    span_tokens=600,
    span_slots=60,
    spans=1,
    budget=0.1,
    quality=0.8,
    profile="default",
    reprefilled_tokens=0,
)


def usage(prompt: int, completion: int, cached: int) -> Usage:
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        cached_tokens=cached,
    )


@pytest.fixture
def ada(store: Store) -> Account:
    return store.register("Ada", PASSWORD)


def test_names_are_unique_without_case(store: Store, ada: Account):
    for name in ("Ada", "ADA", "ａda"):
        with pytest.raises(ServiceError, match="is taken"):
            store.register(name, PASSWORD)
    assert store.check_password("aDA", PASSWORD) == ada
    assert store.check_password("Ada", PASSWORD + "x") is None
    assert store.check_password("Bob", PASSWORD) is None


def test_every_user_has_a_salt_of_their_own_and_no_plain_secret(store: Store, ada: Account):
    store.register("Bob", PASSWORD)
    token = store.sign_in(ada.id, 1.0)
    with Session(store._engine) as session:
        users = session.scalars(select(User)).all()
        kept = session.scalars(select(SignIn.token_sha256)).one()
    assert len({user.cache_salt for user in users}) == 2
    assert all(re.fullmatch(r"[0-9a-f]{32}", user.cache_salt) for user in users)
    assert all(PASSWORD not in user.password_hash for user in users)
    assert token != kept


def test_sign_ins_expire_and_end(store: Store, ada: Account):
    token, other = store.sign_in(ada.id, 1.0), store.sign_in(ada.id, 1.0)
    assert store.signed_in(token) == ada
    store.sign_out(token)
    assert store.signed_in(token) is None
    assert store.signed_in(other) == ada
    with Session(store._engine) as session, session.begin():
        session.execute(update(SignIn).values(expires_s=1.0))
    assert store.signed_in(other) is None
    store.sign_in(ada.id, 1.0)
    with Session(store._engine) as session:
        assert len(session.scalars(select(SignIn)).all()) == 1


def test_another_users_conversation_does_not_exist(store: Store, ada: Account):
    bob = store.register("Bob", PASSWORD)
    mine = store.create_conversation(ada.id, "").id
    for attempt in (
        lambda: store.conversation(bob.id, mine),
        lambda: store.rename(bob.id, mine, "x"),
        lambda: store.delete(bob.id, mine),
        lambda: store.begin_turn(bob.id, mine, "x"),
        lambda: store.begin_again(bob.id, mine),
        lambda: store.check_owner(bob.id, mine),
        lambda: store.conversation(ada.id, "0" * 32),
    ):
        with pytest.raises(ServiceError) as caught:
            attempt()
        assert caught.value.problem.status == 404
    assert store.conversations(bob.id) == []
    assert [c.id for c in store.conversations(ada.id)] == [mine]


def test_turns_become_the_next_prompt_and_the_counters(store: Store, ada: Account):
    mine = store.create_conversation(ada.id, "Be brief.").id
    first = store.begin_turn(ada.id, mine, "  What is\n a clock? ")
    assert (first.position, first.answered, first.covered_tokens) == (1, [], 0)
    store.end_turn(first.turn_id, Outcome("done", "It shows the time.", usage=usage(600, 20, 0), ttft_s=2.0))
    second = store.begin_turn(ada.id, mine, "Why?")
    assert second.answered == [("  What is\n a clock? ", "It shows the time.")]
    assert second.system_message == "Be brief."
    store.end_turn(
        second.turn_id,
        Outcome("done", "Because.", usage=usage(640, 10, 610), ttft_s=0.5, marked_tokens=620),
    )
    third = store.begin_turn(ada.id, mine, "And then?")
    assert third.covered_tokens == 620
    store.end_turn(
        third.turn_id,
        Outcome("done", "Nothing.", usage=usage(660, 5, 630), served=SERVED, ttft_s=0.25),
    )
    view = store.conversation(ada.id, mine)
    assert view.title == "What is a clock?"
    assert view.turns[0].answer_html == "<p>It shows the time.</p>\n"
    assert view.counters.model_dump() == {
        "prompt_tokens": 1900,
        "completion_tokens": 35,
        "cached_tokens": 1240,
        "span_tokens": 600,
        "compressions": 1,
        "context_tokens": 665,
        "held_slots": 125,
        "quality": 0.8,
        "ttft_s": 0.25,
    }
    assert store.begin_turn(ada.id, mine, "More.").covered_tokens == 620


def test_what_was_not_answered_is_kept_but_not_part_of_the_prompt(store: Store, ada: Account):
    mine = store.create_conversation(ada.id, "").id
    ends: list[tuple[TurnState, str]] = [("failed", ""), ("stopped", ""), ("interrupted", "half an ans")]
    for state, answer in ends:
        turn = store.begin_turn(ada.id, mine, f"asked, {state}")
        store.end_turn(turn.turn_id, Outcome(state, answer, Problem(503, "engine_down", "It is down.")))
    assert store.begin_turn(ada.id, mine, "x").answered == [("asked, interrupted", "half an ans")]
    turns = store.conversation(ada.id, mine).turns
    assert [turn.question for turn in turns[:2]] == ["asked, failed", "asked, stopped"]
    assert turns[0].problem is not None
    assert turns[0].problem.model_dump() == {"code": "engine_down", "message": "It is down."}


def test_one_answer_at_a_time(store: Store, ada: Account):
    mine = store.create_conversation(ada.id, "").id
    turn = store.begin_turn(ada.id, mine, "x")
    for attempt in (lambda: store.begin_turn(ada.id, mine, "y"), lambda: store.begin_again(ada.id, mine)):
        with pytest.raises(ServiceError) as caught:
            attempt()
        assert (caught.value.problem.status, caught.value.problem.code) == (409, "busy")
    store.end_turn(turn.turn_id, Outcome("done", "z"))
    assert store.begin_turn(ada.id, mine, "y").position == 2


@pytest.mark.parametrize("again", [False, True])
def test_of_many_at_once_one_wins(store: Store, ada: Account, again: bool):
    mine = store.create_conversation(ada.id, "").id
    store.end_turn(store.begin_turn(ada.id, mine, "x").turn_id, Outcome("failed", ""))

    def attempt(number: int) -> str:
        try:
            if again:
                store.begin_again(ada.id, mine)
            else:
                store.begin_turn(ada.id, mine, f"question {number}")
        except ServiceError as error:
            return error.problem.code
        return "won"

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(attempt, range(8)))
    assert sorted(results) == ["busy"] * 7 + ["won"]
    assert len(store.conversation(ada.id, mine).turns) == (1 if again else 2)


def test_answering_again_forgets_the_first_attempt(store: Store, ada: Account):
    mine = store.create_conversation(ada.id, "").id
    with pytest.raises(ServiceError, match="no question yet"):
        store.begin_again(ada.id, mine)
    turn = store.begin_turn(ada.id, mine, "x")
    store.end_turn(
        turn.turn_id, Outcome("interrupted", "ha", Problem(502, "engine_broke_off", "cut"), "abort")
    )
    again = store.begin_again(ada.id, mine)
    assert (again.turn_id, again.question, again.answered) == (turn.turn_id, "x", [])
    shown = store.conversation(ada.id, mine).turns[0]
    assert (shown.state, shown.answer, shown.problem, shown.finish_reason) == ("answering", "", None, None)


def test_answers_cut_off_by_a_restart_are_marked_with_what_there_is(store: Store, ada: Account):
    mine = store.create_conversation(ada.id, "").id
    turn = store.begin_turn(ada.id, mine, "x")
    store.keep_progress(turn.turn_id, "half an ans")
    assert store.mark_interrupted() == 1
    store.keep_progress(turn.turn_id, "too late")
    shown = store.conversation(ada.id, mine).turns[0]
    assert (shown.state, shown.answer) == ("interrupted", "half an ans")
    assert shown.problem is not None
    assert shown.problem.code == "server_restarted"
    assert store.mark_interrupted() == 0


def test_deleting_takes_the_turns_along(store: Store, ada: Account):
    mine = store.create_conversation(ada.id, "").id
    turn = store.begin_turn(ada.id, mine, "x")
    store.delete(ada.id, mine)
    store.end_turn(turn.turn_id, Outcome("done", "late"))
    with Session(store._engine) as session:
        assert session.scalars(select(Turn)).all() == []


def test_titles_are_short():
    assert title_of(" a\n b ") == "a b"
    assert title_of("x" * 60) == "x" * 60
    assert title_of("word " * 30) == ("word " * 12).rstrip()[:59] + "…"


def test_a_database_is_opened_again_and_another_version_refused(database_url: str):
    first = Store(open_database(database_url))
    first.register("Ada", PASSWORD)
    first.close()
    second = Store(open_database(database_url))
    assert second.check_password("Ada", PASSWORD) is not None
    with Session(second._engine) as session, session.begin():
        session.execute(update(Schema).values(version=99))
    second.close()
    with pytest.raises(ConfigError, match="is of version 99, this program's is 1"):
        open_database(database_url)


def test_a_new_sqlite_file_is_for_its_owner_only(tmp_path: Path):
    open_database(f"sqlite:///{tmp_path}/new/chat.db").dispose()
    assert stat.S_IMODE((tmp_path / "new" / "chat.db").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nonsense", "Could not parse"),
        ("sqlite:////proc/nowhere/chat.db", "cannot write"),
        ("postgresql+psycopg://u:secret@127.0.0.1:1/d", "cannot open"),
        ("oracle+nothing://x", "database_url"),
    ],
)
def test_a_database_that_cannot_be_opened_is_refused_in_words(url: str, words: str):
    with pytest.raises(ConfigError, match=words) as caught:
        open_database(url)
    assert "secret" not in str(caught.value)
