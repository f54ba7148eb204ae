"""A small client of SGLang's native HTTP interface, with the times that the demo reports."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

from grkv_sglang.client.state import GrkvState, SpanState, spans_of

REQUEST_TIMEOUT_S = 900.0
FLUSH_TIMEOUT_S = 60.0
COMPRESSION_TIMEOUT_S = 300.0
POLL_S = 0.25


class ClientError(RuntimeError):
    """The server refused a request, or did not do what the demo waits for."""


@dataclass(frozen=True)
class Generation:
    """One answer. Times in seconds from sending the request."""

    text: str
    output_ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    total_s: float
    grkv: dict[str, Any] | None
    """What the plugin says of the prefix that served this request; None without the plugin."""


class SglangClient:
    """Greedy requests to one server; a context manager that closes its connections."""

    def __init__(self, base_url: str, transport: httpx.BaseTransport | None = None) -> None:
        # The server closes a connection that was idle for five seconds, maybe just as it is used again.
        limits = httpx.Limits(keepalive_expiry=2)
        self._http = httpx.Client(
            base_url=base_url, timeout=REQUEST_TIMEOUT_S, transport=transport, limits=limits
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def stream(
        self,
        input_ids: Sequence[int],
        max_new_tokens: int,
        *,
        options: dict[str, Any] | None = None,
        on_text: Callable[[str], None] = lambda new_text: None,
    ) -> Generation:
        """One request, streamed; `on_text` gets every new piece of the answer as it comes.

        Raises:
            ClientError: the server answered with an error.
        """
        body = {
            "input_ids": list(input_ids),
            "sampling_params": _sampling(max_new_tokens, options, ignore_eos=False),
            "stream": True,
        }
        started = time.perf_counter()
        ttft_s: float | None = None
        last: dict[str, Any] | None = None
        shown = 0
        with self._http.stream("POST", "/generate", json=body) as response:
            if response.status_code != httpx.codes.OK:
                raise ClientError(f"/generate: {response.status_code} {response.read().decode()}")
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                last = json.loads(line.removeprefix("data: "))
                if "error" in last:
                    raise ClientError(f"/generate: {last['error']}")
                if ttft_s is None and last["meta_info"]["completion_tokens"] > 0:
                    ttft_s = time.perf_counter() - started
                # Every event carries the whole text so far.
                on_text(last["text"][shown:])
                shown = len(last["text"])
        if last is None or ttft_s is None:
            raise ClientError("/generate: the stream ended without a token")
        return _generation(last, ttft_s, time.perf_counter() - started)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        options: dict[str, Any] | None = None,
        ignore_eos: bool = True,
    ) -> list[Generation]:
        """Several prompts sent as one concurrent batch, not streamed: `ttft_s` is the time to all answers.

        Raises:
            ClientError: the server answered with an error.
        """
        body = {
            "input_ids": [list(ids) for ids in prompts],
            "sampling_params": _sampling(max_new_tokens, options, ignore_eos=ignore_eos),
        }
        started = time.perf_counter()
        response = self._http.post("/generate", json=body)
        total_s = time.perf_counter() - started
        if response.status_code != httpx.codes.OK:
            raise ClientError(f"/generate: {response.status_code} {response.text}")
        return [_generation(answer, total_s, total_s) for answer in response.json()]

    def flush_cache(self) -> None:
        """Empty the radix tree.

        Raises:
            ClientError: requests were still running.
        """
        response = self._http.post("/flush_cache", params={"timeout": FLUSH_TIMEOUT_S})
        if response.status_code != httpx.codes.OK:
            raise ClientError(f"/flush_cache: {response.status_code} {response.text}")

    def server_info(self) -> dict[str, Any]:
        """``GET /server_info`` as it is."""
        response = self._http.get("/server_info")
        response.raise_for_status()
        info: dict[str, Any] = response.json()
        return info

    def grkv_state(self) -> GrkvState:
        """The plugin's own state.

        Raises:
            ClientError: the server does not run the plugin.
        """
        state = self.server_info()["internal_states"][0].get("grkv")
        if state is None:
            raise ClientError(
                "/server_info: internal_states[0] has no 'grkv'; is the plugin's cache selected?"
            )
        return GrkvState.model_validate(state)

    def wait_for_span(self, prefix: Sequence[int]) -> SpanState:
        """Wait until a span ends exactly where `prefix` ends.

        Raises:
            ClientError: none appeared in time; the message tells what the server counted instead.
        """
        deadline = time.perf_counter() + COMPRESSION_TIMEOUT_S
        while True:
            state = self.grkv_state()
            ending_there = [span for span in spans_of(state, prefix) if span.end_tokens == len(prefix)]
            if ending_there:
                return ending_there[0]
            if time.perf_counter() > deadline:
                raise ClientError(
                    f"no span over the first {len(prefix)} tokens within {COMPRESSION_TIMEOUT_S:.0f} s; "
                    f"the server's counters: {state.counters.model_dump()}"
                )
            time.sleep(POLL_S)


def _sampling(max_new_tokens: int, options: dict[str, Any] | None, *, ignore_eos: bool) -> dict[str, Any]:
    sampling: dict[str, Any] = {
        "temperature": 0.0,
        "max_new_tokens": max_new_tokens,
        "ignore_eos": ignore_eos,
    }
    if options is not None:
        sampling["custom_params"] = {"grkv": options}
    return sampling


def _generation(answer: dict[str, Any], ttft_s: float, total_s: float) -> Generation:
    meta = answer["meta_info"]
    reported = meta.get("grkv")
    return Generation(
        text=answer["text"],
        output_ids=tuple(answer["output_ids"]),
        prompt_tokens=meta["prompt_tokens"],
        cached_tokens=meta["cached_tokens"],
        ttft_s=ttft_s,
        total_s=total_s,
        grkv=reported[0] if reported else None,
    )
