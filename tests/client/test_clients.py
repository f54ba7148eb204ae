"""Both clients over a transport: they send the same, understand the same, and fail the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from grkv_sglang.client import (
    AsyncGrkvClient,
    CompressionOptions,
    GrkvApiError,
    GrkvClient,
    GrkvConnectionError,
    GrkvError,
    RetryPolicy,
    Timeouts,
)
from tests.cache.harness import Harness
from tests.client.recorded import body, stream

MESSAGES = [{"role": "user", "content": "Who?"}]
AT_ONCE = RetryPolicy(attempts=3, base_delay_s=0.0)
Answer = httpx.Response | Exception


class Script:
    """Answers requests one after another as it was told, and remembers them."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        found = self.answers[len(self.requests) - 1]
        if isinstance(found, Exception):
            raise found
        return found

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """What was sent, without the ids that differ every time."""
        sent = [json.loads(request.content) if request.content else {} for request in self.requests]
        return [{name: value for name, value in one.items() if name != "rid"} for one in sent]


def run_sync(script: Script, method: str, *args: Any, settings: dict[str, Any], **fields: Any) -> Any:
    with GrkvClient("http://server/", transport=httpx.MockTransport(script), **settings) as client:
        result = getattr(client, method)(*args, **fields)
        if not method.startswith("stream"):
            return result
        with result:
            pieces = list(result)
        assert result.so_far == result.result
        return pieces, result.result


def run_async(script: Script, method: str, *args: Any, settings: dict[str, Any], **fields: Any) -> Any:
    async def run() -> Any:
        transport = httpx.MockTransport(script)
        async with AsyncGrkvClient("http://server/", transport=transport, **settings) as client:
            result = await getattr(client, method)(*args, **fields)
            if not method.startswith("stream"):
                return result
            async with result:
                pieces = [piece async for piece in result]
            assert result.so_far == result.result
            return pieces, result.result

    return asyncio.run(run())


def both(
    answers: Callable[[], list[Answer]],
    method: str,
    *args: Any,
    settings: dict[str, Any] | None = None,
    **fields: Any,
) -> tuple[Any, Script]:
    """The result of a method, or its error, which must be the same for both clients; and one's requests."""
    results, scripts = [], []
    for run in (run_sync, run_async):
        script = Script(*answers())
        scripts.append(script)
        try:
            results.append(
                run(script, method, *args, settings={"retry": AT_ONCE, **(settings or {})}, **fields)
            )
        except GrkvError as error:
            results.append(error)
    one, other = results
    if isinstance(one, GrkvError):
        assert type(one) is type(other)
        assert str(one).split(" (request")[0] == str(other).split(" (request")[0]
    else:
        assert one == other
    sent = [[(r.method, r.url, r.headers.get("Authorization")) for r in s.requests] for s in scripts]
    assert sent[0] == sent[1]
    assert scripts[0].bodies == scripts[1].bodies
    return one, scripts[0]


def json_answer(name: str, status: int = 200) -> httpx.Response:
    return httpx.Response(status, json=body(name))


def test_chat():
    options = CompressionOptions(prefix_end="document")
    answer, script = both(lambda: [json_answer("chat")], "chat", MESSAGES, options=options, cache_salt="s")
    assert answer.grkv.span_tokens > 0
    assert str(script.requests[0].url) == "http://server/v1/chat/completions"
    assert script.bodies[0]["custom_params"] == {"grkv": {"prefix_end": "document"}}


def test_complete():
    answer, script = both(lambda: [json_answer("completion")], "complete", "Marta told him", max_tokens=2)
    assert answer.text == body("completion")["choices"][0]["text"]
    assert script.bodies[0]["max_tokens"] == 2


def test_tokenize():
    ids, _ = both(lambda: [json_answer("tokenize")], "tokenize", MESSAGES)
    assert ids == body("tokenize")["tokens"]


