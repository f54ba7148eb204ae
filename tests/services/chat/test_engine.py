"""The chat server on the real engine: what is compressed, who shares what, and how answers end."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from grkv_sglang.client import GrkvClient
from grkv_sglang.services.chat.database import User, open_database
from grkv_sglang.services.chat.history import prompt_messages
from grkv_sglang.services.chat.settings import ChatSettings
from tests.services.chat.conftest import BEGUN
from tests.services.chat.servers import LONG_ANSWER, answering_at_length, chat_server
from tests.services.chat.streams import ChatUser, passage, wait_for_span
from tests.services.proxy import BreakableProxy

pytestmark = pytest.mark.engine


@pytest.fixture
def settings(engine_url: str, tmp_path: Path) -> ChatSettings:
    return ChatSettings(
        database_url=f"sqlite:///{tmp_path / 'chat.db'}",
        engine_url=engine_url,
        system_message="Answer briefly.",
        max_tokens=8,
        temperature=0.0,
        compress_after_tokens=200,
        # A tenth of so short a history is less than what is always kept.
        budget=0.25,
        max_message_characters=40_000,
    )


def salts(settings: ChatSettings) -> dict[str, str]:
    engine = open_database(settings.database_url or "")
    with Session(engine) as session:
        found = {user.name: user.cache_salt for user in session.scalars(select(User))}
    engine.dispose()
    return found


def test_the_history_is_compressed_and_served_from_its_span(settings: ChatSettings):
    with chat_server(settings) as url:
        ada = ChatUser(url, "Ada")
        conversation = ada.new()
        first = ada.send(conversation, f"Read this.\n\n{passage(1000)}")["counters"]
        assert (first["compressions"], first["cached_tokens"], first["span_tokens"]) == (0, 0, 0)
        assert first["held_slots"] == first["context_tokens"] == first["prompt_tokens"] + 8
        second = ada.send(conversation, "Who is it about?")["counters"]
        assert second["compressions"] == 1
        assert second["cached_tokens"] >= first["prompt_tokens"]

        span = wait_for_span(settings.engine_url, salts(settings)["Ada"])
        # The whole first turn, and nothing of the second.
        assert first["context_tokens"] <= span.end_tokens < second["context_tokens"] - 8
        third = ada.send(conversation, "And where?")["counters"]
    assert third["span_tokens"] == span.tokens
    assert third["context_tokens"] - third["held_slots"] == span.tokens - span.slots
    assert third["held_slots"] < 0.5 * third["context_tokens"]
    assert third["compressions"] == 1, "what is in a span is not marked again"
    assert third["quality"] == pytest.approx(span.quality, abs=1e-5)
    # All but the newest turn came from the cache, compressed or not.
    newest = (
        third["prompt_tokens"] - second["prompt_tokens"] - third["cached_tokens"] + second["cached_tokens"]
    )
    assert 0 < newest < 60
    assert third["ttft_s"] > 0.0


def test_nothing_is_shared_between_users(settings: ChatSettings):
    question = f"What is this? {passage(300, start=9000)}"
    with chat_server(settings) as url:
        ada, bob = ChatUser(url, "Ada"), ChatUser(url, "Bob")
        cold = ada.send(ada.new(), question)["counters"]
        warm = ada.send(ada.new(), question)["counters"]
        other = bob.send(bob.new(), question)["counters"]
    assert cold["cached_tokens"] == 0
    assert warm["cached_tokens"] >= warm["prompt_tokens"] - 2, "the same user's cache does serve"
    assert other["prompt_tokens"] == warm["prompt_tokens"]
    assert other["cached_tokens"] == 0


def test_an_answer_goes_on_without_its_reader_and_ends_when_it_is_stopped(endless: ChatSettings):
    with chat_server(endless) as url:
        ada = ChatUser(url, "Ada")
        conversation = ada.new()
        for name, data in ada.events(conversation, "messages", {"text": LONG_ANSWER}):
            if name == "answer" and data["html"]:
                break  # the connection is closed here
        shown = ada.view(conversation)["turns"][0]
        assert shown["state"] == "answering"
        refused = ada.http.post(f"/api/conversations/{conversation}/messages", json={"text": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "busy")
        with ada.http.stream("GET", f"/api/conversations/{conversation}/stream") as follower:
            lines = follower.iter_lines()
            assert next(lines) == "event: turn"
            assert ada.http.post(f"/api/conversations/{conversation}/stop").status_code == 204
            assert "event: end" in list(lines)
        view = ada.view(conversation)
        stopped, counters = view["turns"][0], view["counters"]
        assert (stopped["state"], stopped["problem"]) == ("stopped", None)
        assert len(stopped["answer"]) > 0
        # It counts as far as it came.
        with GrkvClient(endless.engine_url) as client:
            prompt = client.tokenize(prompt_messages(endless.system_message, [], LONG_ANSWER))
        assert counters["prompt_tokens"] == len(prompt)
        assert 0 < counters["completion_tokens"] <= BEGUN
        assert (
            counters["context_tokens"]
            == counters["held_slots"]
            == len(prompt) + counters["completion_tokens"]
        )
        assert counters["ttft_s"] > 0.0
        # What there is of the answer is part of the conversation.
        ada.http.post(f"/api/conversations/{conversation}/stop").raise_for_status()
        assert ada.http.delete(f"/api/conversations/{conversation}").status_code == 204


def test_a_stopped_answer_compresses_its_history_and_counts(endless: ChatSettings, proxy: BreakableProxy):
    settings = endless.model_copy(update={"max_tokens": 8})
    with chat_server(settings) as url:
        ada = ChatUser(url, "Ada")
        conversation = ada.new()
        proxy.hold_back(None)
        first = ada.send(conversation, f"Read this.\n\n{passage(1000, start=15_000)}")["counters"]
        proxy.hold_back(BEGUN)
        for name, data in ada.events(conversation, "messages", {"text": "Who is it about?"}):
            if name == "answer" and data["html"]:
                ada.http.post(f"/api/conversations/{conversation}/stop").raise_for_status()
        second = ada.view(conversation)["counters"]
        assert second["compressions"] == 1
        assert second["prompt_tokens"] > 2 * first["prompt_tokens"]
        assert second["cached_tokens"] >= first["prompt_tokens"]
        assert 8 < second["completion_tokens"] <= 8 + BEGUN

        span = wait_for_span(settings.engine_url, salts(settings)["Ada"])
        proxy.hold_back(None)
        third = ada.send(conversation, "And where?")["counters"]
    assert third["span_tokens"] == span.tokens >= first["context_tokens"] - span.start_tokens
    assert third["compressions"] == 1, "what is in a span is not marked again"


def test_a_message_that_is_too_long_for_the_model_does_not_end_the_conversation(settings: ChatSettings):
    with chat_server(settings) as url:
        ada = ChatUser(url, "Ada")
        conversation = ada.new()
        ada.send(conversation, "Hello.")
        full = ada.send(conversation, 3 * passage(10_000))["turns"][1]
        assert (full["state"], full["problem"]["code"]) == ("failed", "context_full")
        assert "Start a new conversation" in full["problem"]["message"]
        after = ada.send(conversation, "Are you there?")
    assert [turn["state"] for turn in after["turns"]] == ["done", "failed", "done"]
    assert after["counters"]["context_tokens"] < 120


def test_nothing_is_lost_when_the_engine_goes_away(endless: ChatSettings, proxy: BreakableProxy):
    with chat_server(endless) as url:
        ada = ChatUser(url, "Ada")
        conversation = ada.new()
        for name, data in ada.events(conversation, "messages", {"text": LONG_ANSWER}):
            if name == "answer" and data["html"]:
                proxy.break_off()
            ended = data
        cut = ended["turns"][0]
        assert (cut["state"], cut["problem"]["code"]) == ("interrupted", "engine_broke_off")
        assert cut["answer"]
        assert 0 < ended["counters"]["completion_tokens"] <= BEGUN

        down = ada.send(conversation, "Are you there?")["turns"][1]
        assert (down["state"], down["problem"]["code"]) == ("failed", "engine_down")
        assert proxy.url in down["problem"]["message"]
        assert ada.http.get("/healthz").json() == {"database": "ok", "engine": "down"}

    # Another server on the same database, with short answers.
    proxy.mend()
    with chat_server(endless.model_copy(update={"max_tokens": 8})) as url:
        ada.http.base_url = url
        assert ada.http.get("/healthz").json() == {"database": "ok", "engine": "ok"}
        again = ada.retry(conversation)
    assert [turn["state"] for turn in again["turns"]] == ["interrupted", "done"]
    assert again["turns"][1]["question"] == "Are you there?"
    assert again["turns"][0]["answer"] == cut["answer"]


def test_a_stopped_server_keeps_what_there_is(endless: ChatSettings, tmp_path: Path):
    process = answering_at_length(endless, tmp_path)
    process.start()
    try:
        ada = ChatUser(process.url, "Ada")
        conversation = ada.new()
        for name, data in ada.events(conversation, "messages", {"text": LONG_ANSWER}):
            if name == "answer" and data["html"]:
                break
        process.end(signal.SIGTERM)
        process.start()
        view = ada.view(conversation)
    finally:
        process.close()
    turn = view["turns"][0]
    assert (turn["state"], turn["problem"]["code"]) == ("interrupted", "server_restarted")
    assert turn["answer"]
    assert 0 < view["counters"]["completion_tokens"] <= BEGUN
