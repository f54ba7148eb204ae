"""The clients and the `grkv` commands against a running server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from grkv_sglang import cli
from grkv_sglang.client import (
    AsyncGrkvClient,
    Completion,
    CompressionOptions,
    GrkvApiError,
    GrkvClient,
    Message,
    Timeouts,
)
from grkv_sglang.client.calls import chat_call, complete_call, generate_call
from tests.client import recorded
from tests.engine.client import Client, distinct_tails, document

pytestmark = pytest.mark.engine

SYSTEM = "Answer from the document."


@pytest.fixture
def server(small_server: Client) -> Client:
    return small_server


@pytest.fixture
def url(server: Client) -> str:
    return str(server.http.base_url)


@pytest.fixture
def client(server: Client, url: str) -> Iterator[GrkvClient]:
    server.flush()
    with GrkvClient(url, timeouts=Timeouts(read_s=300)) as client:
        yield client


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are not cut to the terminal that tests do not have."""
    monkeypatch.setattr(cli, "console", Console(width=250))


def grkv(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


def text_of(server: Client, tokens: int, seed: int) -> str:
    text: str = server.tokenizer.decode(document(server, tokens, seed=seed))
    return text


def chat(text: str, question: str) -> list[Message]:
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": text},
        {"role": "user", "content": question},
    ]


MARKED = CompressionOptions(prefix_end="document")


def test_a_chat_is_served_from_the_span_that_the_first_one_asked_for(server: Client, client: GrkvClient):
    text = text_of(server, 500, seed=40)
    cold = client.chat(chat(text, "Who keeps the clock?"), options=MARKED, max_tokens=4)
    assert cold.grkv is not None
    assert (cold.grkv.span_tokens, cold.usage.cached_tokens) == (0, 0)
    assert cold.usage.completion_tokens <= 4
    server.settled_state()
    (span,) = client.state().spans
    warm = client.chat(chat(text, "What did it carry?"), max_tokens=4, return_token_ids=True)
    assert warm.grkv is not None
    assert (warm.grkv.span_tokens, warm.grkv.span_slots) == (span.tokens, span.slots)
    assert warm.usage.cached_tokens == span.tokens + warm.grkv.exact_tokens
    assert len(warm.prompt_token_ids or []) == warm.usage.prompt_tokens
    assert len(warm.token_ids or []) == warm.usage.completion_tokens
    assert client.tokenize(chat(text, "What did it carry?")) == warm.prompt_token_ids
    exact = client.chat(
        chat(text, "What did it carry?"), max_tokens=4, options=CompressionOptions(mode="exact")
    )
    assert exact.grkv is not None
    assert exact.grkv.span_tokens == 0
    assert exact.grkv.reprefilled_tokens > 0


def test_streams_and_the_asynchronous_client_say_the_same(server: Client, client: GrkvClient, url: str):
    text = text_of(server, 500, seed=41)
    client.chat(chat(text, "Who?"), options=MARKED, max_tokens=1, cache_salt="tenant")
    (span,) = server.settled_state()["spans"]
    asked: dict[str, Any] = {"max_tokens": 6, "cache_salt": "tenant"}
    whole = client.chat(chat(text, "What did it carry?"), **asked)
    with client.stream_chat(chat(text, "What did it carry?"), **asked) as stream:
        pieces = list(stream)
    assert len(pieces) > 1
    assert "".join(pieces) == stream.result.text == whole.text
    assert stream.result.usage.cached_tokens >= span["tokens"]
    assert stream.result.usage.completion_tokens == whole.usage.completion_tokens

    with client.stream_generate(client.tokenize(chat(text, "What did it carry?")), **asked) as native:
        assert "".join(native) == whole.text
    assert whole.grkv is not None
    assert native.result.grkv is not None
    for fact in ("mode", "span_tokens", "span_slots", "quality", "profile"):
        assert getattr(native.result.grkv, fact) == getattr(whole.grkv, fact)
    assert native.result.usage.prompt_tokens == whole.usage.prompt_tokens
    assert native.result.usage.completion_tokens == whole.usage.completion_tokens
    assert native.result.finish_reason == whole.finish_reason

    async def run() -> tuple[Completion, Completion]:
        async with AsyncGrkvClient(url) as other:
            answer = await other.chat(chat(text, "What did it carry?"), **asked)
            async with await other.stream_chat(chat(text, "What did it carry?"), **asked) as stream:
                assert "".join([piece async for piece in stream]) == answer.text
            assert await other.health()
            assert (await other.state()).num_spans == 1
            return answer, stream.result

    answer, streamed = asyncio.run(run())
    assert answer.text == streamed.text == whole.text
    assert answer.grkv is not None
    assert answer.grkv.span_tokens == span["tokens"]


