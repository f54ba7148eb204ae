"""What the clients make of SGLang's bodies, errors and streams."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grkv_sglang.client import GrkvApiError, GrkvConnectionError
from grkv_sglang.client.answers import (
    GenerateReader,
    OpenAIReader,
    StreamReader,
    api_error,
    parse_completion,
    parse_state,
)
from tests.client.recorded import body, stream


def test_a_chat():
    answer = parse_completion(body("chat"), "url")
    meta = body("chat")["choices"][0]["meta_info"]
    assert answer.text == body("chat")["choices"][0]["message"]["content"]
    assert answer.finish_reason == meta["finish_reason"]["type"]
    assert answer.usage.prompt_tokens == meta["prompt_tokens"]
    assert answer.usage.completion_tokens == meta["completion_tokens"] == len(answer.token_ids or [])
    assert answer.usage.cached_tokens == meta["cached_tokens"] > 0
    assert answer.grkv is not None
    assert answer.grkv.model_dump() == meta["grkv"][0]
    assert answer.prompt_token_ids == body("chat")["choices"][0]["prompt_token_ids"]
    assert answer.request_id == meta["id"]


def test_a_completion_tells_nothing_of_spans():
    answer = parse_completion(body("completion"), "url")
    assert answer.text == body("completion")["choices"][0]["text"]
    assert (answer.grkv, answer.token_ids) == (None, None)


@pytest.mark.parametrize(
    ("details", "sglext", "cached"),
    [
        (None, None, 0),
        ({"cached_tokens": 7}, None, 7),  # a server with --enable-cache-report
        (None, {"cached_tokens_details": {"device": 5, "host": 2}}, 7),
        (None, {"cached_tokens_details": {"device": 5, "host": 2, "storage": 1}}, 8),
        (None, {"cached_tokens_details": None}, 0),
    ],
)
def test_cached_tokens_of_every_form(details, sglext, cached):
    found = body("completion")
    found["usage"]["prompt_tokens_details"] = details
    found["sglext"] = sglext
    assert parse_completion(found, "url").usage.cached_tokens == cached


def test_an_answer_without_the_plugin():
    found = body("chat")
    del found["choices"][0]["meta_info"]["grkv"]
    assert parse_completion(found, "url").grkv is None


@pytest.mark.parametrize("found", [{}, {"choices": []}, [], None, {"choices": [{"text": "x"}]}, "text"])
def test_another_body_is_an_error_with_the_address(found):
    with pytest.raises(GrkvConnectionError, match=r"http://here.*not an answer"):
        parse_completion(found, "http://here")


@pytest.mark.parametrize("found", [[], {}, [{"pool": {}}], "x"])
def test_another_state_is_an_error(found):
    with pytest.raises(GrkvConnectionError, match="not a state of this version"):
        parse_state(found)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps(body("bad_options")), body("bad_options")["message"]),
        ('{"error": {"message": "too long"}}', "too long"),
        ('{"error": "Unauthorized"}', "Unauthorized"),
        ('{"detail": "Method Not Allowed"}', "Method Not Allowed"),
        ("<html>upstream</html>", "<html>upstream</html>"),
        ("", "(no message)"),
        ("[1]", "[1]"),
        ("x" * 900, "x" * 500),
    ],
)
def test_every_form_of_error(text: str, message: str):
    request = httpx.Request("POST", "http://here/v1/chat/completions")
    error = api_error(httpx.Response(400, text=text, request=request), "rid")
    assert (error.status, error.message, error.request_id) == (400, message, "rid")
    assert str(error) == f"400: {message} (request rid)"


def test_a_missing_route_says_what_is_missing():
    response = httpx.Response(
        404, json={"detail": "Not Found"}, request=httpx.Request("GET", "http://a/grkv/state")
    )
    assert "no route /grkv/state: is it a server with the plugin" in str(api_error(response, None))


def read(reader: StreamReader, parts: list[bytes]) -> list[str]:
    return [piece for part in parts for piece in reader.feed(part)]


READERS: dict[str, type[StreamReader]] = {
    "chat_stream": OpenAIReader,
    "completion_stream": OpenAIReader,
    "generate_stream": GenerateReader,
}
WIDE = "— 鐘 ü"


def reader_of(name: str) -> StreamReader:
    return READERS[name]("rid", "url")


def wide(name: str) -> bytes:
    """A recorded stream with a word of its answer replaced by one of several bytes a character."""
    plain = stream(name)
    # Native events repeat the answer so far.
    assert plain.count(b'" of') == (3 if name == "generate_stream" else 1)
    return plain.replace(b'" of', f'"{WIDE}'.encode())


@pytest.mark.parametrize("name", READERS)
def test_a_stream(name: str):
    reader = reader_of(name)
    pieces = read(reader, [wide(name)])
    result = reader.result()
    assert len(pieces) == result.usage.completion_tokens == 3
    assert result.text == "".join(pieces)
    assert WIDE in result.text
    assert 0 < result.usage.cached_tokens < result.usage.prompt_tokens
    assert result.finish_reason == "length"
    assert (result.grkv is not None) == (name == "generate_stream")


def test_a_native_stream_tells_what_served_the_prompt():
    reader = reader_of("generate_stream")
    assert read(reader, [stream("generate_stream")]) == [" of", " the", " Angels"]
    result = reader.result()
    assert result.grkv is not None
    assert (result.grkv.span_tokens, result.grkv.span_slots) == (400, 40)
    assert (result.usage.prompt_tokens, result.usage.cached_tokens) == (404, 400)
    assert result.request_id == "grkv-2"


def test_a_native_stream_tells_what_there_is_before_its_end():
    reader = reader_of("generate_stream")
    assert reader.so_far() is None
    whole = stream("generate_stream")
    events = whole.split(b"\n\n")
    # The second event is cut: it does not count.
    assert read(reader, [events[0] + b"\n\n" + events[1][:-9]]) == [" of"]
    told = reader.so_far()
    assert told is not None
    assert (told.text, told.finish_reason) == (" of", None)
    assert (told.usage.prompt_tokens, told.usage.completion_tokens, told.usage.cached_tokens) == (404, 1, 400)
    assert told.grkv is not None
    assert told.grkv.span_slots == 40
    with pytest.raises(GrkvConnectionError, match="broke off"):
        reader.result()
    read(reader, [whole[len(events[0]) + 2 + len(events[1]) - 9 :]])
    assert reader.so_far() == reader.result()


def test_an_openai_stream_tells_its_usage_at_the_end():
    reader = reader_of("chat_stream")
    first, rest = stream("chat_stream").split(b"\n\n", 1)
    read(reader, [first + b"\n\n"])
    assert reader.so_far() is None
    read(reader, [rest])
    assert reader.so_far() == reader.result()


def test_a_native_stream_that_says_done_without_a_reason_has_broken_off():
    reader = reader_of("generate_stream")
    first, _ = stream("generate_stream").split(b"\n\n", 1)
    read(reader, [first + b"\n\ndata: [DONE]\n\n"])
    with pytest.raises(GrkvConnectionError, match="broke off"):
        reader.result()


def test_a_native_stream_of_a_server_that_sends_only_what_is_new():
    """SGLang's --incremental-streaming-output."""
    new = stream("generate_stream")
    for old, piece in (
        (b'" of the","output_ids":[282,260]', b'" the","output_ids":[260]'),
        (b'" of the Angels","output_ids":[282,260,40097]', b'" Angels","output_ids":[40097]'),
    ):
        assert old in new
        new = new.replace(old, piece)
    reader, whole = reader_of("generate_stream"), reader_of("generate_stream")
    assert read(reader, [new]) == read(whole, [stream("generate_stream")])
    assert reader.result() == whole.result()


