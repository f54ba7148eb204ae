"""Databases, a server without an engine, and browsers for the chat's tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from playwright.sync_api import Browser, Page
from sqlalchemy import create_engine

from grkv_sglang.services.chat.app import create_app
from grkv_sglang.services.chat.database import Base, open_database
from grkv_sglang.services.chat.settings import ChatSettings
from grkv_sglang.services.chat.store import Store
from grkv_sglang.serving import free_port
from tests.services.proxy import BreakableProxy

POSTGRESQL = "CHAT_TEST_POSTGRESQL_URL"
PASSWORD = "correct horse"
BEGUN = 6


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database of each kind; the chat's tables of the one that is named are dropped."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'chat.db'}"
        return
    url = os.environ.get(POSTGRESQL)
    if url is None:
        pytest.skip(f"{POSTGRESQL} must name a PostgreSQL database for tests (postgresql+psycopg://...)")
    engine = create_engine(url)
    Base.metadata.drop_all(engine)
    yield url
    Base.metadata.drop_all(engine)
    engine.dispose()


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    opened = Store(open_database(database_url))
    yield opened
    opened.close()


@pytest.fixture
def settings(tmp_path: Path) -> ChatSettings:
    """Of a server whose engine is not there."""
    return ChatSettings(
        database_url=f"sqlite:///{tmp_path / 'chat.db'}",
        engine_url=f"http://127.0.0.1:{free_port()}",
        max_message_characters=1000,
    )


@pytest.fixture
def endless(settings: ChatSettings, proxy: BreakableProxy) -> ChatSettings:
    """The test's settings, with answers that begin and then wait: of each, the engine's first `BEGUN` events
    arrive, one token each, until the test lets more of them through `proxy`."""
    proxy.hold_back(BEGUN)
    return settings.model_copy(update={"engine_url": proxy.url, "max_tokens": 400})


@pytest.fixture
def client(settings: ChatSettings) -> Iterator[TestClient]:
    """A browser's worth of cookies in front of a server without an engine."""
    with TestClient(create_app(settings)) as opened:
        yield opened


def register(client: Any, name: str) -> None:
    """An account, signed in to by `client` (httpx's or a test client)."""
    answer = client.post("/api/register", json={"name": name, "password": PASSWORD})
    assert answer.status_code == 201, answer.text


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens a URL in a browser of its own (its own cookies); errors of the page fail the test."""
    errors: list[str] = []
    contexts = []

    def open_url(url: str, *, width: int = 1280, height: int = 800, **options: Any) -> Page:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        context.set_default_timeout(120_000)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(url)
        return page

    yield open_url
    for context in contexts:
        context.close()
    assert errors == []
