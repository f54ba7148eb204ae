"""What is put behind a span to see what the model looks at: requests in the model's own chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grkv_sglang.core import CUE_TOKENS, PassChunk, PassKind, question_chunks, repetition_chunks, span_chunks

FIRST = "\n\nRepeat the previous context exactly."
CUE = "\n\nRepeat the part of the previous context exactly, starting with:"
QUESTIONS = (
    ("\n\nWhat are the most important points?", "The most important points are"),
    (FIRST, ""),
)
"""Generic requests and what their replies begin with. Few, because every token of them is computed."""
SAMPLED_QUERIES = 128
"""Queries that are kept of a repetition, for the regression to take some of."""
_USER = "qzuserqz"


@dataclass(frozen=True)
class PassPrompts:
    """Token ids.

    Attributes:
        repeat_first: asks for a repetition of the span from its start (KVzip's prompt, arXiv 2505.23416).
        repeat_cue: asks for a later part, followed by the tokens before it.
        answer: what a reply starts with: the chat template's change of turns.
        questions: generic requests with the first words of their replies, one behind the other.
    """

    repeat_first: tuple[int, ...]
    repeat_cue: tuple[int, ...]
    answer: tuple[int, ...]
    questions: tuple[int, ...]


def pass_prompts(tokenizer: Any) -> PassPrompts:
    """For a tokenizer with a chat template a reply starts as an assistant's message, else in a new line."""
    change = "\n\n"
    if getattr(tokenizer, "chat_template", None) is not None:
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": _USER}], tokenize=False, add_generation_prompt=True
        )
        change = rendered.split(_USER, 1)[1]

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    return PassPrompts(
        repeat_first=encode(FIRST),
        repeat_cue=encode(CUE),
        answer=encode(change),
        questions=encode("".join(f"{question}{change}{reply}" for question, reply in QUESTIONS)),
    )


def pass_chunks(
    kind: PassKind,
    token_ids: Sequence[int],
    prompts: PassPrompts | None,
    *,
    chunk_tokens: int,
    reach_tokens: int | None,
) -> list[PassChunk]:
    """The forward passes of one kind over a span.

    Args:
        kind: which.
        token_ids: the span's tokens.
        prompts: of the model's tokenizer; None will do for a pass over the span's own tokens.
        chunk_tokens: most tokens of the span per forward pass.
        reach_tokens: how far a repetition looks, see `repetition_chunks`.

    Raises:
        ValueError: `chunk_tokens` is less than 1, or the pass needs prompts.
    """
    if kind == "span":
        return span_chunks(token_ids, chunk_tokens=chunk_tokens)
    if prompts is None:
        raise ValueError(f"expected the prompts of pass {kind!r}, got None")
    if kind == "questions":
        return question_chunks(prompts.questions, n_tokens=len(token_ids))
    return repetition_chunks(
        token_ids,
        first=prompts.repeat_first,
        cue=prompts.repeat_cue,
        answer=prompts.answer,
        chunk_tokens=chunk_tokens,
        # No query twice.
        n_sampled=min(SAMPLED_QUERIES, len(token_ids)),
        reach_tokens=reach_tokens,
    )


def longest_prompt(prompts: PassPrompts) -> int:
    """Most tokens that a forward pass puts behind the span besides repeated ones."""
    asking = max(len(prompts.repeat_first), len(prompts.repeat_cue) + CUE_TOKENS) + len(prompts.answer)
    return max(asking, len(prompts.questions))
