"""The page in a real browser, on the real server and engine."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from grkv_sglang.services.chat.database import open_database
from grkv_sglang.services.chat.settings import ChatSettings
from grkv_sglang.services.chat.store import Outcome, Store
from grkv_sglang.services.common.engine import Problem
from tests.services.chat.conftest import PASSWORD
from tests.services.chat.servers import LONG_ANSWER, answering_at_length, chat_server
from tests.services.chat.streams import wait_for
from tests.services.proxy import BreakableProxy

OpenPage = Callable[..., Page]

ANSWER_MS = 300_000


def sign_up(page: Page, name: str) -> None:
    page.get_by_role("button", name="Create an account").click()
    page.get_by_label("Name", exact=True).fill(name)
    page.get_by_label("Password", exact=True).fill(PASSWORD)
    page.get_by_role("button", name="Create an account").first.click()
    expect(page.get_by_label("Message", exact=True)).to_be_visible()


def sign_in(page: Page, name: str) -> None:
    page.get_by_label("Name", exact=True).fill(name)
    page.get_by_label("Password", exact=True).fill(PASSWORD)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_label("Message", exact=True)).to_be_visible()


def send(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()


def expect_state(page: Page, position: int, state: str) -> None:
    turn = page.locator(f".turn[data-position='{position}']")
    expect(turn).to_have_attribute("data-state", state, timeout=ANSWER_MS)


def expect_words(page: Page) -> Locator:
    """The answer that is being made, once it has begun; whatever it renders as."""
    answer = page.locator(".turn[data-state=answering] .answer")
    expect(answer).to_have_text(re.compile(r"\S"), timeout=ANSWER_MS)
    return answer


def has_no_horizontal_scrolling(page: Page) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"))


@pytest.fixture
def settings(tmp_path: Path, engine_url: str) -> ChatSettings:
    return ChatSettings(
        database_url=f"sqlite:///{tmp_path / 'chat.db'}",
        engine_url=engine_url,
        system_message="Answer briefly.",
        max_tokens=24,
        temperature=0.0,
    )


@pytest.mark.engine
def test_from_signing_up_to_the_second_turn(settings: ChatSettings, open_page: OpenPage):
    with chat_server(settings) as url:
        page = open_page(url, permissions=["clipboard-read", "clipboard-write"])
        sign_up(page, "Ada")
        page.evaluate(
            """() => { window.lengths = new Set();
            new MutationObserver(() => {
                const answer = document.querySelector(".turn[data-state=answering] .answer");
                if (answer) window.lengths.add(answer.textContent.length);
            }).observe(document.getElementById("turns"), { childList: true, subtree: true }); }"""
        )
        send(page, "Write a Python function that adds two numbers, in a code block.")
        expect_state(page, 1, "done")
        assert page.evaluate("window.lengths.size") >= 3, "the answer grows as it comes"
        expect(page.get_by_label("Message", exact=True)).to_have_value("")
        page.get_by_role("button", name="Copy this answer").click()
        copied = page.evaluate("navigator.clipboard.readText()")
        assert len(copied) > 10

        page.get_by_label("Message", exact=True).fill("And then?")
        page.keyboard.press("Enter")
        expect_state(page, 2, "done")
        expect(page.locator("#counters-summary")).to_contain_text("of prefill avoided")

        page.reload()
        expect(page.locator(".turn")).to_have_count(2)
        first = page.locator(".turn").first
        expect(first.locator(".question-text")).to_have_text(
            "Write a Python function that adds two numbers, in a code block."
        )
        longest = max(copied.splitlines(), key=len)
        assert longest.strip("`# ") in (first.locator(".answer").text_content() or "")
        expect(page.get_by_role("link", name=re.compile("Write a Python function"))).to_have_attribute(
            "aria-current", "page"
        )
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_label("Password", exact=True)).to_be_visible()


@pytest.mark.engine
def test_with_the_keyboard_alone(endless: ChatSettings, open_page: OpenPage):
    """Signing up, two lines, stopping, renaming and deleting, with Tab, Enter and Escape."""
    with chat_server(endless) as url:
        page = open_page(url)
        press = page.keyboard.press
        expect(page.get_by_label("Name", exact=True)).to_be_focused()
        for key in ("Tab", "Tab", "Tab", "Enter"):  # to "Create an account"
            press(key)
        press("Shift+Tab")
        press("Shift+Tab")
        press("Shift+Tab")
        expect(page.get_by_label("Name", exact=True)).to_be_focused()
        page.keyboard.type("Ada")
        press("Tab")
        page.keyboard.type(PASSWORD)
        press("Enter")

        expect(page.get_by_label("Message", exact=True)).to_be_focused()
        page.keyboard.type(LONG_ANSWER)
        press("Shift+Enter")
        page.keyboard.type("Begin at once.")
        press("Enter")
        expect_words(page)
        press("Escape")
        expect_state(page, 1, "stopped")
        expect(page.locator(".question-text")).to_have_text(f"{LONG_ANSWER}\nBegin at once.")
        expect(page.locator(".turn").get_by_text("Stopped", exact=True)).to_be_visible()

        def tab_to(name: str) -> None:
            for _ in range(30):
                press("Shift+Tab")
                if page.evaluate("document.activeElement.getAttribute('aria-label')") == name:
                    return
            raise AssertionError(f"{name} is not reached with the Tab key")

        for name in ("Copy this answer", "Rename this conversation"):
            tab_to(name)
        press("Enter")
        expect(page.get_by_label("Title", exact=True)).to_be_focused()
        press("Control+A")
        page.keyboard.type("Clocks")
        press("Enter")
        expect(page.get_by_role("heading", name="Clocks")).to_be_visible()
        expect(page.get_by_role("link", name="Clocks")).to_be_visible()

        tab_to("Delete this conversation")
        press("Enter")
        press("Escape")
        expect(page.get_by_role("link", name="Clocks")).to_be_visible()
        press("Enter")
        # Left and opened again before the page hears of it, which no keyboard does reliably.
        page.evaluate("document.querySelector('#delete-dialog').close(), document.activeElement.click()")
        press("Tab")
        press("Enter")
        expect(page.get_by_text("No conversations yet.")).to_be_visible()
        expect(page.locator(".turn")).to_have_count(0)


@pytest.mark.engine
def test_a_killed_server_and_another_tab(
    endless: ChatSettings, open_page: OpenPage, proxy: BreakableProxy, tmp_path: Path
):
    """Killed while it answers: the history is there, the half answer is marked, and the page goes on."""
    process = answering_at_length(endless, tmp_path)
    process.start()
    try:
        page = open_page(process.url)
        sign_up(page, "Ada")
        send(page, LONG_ANSWER)
        answer = expect_words(page)

        other = page.context.new_page()
        other.goto(page.url)
        # The second tab follows the same answer.
        wait_for(lambda: expect_words(other).text_content() == answer.text_content() or None)
        expect(other.get_by_role("button", name="Stop the answer")).to_be_visible()
        other.close()

        kept = wait_for(lambda: kept_of_one_more_event(page, proxy))
        process.end(signal.SIGKILL)
        expect(page.get_by_text("The connection is lost")).to_be_visible()
        process.start()
        expect_state(page, 1, "interrupted")
        expect(page.get_by_text("The chat server was restarted while it answered.")).to_be_visible()
        assert answer_kept(page).startswith(kept)
        expect(page.locator(".turn .answer")).to_have_text(re.compile(r"\S"))
        expect(page.get_by_text("The connection is lost")).to_be_hidden()

        page.get_by_role("button", name="Try again").click()
        expect_words(page)
        page.get_by_role("button", name="Stop the answer").click()
        expect_state(page, 1, "stopped")
        expect(page.locator(".turn")).to_have_count(1)
    finally:
        process.close()


def answer_kept(page: Page) -> str:
    """What the database has of the first answer of the page's conversation."""
    url, _, conversation = page.url.partition("#")
    view = page.request.get(f"{url}api/conversations/{conversation}").json()
    return str(view["turns"][0]["answer"])


