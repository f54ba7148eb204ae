"""Server-sent events of an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from grkv_sglang.services.common.events import HEADERS, MEDIA_TYPE, PING, event

PING_AFTER_S = 10.0


class EventResponse(StreamingResponse):
    """A stream of events; `close` is called when it has ended, however it ended."""

    def __init__(
        self, events: AsyncIterator[tuple[str, dict[str, object]]], close: Callable[[], Awaitable[None]]
    ) -> None:
        self._encoded = _encoded(events)
        self._close = close
        super().__init__(self._encoded, media_type=MEDIA_TYPE, headers=HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await asyncio.shield(self._end())

    async def _end(self) -> None:
        await self._encoded.aclose()
        await self._close()


async def _encoded(events: AsyncIterator[tuple[str, dict[str, object]]]) -> AsyncGenerator[bytes]:
    """The events as bytes, with a comment whenever there was none for a while: it shows proxies that the
    stream is alive, and us that nobody listens any more."""
    waiting = asyncio.ensure_future(anext(events, None))
    try:
        while True:
            done, _ = await asyncio.wait({waiting}, timeout=PING_AFTER_S)
            if not done:
                yield PING
                continue
            item = waiting.result()
            if item is None:
                return
            yield event(*item)
            waiting = asyncio.ensure_future(anext(events, None))
    finally:
        waiting.cancel()
