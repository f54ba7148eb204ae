"""Citations, the gate, prompts and small views."""

from __future__ import annotations

import asyncio

import pytest

from grkv_sglang.services.common.web import ServiceError
from grkv_sglang.services.rag.citations import cited_numbers
from grkv_sglang.services.rag.gate import Gate
from grkv_sglang.services.rag.prompts import prompt_messages, section_message
from grkv_sglang.services.rag.views import page_at


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("So it is [1].", [1]),
        ("[2] and [1], [2] again", [1, 2]),
        ("both [1, 2]", [1, 2]),
        ("invented [3], [0] and [999]", []),
        ("a list[1] of code", [1]),
        ("no [a], [-1], [1.5], []", []),
    ],
)
def test_citations_are_of_sources_that_there_are(text, numbers):
    assert cited_numbers(text, 2) == numbers


def test_the_gate_lets_in_what_it_has_room_for():
    async def run():
        gate = Gate(places=2, queue=1)
        await gate.enter()
        await gate.enter()
        third = asyncio.create_task(gate.enter())
        await asyncio.sleep(0)
        with pytest.raises(ServiceError) as raised:
            await gate.enter()
        assert raised.value.problem.status == 503
        assert raised.value.headers == {"Retry-After": "5"}
        assert not third.done()
        gate.leave()
        await third
        # Who gives up waiting takes no room.
        fourth = asyncio.create_task(gate.enter())
        await asyncio.sleep(0)
        fourth.cancel()
        await asyncio.gather(fourth, return_exceptions=True)
        fifth = asyncio.create_task(gate.enter())
        await asyncio.sleep(0)
        gate.leave()
        await fifth

    asyncio.run(run())


def test_sections_come_before_the_question_and_nothing_of_it_before_them():
    sections = [section_message(1, "a.txt", None, " text \n"), section_message(2, "b.md", "Head", "more")]
    messages = prompt_messages("Instructions.", sections, " Who? ")
    assert messages == [
        {"role": "system", "content": "Instructions."},
        {"role": "user", "content": "[1] a.txt\n\ntext"},
        {"role": "user", "content": "[2] b.md: Head\n\nmore"},
        {"role": "user", "content": "Who?"},
    ]
    assert prompt_messages("Instructions.", sections, "When?")[:3] == messages[:3]


def test_pages():
    assert [page_at([0, 10, 10, 30], position) for position in (0, 9, 10, 29, 30, 99)] == [1, 1, 3, 3, 4, 4]
    assert page_at([], 5) is None
