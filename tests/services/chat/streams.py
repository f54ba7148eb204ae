"""Talking to a chat server as a program does: accounts, messages, and events as they come."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import httpx

from grkv_sglang.client import GrkvClient
from grkv_sglang.client.state import SpanState, namespace_name
from grkv_sglang.demo.documents import load_documents

ANSWER_S = 300.0


class ChatUser:
    """A user of a chat server, signed in."""

    def __init__(self, url: str, name: str, password: str = "correct horse") -> None:
        self.http = httpx.Client(base_url=url, limits=httpx.Limits(keepalive_expiry=2), timeout=ANSWER_S)
        answer = self.http.post("/api/register", json={"name": name, "password": password})
        assert answer.status_code == 201, answer.text

    def new(self) -> str:
        """A new conversation's id."""
        return str(self.http.post("/api/conversations").raise_for_status().json()["id"])

    def view(self, conversation: str) -> Any:
        return self.http.get(f"/api/conversations/{conversation}").raise_for_status().json()

    def events(self, conversation: str, path: str, body: Any = None) -> Iterator[tuple[str, Any]]:
        """Events as they come."""
        with self.http.stream("POST", f"/api/conversations/{conversation}/{path}", json=body) as answer:
            assert answer.status_code == 200, answer.read()
            name = ""
            for line in answer.iter_lines():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    yield name, json.loads(line.removeprefix("data: "))

    def send(self, conversation: str, text: str) -> Any:
        """The conversation once it is answered."""
        return dict(self.events(conversation, "messages", {"text": text}))["end"]

    def retry(self, conversation: str) -> Any:
        return dict(self.events(conversation, "retry"))["end"]


def passage(characters: int, start: int = 3000) -> str:
    """Part of a book."""
    return load_documents()[0].text[start : start + characters]


def wait_for_span(engine_url: str, cache_salt: str, timeout_s: float = 120.0) -> SpanState:
    """The first span of a namespace, once it is there."""

    def find() -> SpanState | None:
        with GrkvClient(engine_url) as client:
            spans = client.state().spans
        return next((span for span in spans if span.namespace == namespace_name(cache_salt)), None)

    return wait_for(find, timeout_s)


T = TypeVar("T")


def wait_for(find: Callable[[], T | None], timeout_s: float = 60.0) -> T:
    """What `find` gives once it is not None."""
    deadline = time.monotonic() + timeout_s
    while (found := find()) is None:
        assert time.monotonic() < deadline, f"not there after {timeout_s:g} s"
        time.sleep(0.1)
    return found
