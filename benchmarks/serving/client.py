"""Requests to a server, streamed, with the time of every token."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx

from benchmarks.serving.workload import Request

TIMEOUT_S = 900.0


class ServingError(RuntimeError):
    """A server refused a request, or broke off its answer."""


@dataclass(frozen=True)
class Answer:
    """One answered request. Seconds from sending; `gaps_s` between each token and the one before.

    Attributes:
        gaps_s: where tokens came in one event, its gap is shared out among them.
        span_tokens, span_slots: of the prompt, what compressed prefixes served; 0 without the plugin.
    """

    ttft_s: float
    total_s: float
    gaps_s: tuple[float, ...]
    output_ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    span_tokens: int
    span_slots: int


def generate_body(
    prompt: Sequence[int], new_tokens: int, options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A greedy, streamed ``/generate`` request of exactly `new_tokens` tokens."""
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    if options is not None:
        sampling["custom_params"] = {"grkv": options}
    return {"input_ids": list(prompt), "sampling_params": sampling, "stream": True}


async def stream_events(
    http: httpx.AsyncClient, body: dict[str, Any]
) -> AsyncIterator[tuple[float, dict[str, Any]]]:
    """Every event of an answer, with the moment it came (`time.perf_counter`).

    Raises:
        ServingError: the server answered with an error.
    """
    async with http.stream("POST", "/generate", json=body) as response:
        if response.status_code != httpx.codes.OK:
            text = (await response.aread()).decode(errors="replace")
            raise ServingError(f"/generate: {response.status_code} {text}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                now = time.perf_counter()
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise ServingError(f"/generate: {event['error']}")
                yield now, event


async def ask(
    http: httpx.AsyncClient, prompt: Sequence[int], new_tokens: int, options: dict[str, Any] | None = None
) -> Answer:
    """One request.

    Raises: ServingError: the server answered with an error, with another number of tokens than asked for, or
    not at all.
    """
    started = time.perf_counter()
    arrivals: list[tuple[float, int]] = []
    last: dict[str, Any] = {}
    try:
        async for now, event in stream_events(http, generate_body(prompt, new_tokens, options)):
            count = event["meta_info"]["completion_tokens"]
            if count > (arrivals[-1][1] if arrivals else 0):
                arrivals.append((now - started, count))
            last = event
    except httpx.TransportError as error:
        raise ServingError(f"{http.base_url}: no answer, the server may have ended: {error!r}") from error
    return answer_of(arrivals, last, new_tokens)


def answer_of(arrivals: Sequence[tuple[float, int]], last: dict[str, Any], new_tokens: int) -> Answer:
    """Put together from ``(seconds, tokens so far)`` of each event, and the last event.

    Raises:
        ServingError: fewer or more tokens than asked for.
    """
    if not arrivals or arrivals[-1][1] != new_tokens:
        raise ServingError(
            f"/generate: expected {new_tokens} tokens, got {arrivals[-1][1] if arrivals else 0}"
        )
    meta = last["meta_info"]
    served = meta.get("grkv")
    return Answer(
        ttft_s=arrivals[0][0],
        total_s=arrivals[-1][0],
        gaps_s=token_gaps(arrivals),
        output_ids=tuple(last["output_ids"]),
        prompt_tokens=meta["prompt_tokens"],
        cached_tokens=meta["cached_tokens"],
        span_tokens=served[0]["span_tokens"] if served else 0,
        span_slots=served[0]["span_slots"] if served else 0,
    )


def token_gaps(arrivals: Sequence[tuple[float, int]]) -> tuple[float, ...]:
    """Seconds before each token but those of the first event, from ``(seconds, tokens so far)``."""
    gaps: list[float] = []
    for (before_s, before), (after_s, after) in pairwise(arrivals):
        gaps += [(after_s - before_s) / (after - before)] * (after - before)
    return tuple(gaps)


Send = Callable[[Request], Awaitable[Answer]]


async def closed_loop(requests: Sequence[Request], clients: int, send: Send) -> list[Answer]:
    """`clients` clients take one request after the other, in order; each waits for its answer.

    Returns:
        Answers in the order of the requests.
    """
    answers: dict[int, Answer] = {}
    numbers = iter(range(len(requests)))

    async def client() -> None:
        for number in numbers:
            answers[number] = await send(requests[number])

    await _all(client() for _ in range(min(clients, len(requests))))
    return [answers[number] for number in range(len(requests))]


async def open_loop(requests: Sequence[Request], send: Send) -> list[Answer]:
    """Requests come when their time has come, counted from the first one, answered or not the one before."""
    started, first_s = time.perf_counter(), requests[0].arrival_s
    answers: dict[int, Answer] = {}

    async def come(number: int) -> None:
        due_s = requests[number].arrival_s - first_s
        await asyncio.sleep(max(0.0, started + due_s - time.perf_counter()))
        answers[number] = await send(requests[number])

    await _all(come(number) for number in range(len(requests)))
    return [answers[number] for number in range(len(requests))]


async def _all(work: Any) -> None:
    """Wait for all; the first failure ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            for one in work:
                group.create_task(one)
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
