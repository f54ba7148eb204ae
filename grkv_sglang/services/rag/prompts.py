"""How a prompt is laid out, so that as much of it as possible is shared.

    system     the instructions, the same for all tenants
    user       [1] the first section
    user       [2] the second section, if there is one
    user       the question

KV depends on everything before it. So what changes least comes first, nothing of a user or a question stands
before a section, and sections come in a stable order (by document, then by place) and not by score: the
same sections always make the same prompt.

Every section is a message of its own, and a span ends with each. Warm-up compresses each section as the
*first* one, ``instructions [1]``, because that prefix does not depend on what follows: every prompt that
begins with this section is served from its span, whatever the second section is. Only the second one's KV
belongs to the combination; when a combination is asked about, it gets a span of its own, which begins where
the first one's ends. Were both sections marked as one prefix, two questions with the same first and another
second section would share nothing.

A prefix ends one token before the text of the next message: within its header, which all prompts share. (The
header's last token is left out: a tokenizer may merge it with what follows.)
"""

from __future__ import annotations

from collections.abc import Sequence

from grkv_sglang.client import AsyncGrkvClient, Message
from grkv_sglang.demo.documents import common_prefix_length

PROBES = ("Who is it?", "1 or 2?")
"""Begin differently, for any tokenizer."""


def section_message(number: int, document_name: str, heading: str | None, text: str) -> Message:
    """The user message that holds a section, under the number that answers cite."""
    title = document_name if heading is None else f"{document_name}: {heading}"
    return Message(role="user", content=f"[{number}] {title}\n\n{text.strip()}")


def prompt_messages(instructions: str, sections: Sequence[Message], question: str) -> list[Message]:
    """The chat that asks `question` about sections."""
    return [
        Message(role="system", content=instructions),
        *sections,
        Message(role="user", content=question.strip()),
    ]


async def section_ends(
    client: AsyncGrkvClient, messages: Sequence[Message], prompt_ids: Sequence[int]
) -> list[int]:
    """Where each section's reusable prefix ends in a prompt, in tokens.

    Found with the engine's own tokenizer: what the prompt shares with one that goes on otherwise behind the
    section.

    Args:
        messages: as `prompt_messages` lays them out.
        prompt_ids: their tokens.

    Raises:
        GrkvError: the engine is not reached.
    """
    ends = []
    for last in range(1, len(messages) - 1):
        following = messages[last + 1]["content"]
        probe = next(text for text in PROBES if text[0] != following[:1])
        other = await client.tokenize([*messages[: last + 1], Message(role="user", content=probe)])
        ends.append(common_prefix_length([prompt_ids, other]) - 1)
    return ends
