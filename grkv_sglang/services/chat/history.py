"""A conversation as a prompt, and when its history is compressed. Pure functions of tokens and counts."""

from __future__ import annotations

from collections.abc import Sequence

from grkv_sglang.client import Message, Served


def prompt_messages(system_message: str, answered: Sequence[tuple[str, str]], question: str) -> list[Message]:
    """The messages of a request: the system message unless it is empty, answered turns as (question, answer),
    and the question.

    Letter by letter as they were sent and received: a prefix is shared only where its tokens are equal.
    """
    messages: list[Message] = []
    if system_message:
        messages.append({"role": "system", "content": system_message})
    for asked, answer in answered:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    messages.append({"role": "user", "content": question})
    return messages


def without_question(messages: Sequence[Message]) -> list[Message]:
    """The same prompt with an empty question: with the real one it has the history in common."""
    return [*messages[:-1], {"role": "user", "content": ""}]


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading tokens are equal."""
    for at, (left, right) in enumerate(zip(first, second, strict=False)):
        if left != right:
            return at
    return min(len(first), len(second))


def tokens_to_mark(history_tokens: int, covered_tokens: int, compress_after_tokens: int) -> int | None:
    """The prefix that this request should ask to compress (``prefix_end_tokens``), None for none.

    Args:
        history_tokens: of the prompt up to the end of the last answered turn, which every further prompt of
            the conversation begins with. The newest question and its answer stay exact until the next turn.
        covered_tokens: so many of them are in spans.
        compress_after_tokens: a span is worth its compression from so many tokens on.
    """
    return history_tokens if history_tokens - covered_tokens >= compress_after_tokens else None


def covered_after(covered_tokens: int, marked_tokens: int | None, served: Served | None) -> int:
    """How far the prompt is in spans, after an answer.

    A request that marks a prefix is answered before it is compressed, so its mark is believed; the next
    answer shows whether the span is there, and a history without it (evicted, failed, another engine) is
    marked again.

    Args:
        covered_tokens: before this request.
        marked_tokens: what this request marked.
        served: what served it; None where the engine does not tell.
    """
    if marked_tokens is not None:
        return marked_tokens
    if served is None:
        return covered_tokens
    if served.span_tokens == 0:
        return 0
    if served.exact_tokens + served.span_tokens < covered_tokens:
        # The last spans are gone. What is left lies behind the system message, which may be exact.
        return served.span_tokens
    return max(covered_tokens, served.span_tokens)