@given(st.data())
def test_a_stream_may_be_cut_anywhere(data: st.DataObject):
    name = data.draw(st.sampled_from(sorted(READERS)))
    ends = data.draw(st.sampled_from([b"\n", b"\r\n"]))
    whole = wide(name).replace(b"\n", ends)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=40)))
    parts = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    reader, uncut = reader_of(name), reader_of(name)
    assert read(reader, parts) == read(uncut, [wide(name)])
    assert reader.result() == uncut.result()
    assert WIDE in reader.result().text


def test_every_single_byte_of_a_stream():
    reader = reader_of("chat_stream")
    whole = wide("chat_stream")
    pieces = read(reader, [whole[i : i + 1] for i in range(len(whole))])
    assert "".join(pieces) == reader.result().text


@given(st.sampled_from(sorted(READERS)), st.data())
def test_a_stream_that_breaks_off_has_no_result(name: str, data: st.DataObject):
    whole = stream(name).rstrip()
    reader = reader_of(name)
    reader.feed(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(GrkvConnectionError, match="broke off"):
        reader.result()


def test_comments_and_named_events_are_passed_over():
    reader = reader_of("chat_stream")
    assert read(reader, [b": ping\n\nevent: note\n", stream("chat_stream")])
    assert reader.result().finish_reason


@pytest.mark.parametrize("name", READERS)
def test_an_error_inside_a_stream(name: str):
    event: dict[str, Any] = {"error": {**body("bad_options"), "code": 503, "message": "out of memory"}}
    reader = reader_of(name)
    with pytest.raises(GrkvApiError, match="503: out of memory") as error:
        reader.feed(f"data: {json.dumps(event)}\n\n".encode())
    assert error.value.request_id == "rid"


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("data", [b"data: {\n", b"data: 5\n", b"data: {}\n", b'data: {"error": "x"}\n'])
def test_another_event_is_an_error(name: str, data: bytes):
    with pytest.raises(GrkvConnectionError, match="not an event"):
        reader_of(name).feed(data)