def kept_of_one_more_event(page: Page, proxy: BreakableProxy) -> str | None:
    """An answer is kept when a piece of it comes after a while (`KEEP_EVERY_S`): lets one more come."""
    proxy.let_through(1)
    return answer_kept(page) or None


@pytest.mark.engine
def test_a_message_of_two_tabs_at_once_stays_in_its_box(endless: ChatSettings, open_page: OpenPage):
    with chat_server(endless) as url:
        page = open_page(url)
        sign_up(page, "Ada")
        send(page, LONG_ANSWER)
        expect_words(page)
        page.get_by_role("button", name="Stop the answer").click()
        expect_state(page, 1, "stopped")
        other = page.context.new_page()
        other.goto(page.url)
        expect_state(other, 1, "stopped")
        send(page, LONG_ANSWER)
        expect_state(page, 2, "answering")
        send(other, "Me too.")
        expect(other.get_by_text("is being answered already, perhaps in another tab")).to_be_visible()
        expect(other.get_by_label("Message", exact=True)).to_have_value("Me too.")
        expect_state(other, 2, "answering")
        other.get_by_role("button", name="Stop the answer").click()
        expect_state(page, 2, "stopped")
        expect_state(other, 2, "stopped")


@pytest.mark.engine
def test_the_engine_goes_away_and_comes_back(
    settings: ChatSettings, open_page: OpenPage, proxy: BreakableProxy
):
    proxy.break_off()
    with chat_server(settings.model_copy(update={"engine_url": proxy.url})) as url:
        page = open_page(url)
        sign_up(page, "Ada")
        send(page, "Say hello.")
        expect_state(page, 1, "failed")
        expect(page.locator(".turn .question-text")).to_have_text("Say hello.")
        notice = page.locator(".turn .notice")
        expect(notice).to_contain_text(
            f"The model server at {proxy.url} does not answer; your message is kept"
        )
        page.reload()
        expect(page.locator(".turn .notice")).to_be_visible()
        proxy.mend()
        page.get_by_role("button", name="Try again").click()
        expect_state(page, 1, "done")
        expect(page.locator(".turn .notice")).to_have_count(0)
        expect(page.locator(".turn .answer")).to_have_text(re.compile(r"\S"))


