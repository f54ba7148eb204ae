"""When a request is sent again, and how long a client waits. Sends and sleeps nothing itself, so that the
synchronous and the asynchronous client share it."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import httpx

from grkv_sglang.client.answers import api_error
from grkv_sglang.client.errors import GrkvConnectionError

RETRIED_STATUSES = frozenset({429, 502, 503, 504})

_NOTHING_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_BROKEN_OFF = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)


@dataclass(frozen=True)
class Timeouts:
    """Seconds.

    Attributes:
        connect_s: to open a connection.
        read_s: without a byte from the server. An answer that is not streamed arrives at once when it is
            done, so this bounds its whole generation.
        total_s: for a request with all of its attempts, waits and, when streamed, its answer; None: no bound.
            Looked at before every attempt and at every piece of a stream; a single read may overrun it by no
            more than what was left when the attempt began.
    """

    connect_s: float = 10.0
    read_s: float = 600.0
    total_s: float | None = None


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential backoff with jitter.

    Attributes:
        attempts: in all, the first one included; 1: no retries.
        base_delay_s: before the second attempt; doubled before each further one.
        max_delay_s: bound on a delay, also on one that the server asks for (``Retry-After``).
        jitter: share of a delay that is random, so that clients that failed together do not return together.
    """

    attempts: int = 4
    base_delay_s: float = 0.5
    max_delay_s: float = 20.0
    jitter: float = 0.5

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts must be at least 1, got {self.attempts}")
        if not 0.0 <= self.jitter <= 1.0:
            raise ValueError(f"jitter must be between 0 and 1, got {self.jitter:g}")

    def delay_s(self, failures: int, draw: float, asked_s: float = 0.0) -> float:
        """Seconds to wait after `failures` failed attempts.

        Args:
            failures: 1 or more.
            draw: a random number in [0, 1).
            asked_s: what the server asked for; the wait is at least that long, within `max_delay_s`.
        """
        # 2.0 ** 1024 is an overflow; max_delay_s is reached long before.
        backoff = min(self.base_delay_s * 2.0 ** min(failures - 1, 64), self.max_delay_s)
        return max(backoff * (1.0 - self.jitter * draw), min(asked_s, self.max_delay_s))


class Attempts:
    """The attempts of one request: told what happened to each, it says how long to wait for the next.

    Args:
        repeatable: False for a request that must not be done twice: it is only sent again where the server
            did not receive it, or said that it did not do it.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        timeouts: Timeouts,
        *,
        repeatable: bool = True,
        draw: random.Random | None = None,
    ) -> None:
        self._policy, self._timeouts = policy, timeouts
        self._repeatable = repeatable
        self._random = draw or random.Random()
        self._failures = 0
        self._started = time.monotonic()

    def timeout(self) -> httpx.Timeout:
        """Time-outs of the next attempt.

        Raises:
            GrkvConnectionError: the total time is up.
        """
        self.check_total()
        left = self._left_s()
        limits = self._timeouts
        return httpx.Timeout(
            min(limits.read_s, left),
            connect=min(limits.connect_s, left),
        )

    def check_total(self) -> None:
        """Raises GrkvConnectionError when the total time is up."""
        if self._left_s() <= 0.0:
            raise GrkvConnectionError(f"no answer within {self._timeouts.total_s:g} s in all")

    def delay_after_error(self, error: httpx.TransportError) -> float:
        """Seconds to wait before the next attempt.

        Raises:
            GrkvConnectionError: there is none.
        """
        self._failures += 1
        again = isinstance(error, _NOTHING_SENT) or (self._repeatable and isinstance(error, _BROKEN_OFF))
        delay_s = self._next_delay_s(0.0) if again else None
        if delay_s is None:
            tried = f" after {self._failures} attempts" if self._failures > 1 else ""
            raise connection_error(error, tried) from error
        return delay_s

    def delay_after_answer(self, response: httpx.Response, request_id: str | None) -> float:
        """Seconds to wait before the next attempt, after an answer that was read and is not of status 200.

        Raises:
            GrkvApiError: there is none.
        """
        self._failures += 1
        again = response.status_code in RETRIED_STATUSES
        delay_s = self._next_delay_s(_retry_after_s(response)) if again else None
        if delay_s is None:
            raise api_error(response, request_id)
        return delay_s

    def _next_delay_s(self, asked_s: float) -> float | None:
        if self._failures >= self._policy.attempts:
            return None
        delay_s = self._policy.delay_s(self._failures, self._random.random(), asked_s)
        return delay_s if delay_s < self._left_s() else None

    def _left_s(self) -> float:
        total_s = self._timeouts.total_s
        return float("inf") if total_s is None else total_s - (time.monotonic() - self._started)


def connection_error(error: httpx.TransportError, tried: str = "") -> GrkvConnectionError:
    """httpx's error in words; some of its time-outs have no message of their own."""
    try:
        where = f"{error.request.method} {error.request.url}: "
    except RuntimeError:  # raised outside a request
        where = ""
    return GrkvConnectionError(f"{where}{type(error).__name__}{tried}: {error}".rstrip(": "))


def _retry_after_s(response: httpx.Response) -> float:
    """``Retry-After`` in seconds; its other form, a date, counts as 0: the backoff alone decides."""
    value = response.headers.get("retry-after", "")
    return float(value) if value.isdecimal() else 0.0
