"""The asynchronous client: `GrkvClient` with await. What it says and understands is in `calls`, `answers`
and `retry`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, Unpack

import httpx

from grkv_sglang.client import answers, calls
from grkv_sglang.client.calls import Call, GenerationFields, Message
from grkv_sglang.client.connection import Connection
from grkv_sglang.client.models import Completion
from grkv_sglang.client.retry import Attempts, RetryPolicy, Timeouts, connection_error
from grkv_sglang.client.state import GrkvState


class AsyncGrkvClient:
    """`GrkvClient` for asyncio: the same arguments, methods, answers and errors."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        timeouts: Timeouts | None = None,
        retry: RetryPolicy | None = None,
        headers: Mapping[str, str] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._connection = Connection(
            base_url, api_key, admin_api_key, timeouts or Timeouts(), retry or RetryPolicy(), headers or {}
        )
        self._http = httpx.AsyncClient(transport=transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        return_token_ids: bool = False,
        **fields: Unpack[GenerationFields],
    ) -> Completion:
        """As `GrkvClient.chat`."""
        return await self._complete(calls.chat_call(messages, return_token_ids=return_token_ids, **fields))

    async def complete(
        self,
        prompt: str | Sequence[int],
        *,
        return_token_ids: bool = False,
        **fields: Unpack[GenerationFields],
    ) -> Completion:
        """As `GrkvClient.complete`."""
        return await self._complete(calls.complete_call(prompt, return_token_ids=return_token_ids, **fields))

    async def stream_chat(
        self, messages: Sequence[Message | Mapping[str, Any]], **fields: Unpack[GenerationFields]
    ) -> AsyncTextStream:
        """As `GrkvClient.stream_chat`; the stream is there once its status is."""
        return await self._stream(calls.chat_call(messages, stream=True, **fields))

    async def stream_complete(
        self, prompt: str | Sequence[int], **fields: Unpack[GenerationFields]
    ) -> AsyncTextStream:
        """As `GrkvClient.stream_complete`; the stream is there once its status is."""
        return await self._stream(calls.complete_call(prompt, stream=True, **fields))

    async def stream_generate(
        self, prompt: str | Sequence[int], **fields: Unpack[GenerationFields]
    ) -> AsyncTextStream:
        """As `GrkvClient.stream_generate`; the stream is there once its status is."""
        return await self._stream(calls.generate_call(prompt, **fields), answers.GenerateReader)

    async def tokenize(self, content: str | Sequence[Message | Mapping[str, Any]]) -> list[int]:
        """As `GrkvClient.tokenize`."""
        ids: list[int] = answers.json_of(await self._send(calls.tokenize_call(content)))["tokens"]
        return ids

    async def state(self) -> GrkvState:
        """As `GrkvClient.state`."""
        return answers.parse_state(answers.json_of(await self._send(calls.state_call())))

    async def command(
        self,
        action: Literal["delete", "pin", "unpin"],
        *,
        tokens_sha256: str | None = None,
        cache_salt: str | None = None,
        extra_key: str | None = None,
    ) -> GrkvState:
        """As `GrkvClient.command`."""
        call = calls.command_call(action, tokens_sha256, cache_salt, extra_key)
        return answers.parse_state(answers.json_of(await self._send(call)))

    async def health(self) -> bool:
        """As `GrkvClient.health`."""
        call = calls.health_call()
        request, _ = self._connection.request(call, self._connection.attempts(call).timeout())
        try:
            return (await self._http.send(request)).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    async def get(self, path: str) -> Any:
        """As `GrkvClient.get`."""
        return answers.json_of(await self._send(Call("GET", path)))

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """As `GrkvClient.post`."""
        return answers.json_of(await self._send(Call("POST", path, body)))

    async def _complete(self, call: Call) -> Completion:
        response = await self._send(call)
        return answers.parse_completion(answers.json_of(response), str(response.request.url))

    async def _send(self, call: Call) -> httpx.Response:
        response, _ = await self._open(call, self._connection.attempts(call), stream=False)
        return response

    async def _stream(
        self, call: Call, reader: type[answers.StreamReader] = answers.OpenAIReader
    ) -> AsyncTextStream:
        attempts = self._connection.attempts(call)
        response, request_id = await self._open(call, attempts, stream=True)
        return AsyncTextStream(response, attempts, reader(request_id, str(response.request.url)))

    async def _open(
        self, call: Call, attempts: Attempts, *, stream: bool
    ) -> tuple[httpx.Response, str | None]:
        """The first answer of status 200, and the id of its request."""
        while True:
            request, request_id = self._connection.request(call, attempts.timeout())
            try:
                response = await self._http.send(request, stream=stream)
                if response.status_code == httpx.codes.OK:
                    return response, request_id
                await response.aread()
            except httpx.TransportError as error:
                delay_s = attempts.delay_after_error(error)
            else:
                delay_s = attempts.delay_after_answer(response, request_id)
            await asyncio.sleep(delay_s)


class AsyncTextStream:
    """`TextStream` for asyncio: iterate with ``async for``."""

    def __init__(self, response: httpx.Response, attempts: Attempts, reader: answers.StreamReader) -> None:
        self._response, self._attempts, self._reader = response, attempts, reader
        self._result: Completion | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def __aiter__(self) -> AsyncIterator[str]:
        try:
            async for data in self._response.aiter_bytes():
                for piece in self._reader.feed(data):
                    yield piece
                self._attempts.check_total()
        except httpx.TransportError as error:
            raise connection_error(error) from error
        finally:
            await self.close()
        self._result = self._reader.result()

    async def close(self) -> None:
        """As `TextStream.close`."""
        await self._response.aclose()

    @property
    def so_far(self) -> Completion | None:
        """As `TextStream.so_far`."""
        return self._reader.so_far()

    @property
    def result(self) -> Completion:
        """As `TextStream.result`."""
        if self._result is None:
            raise RuntimeError("the result is there once the stream was read to its end")
        return self._result