@pytest.mark.parametrize(
    ("method", "content", "name"),
    [
        ("stream_chat", MESSAGES, "chat_stream"),
        ("stream_complete", "x", "completion_stream"),
        ("stream_generate", [1, 2], "generate_stream"),
    ],
)
def test_streams(method: str, content: Any, name: str):
    (pieces, result), script = both(lambda: [httpx.Response(200, content=stream(name))], method, content)
    assert "".join(pieces) == result.text
    assert script.bodies[0]["stream"] is True


def harness_state() -> list[dict[str, Any]]:
    """As `/grkv/state` answers, of a cache without an engine."""
    h = Harness()
    h.run([1, 2, 3, 1, 1, 2, 2, 3, 3, 1, 2, 1, 7, 8], {"prefix_end_tokens": 12})
    return [h.cache.state()]


def test_state_and_command():
    held = harness_state()
    state, _ = both(lambda: [httpx.Response(200, json=held)], "state")
    assert [span.tokens for span in state.spans] == [12]
    after, script = both(
        lambda: [httpx.Response(200, json=held)], "command", "pin", tokens_sha256=state.spans[0].tokens_sha256
    )
    assert after == state
    assert script.bodies == [{"action": "pin", "tokens_sha256": state.spans[0].tokens_sha256}]


@pytest.mark.parametrize(
    ("keys", "chat", "state"),
    [
        ({}, None, None),
        ({"api_key": "user"}, "Bearer user", "Bearer user"),
        ({"api_key": "user", "admin_api_key": "admin"}, "Bearer user", "Bearer admin"),
        ({"admin_api_key": "admin"}, None, "Bearer admin"),
    ],
)
def test_keys(keys: dict[str, str], chat: str | None, state: str | None):
    _, script = both(lambda: [json_answer("chat")], "chat", MESSAGES, settings=keys)
    assert script.requests[0].headers.get("Authorization") == chat
    held = harness_state()
    _, script = both(lambda: [httpx.Response(200, json=held)], "state", settings=keys)
    assert script.requests[0].headers.get("Authorization") == state


@pytest.mark.parametrize(
    ("answer", "healthy"),
    [
        (lambda: httpx.Response(200), True),
        (lambda: httpx.Response(503), False),
        (lambda: httpx.ConnectError("no"), False),
    ],
)
def test_health_is_asked_once(answer: Callable[[], Answer], healthy: bool):
    found, script = both(lambda: [answer()], "health")
    assert found is healthy
    assert len(script.requests) == 1


def test_an_error_has_status_message_and_request_id():
    error, script = both(lambda: [json_answer("bad_options", 400)], "chat", MESSAGES)
    assert isinstance(error, GrkvApiError)
    assert (error.status, error.message) == (400, body("bad_options")["message"])
    assert error.request_id == json.loads(script.requests[0].content)["rid"]
    assert len(script.requests) == 1


def test_retries_until_it_works_each_under_an_id_of_its_own():
    answer, script = both(
        lambda: [httpx.ConnectError("refused"), httpx.Response(503, text="starting"), json_answer("chat")],
        "chat",
        MESSAGES,
    )
    assert answer.text
    ids = [json.loads(request.content)["rid"] for request in script.requests]
    assert len(set(ids)) == 3
    assert script.bodies[0] == script.bodies[1] == script.bodies[2]


def test_retries_end():
    error, script = both(lambda: [httpx.Response(429, text="slow down")] * 9, "complete", "x")
    assert isinstance(error, GrkvApiError)
    assert (error.status, len(script.requests)) == (429, 3)
    error, script = both(lambda: [httpx.ReadError("gone")] * 9, "complete", "x")
    assert isinstance(error, GrkvConnectionError)
    assert len(script.requests) == 3


def test_a_command_is_not_sent_twice_where_it_may_have_arrived():
    error, script = both(lambda: [httpx.ReadError("gone")] * 9, "command", "delete", cache_salt="s")
    assert isinstance(error, GrkvConnectionError)
    assert len(script.requests) == 1


