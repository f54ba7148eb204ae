"""A conversation as a prompt, and the decision when its history is compressed."""

from __future__ import annotations

from typing import Any

import pytest

from grkv_sglang.client import Served
from grkv_sglang.services.chat.history import (
    common_prefix,
    covered_after,
    prompt_messages,
    tokens_to_mark,
    without_question,
)


def test_prompt_is_system_message_turns_and_question():
    messages = prompt_messages("Be brief.", [("a", "b"), ("c", "d")], "e")
    assert [(m["role"], m["content"]) for m in messages] == [
        ("system", "Be brief."),
        *(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e")),
    ]
    assert prompt_messages("", [], "e") == [{"role": "user", "content": "e"}]
    assert without_question(messages)[:-1] == messages[:-1]
    assert without_question(messages)[-1]["content"] == ""


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [([1, 2, 3], [1, 2, 4], 2), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 2], 2), ([9], [1], 0), ([], [1], 0)],
)
def test_common_prefix(first: list[int], second: list[int], expected: int):
    assert common_prefix(first, second) == expected


def test_history_ends_before_the_question_and_is_a_prefix_of_the_next_prompt(tokenizer: Any):
    """By the real template: what is marked is a token prefix of every further prompt of the conversation."""

    def ids(messages: Any) -> list[int]:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    turns = [
        ("What is a clock?", "It shows the time.\n"),
        ("  And a sundial? ", "A clock\n\n- without wheels"),
    ]
    for question in ("Why?", " leading space", "\n\nnew lines", "", "<|im_end|>"):
        messages = prompt_messages("Be brief.", turns, question)
        prompt = ids(messages)
        end = common_prefix(prompt, ids(without_question(messages)))
        history = tokenizer.decode(prompt[:end])
        assert history.startswith("<|im_start|>system\nBe brief.")
        assert "A clock\n\n- without wheels<|im_end|>" in history
        longer = ids(prompt_messages("Be brief.", [*turns, (question, "So.")], "Next?"))
        assert longer[:end] == prompt[:end]


@pytest.mark.parametrize(
    ("history", "covered", "expected"),
    [(511, 0, None), (512, 0, 512), (900, 500, None), (1012, 500, 1012), (100, 500, None)],
)
def test_history_is_marked_once_enough_of_it_is_new(history: int, covered: int, expected: int | None):
    assert tokens_to_mark(history, covered, 512) == expected


def served(exact: int, span: int) -> Served:
    return Served(
        mode="prefer_compressed",
        exact_tokens=exact,
        span_tokens=span,
        span_slots=span // 10,
        spans=1 if span else 0,
        budget=0.1 if span else None,
        quality=0.8 if span else None,
        profile="default" if span else None,
        reprefilled_tokens=0,
    )


@pytest.mark.parametrize(
    ("covered", "marked", "answer", "expected"),
    [
        pytest.param(0, 600, served(500, 0), 600, id="a mark is believed before its span is there"),
        pytest.param(600, None, served(40, 590), 600, id="the span is there, with exact tokens around it"),
        pytest.param(600, None, served(610, 0), 0, id="no span came of it: mark again"),
        pytest.param(1200, None, served(30, 570), 570, id="the second span was evicted"),
        pytest.param(0, None, served(20, 800), 800, id="the engine compressed by itself"),
        pytest.param(600, None, None, 600, id="an engine that does not tell"),
    ],
)
def test_what_is_covered_after_an_answer(
    covered: int, marked: int | None, answer: Served | None, expected: int
):
    assert covered_after(covered, marked, answer) == expected


def test_a_lost_span_is_marked_again_two_requests_later():
    covered = covered_after(0, tokens_to_mark(600, 0, 512), served(500, 0))
    assert tokens_to_mark(640, covered, 512) is None
    covered = covered_after(covered, None, served(0, 0))  # evicted
    assert tokens_to_mark(700, covered, 512) == 700
