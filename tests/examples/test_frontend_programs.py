"""The programs in SGLang's frontend language, run as they are against a real server: the first run has the
prefix compressed, the second is served from the span.

Every document begins with a random line, so that nothing is left from other runs on the same server.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

import document_analyst
import judge
import many_shot_classifier
import pytest
import sglang as sgl
from served import Answer, Served, read_document

from grkv_sglang.client import GrkvClient

pytestmark = pytest.mark.engine


def fresh_document(words: int) -> str:
    return f"Copy {uuid.uuid4().hex}.\n{read_document(None, words)}"


def wait_for_compression(url: str) -> None:
    """Until the server has no job left."""
    with GrkvClient(url) as client:
        until = time.monotonic() + 120
        while client.state().counters.jobs_waiting:
            assert time.monotonic() < until, "the server goes on compressing"
            time.sleep(0.2)


def served(answer: Answer) -> Served:
    assert answer.served is not None
    return answer.served


def test_the_analysts_questions_share_one_document(engine_url):
    document = fresh_document(350)
    questions = ("Who sits at the table?", "What time is it?", "How does Alice leave?")

    def ask() -> list[Answer]:
        return document_analyst.run(
            engine_url, document, questions, at_once=1, answer_tokens=4, chat_template="chatml"
        )

    cold = ask()
    assert [a.label for a in cold] == list(questions)
    assert all(a.text for a in cold)
    # The fork sent the document before any question did.
    assert cold[0].cached_tokens > 400
    assert served(cold[0]).span_tokens == 0

    wait_for_compression(engine_url)
    for answer in ask():
        from_span = served(answer)
        # The span ends 16 tokens before the document does.
        assert from_span.span_tokens > 400
        assert from_span.span_slots <= 0.22 * from_span.span_tokens  # the fixture's budget is 0.2
        assert answer.prompt_tokens - answer.cached_tokens < 20


def test_choices_are_scored_on_the_compressed_examples(engine_url, monkeypatch):
    scored: list[dict[str, Any]] = []

    class Recording(sgl.RuntimeEndpoint):  # type: ignore[misc]
        """Keeps what `choices` is answered with, which SGLang does not hand on."""

        def _generate_http_request(self, s: Any, data: dict[str, Any]) -> Any:
            answer = super()._generate_http_request(s, data)
            if data.get("return_logprob"):
                scored.extend(answer)
            return answer

    monkeypatch.setattr(sgl, "RuntimeEndpoint", Recording)
    examples = many_shot_classifier.read_examples(many_shot_classifier.DATA / "labelled_messages.tsv")[:20]
    examples = [(examples[0][0], f"Order {uuid.uuid4().hex} was charged twice."), *examples]
    # More words than the margin of 16 tokens: a span that held the first one would serve the first alone.
    first = (
        "The parcel that I ordered for my mother in the second week of March has never been seen by anyone"
    )
    second = (
        "My old address is still in the profile and cannot be removed from there by any means that I know"
    )
    labels = {label for label, _ in examples}

    cold = many_shot_classifier.run(engine_url, examples, [first, second], at_once=1)
    assert [a.label for a in cold] == [first, second]
    assert {a.text for a in cold} <= labels
    assert cold[0].cached_tokens > 300

    wait_for_compression(engine_url)
    scored.clear()
    warm = many_shot_classifier.run(engine_url, examples, [second, first], at_once=1)
    assert {a.text for a in warm} <= labels
    assert all(served(a).span_tokens > 300 for a in warm)
    assert len(scored) == 2 * len(labels)
    for answer in scored:
        meta = answer["meta_info"]
        assert meta["grkv"][0]["span_tokens"] > 300
        assert meta["prompt_tokens"] - meta["cached_tokens"] < 10
        assert meta["input_token_logprobs"][-1][0] < 0


def test_the_judge_reads_rubric_and_document_from_the_span(engine_url):
    # A rubric shorter than the least span, which then begins with it.
    document, rubric = fresh_document(250), judge.RUBRIC.read_text(encoding="utf-8")[:500]
    candidates = judge.CANDIDATES[:2]

    def marks() -> dict[tuple[int, str], Answer]:
        return judge.run(engine_url, document, candidates=candidates, rubric=rubric, chat_template="chatml")

    cold = marks()
    assert set(cold) == {(n, criterion) for n in (0, 1) for criterion in judge.CRITERIA}
    assert all(mark.text in "12345" and len(mark.text) == 1 for mark in cold.values())
    assert cold[0, "support"].cached_tokens > 300

    wait_for_compression(engine_url)
    assert all(served(mark).span_tokens > 300 for mark in marks().values())


def test_the_servers_refusal_reaches_the_user(engine_url):
    with (
        pytest.warns(UserWarning, match="stream_executor"),
        pytest.raises(RuntimeError, match="context length"),
    ):
        document_analyst.run(engine_url, "word " * 9000, ("Who?", "Where?"), chat_template="chatml")
