"""The page in a real browser."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import FileChooser, FilePayload, expect

from tests.services.rag.browser import new_page
from tests.services.rag.files import QUESTIONS, TOPICS, long_text, pdf

READY_MS, ANSWER_MS = 120_000, 240_000


def open_page(page, rag, key=None):
    page.goto(f"{rag.url}/#key={key or rag.key}")
    expect(page.get_by_role("heading", name="Documents", exact=True)).to_be_visible()


def choose(page, name, data):
    content = data.encode() if isinstance(data, str) else data
    page.locator("#files").set_input_files({"name": name, "mimeType": "text/plain", "buffer": content})


@pytest.mark.engine
def test_upload_ask_and_ask_again(browser, start_rag, engine_url):
    rag = start_rag(engine_url=engine_url, answer_tokens=6)
    with new_page(browser) as page:
        open_page(page, rag)
        expect(page.get_by_text("No documents yet.")).to_be_visible()
        choose(page, "baking.pdf", pdf([TOPICS["sailing"], long_text("bread", 4)]))
        row = page.get_by_role("list", name="Documents").get_by_role("listitem")
        expect(row.get_by_text("baking.pdf")).to_be_visible()
        expect(row.get_by_text(re.compile(r"Ready: \d+ tokens in \d+ slots, quality 0\.\d\d"))).to_be_visible(
            timeout=READY_MS
        )
        expect(row.get_by_text("PDF · 2 pages · 1 section")).to_be_visible()
        box = page.get_by_label("Your question")
        for question in (QUESTIONS["bread"], "When is the dough folded?"):
            box.fill(question)
            box.press("Enter")
            answer = page.get_by_role("article").first
            expect(answer.get_by_role("heading", name=question)).to_be_visible()
            line = answer.locator(".served")
            expect(line).to_be_visible(timeout=ANSWER_MS)
            # Both are served from the span that warm-up made.
            found = re.fullmatch(
                r"TTFT [\d.]+ s; (\d+) of (\d+) prompt tokens from the cache, (\d+) of them compressed into "
                r"(\d+) slots; quality 0\.\d\d",
                line.inner_text(),
            )
            assert found, line.inner_text()
            cached, prompt, compressed, slots = map(int, found.groups())
            assert prompt > cached >= compressed > slots > 0
            assert compressed > 200
            expect(answer.locator(".words")).not_to_be_empty()
            source = answer.get_by_role("region").or_(answer.locator(".sources"))
            expect(source.get_by_text("baking.pdf")).to_be_visible()
            expect(source.locator(".source-place")).to_contain_text(re.compile("page 2|pages 1 to 2"))
            expect(source.locator("blockquote").first).to_contain_text("The dough rests for four hours")
        assert page.get_by_role("article").count() == 2
        # The key is not in the address, and a reload stays signed in.
        assert page.url == f"{rag.url}/"
        page.reload()
        expect(page.get_by_text("baking.pdf").first).to_be_visible()


@pytest.mark.engine
def test_two_tenants_see_their_own(browser, start_rag, engine_url):
    rag = start_rag(engine_url=engine_url)
    rag.tenant().add("of-the-first.txt", "The kettle holds two litres.")
    with new_page(browser) as page:
        open_page(page, rag, rag.store.add_tenant("second"))
        expect(page.get_by_text("second", exact=True)).to_be_visible()
        expect(page.get_by_text("No documents yet.")).to_be_visible()
        page.get_by_label("Your question").fill("How much does the kettle hold?")
        page.get_by_role("button", name="Ask", exact=True).click()
        expect(
            page.get_by_role("alert").filter(has_text="There is no document to answer from")
        ).to_be_visible()
        assert "of-the-first" not in page.content()


def test_signing_in_and_out(browser, rag_without_engine):
    with new_page(browser) as page:
        page.goto(rag_without_engine.url)
        page.get_by_label("Key").fill("wrong")
        page.get_by_label("Key").press("Enter")
        expect(page.get_by_role("alert")).to_have_text("This key is not valid.")
        page.get_by_label("Key").fill(rag_without_engine.key)
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("heading", name="Documents", exact=True)).to_be_visible()
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_label("Key")).to_be_focused()
        assert page.evaluate("sessionStorage.length") == 0


def test_uploads_that_are_refused_say_why(browser, rag_without_engine):
    with new_page(browser) as page:
        open_page(page, rag_without_engine)
        alerts = page.get_by_role("list", name="Uploads").get_by_role("alert")
        for name, data, words in (
            ("broken.pdf", b"%PDF-1.7 rubbish", "broken.pdf: The PDF is broken"),
            ("empty.txt", b"", "empty.txt: The file is empty."),
            ("scan.pdf", pdf([""]), "scan.pdf: There is no text in the PDF"),
            ("latin.txt", b"Gr\xfc\xdfe", "latin.txt: The text is not UTF-8"),
        ):
            choose(page, name, data)
            expect(alerts).to_contain_text([words])
            page.get_by_role("button", name="Dismiss").click()
            expect(alerts).to_have_count(0)
        expect(page.get_by_text("No documents yet.")).to_be_visible()


def test_an_engine_that_is_down_is_told_and_the_upload_is_kept(browser, rag_without_engine):
    with new_page(browser) as page:
        open_page(page, rag_without_engine)
        choose(page, "bread.txt", TOPICS["bread"])
        row = page.get_by_role("list", name="Documents").get_by_role("listitem")
        expect(row.get_by_text("does not answer; the document is kept")).to_be_visible(timeout=20_000)
        choose(page, "same.txt", TOPICS["bread"])
        expect(page.get_by_text("same.txt is there already, as bread.txt.")).to_be_visible()
        page.get_by_role("button", name="Delete bread.txt").click()
        page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
        expect(row).to_have_count(1)
        page.get_by_role("button", name="Delete bread.txt").click()
        page.get_by_role("dialog").get_by_role("button", name="Delete").click()
        expect(row).to_have_count(0)


def test_a_name_is_text_and_never_html(browser, rag_without_engine):
    with new_page(browser) as page:
        open_page(page, rag_without_engine)
        choose(page, "<img src=x onerror=alert(1)>.txt", "text")
        expect(page.get_by_text("<img src=x onerror=alert(1)>.txt").first).to_be_visible()
        assert page.locator("main img").count() == 0


def test_everything_by_keyboard(browser, rag_without_engine):
    file: FilePayload = {"name": "a.txt", "mimeType": "text/plain", "buffer": b"text"}

    def pick(chooser: FileChooser) -> None:
        chooser.set_files(file)

    with new_page(browser) as page:
        # Listened to from the start: asked for at the last moment, a busy browser does not tell of it.
        page.on("filechooser", pick)
        open_page(page, rag_without_engine)
        expect(page.get_by_label("Your question")).to_be_focused()
        page.get_by_role("button", name="Sign out").focus()
        page.keyboard.press("Tab")
        expect(page.get_by_role("button", name="Add documents")).to_be_focused()
        page.keyboard.press("Enter")
        box = page.get_by_role("checkbox", name="Answer from a.txt")
        expect(box).to_be_visible()
        box.focus()
        page.keyboard.press("Space")
        expect(page.get_by_text("From a.txt")).to_be_visible()
        page.keyboard.press("Tab")
        expect(page.get_by_role("button", name="Delete a.txt")).to_be_focused()
        page.keyboard.press("Enter")
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_be_hidden()
        page.keyboard.press("Tab")
        expect(page.get_by_label("Your question")).to_be_focused()
        # A question that was not answered is still there.
        page.keyboard.type("What is it?")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert").filter(has_text="a.txt is not indexed yet.")).to_be_visible()
        expect(page.get_by_label("Your question")).to_have_value("What is it?")


@pytest.mark.parametrize("width", [320, 360, 768, 1280])
def test_nothing_is_wider_than_the_window(browser, rag_without_engine, width):
    rag_without_engine.tenant().upload("a-very-long-name-" * 8 + ".txt", "text")
    with new_page(browser, (width, 800)) as page:
        open_page(page, rag_without_engine)
        expect(page.get_by_text("a-very-long-name").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for control in ("Add documents", "Ask"):
            bounds = page.get_by_role("button", name=control, exact=True).bounding_box()
            assert bounds is not None
            assert bounds["height"] >= 40
            assert bounds["x"] >= 0
            assert bounds["x"] + bounds["width"] <= width
