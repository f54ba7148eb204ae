"""What a client sends: one call per method, built in one place for the synchronous and the asynchronous
client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

from grkv_sglang.policy.options import OPTIONS_KEY
from grkv_sglang.policy.options import RequestOptions as CompressionOptions

CHAT_PATH = "/v1/chat/completions"
COMPLETION_PATH = "/v1/completions"
GENERATE_PATH = "/generate"

DEFAULT_MODEL = "default"
DEFAULT_MAX_TOKENS = 256

_OWN_FIELDS = frozenset(
    {
        *("messages", "prompt", "model", "max_tokens", "temperature", "stop", "cache_salt", "custom_params"),
        *("stream", "stream_options", "return_meta_info", "return_cached_tokens_details", "rid"),
        *("return_token_ids", "n", "best_of"),
    }
)


class Message(TypedDict):
    """One message of a chat; `content` is text."""

    role: str
    content: str


class GenerationFields(TypedDict, total=False):
    """What chats and completions have in common.

    Attributes:
        model: the served model's name, with an adapter behind a colon ("base:adapter").
        max_tokens: most tokens of the answer; 256 unless given.
        temperature: 0, greedy, unless given.
        stop: one or more texts that end the answer.
        options: how the prompt's prefix is compressed and what may serve it; the server's settings unless
            given.
        cache_salt: the namespace: prefixes are shared only among requests with the same one.
        extra: further fields of SGLang's API, such as ``top_p`` or ``tools``, as they are.
    """

    model: str
    max_tokens: int
    temperature: float
    stop: str | Sequence[str] | None
    options: CompressionOptions | None
    cache_salt: str | None
    extra: Mapping[str, Any] | None


@dataclass(frozen=True)
class Call:
    """One HTTP request, before it is known how often it is sent.

    Attributes:
        admin: sent with the key for administrative routes where there is one.
        named: carries a request id, a new one for every attempt (a server refuses one that it still works
            on).
        repeatable: see `retry.Attempts`.
    """

    method: str
    path: str
    body: Mapping[str, Any] | None = None
    admin: bool = False
    named: bool = False
    repeatable: bool = True


def chat_call(
    messages: Sequence[Message | Mapping[str, Any]],
    *,
    stream: bool = False,
    return_token_ids: bool = False,
    **fields: Unpack[GenerationFields],
) -> Call:
    """A call of ``/v1/chat/completions``. Raises ValueError for `extra` fields that are the client's own."""
    body: dict[str, Any] = {"messages": [dict(message) for message in messages]}
    body |= _generation_body(fields, stream=stream, return_token_ids=return_token_ids)
    if not stream:
        body["return_meta_info"] = True  # with streaming SGLang refuses it
    return Call("POST", CHAT_PATH, body, named=True)


def complete_call(
    prompt: str | Sequence[int],
    *,
    stream: bool = False,
    return_token_ids: bool = False,
    **fields: Unpack[GenerationFields],
) -> Call:
    """A call of ``/v1/completions``. Raises ValueError for `extra` fields that are the client's own."""
    body: dict[str, Any] = {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
    body |= _generation_body(fields, stream=stream, return_token_ids=return_token_ids)
    return Call("POST", COMPLETION_PATH, body, named=True)


def generate_call(prompt: str | Sequence[int], **fields: Unpack[GenerationFields]) -> Call:
    """A streamed call of SGLang's native ``/generate``; `extra` holds further sampling parameters.

    Raises:
        ValueError: `extra` fields are the client's own.
    """
    common = _generation_body(fields, stream=False, return_token_ids=False)
    _, _, adapter = common.pop("model").partition(":")
    del common["return_cached_tokens_details"]
    cache_salt = common.pop("cache_salt", None)
    common["max_new_tokens"] = common.pop("max_tokens")
    body: dict[str, Any] = {"sampling_params": common, "stream": True}
    body |= {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
    body |= {"cache_salt": cache_salt} if cache_salt is not None else {}
    body |= {"lora_path": adapter} if adapter else {}
    return Call("POST", GENERATE_PATH, body, named=True)


def tokenize_call(content: str | Sequence[Message | Mapping[str, Any]]) -> Call:
    """Token ids of a text, or of messages as a chat completion would render them."""
    if isinstance(content, str):
        return Call("POST", "/v1/tokenize", {"prompt": content})
    return Call("POST", "/v1/tokenize", {"messages": [dict(message) for message in content]})


def health_call() -> Call:
    return Call("GET", "/health")


def state_call() -> Call:
    return Call("GET", "/grkv/state", admin=True)


def command_call(
    action: str, tokens_sha256: str | None, cache_salt: str | None, extra_key: str | None
) -> Call:
    names = {"tokens_sha256": tokens_sha256, "cache_salt": cache_salt, "extra_key": extra_key}
    body = {"action": action, **{name: value for name, value in names.items() if value is not None}}
    return Call("POST", "/grkv/command", body, admin=True, repeatable=False)


def _generation_body(fields: GenerationFields, *, stream: bool, return_token_ids: bool) -> dict[str, Any]:
    extra = fields.get("extra") or {}
    clashes = sorted(_OWN_FIELDS & set(extra))
    if clashes:
        raise ValueError(f"extra must not hold {', '.join(clashes)}: the client sets these itself")
    body: dict[str, Any] = {
        **extra,
        "model": fields.get("model", DEFAULT_MODEL),
        "max_tokens": fields.get("max_tokens", DEFAULT_MAX_TOKENS),
        "temperature": fields.get("temperature", 0.0),
        # The one way to hear of cached tokens without --enable-cache-report on every route.
        "return_cached_tokens_details": True,
    }
    stop, options, cache_salt = fields.get("stop"), fields.get("options"), fields.get("cache_salt")
    if stop is not None:
        body["stop"] = stop if isinstance(stop, str) else list(stop)
    given = {} if options is None else options.model_dump(exclude_none=True)
    if given:
        body["custom_params"] = {OPTIONS_KEY: given}
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    if return_token_ids:
        body["return_token_ids"] = True
    if stream:
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
    return body