# -- what needs no engine --------------------------------------------------------------------------

WIDE_ANSWER = f"""\
# A heading

{"word" * 60} and `{"code" * 40}`

```
{"a line of code that is wider than a phone; " * 4}
second line
```

| {" | ".join(f"column {n}" for n in range(12))} |
|{"---|" * 12}
| {" | ".join("value" for _ in range(12))} |

- https://example.org/{"path/" * 40}

<script>document.title = "hacked"</script> <img src=x onerror="document.title='hacked'">
"""


@pytest.fixture
def kept(tmp_path: Path) -> ChatSettings:
    """Settings of a server without an engine, with a conversation of every kind of turn."""
    settings = ChatSettings(database_url=f"sqlite:///{tmp_path / 'kept.db'}", engine_url="http://127.0.0.1:1")
    store = Store(open_database(settings.database_url or ""))
    ada = store.register("Ada", PASSWORD)
    conversation = store.create_conversation(ada.id, "").id
    down = Problem(503, "engine_down", "The model server does not answer; your message is kept.")
    for question, outcome in (
        ("Wide " + "question" * 30 + "\n" * 12 + "end " * 300, Outcome("done", WIDE_ANSWER)),
        ("Stop", Outcome("stopped", "Half an")),
        ("Lost", Outcome("failed", "", down)),
        ("Cut", Outcome("interrupted", "Half", down)),
    ):
        store.end_turn(store.begin_turn(ada.id, conversation, question).turn_id, outcome)
    store.close()
    return settings


@pytest.mark.parametrize(("width", "height"), [(360, 640), (390, 844), (768, 1024), (1280, 800)])
def test_nothing_is_wider_than_the_screen(kept: ChatSettings, open_page: OpenPage, width: int, height: int):
    with chat_server(kept) as url:
        page = open_page(url, width=width, height=height)
        assert has_no_horizontal_scrolling(page)
        sign_in(page, "Ada")
        assert has_no_horizontal_scrolling(page)
        if width <= 768:
            page.get_by_role("button", name="Conversations", exact=True).click()
        page.get_by_role("link", name=re.compile("Wide")).click()
        expect(page.locator(".turn")).to_have_count(4)
        assert has_no_horizontal_scrolling(page)
        scrolling = page.locator("#scroll").evaluate("e => e.scrollWidth <= e.clientWidth")
        assert scrolling, "wide things scroll by themselves"
        assert page.title() != "hacked"
        box = page.get_by_role("button", name="Send").bounding_box()
        assert box is not None
        assert box["x"] + box["width"] <= width
        assert box["y"] + box["height"] <= height


