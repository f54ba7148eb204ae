"""What the clients send."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from grkv_sglang.client import CompressionOptions
from grkv_sglang.client.calls import chat_call, command_call, complete_call, generate_call, tokenize_call
from grkv_sglang.policy.options import parse_options

MESSAGES = [{"role": "user", "content": "Who?"}]


def body_of(call: Any) -> dict[str, Any]:
    assert call.body is not None
    return dict(call.body)


def test_a_plain_chat():
    call = chat_call(MESSAGES)
    assert (call.method, call.path, call.named, call.admin) == ("POST", "/v1/chat/completions", True, False)
    assert body_of(call) == {
        "messages": MESSAGES,
        "model": "default",
        "max_tokens": 256,
        "temperature": 0.0,
        "return_cached_tokens_details": True,
        "return_meta_info": True,
    }


def test_a_chat_with_everything():
    call = chat_call(
        MESSAGES,
        return_token_ids=True,
        model="base:adapter",
        max_tokens=7,
        temperature=0.5,
        stop=("a", "b"),
        options=CompressionOptions(prefix_end="document", budget=0.2, pin=True),
        cache_salt="tenant",
        extra={"top_p": 0.9},
    )
    assert body_of(call) == {
        "messages": MESSAGES,
        "model": "base:adapter",
        "max_tokens": 7,
        "temperature": 0.5,
        "stop": ["a", "b"],
        "custom_params": {"grkv": {"prefix_end": "document", "budget": 0.2, "pin": True}},
        "cache_salt": "tenant",
        "top_p": 0.9,
        "return_cached_tokens_details": True,
        "return_meta_info": True,
        "return_token_ids": True,
    }


@pytest.mark.parametrize("call", [chat_call(MESSAGES, stream=True), complete_call("x", stream=True)])
def test_a_stream_asks_for_usage_and_for_no_meta_info(call):
    body = body_of(call)
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})
    assert "return_meta_info" not in body  # SGLang refuses it with streaming


@pytest.mark.parametrize(("prompt", "sent"), [("a text", "a text"), ((1, 2), [1, 2])])
def test_a_completion(prompt, sent):
    call = complete_call(prompt)
    assert call.path == "/v1/completions"
    assert body_of(call)["prompt"] == sent
    assert "return_meta_info" not in body_of(call)


def test_a_native_call():
    call = generate_call(
        (1, 2), model="base:adapter", max_tokens=7, temperature=0.5, stop=("a",), cache_salt="tenant",
        options=CompressionOptions(prefix_end_tokens=2), extra={"top_p": 0.9},
    )  # fmt: skip
    assert call.path == "/generate"
    assert body_of(call) == {
        "input_ids": [1, 2],
        "stream": True,
        "lora_path": "adapter",
        "cache_salt": "tenant",
        "sampling_params": {
            "max_new_tokens": 7,
            "temperature": 0.5,
            "stop": ["a"],
            "top_p": 0.9,
            "custom_params": {"grkv": {"prefix_end_tokens": 2}},
        },
    }
    assert body_of(generate_call("a text"))["text"] == "a text"


@pytest.mark.parametrize("options", [None, CompressionOptions()])
def test_no_options_are_not_sent(options):
    assert "custom_params" not in body_of(chat_call(MESSAGES, options=options))


@pytest.mark.parametrize("name", ["stream", "custom_params", "n", "rid", "max_tokens"])
def test_extra_fields_must_not_be_the_clients_own(name):
    with pytest.raises(ValueError, match=f"extra must not hold {name}"):
        chat_call(MESSAGES, extra={name: 1})


def test_options_arrive_as_they_were_given():
    options = CompressionOptions(
        prefix_end_tokens=900, budget_tokens=90, profile="best", protected="0-20,80-90", ttl_s=60.0,
        min_quality=0.5, mode="prefer_exact",
    )  # fmt: skip
    assert parse_options(body_of(complete_call("x", options=options))["custom_params"]) == options


@pytest.mark.parametrize(
    "wrong",
    [
        {"budget": 0.0},
        {"budget": 0.1, "budget_tokens": 5},
        {"pin": True},
        {"prefix_end": "end"},
        {"budgets": 0.1},
    ],
)
def test_wrong_options_are_refused_before_they_are_sent(wrong):
    with pytest.raises(ValidationError):
        CompressionOptions(**wrong)


def test_tokenize():
    assert body_of(tokenize_call("text")) == {"prompt": "text"}
    assert body_of(tokenize_call(MESSAGES)) == {"messages": MESSAGES}


def test_commands_are_for_operators_and_not_repeated():
    call = command_call("delete", None, "salt", None)
    assert (call.path, call.admin, call.repeatable) == ("/grkv/command", True, False)
    assert body_of(call) == {"action": "delete", "cache_salt": "salt"}
