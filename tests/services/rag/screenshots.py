"""The pictures of docs/rag.md, of the real page with a real engine:

    python -m tests.services.rag.screenshots --engine-url http://127.0.0.1:30000 [--folder docs/images]

Writes rag-wide.png (1280 x 800) and rag-narrow.png (390 x 844). Takes a minute or two on a CPU.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from playwright.sync_api import Page, expect

from grkv_sglang.services.rag.embedding import Embedder
from grkv_sglang.services.rag.settings import BUILT_IN_EMBEDDING, RagSettings
from grkv_sglang.serving import free_port
from tests.services.browser import running_browser
from tests.services.rag.browser import NARROW, WIDE, new_page
from tests.services.rag.files import TOPICS, long_text, pdf
from tests.services.rag.serving import RunningRag, serving

ANSWER_MS = 180_000
QUESTION = "What is the sourdough starter fed with?"


def main(
    engine_url: Annotated[str, typer.Option(help="A server with the plugin.")] = "http://127.0.0.1:30000",
    folder: Annotated[Path, typer.Option(help="Where the pictures go.")] = Path("docs/images"),
) -> None:
    """Take both pictures."""
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    assert executable, "needs Chromium"
    with (
        tempfile.TemporaryDirectory() as data_dir,
        serving(settings(engine_url, Path(data_dir)), Embedder(BUILT_IN_EMBEDDING)) as rag,
        running_browser(executable) as browser,
    ):
        add_documents(rag)
        for name, size in (("rag-wide.png", WIDE), ("rag-narrow.png", NARROW)):
            with new_page(browser, size) as page:
                ask(page, rag)
                page.screenshot(path=folder / name)


def settings(engine_url: str, data_dir: Path) -> RagSettings:
    return RagSettings(
        port=free_port(), data_dir=data_dir, engine_url=engine_url, budget=0.2, answer_tokens=40,
        min_compressed_tokens=200,
    )  # fmt: skip


def add_documents(rag: RunningRag) -> None:
    tenant = rag.tenant()
    tenant.add("Beekeeping notes.md", f"# Winter\n\n{TOPICS['beekeeping']}")
    tenant.add("Sailing handbook.pdf", pdf([long_text("sailing", 3), long_text("sailing", 5)[-900:]]))
    tenant.add("Sourdough.pdf", pdf([long_text("bread", 3), TOPICS["bread"]]))


def ask(page: Page, rag: RunningRag) -> None:
    page.goto(f"{rag.url}/#key={rag.key}")
    page.get_by_label("Your question").fill(QUESTION)
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.locator(".served")).to_be_visible(timeout=ANSWER_MS)
    page.get_by_label("Your question").blur()


if __name__ == "__main__":
    typer.run(main)
