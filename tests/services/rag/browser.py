"""Pages of the service in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, Page

WIDE, NARROW = (1280, 800), (390, 844)


@contextmanager
def new_page(browser: Browser, size: tuple[int, int] = WIDE) -> Iterator[Page]:
    """A page of a fresh profile. Errors of its scripts, and what its policy refused, fail the test."""
    context = browser.new_context(viewport={"width": size[0], "height": size[1]})
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "console",
        # Answers with an error status are told there too; the page shows those itself.
        lambda message: (
            problems.append(message.text)
            if message.type == "error" and "Failed to load resource" not in message.text
            else None
        ),
    )
    yield page
    context.close()
    assert problems == []