def test_a_completion_of_token_ids(server: Client, client: GrkvClient):
    n = 400
    doc = document(server, n, seed=42)
    first, second = distinct_tails(server, 2)
    client.complete(doc + first, options=CompressionOptions(prefix_end_tokens=n), max_tokens=2)
    server.settled_state()
    answer = client.complete(doc + second, max_tokens=3, return_token_ids=True)
    assert answer.usage.cached_tokens == n
    assert answer.grkv is None  # SGLang does not tell it here
    assert len(answer.token_ids or []) == answer.usage.completion_tokens == 3
    with client.stream_complete(doc + second, max_tokens=3) as stream:
        assert "".join(stream) == answer.text
    assert stream.result.usage.cached_tokens >= n


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0.001}, "this server allows budgets between 0.01 and 1"),
        ({"prefix_end_tokens": 4000}, "must leave at least one token"),
        ({"profile": "bset"}, "profile"),
    ],
)
def test_options_that_the_server_refuses(client: GrkvClient, options: dict[str, Any], message: str):
    messages = chat("A text.", "Who?")
    wrong = CompressionOptions(**options)
    for ask in (client.chat, client.stream_chat):
        with pytest.raises(GrkvApiError) as error:
            ask(messages, options=wrong)
        assert error.value.status == 400
        assert message in error.value.message
        assert error.value.request_id is not None


def test_pins_and_deletions(server: Client, client: GrkvClient):
    client.chat(chat(text_of(server, 400, seed=43), "Who?"), options=MARKED, max_tokens=1, cache_salt="t")
    server.settled_state()
    (span,) = client.state().spans
    assert client.command("pin", tokens_sha256=span.tokens_sha256).spans[0].pinned
    assert client.command("delete", cache_salt="t").spans == []
    with pytest.raises(GrkvApiError, match="no span has tokens_sha256") as error:
        client.command("unpin", tokens_sha256=span.tokens_sha256)
    assert error.value.status == 404


def warm_arguments(url: str, *further: str) -> list[str]:
    return ["warm", "--url", url, "--system", SYSTEM, *further]


def test_warm_and_inspect(server: Client, client: GrkvClient, url: str, tmp_path: Path, wide: None):
    one, two = text_of(server, 500, seed=44), text_of(server, 600, seed=45)
    (tmp_path / "one.txt").write_text(one)
    (tmp_path / "two.jsonl").write_text(json.dumps({"text": two, "name": "second"}))
    result = grkv(*warm_arguments(url, "--budget", "0.25", "--pin", str(tmp_path)))
    assert result.exit_code == 0, result.output
    assert "one.txt" in result.output
    assert "2 of 2 documents" in result.output
    state = client.state()
    assert [(span.pinned, span.reason) for span in state.spans] == [(True, "explicit")] * 2
    for text in (one, two):
        answer = client.chat(chat(text, "Who keeps the clock?"), max_tokens=2)
        assert answer.grkv is not None
        assert answer.grkv.span_tokens in {span.tokens for span in state.spans}
        assert answer.grkv.budget == pytest.approx(0.25, abs=0.01)
    again = grkv(*warm_arguments(url, str(tmp_path / "one.txt")))
    assert again.exit_code == 0
    assert "already there" in again.output

    shown = grkv("inspect", "--url", url).output
    for span in client.state().spans:
        assert span.tokens_sha256[:12] in shown
    assert "spans: 2" in shown
    listed = json.loads(grkv("inspect", "--url", url, "--json").output)
    assert listed["num_spans"] == 2
    server.settled_state()


