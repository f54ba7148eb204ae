"""A model's text as HTML that is safe to put into a page, whatever the text says."""

from __future__ import annotations

import nh3
from markdown_it import MarkdownIt

# HTML in the text is shown as text (`html: False`); what comes out is sanitised all the same, so that a hole
# in one of the two libraries is not a hole in the page.
_MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"]).disable("image")

_CLEANER = nh3.Cleaner(
    tags={
        *("p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "blockquote", "ul", "ol", "li"),
        *("strong", "em", "s", "code", "pre", "a", "table", "thead", "tbody", "tr", "th", "td"),
    },
    attributes={"a": {"href", "title"}, "ol": {"start"}},
    url_schemes={"http", "https", "mailto"},
    url_relative="deny",
    link_rel="noopener noreferrer nofollow",
    set_tag_attribute_values={"a": {"target": "_blank"}},
)


def render(text: str) -> str:
    """`text`, read as CommonMark with tables and strikethrough, as sanitised HTML.

    No scripts, styles, forms or images; links leave the page in a new tab and tell nothing of where they come
    from.
    """
    return _CLEANER.clean(_MARKDOWN.render(text))
