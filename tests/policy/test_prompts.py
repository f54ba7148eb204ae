from __future__ import annotations

from collections.abc import Sequence

import pytest

from grkv_sglang.core import CUE_TOKENS, PassKind, question_chunks, repetition_chunks, span_chunks
from grkv_sglang.policy.prompts import (
    CUE,
    FIRST,
    QUESTIONS,
    SAMPLED_QUERIES,
    PassPrompts,
    longest_prompt,
    pass_chunks,
    pass_prompts,
)


class Tokenizer:
    """One token per character; special tokens only where nobody asked for none."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [*([0] if add_special_tokens else []), *map(ord, text)]


class ChatTokenizer(Tokenizer):
    chat_template = "a template"

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize
        (message,) = messages
        assert message["role"] == "user"
        reply = "<assistant>" if add_generation_prompt else ""
        return f"<system>Be kind.</system><user>{message['content']}</user>{reply}"


class UntaughtTokenizer(ChatTokenizer):
    """As of a base model: the method is there, a template is not."""

    chat_template = None  # type: ignore[assignment]


def text(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))


@pytest.mark.parametrize(
    ("tokenizer", "change"),
    [(Tokenizer(), "\n\n"), (UntaughtTokenizer(), "\n\n"), (ChatTokenizer(), "</user><assistant>")],
)
def test_prompts(tokenizer: Tokenizer, change: str) -> None:
    prompts = pass_prompts(tokenizer)
    assert text(prompts.repeat_first) == FIRST
    assert text(prompts.repeat_cue) == CUE
    assert text(prompts.answer) == change
    # One request behind the other, each with what its reply begins with.
    assert text(prompts.questions) == "".join(f"{question}{change}{reply}" for question, reply in QUESTIONS)
    assert text(prompts.questions).endswith(f"{FIRST}{change}")


PROMPTS = PassPrompts(repeat_first=(1, 2, 3), repeat_cue=(4,), answer=(5, 6), questions=(7, 8, 9, 10))
SPAN = range(100, 130)


def chunks_of(kind: PassKind, prompts: PassPrompts | None = PROMPTS, reach_tokens: int | None = 3) -> object:
    return pass_chunks(kind, SPAN, prompts, chunk_tokens=12, reach_tokens=reach_tokens)


def test_chunks_of_every_kind() -> None:
    assert chunks_of("span") == span_chunks(SPAN, chunk_tokens=12)
    assert chunks_of("questions") == question_chunks((7, 8, 9, 10), n_tokens=30)
    for reach_tokens in (3, None):
        assert chunks_of("repetition", reach_tokens=reach_tokens) == repetition_chunks(
            SPAN,
            first=(1, 2, 3),
            cue=(4,),
            answer=(5, 6),
            chunk_tokens=12,
            n_sampled=30,
            reach_tokens=reach_tokens,
        )


@pytest.mark.parametrize("n", [1, SAMPLED_QUERIES - 1, SAMPLED_QUERIES, 300])
def test_a_repetition_keeps_no_query_twice(n: int) -> None:
    chunks = pass_chunks("repetition", range(n), PROMPTS, chunk_tokens=100, reach_tokens=0)
    kept = [chunk.token_ids[at] for chunk in chunks for at in chunk.sampled]
    assert len(set(kept)) == len(kept) == min(n, SAMPLED_QUERIES)


def test_only_the_span_itself_needs_no_prompts() -> None:
    assert chunks_of("span", None) == chunks_of("span")
    kinds: tuple[PassKind, ...] = ("questions", "repetition")
    for kind in kinds:
        with pytest.raises(ValueError, match=f"expected the prompts of pass '{kind}', got None"):
            chunks_of(kind, None)


@pytest.mark.parametrize(
    ("prompts", "longest"),
    [
        (PROMPTS, 1 + CUE_TOKENS + 2),
        (PassPrompts((0,) * 20, (0,), (0,) * 3, ()), 20 + 3),
        (PassPrompts((), (), (), (0,) * 50), 50),
        (PassPrompts((), (), (), ()), CUE_TOKENS),
    ],
)
def test_longest_prompt(prompts: PassPrompts, longest: int) -> None:
    assert longest_prompt(prompts) == longest
    kinds: tuple[PassKind, ...] = ("questions", "repetition")
    for kind in kinds:
        for chunk in pass_chunks(kind, range(30), prompts, chunk_tokens=12, reach_tokens=None):
            n_repeated = len(chunk.token_ids) - chunk.n_prompt if kind == "repetition" else 0
            assert len(chunk.token_ids) - n_repeated <= longest
