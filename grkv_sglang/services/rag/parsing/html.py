"""HTML: its text, with headings and without scripts."""

from __future__ import annotations

import re

from bs4 import BeautifulSoup, NavigableString, Tag
from bs4.element import PageElement, PreformattedString

from grkv_sglang.services.rag.parsing.base import DocumentError, ParsedDocument
from grkv_sglang.services.rag.parsing.text import clean, decode

_DROPPED = frozenset({"script", "style", "noscript", "template", "svg", "math", "iframe", "object", "canvas"})
_DROPPED |= {"head", "button", "input", "select", "textarea", "nav"}
_BLOCKS = frozenset(
    {
        *("address", "article", "aside", "blockquote", "dd", "div", "dl", "dt", "fieldset", "figcaption"),
        *("figure", "footer", "form", "header", "hr", "main", "ol", "p", "pre", "section", "table", "ul"),
    }
)
_LINES = frozenset({"li", "tr", "br"})
_CELLS = frozenset({"td", "th"})
_HEADING = re.compile(r"h([1-6])")
_CHARSET = re.compile(rb"<meta[^>]{0,200}charset\s*=\s*[\"']?([\w-]{2,40})", re.IGNORECASE)
_CHARSET_REACH = 2048
_WHITE = re.compile(r"\s+")


def parse_html(data: bytes) -> ParsedDocument:
    """Raises DocumentError as `decode` does, or where it cannot be parsed."""
    declared = _CHARSET.search(data[:_CHARSET_REACH])
    text = decode(data, declared.group(1).decode("ascii") if declared else None)
    try:
        soup = BeautifulSoup(text, "html.parser")
    except Exception as error:  # html.parser raises errors of many kinds on rubbish
        raise DocumentError(f"the HTML cannot be read: {type(error).__name__}") from error
    return ParsedDocument("html", clean(_text_of(soup)))


def _text_of(soup: BeautifulSoup) -> str:
    """Blocks become paragraphs, headings Markdown's; white space inside them is collapsed, except in <pre>.

    With a stack of its own: documents may be nested deeper than Python calls.
    """
    pieces: list[str] = []
    stack: list[PageElement | str] = [soup]
    preformatted = 0
    while stack:
        element = stack.pop()
        if isinstance(element, str) and not isinstance(element, NavigableString):
            # What was put there for the end of an element.
            preformatted -= element == _END_OF_PRE
            pieces.append("\n\n" if element == _END_OF_PRE else element)
        elif isinstance(element, PreformattedString):
            continue  # comments, declarations
        elif isinstance(element, NavigableString):
            words = str(element) if preformatted else _WHITE.sub(" ", str(element))
            if not preformatted and (not pieces or pieces[-1].endswith(("\n", " "))):
                words = words.lstrip()
            if words:
                pieces.append(words)
        elif isinstance(element, Tag) and not _is_dropped(element):
            before, after = _around(element)
            preformatted += element.name == "pre"
            if before:
                pieces.append(before)
            if after:
                stack.append(after)
            stack.extend(reversed(element.contents))
    text = "".join(pieces)
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text)


_END_OF_PRE = "</pre>"


def _around(tag: Tag) -> tuple[str, str]:
    heading = _HEADING.fullmatch(tag.name)
    if heading:
        return "\n\n" + "#" * int(heading.group(1)) + " ", "\n\n"
    if tag.name == "pre":
        return "\n\n", _END_OF_PRE
    if tag.name in _BLOCKS:
        return "\n\n", "\n\n"
    if tag.name in _LINES:
        return ("\n- " if tag.name == "li" else "\n"), ""
    if tag.name in _CELLS:
        return "", " | "
    return "", ""


def _is_dropped(tag: Tag) -> bool:
    return tag.name in _DROPPED or tag.has_attr("hidden") or tag.get("aria-hidden") == "true"
