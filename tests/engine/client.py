"""What the engine tests say to a server, over its own HTTP interface."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx


@dataclass(frozen=True)
class Answer:
    output_ids: list[int]
    text: str
    cached_tokens: int
    served: dict[str, Any]
    """meta_info["grkv"]"""


class Client:
    def __init__(self, base_url: str, tokenizer: Any, folder: Path) -> None:
        # SGLang's server closes a connection that was idle for five seconds, maybe just as it is used again.
        limits = httpx.Limits(keepalive_expiry=2)
        self.http = httpx.Client(base_url=base_url, timeout=300, limits=limits)
        self.tokenizer = tokenizer
        self.folder = folder

    def generate(
        self,
        input_ids: Sequence[int],
        options: dict[str, Any] | None = None,
        max_new_tokens: int = 8,
        **fields: Any,
    ) -> Answer:
        response = self.post(input_ids, options, max_new_tokens, **fields)
        assert response.status_code == 200, response.text
        return self.answer(response.json())

    def post(
        self, input_ids: Sequence[int], options: Any = None, max_new_tokens: int = 8, **fields: Any
    ) -> httpx.Response:
        params: dict[str, Any] = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        if options is not None:
            params["custom_params"] = {"grkv": options}
        return self.http.post(
            "/generate", json={"input_ids": list(input_ids), "sampling_params": params, **fields}
        )

    @staticmethod
    def answer(data: dict[str, Any]) -> Answer:
        meta = data["meta_info"]
        (served,) = meta["grkv"]
        return Answer(data["output_ids"], data["text"], meta["cached_tokens"], served)

    def together(self, calls: Sequence[tuple[Sequence[int], dict[str, Any] | None, int]]) -> list[Answer]:
        """Requests sent at the same time."""
        with ThreadPoolExecutor(len(calls)) as threads:
            return list(threads.map(lambda call: self.generate(*call), calls))

    def state(self) -> dict[str, Any]:
        response = self.http.get("/server_info")
        assert response.status_code == 200, response.text
        state: dict[str, Any] = response.json()["internal_states"][0]["grkv"]
        return state

    def command(self, **command: Any) -> httpx.Response:
        return self.http.post("/grkv/command", json=command)

    def settled_state(self) -> dict[str, Any]:
        """The state once nothing is left to do and an idle census has been taken after it."""
        before = self.state()["census"]["checks"]
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            state = self.state()
            if state["counters"]["jobs_waiting"] == 0 and state["census"]["checks"] > before:
                assert state["census"]["ok"], state["census"]
                return state
            time.sleep(0.05)
        raise AssertionError(f"the server did not settle: {self.state()}")

    def flush(self) -> None:
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            if self.http.post("/flush_cache").status_code == 200:
                return
            time.sleep(0.1)
        raise AssertionError("the cache was not flushed: requests still pending")

    @contextmanager
    def slow_layers(self) -> Iterator[None]:
        """Every layer of a compression takes long enough for a request to come in between."""
        slow = self.flag("slow")
        try:
            yield
        finally:
            slow.unlink()

    def flag(self, name: str, layer: int | None = None) -> Path:
        """Tell the test plugin inside the server to do something."""
        path = self.folder / name
        path.write_text("" if layer is None else str(layer))
        return path


WORDS = (
    "The ferry left the harbour at six in the morning with forty sacks of barley, two horses and a clock "
    "that had once stood in the town hall of a place nobody on board could name. Its keeper, Marta "
    "Lindqvist, said that it ran slow in the cold and fast in good company, and that she had wound it "
    "every evening for thirty years. When the fog came down the captain asked her for the hour, and she "
    "told him, and he steered by it. "
)


def document(client: Client, tokens: int, seed: int = 0) -> list[int]:
    """A text of `tokens` tokens; of two seeds not even the first token is the same."""
    text = "".join(f"Chapter {i * (seed + 1)}. {WORDS}" for i in range(tokens // 60 + 1))
    return [3000 + seed, *client.tokenizer.encode(text)][:tokens]


def question(client: Client, text: str) -> list[int]:
    return list(client.tokenizer.encode(f"\n\nQuestion: {text}\nAnswer:"))


def distinct_tails(client: Client, count: int) -> list[list[int]]:
    """Continuations that differ in their first token, so that the common prefix ends where they start."""
    starts = list(range(1000, 1000 + 40 * count, 40))
    return [[start, *question(client, f"What happens in part {i}?")] for i, start in enumerate(starts)]
