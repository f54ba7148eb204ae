"""What a client receives: bodies, errors and streams of SGLang 0.5.23 turned into models. No input or output
of its own, so that the synchronous and the asynchronous client share it.

Written against SGLang 0.5.23: ``entrypoints/openai/protocol.py``, ``serving_chat.py``,
``serving_completions.py``.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
from pydantic import ValidationError

from grkv_sglang.client.errors import GrkvApiError, GrkvConnectionError
from grkv_sglang.client.models import Completion, Served, Usage
from grkv_sglang.client.state import GrkvState
from grkv_sglang.policy.options import OPTIONS_KEY

_MESSAGE_CHARACTERS = 500
_DATA = b"data:"
_DONE = b"[DONE]"


def api_error(response: httpx.Response, request_id: str | None) -> GrkvApiError:
    """The error of an answer that was read and has another status than 200."""
    message = _message_in(response.text)
    if response.status_code == httpx.codes.NOT_FOUND and message == "Not Found":
        path = response.request.url.path
        message = f"no route {path}: is it a server with the plugin (--radix-cache-backend grkv)?"
    return GrkvApiError(response.status_code, message, request_id)


def _message_in(text: str) -> str:
    """The server's words out of any of SGLang's forms: ``{"message"}``, ``{"error": {"message"}}``,
    ``{"error"}``, ``{"detail"}``, or plain text."""
    try:
        found = json.loads(text)
    except ValueError:
        return text[:_MESSAGE_CHARACTERS] or "(no message)"
    for name in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(name):
            found = found[name]
    return found if isinstance(found, str) else text[:_MESSAGE_CHARACTERS]


def json_of(response: httpx.Response) -> Any:
    """Raises GrkvConnectionError when the body is not JSON: something else than SGLang answers there."""
    try:
        return response.json()
    except ValueError as error:
        raise GrkvConnectionError(
            f"{response.request.url}: the answer is not JSON: {response.text[:_MESSAGE_CHARACTERS]}"
        ) from error


def parse_completion(body: Any, url: str) -> Completion:
    """A body of ``/v1/chat/completions`` or ``/v1/completions`` that was not streamed.

    Raises:
        GrkvConnectionError: it has another shape.
    """
    try:
        choice = body["choices"][0]
        message = choice.get("message") or {}
        meta = choice.get("meta_info") or {}
        served = meta.get(OPTIONS_KEY)
        text = choice.get("text")
        return Completion(
            text=text if text is not None else message.get("content") or "",
            finish_reason=choice.get("finish_reason"),
            usage=_usage(body["usage"], body.get("sglext"), meta.get("cached_tokens")),
            grkv=Served.model_validate(served[0]) if served else None,
            request_id=body["id"],
            model=body["model"],
            reasoning=message.get("reasoning_content"),
            tool_calls=message.get("tool_calls"),
            prompt_token_ids=choice.get("prompt_token_ids"),
            token_ids=choice.get("token_ids") or choice.get("response_token_ids"),
        )
    except (KeyError, IndexError, TypeError, AttributeError, ValidationError) as error:
        raise GrkvConnectionError(f"{url}: not an answer of SGLang's OpenAI API: {error!r}") from error


def parse_state(body: Any) -> GrkvState:
    """A body of ``/grkv/state`` or ``/grkv/command``.

    Raises:
        GrkvConnectionError: it has another shape, as that of another version of the plugin.
    """
    try:
        return GrkvState.model_validate(body[0])
    except (KeyError, IndexError, TypeError, ValidationError) as error:
        raise GrkvConnectionError(f"not a state of this version of grkv_sglang: {error}") from error


def _usage(usage: dict[str, Any], sglext: dict[str, Any] | None, meta_cached: int | None = None) -> Usage:
    details = usage.get("prompt_tokens_details") or {}
    sources = (sglext or {}).get("cached_tokens_details") or {}
    # SGLang leaves the details out where nothing was cached.
    by_source = sum(sources.get(name) or 0 for name in ("device", "host", "storage"))
    cached = meta_cached if meta_cached is not None else details.get("cached_tokens", by_source)
    return Usage(
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        total_tokens=usage["total_tokens"],
        cached_tokens=cached,
    )


class StreamReader:
    """Server-sent events of one answer: fed with bytes, cut anywhere, it gives the pieces of text."""

    def __init__(self, request_id: str | None, url: str) -> None:
        self._request_id, self._url = request_id, url
        self._pending = b""
        self._characters = 0
        self._done = False

    def feed(self, data: bytes) -> list[str]:
        """The pieces of text that `data` completes.

        Raises:
            GrkvApiError: the server put an error into the stream.
            GrkvConnectionError: an event is not SGLang's.
        """
        *lines, self._pending = (self._pending + data).split(b"\n")
        pieces = []
        for line in lines:
            # Events may have names (``event:``) and comments; the data says all we need.
            if line.startswith(_DATA):
                pieces.append(self._event(line.removeprefix(_DATA).strip()))
        self._characters += sum(map(len, pieces))
        return [piece for piece in pieces if piece]

    def result(self) -> Completion:
        """The whole answer, once the stream has ended.

        Raises:
            GrkvConnectionError: it broke off before its end.
        """
        completion = self.so_far() if self._ended() else None
        if completion is None:
            raise GrkvConnectionError(
                f"{self._url}: the stream broke off after {self._characters} characters"
            )
        return completion

    def _event(self, data: bytes) -> str:
        if data == _DONE:
            self._done = True
            return ""
        try:
            chunk = json.loads(data)
            if "error" in chunk:
                error = chunk["error"]
                raise GrkvApiError(int(error.get("code") or 500), error["message"], self._request_id)
            return self._chunk(chunk)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise GrkvConnectionError(f"{self._url}: not an event of SGLang's: {error!r}") from error

    def _chunk(self, chunk: dict[str, Any]) -> str:
        """The piece of text that one event adds."""
        raise NotImplementedError

    def so_far(self) -> Completion | None:
        """What the events have told of the answer; None where they have not told its usage."""
        raise NotImplementedError

    def _ended(self) -> bool:
        """Whether the answer came to its end."""
        return self._done


class OpenAIReader(StreamReader):
    """Streams of ``/v1/chat/completions`` and ``/v1/completions``."""

    def __init__(self, request_id: str | None, url: str) -> None:
        super().__init__(request_id, url)
        self._parts: list[str] = []
        self._reasoning: list[str] = []
        self._finish_reason: str | None = None
        self._id, self._model = "", ""
        self._usage: dict[str, Any] | None = None
        self._sglext: dict[str, Any] | None = None

    def _chunk(self, chunk: dict[str, Any]) -> str:
        self._id, self._model = chunk["id"], chunk["model"]
        self._usage = chunk.get("usage") or self._usage
        self._sglext = chunk.get("sglext") or self._sglext
        if not chunk["choices"]:
            return ""
        choice = chunk["choices"][0]
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        delta = choice.get("delta") or {}
        self._reasoning.append(delta.get("reasoning_content") or "")
        piece: str = choice.get("text") or delta.get("content") or ""
        self._parts.append(piece)
        return piece

    def so_far(self) -> Completion | None:
        if self._usage is None:
            return None
        return Completion(
            text="".join(self._parts),
            finish_reason=self._finish_reason,
            usage=_usage(self._usage, self._sglext),
            request_id=self._id,
            model=self._model,
            reasoning="".join(self._reasoning) or None,
        )


class GenerateReader(StreamReader):
    """Streams of SGLang's native ``/generate``, whose every event has the usage so far and what served the
    prompt."""

    def __init__(self, request_id: str | None, url: str) -> None:
        super().__init__(request_id, url)
        self._text = ""
        self._meta: dict[str, Any] = {}
        self._served: Served | None = None

    def _chunk(self, chunk: dict[str, Any]) -> str:
        meta, text = chunk["meta_info"], chunk["text"]
        # Each event carries the whole answer so far, or with --incremental-streaming-output what is new; its
        # token ids tell which.
        if len(chunk["output_ids"]) < meta["completion_tokens"]:
            text = self._text + text
        piece: str = text[len(self._text) :]
        self._text, self._meta = text, meta
        if meta.get(OPTIONS_KEY):
            self._served = Served.model_validate(meta[OPTIONS_KEY][0])
        return piece

    def _ended(self) -> bool:
        return self._done and self._meta.get("finish_reason") is not None

    def so_far(self) -> Completion | None:
        if not self._meta:
            return None
        reason = self._meta["finish_reason"]
        prompt_tokens, new_tokens = self._meta["prompt_tokens"], self._meta["completion_tokens"]
        return Completion(
            text=self._text,
            finish_reason=None if reason is None else reason["type"],
            usage=Usage(
                prompt_tokens=prompt_tokens,
                completion_tokens=new_tokens,
                total_tokens=prompt_tokens + new_tokens,
                cached_tokens=self._meta["cached_tokens"],
            ),
            grkv=self._served,
            request_id=self._meta["id"],
            model="",
        )