def test_warm_of_a_template(server: Client, client: GrkvClient, url: str, tmp_path: Path, wide: None):
    text = text_of(server, 500, seed=46)
    (tmp_path / "a.md").write_text(text)
    template = "Text: {document}\n\nQuestion: {question}"
    result = grkv(*warm_arguments(url, "--template", template, str(tmp_path)))
    assert result.exit_code == 0, result.output
    (span,) = client.state().spans
    message = template.replace("{document}", text).replace("{question}", "Which ferry?")
    answer = client.chat(
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": message}], max_tokens=2
    )
    assert answer.grkv is not None
    assert answer.grkv.span_tokens == span.tokens
    server.settled_state()


def test_warm_tells_what_failed(server: Client, client: GrkvClient, url: str, tmp_path: Path, wide: None):
    (tmp_path / "good.txt").write_text(text_of(server, 500, seed=47))
    (tmp_path / "long.txt").write_text(text_of(server, 5000, seed=48))
    (tmp_path / "short.txt").write_text("Too short.")
    result = grkv(*warm_arguments(url, "--concurrency", "1", str(tmp_path)))
    assert result.exit_code == 1
    assert "1 of 3 documents" in result.output
    assert "failed: 400: " in result.output  # longer than the context
    assert "the server counted since then: failed: " in result.output
    server.settled_state()


def test_verify(server: Client, client: GrkvClient, url: str, wide: None):
    before = server.settled_state()
    result = grkv("verify", "--url", url, "--answer-tokens", "12")
    assert result.exit_code == 0, result.output
    assert "verified: " in result.output
    assert "FAILED" not in result.output
    state = server.settled_state()
    assert state["spans"] == before["spans"] == []
    assert state["pool"]["exact_slots"] == before["pool"]["exact_slots"]


def test_verify_says_what_is_wrong(server: Client, url: str, tmp_path: Path, wide: None):
    """Here that no span is good enough for what is asked."""
    (tmp_path / "a.txt").write_text(text_of(server, 500, seed=49))
    result = grkv("verify", "--url", url, "--text", str(tmp_path / "a.txt"), "--min-quality", "0.9999")
    assert result.exit_code == 1
    assert "a warm request is served from the span" in result.output
    assert "is the least quality asked for higher?" in result.output
    assert "not verified: " in result.output
    assert server.settled_state()["spans"] == []


def test_doctor_of_this_server(url: str, monkeypatch: pytest.MonkeyPatch, wide: None):
    monkeypatch.setattr("grkv_sglang.commands.doctor.check_contracts", list)  # slow, and not of the server
    result = grkv("doctor", "--url", url)
    assert f"server {url}: SGLang 0.5.23" in result.output
    assert "of 6,000 slots free; budget 0.2, profile default" in result.output


def paths(found: Any, name: str = "") -> set[str]:
    """Where values are in a body; entries of a list are taken together."""
    if isinstance(found, dict):
        return set().union(*(paths(value, f"{name}.{key}") for key, value in found.items()))
    if isinstance(found, list):
        return set().union({name}, *(paths(value, name) for value in found))
    return {name}


def values_of(content: bytes) -> list[Any]:
    """A JSON body, or the events of a stream."""
    lines = [line.removeprefix(b"data: ") for line in content.split(b"\n")]
    return [json.loads(line) for line in lines if line.startswith(b"{")]


def test_recorded_bodies_are_such_as_this_server_sends(server: Client, client: GrkvClient, server_dir: Path):
    """What the clients' fast tests read has no field that a server does not send. The server's own bodies are
    left in `server_dir`."""
    messages = chat(text_of(server, 400, seed=50), "Who?")
    client.chat(messages, options=MARKED, max_tokens=1)
    server.settled_state()
    calls = {
        "chat.json": chat_call(messages, max_tokens=3, return_token_ids=True),
        "completion.json": complete_call("The ferry left", max_tokens=3),
        "chat_stream.txt": chat_call(messages, max_tokens=3, stream=True),
        "completion_stream.txt": complete_call("The ferry left", max_tokens=3, stream=True),
        "generate_stream.txt": generate_call(client.tokenize(messages), max_tokens=3),
        "bad_options.json": chat_call(messages, options=CompressionOptions(budget=0.001)),
    }
    sent = {name: server.http.post(call.path, json=call.body).content for name, call in calls.items()}
    for name, content in sent.items():
        (server_dir / name).write_bytes(content)
    for name, content in sent.items():
        kept = (recorded.FOLDER / name).read_bytes()
        assert paths(values_of(kept)) <= paths(values_of(content)), name
