"""What the pages take from the repository around them: the changelog, and links to its files.

MkDocs knows the files of `docs/` only. A link that leaves it becomes the path that it names, as text; one
whose file is not there stops the build.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).parents[2]
_LEAVING = re.compile(r"\[(?P<text>[^\]]+)\]\(\.\./(?P<path>[^)#]*)(?:#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The repository's CHANGELOG.md as a page."""
    files.append(File.generated(config, "changelog.md", abs_src_path=str(REPOSITORY / "CHANGELOG.md")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links that leave `docs/` become text."""

    def as_text(link: re.Match[str]) -> str:
        text, path = link["text"], link["path"].rstrip("/")
        if not (REPOSITORY / path).exists():
            raise PluginError(f"{page.file.src_uri}: {link[0]}: there is no {path} in the repository")
        return f"`{path}`" if Path(path).name in text else f"{text} (`{path}`)"

    return _LEAVING.sub(as_text, markdown)
