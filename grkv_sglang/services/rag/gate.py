"""A bounded number of questions at a time, and a bounded number that wait."""

from __future__ import annotations

import asyncio

from grkv_sglang.services.common.web import ServiceError

RETRY_AFTER_S = 5


class Gate:
    """Lets `places` in; up to `queue` wait for their turn.

    Who was let in must `leave`.
    """

    def __init__(self, places: int, queue: int) -> None:
        self._places = asyncio.Semaphore(places)
        self._queue, self._waiting = queue, 0

    async def enter(self) -> None:
        """Raises ServiceError, 503 with ``Retry-After``, where too many wait already."""
        if self._places.locked() and self._waiting >= self._queue:
            raise ServiceError(
                503,
                "busy",
                "Too many questions are being answered. Try again in a few seconds.",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )
        self._waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._waiting -= 1

    def leave(self) -> None:
        self._places.release()
