"""One real browser at a time for all tests of the services."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from tests.services.browser import running_browser
from tests.services.proxy import BreakableProxy


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of the browser; its absence fails rather than skips, so that CI cannot lose these tests."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    assert path, "browser tests need Chromium: `apt-get install chromium`"
    return path


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    """Not for the whole session: while Playwright runs, no other test can run an event loop."""
    expect.set_options(timeout=30_000)  # the engine may have the machine to itself
    with running_browser(chromium) as browser:
        yield browser


@pytest.fixture
def proxy(engine_url: str) -> Iterator[BreakableProxy]:
    opened = BreakableProxy(engine_url)
    yield opened
    opened.break_off()
