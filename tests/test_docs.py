"""The documentation: settings are those of the models, quoted messages are printed somewhere, and the site
builds without a warning and without a network."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.main import get_command

from grkv_sglang.cli import app
from grkv_sglang.commands import reference
from grkv_sglang.settings import as_text, load_settings

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def test_the_page_of_settings_is_up_to_date():
    committed = (DOCS / "configuration.md").read_text(encoding="utf-8")
    assert committed == reference.page(), f"run: {reference.COMMAND}"


@pytest.mark.parametrize("program", reference.PROGRAMS, ids=lambda program: program.command)
def test_variables_and_flags_are_read_as_the_page_says(program):
    rows = [line for line in reference.section(program).splitlines() if line.startswith("| `")]
    assert len(rows) == len(program.model.model_fields)
    command = get_command(app).commands[program.command.removeprefix("grkv ")]  # type: ignore[attr-defined]
    flags = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    for row, (name, field) in zip(rows, program.model.model_fields.items(), strict=True):
        setting, variable, flag = re.findall(r"`([^`]+)`", row.split(" | ")[0])
        assert setting == name
        assert set(flag.split(" / ")) <= flags
        value = field.get_default(call_default_factory=True)
        if value is not None:
            read = load_settings(program.model, program.prefix, environ={variable: as_text(value)}, label="")
            assert getattr(read, name) == value


def literals(files: list[Path]) -> str:
    """All texts of Python files; what an f-string puts in is `…`."""
    found = []
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def quoted_messages() -> Iterator[str]:
    """First cells of the tables whose first column is `message`."""
    in_table = False
    for line in (DOCS / "troubleshooting.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| message "):
            in_table = True
        elif not line.startswith("|"):
            in_table = False
        elif in_table and not line.startswith("|--"):
            yield from re.findall(r"`([^`]+)`", line.split(" | ")[0])


def test_messages_that_are_explained_are_printed_somewhere():
    sglang = Path(importlib.util.find_spec("sglang").submodule_search_locations[0])  # type: ignore[union-attr,index]
    ours = sorted((ROOT / "grkv_sglang").rglob("*.py"))
    theirs = [sglang / "srt/mem_cache/registry.py", sglang / "srt/managers/tokenizer_manager.py"]
    printed = literals(ours + theirs)
    messages = list(quoted_messages())
    assert len(messages) > 15
    for message in messages:
        for part in message.split("…"):
            assert part.strip() in printed, message


def test_reasons_of_failure_are_explained():
    source = "\n".join(p.read_text() for p in (ROOT / "grkv_sglang/cache").glob("*.py"))
    reasons = set(re.findall(r'(?:CompressionError|cancel|end_lost_work)\(\s*"(\w+)"', source))
    assert {"no_room", "budget_too_small", "deleted"} <= reasons
    operations = (DOCS / "operations.md").read_text(encoding="utf-8")
    troubleshooting = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    for reason in reasons:
        assert f"`{reason}`" in operations + troubleshooting, reason


class Assets(HTMLParser):
    """What a page loads by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "link" and values.get("rel") not in ("prev", "next", "canonical"):
            self.urls.append(values.get("href") or "")
        elif tag != "a":
            self.urls += [
                values[name] or "" for name in ("src", "srcset", "data", "poster") if name in values
            ]


def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 12
    for page in pages:
        assets = Assets()
        assets.feed(page.read_text(encoding="utf-8"))
        assert any(url.endswith(".css") for url in assets.urls)
        assert not [url for url in assets.urls if url.startswith(("http:", "https:", "//"))], page
    for sheet in (tmp_path / "site").rglob("*.css"):
        assert not re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", sheet.read_text(encoding="utf-8"))
    # The changelog is the repository's.
    assert "Keep a Changelog" in (tmp_path / "site/changelog/index.html").read_text(encoding="utf-8")


def test_a_link_to_a_file_that_is_not_there_stops_the_build(tmp_path):
    spec = importlib.util.spec_from_file_location("repository_hook", DOCS / "hooks/repository.py")
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)

    class Page:
        class file:
            src_uri = "page.md"

    def rewritten(text: str) -> str:
        result: str = hook.on_page_markdown(text, Page, None, None)
        return result

    assert rewritten("see [deploy/](../deploy) and [x](other.md)") == "see `deploy` and [x](other.md)"
    assert rewritten("the [settings](../README.md#settings)") == "the settings (`README.md`)"
    with pytest.raises(hook.PluginError, match=r"page\.md.*no such\.py"):
        rewritten("[such.py](../such.py)")
