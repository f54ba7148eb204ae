"""The synchronous client. What it says and understands is in `calls`, `answers` and `retry`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, Unpack

import httpx

from grkv_sglang.client import answers, calls
from grkv_sglang.client.calls import Call, GenerationFields, Message
from grkv_sglang.client.connection import Connection
from grkv_sglang.client.models import Completion
from grkv_sglang.client.retry import Attempts, RetryPolicy, Timeouts, connection_error
from grkv_sglang.client.state import GrkvState


class GrkvClient:
    """A client of one SGLang server with the plugin; thread-safe, a context manager that closes its
    connections.

    Every method raises `GrkvApiError` for an answer other than 200 and `GrkvConnectionError` where there
    was no answer. Broken connections and the statuses 429, 502, 503 and 504 are tried again.

    Args:
        base_url: such as ``http://127.0.0.1:30000``, without ``/v1``.
        api_key, admin_api_key: see `Connection`.
        timeouts: seconds; see `Timeouts`.
        retry: how often and how fast to try again.
        headers: sent with every request.
        transport: httpx's, for proxies and tests.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        timeouts: Timeouts | None = None,
        retry: RetryPolicy | None = None,
        headers: Mapping[str, str] | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._connection = Connection(
            base_url, api_key, admin_api_key, timeouts or Timeouts(), retry or RetryPolicy(), headers or {}
        )
        self._http = httpx.Client(transport=transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        return_token_ids: bool = False,
        **fields: Unpack[GenerationFields],
    ) -> Completion:
        """One answer of a chat, with what served its prompt (`Completion.grkv`)."""
        return self._complete(calls.chat_call(messages, return_token_ids=return_token_ids, **fields))

    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        return_token_ids: bool = False,
        **fields: Unpack[GenerationFields],
    ) -> Completion:
        """One continuation of a text or of token ids. SGLang does not tell here what served the prompt."""
        return self._complete(calls.complete_call(prompt, return_token_ids=return_token_ids, **fields))

    def stream_chat(
        self, messages: Sequence[Message | Mapping[str, Any]], **fields: Unpack[GenerationFields]
    ) -> TextStream:
        """A chat's answer piece by piece. Tried again only until its first byte."""
        return self._stream(calls.chat_call(messages, stream=True, **fields))

    def stream_complete(self, prompt: str | Sequence[int], **fields: Unpack[GenerationFields]) -> TextStream:
        """A continuation piece by piece. Tried again only until its first byte."""
        return self._stream(calls.complete_call(prompt, stream=True, **fields))

    def stream_generate(self, prompt: str | Sequence[int], **fields: Unpack[GenerationFields]) -> TextStream:
        """A continuation piece by piece over SGLang's native route, which tells what served the prompt
        (`Completion.grkv`) in streams too. For a chat: ``client.stream_generate(client.tokenize(messages))``.

        Refused options are an error when the stream is read. Tried again only until its first byte.
        """
        return self._stream(calls.generate_call(prompt, **fields), answers.GenerateReader)

    def tokenize(self, content: str | Sequence[Message | Mapping[str, Any]]) -> list[int]:
        """Token ids of a text, or of messages as `chat` would render them."""
        ids: list[int] = answers.json_of(self._send(calls.tokenize_call(content)))["tokens"]
        return ids

    def state(self) -> GrkvState:
        """Pool, spans and counters of the plugin."""
        return answers.parse_state(answers.json_of(self._send(calls.state_call())))

    def command(
        self,
        action: Literal["delete", "pin", "unpin"],
        *,
        tokens_sha256: str | None = None,
        cache_salt: str | None = None,
        extra_key: str | None = None,
    ) -> GrkvState:
        """Pin, unpin or delete a span by its `tokens_sha256`, or delete a namespace; returns the state then.

        Never sent twice where the server may have received it.
        """
        call = calls.command_call(action, tokens_sha256, cache_salt, extra_key)
        return answers.parse_state(answers.json_of(self._send(call)))

    def health(self) -> bool:
        """Whether the server answers its health check with 200; asked once."""
        call = calls.health_call()
        request, _ = self._connection.request(call, self._connection.attempts(call).timeout())
        try:
            return self._http.send(request).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def get(self, path: str) -> Any:
        """The JSON of any other route."""
        return answers.json_of(self._send(Call("GET", path)))

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON of any other route."""
        return answers.json_of(self._send(Call("POST", path, body)))

    def _complete(self, call: Call) -> Completion:
        response = self._send(call)
        return answers.parse_completion(answers.json_of(response), str(response.request.url))

    def _send(self, call: Call) -> httpx.Response:
        response, _ = self._open(call, self._connection.attempts(call), stream=False)
        return response

    def _stream(self, call: Call, reader: type[answers.StreamReader] = answers.OpenAIReader) -> TextStream:
        attempts = self._connection.attempts(call)
        response, request_id = self._open(call, attempts, stream=True)
        return TextStream(response, attempts, reader(request_id, str(response.request.url)))

    def _open(self, call: Call, attempts: Attempts, *, stream: bool) -> tuple[httpx.Response, str | None]:
        """The first answer of status 200, and the id of its request."""
        while True:
            request, request_id = self._connection.request(call, attempts.timeout())
            try:
                response = self._http.send(request, stream=stream)
                if response.status_code == httpx.codes.OK:
                    return response, request_id
                response.read()
            except httpx.TransportError as error:
                delay_s = attempts.delay_after_error(error)
            else:
                delay_s = attempts.delay_after_answer(response, request_id)
            time.sleep(delay_s)


class TextStream:
    """Pieces of an answer as they come; iterate once. A context manager that closes its connection, which
    ends the request on the server."""

    def __init__(self, response: httpx.Response, attempts: Attempts, reader: answers.StreamReader) -> None:
        self._response, self._attempts, self._reader = response, attempts, reader
        self._result: Completion | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[str]:
        try:
            for data in self._response.iter_bytes():
                yield from self._reader.feed(data)
                self._attempts.check_total()
        except httpx.TransportError as error:
            raise connection_error(error) from error
        finally:
            self.close()
        self._result = self._reader.result()

    def close(self) -> None:
        """Leave the rest of the answer; the server stops generating it."""
        self._response.close()

    @property
    def so_far(self) -> Completion | None:
        """The answer as far as the server has told of it, for one that is not read to its end: text, usage
        and what served the prompt. None before the first event, and in streams of the OpenAI API until their
        end, where they tell their usage."""
        return self._reader.so_far()

    @property
    def result(self) -> Completion:
        """The whole answer with its usage.

        Raises:
            RuntimeError: the stream was not read to its end.
        """
        if self._result is None:
            raise RuntimeError("the result is there once the stream was read to its end")
        return self._result