def test_the_drawer_of_a_phone(kept: ChatSettings, open_page: OpenPage):
    with chat_server(kept) as url:
        page = open_page(url, width=390, height=844, has_touch=True, is_mobile=True)
        sign_in(page, "Ada")
        link = page.get_by_role("link", name=re.compile("Wide"))
        expect(link).to_be_hidden()
        opener = page.get_by_role("button", name="Conversations", exact=True)
        opener.click()
        expect(link).to_be_visible()
        expect(page.get_by_role("button", name="New conversation")).to_be_focused()
        page.keyboard.press("Escape")
        expect(link).to_be_hidden()
        expect(opener).to_be_focused()
        opener.click()
        link.click()
        expect(link).to_be_hidden()
        expect(page.locator(".turn")).to_have_count(4)
        # On a phone Enter starts a new line; the button sends.
        page.get_by_label("Message", exact=True).fill("one")
        page.keyboard.press("Enter")
        page.keyboard.type("two")
        expect(page.get_by_label("Message", exact=True)).to_have_value("one\ntwo")


def test_states_of_turns_and_what_can_be_done(kept: ChatSettings, open_page: OpenPage):
    with chat_server(kept) as url:
        page = open_page(url, permissions=["clipboard-read", "clipboard-write"])
        sign_in(page, "Ada")
        page.get_by_role("link", name=re.compile("Wide")).click()
        expect(page.locator(".turn").get_by_text("Stopped", exact=True)).to_be_visible()
        expect(page.get_by_text("Broken off", exact=True)).to_be_visible()
        expect(page.get_by_text("the model does not see it")).to_be_visible()
        expect(page.get_by_role("button", name="Try again")).to_have_count(1)
        page.get_by_role("button", name="Copy this code").click()
        assert page.evaluate("navigator.clipboard.readText()").endswith("second line\n")
        expect(page.get_by_text("Copied", exact=True).first).to_be_visible()
        page.get_by_role("button", name="Show all").click()
        expect(page.get_by_role("button", name="Show less")).to_have_attribute("aria-expanded", "true")
        # The address names the conversation; back leads to the one before.
        page.get_by_role("button", name="New conversation").click()
        expect(page.locator(".turn")).to_have_count(0)
        page.go_back()
        expect(page.locator(".turn")).to_have_count(4)


def test_wrong_passwords_and_unknown_conversations_are_told(kept: ChatSettings, open_page: OpenPage):
    with chat_server(kept) as url:
        page = open_page(f"{url}/#{'0' * 32}")
        page.get_by_label("Name", exact=True).fill("Ada")
        page.get_by_label("Password", exact=True).fill("wrong horse")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_have_text("Name or password is wrong.")
        sign_in(page, "Ada")
        expect(page.get_by_role("alert")).to_have_text("There is no such conversation.")


def test_everything_has_a_name_and_enough_contrast(kept: ChatSettings, open_page: OpenPage):
    """In both colour schemes: text against what is behind it at least 4.5 to 1; every control has a name."""
    with chat_server(kept) as url:
        for scheme in ("light", "dark"):
            page = open_page(url, color_scheme=scheme)
            sign_in(page, "Ada")
            page.get_by_role("link", name=re.compile("Wide")).click()
            expect(page.locator(".turn")).to_have_count(4)
            page.wait_for_timeout(50)
            assert page.evaluate(_NAMELESS) == []
            assert page.evaluate(_TOO_FAINT) == []


_NAMELESS = """() => [...document.querySelectorAll("button, a, input, textarea")]
    .filter((e) => !(e.textContent.trim() || e.getAttribute("aria-label") || e.labels?.length))
    .map((e) => e.outerHTML)"""

_TOO_FAINT = """() => {
    const parse = (c) => {
        const n = c.match(/[\\d.]+/g).map(Number);
        return { rgb: n.slice(0, 3), a: n[3] ?? 1 };
    };
    const light = (rgb) => rgb.map((v) => v / 255)
        .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const behind = (e) => {
        for (let at = e; at; at = at.parentElement) {
            const c = parse(getComputedStyle(at).backgroundColor);
            if (c.a === 1) return c.rgb;
        }
        return [255, 255, 255];
    };
    const faint = [];
    for (const e of document.querySelectorAll("#app *")) {
        const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
        if (!own || !e.checkVisibility({ visibilityProperty: true })) continue;
        const [a, b] = [light(parse(getComputedStyle(e).color).rgb), light(behind(e))].sort((x, y) => y - x);
        const ratio = (a + 0.05) / (b + 0.05);
        if (ratio < 4.5) faint.push(`${ratio.toFixed(2)} ${e.className} ${e.textContent.slice(0, 30)}`);
    }
    return faint;
}"""
