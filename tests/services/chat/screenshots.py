"""Pictures of the chat for the documentation, of a conversation whose history was compressed:

    python -m tests.services.chat.screenshots --engine-url http://127.0.0.1:30000 --out docs/images

Needs a running engine with the plugin, and Chromium. Writes chat-wide.png and chat-narrow.png.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from playwright.sync_api import Page

from grkv_sglang.services.chat.settings import ChatSettings
from tests.services.browser import running_browser
from tests.services.chat.conftest import PASSWORD
from tests.services.chat.servers import chat_server

NOTES = """\
These are my notes about the clock tower of the town; keep them in mind.

The tower was built in 1871 beside the market hall, of grey stone from the quarry behind the river. Its
clock has four faces. The one to the north was painted white after the great storm, because the old one
could not be read from the station any more. The movement was made by two sisters who had learned their
trade from their father; they also made the small clock in the school and the one on the ferry. A weight of
two hundred kilograms falls eleven metres in a week and drives it. Every Monday somebody has to wind it up
by hand, which takes a quarter of an hour. Since 1932 there has been an electric motor for this, but it is
only used when the keeper is ill. The bell strikes the hours with a hammer and the quarters with a smaller
one. During the night it is silent, which the people at the market asked for in 1954 and voted for by a
narrow margin. The keeper today is Marta Lindqvist. She keeps a book with every repair since the beginning:
three springs, one wheel, forty cables, and a nest of jackdaws that stopped the hands at ten past four for
two days.
"""

QUESTIONS = (
    NOTES,
    "Who is the keeper of the clock today?",
    "Write a short Python function that adds two numbers, in a code block.",
    "Name three things that a clock tower needs, as a list.",
)

ANSWER_MS = 600_000


def main(
    engine_url: Annotated[str, typer.Option(help="A running engine with the plugin.")],
    out: Annotated[Path, typer.Option(help="Folder of the pictures.")],
) -> None:
    """Take the pictures."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise typer.BadParameter("needs Chromium: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        settings = ChatSettings(
            database_url=f"sqlite:///{folder}/chat.db",
            engine_url=engine_url,
            max_tokens=160,
            temperature=0.0,
            compress_after_tokens=300,
            budget=0.25,
        )
        with chat_server(settings) as url, running_browser(chromium) as browser:
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            page.goto(url)
            talk(page)
            page.locator("#counters summary").click()
            picture(page, out / "chat-wide.png")
            page.locator("#counters summary").click()
            page.set_viewport_size({"width": 390, "height": 844})
            picture(page, out / "chat-narrow.png")
            browser.close()


def talk(page: Page) -> None:
    """An account, and a conversation of all questions."""
    page.get_by_role("button", name="Create an account").click()
    page.get_by_label("Name", exact=True).fill("Ada")
    page.get_by_label("Password", exact=True).fill(PASSWORD)
    page.keyboard.press("Enter")
    for position, question in enumerate(QUESTIONS, 1):
        page.get_by_label("Message", exact=True).fill(question)
        page.keyboard.press("Enter")
        done = page.locator(f".turn[data-position='{position}'][data-state=done]")
        done.wait_for(timeout=ANSWER_MS)
        # Time for the compression, which comes after the answer.
        page.wait_for_timeout(10_000)


def picture(page: Page, path: Path) -> None:
    page.wait_for_timeout(500)  # the drawer's movement
    page.evaluate("const e = document.getElementById('scroll'); e.scrollTop = e.scrollHeight")
    page.screenshot(path=path)


if __name__ == "__main__":
    typer.run(main)
