"""Where a message ends in a prompt: found by the chat template's own tokens.

A rendered text prefix need not be a token prefix (tokenizers merge across the seam), so boundaries are
searched in token ids. The markers are learned once from the tokenizer by rendering a tiny conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

_SYSTEM, _USER, _REPLY = "qzsystemqz", "qzuserqz", "qzreplyqz"


class BoundaryError(ValueError):
    """The boundary cannot be found; the message says why and what to give instead."""


@dataclass(frozen=True)
class MessageMarkers:
    """Token ids that the chat template puts around messages."""

    end_of_message: tuple[int, ...]
    """What closes a system or user message, up to and including its last special token."""
    user_header: tuple[int, ...]
    """What opens a user message, starting at its first special token."""


def learn_markers(tokenizer: Any) -> MessageMarkers:
    """Learn the markers of `tokenizer`'s chat template.

    Raises BoundaryError when there is no template, or none whose messages are delimited by special tokens.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise BoundaryError("the tokenizer has no chat template; give prefix_end_tokens instead")
    messages = [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": _USER},
        {"role": "assistant", "content": _REPLY},
    ]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception as error:  # templates are programs of their own: some refuse a system role
        raise BoundaryError(
            f"the chat template cannot render system, user and assistant messages ({error}); "
            "give prefix_end_tokens instead"
        ) from error
    between_system_and_user = text.split(_SYSTEM, 1)[1].split(_USER, 1)[0]
    after_user = text.split(_USER, 1)[1].split(_REPLY, 1)[0]
    special = set(tokenizer.all_special_ids) | set(getattr(tokenizer, "added_tokens_decoder", {}))
    seam = _encode(tokenizer, between_system_and_user)
    closing = _encode(tokenizer, after_user)
    end = _leading_special(closing, special)
    if not end or tuple(seam[: len(end)]) != end:
        raise BoundaryError(
            "the chat template does not close system and user messages with the same special token; "
            "give prefix_end_tokens instead"
        )
    header = [i for i, token in enumerate(seam) if i >= len(end) and token in special]
    if not header:
        raise BoundaryError(
            "the chat template does not open a user message with a special token; "
            "give prefix_end_tokens instead"
        )
    # The last token of the header is white space that may merge with the message: leave it out.
    last = len(seam)
    while (
        last > header[0] + 1
        and seam[last - 1] not in special
        and not tokenizer.decode([seam[last - 1]]).strip()
    ):
        last -= 1
    return MessageMarkers(end_of_message=end, user_header=tuple(seam[header[0] : last]))


def find_prefix_end(
    token_ids: Sequence[int], markers: MessageMarkers, which: Literal["system", "document"]
) -> int:
    """Number of tokens up to and including the end of the system message or of the first user message.

    Raises BoundaryError when the prompt has no such message.
    """
    ids = list(token_ids)
    user_at = _find(ids, markers.user_header, 0)
    if user_at < 0:
        raise BoundaryError(
            "the prompt has no user message of the chat template; give prefix_end_tokens instead"
        )
    if which == "system":
        # The marker that closes the message before the first user message.
        end_at = _rfind(ids, markers.end_of_message, user_at)
        if end_at < 0:
            raise BoundaryError("the prompt has no system message; give prefix_end_tokens instead")
        return end_at + len(markers.end_of_message)
    end_at = _find(ids, markers.end_of_message, user_at + len(markers.user_header))
    if end_at < 0:
        raise BoundaryError(
            "the first user message does not end in the prompt; give prefix_end_tokens instead"
        )
    return end_at + len(markers.end_of_message)


def system_end(token_ids: Sequence[int], markers: MessageMarkers) -> int | None:
    """Number of tokens up to the end of the system message; None when the prompt has none."""
    try:
        return find_prefix_end(token_ids, markers, "system")
    except BoundaryError:
        return None


def tokens_before_user(token_ids: Sequence[int], markers: MessageMarkers) -> int:
    """Number of tokens before the first user message: the system message and what the template puts behind
    it. 0 when the prompt has no system message."""
    if system_end(token_ids, markers) is None:
        return 0
    return _find(list(token_ids), markers.user_header, 0)


def last_turn_start(token_ids: Sequence[int], markers: MessageMarkers) -> int | None:
    """Where the last user message's header starts: what lies before it is what a next request shares at
    least. None when there is no user message."""
    at = _rfind(list(token_ids), markers.user_header, len(token_ids))
    return at if at >= 0 else None


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def _leading_special(ids: Sequence[int], special: set[int]) -> tuple[int, ...]:
    """The ids up to the last of the first run of special tokens; leading white space is allowed."""
    for i, token in enumerate(ids):
        if token in special:
            return tuple(ids[: i + 1])
    return ()


def _find(ids: list[int], needle: tuple[int, ...], start: int) -> int:
    for i in range(start, len(ids) - len(needle) + 1):
        if ids[i] == needle[0] and tuple(ids[i : i + len(needle)]) == needle:
            return i
    return -1


def _rfind(ids: list[int], needle: tuple[int, ...], stop: int) -> int:
    for i in range(stop - len(needle), -1, -1):
        if ids[i] == needle[0] and tuple(ids[i : i + len(needle)]) == needle:
            return i
    return -1