def test_a_stream_is_tried_again_before_its_first_byte():
    whole = stream("chat_stream")
    (pieces, _), script = both(
        lambda: [
            httpx.Response(502),
            httpx.RemoteProtocolError("closed"),
            httpx.Response(200, content=whole),
        ],
        "stream_chat",
        MESSAGES,
    )
    assert pieces
    assert len(script.requests) == 3


class Broken(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body that breaks off."""

    def __init__(self, *parts: bytes) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[bytes]:
        yield from self.parts
        raise httpx.ReadError("gone")

    async def __aiter__(self) -> Any:
        for part in self:
            yield part


@pytest.mark.parametrize("parts", [(), (stream("chat_stream")[:700],)])
def test_a_stream_that_began_is_never_tried_again(parts: tuple[bytes, ...]):
    error, script = both(
        lambda: [httpx.Response(200, stream=Broken(*parts)), httpx.Response(200)], "stream_chat", MESSAGES
    )
    assert isinstance(error, GrkvConnectionError)
    assert "ReadError" in str(error)
    assert len(script.requests) == 1


def test_a_stream_that_ends_early_is_an_error():
    error, _ = both(
        lambda: [httpx.Response(200, content=stream("chat_stream")[:700])], "stream_chat", MESSAGES
    )
    assert isinstance(error, GrkvConnectionError)
    assert "broke off" in str(error)


def test_a_refused_stream_is_an_error_with_the_servers_words():
    error, _ = both(lambda: [json_answer("bad_options", 400)], "stream_chat", MESSAGES)
    assert isinstance(error, GrkvApiError)
    assert "this server allows budgets" in error.message


def test_the_total_time_ends_a_stream():
    error, _ = both(
        lambda: [httpx.Response(200, content=stream("chat_stream"))],
        "stream_chat",
        MESSAGES,
        settings={"timeouts": Timeouts(total_s=0.0)},
    )
    assert isinstance(error, GrkvConnectionError)
    assert "in all" in str(error)


def test_something_else_than_sglang_answers():
    error, _ = both(lambda: [httpx.Response(200, text="<html>")], "chat", MESSAGES)
    assert isinstance(error, GrkvConnectionError)
    assert "not JSON" in str(error)


def test_a_result_is_there_only_at_the_end():
    script = Script(httpx.Response(200, content=stream("chat_stream")))
    with (
        GrkvClient("http://server", transport=httpx.MockTransport(script)) as client,
        client.stream_chat(MESSAGES) as text,
    ):
        next(iter(text))
        with pytest.raises(RuntimeError, match="read to its end"):
            _ = text.result


def test_what_there_is_of_an_answer_is_told_before_its_end():
    first, rest = stream("generate_stream").split(b"\n\n", 1)
    script = Script(httpx.Response(200, stream=Broken(first + b"\n\n", rest)))
    with (
        GrkvClient("http://server", transport=httpx.MockTransport(script)) as client,
        client.stream_generate([1, 2]) as text,
    ):
        assert text.so_far is None
        piece = next(iter(text))
        assert text.so_far is not None
        assert (text.so_far.text, text.so_far.usage.completion_tokens) == (piece, 1)


def test_time_outs_reach_the_transport():
    _, script = both(
        lambda: [json_answer("chat")],
        "chat",
        MESSAGES,
        settings={"timeouts": Timeouts(connect_s=3.0, read_s=50.0)},
    )
    limits = script.requests[0].extensions["timeout"]
    assert (limits["connect"], limits["read"]) == (3.0, 50.0)


def test_any_other_route():
    found, script = both(lambda: [httpx.Response(200, json={"version": "1"})], "get", "/server_info")
    assert found == {"version": "1"}
    found, script = both(lambda: [httpx.Response(200, json={"a": 1})], "post", "/generate", {"b": 2})
    assert (found, script.bodies) == ({"a": 1}, [{"b": 2}])
