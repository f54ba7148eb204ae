"""A real service for a test: its app on uvicorn, in a thread."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn

from grkv_sglang.services.rag.app import create_app
from grkv_sglang.services.rag.command import first_key
from grkv_sglang.services.rag.embedding import Embedder
from grkv_sglang.services.rag.index import PassageIndex
from grkv_sglang.services.rag.service import Parts, open_store
from grkv_sglang.services.rag.settings import RagSettings
from grkv_sglang.services.rag.store import Store

READY_S = 120.0


@dataclass(frozen=True)
class Tenant:
    """One tenant's view of a service."""

    http: httpx.Client

    def upload(self, name: str, data: bytes | str) -> httpx.Response:
        content = data.encode() if isinstance(data, str) else data
        return self.http.post("/documents", files={"file": (name, content)})

    def add(self, name: str, data: bytes | str) -> dict[str, Any]:
        """Upload a document and wait until it is ready."""
        response = self.upload(name, data)
        assert response.status_code == 201, response.text
        return self.wait(response.json()["id"], "ready")

    def document(self, document_id: str) -> dict[str, Any]:
        response = self.http.get(f"/documents/{document_id}")
        assert response.status_code == 200, response.text
        view: dict[str, Any] = response.json()
        return view

    def wait(self, document_id: str, status: str) -> dict[str, Any]:
        deadline = time.monotonic() + READY_S
        while (view := self.document(document_id))["status"] != status:
            assert view["status"] != "failed", view
            assert time.monotonic() < deadline, view
            time.sleep(0.2)
        return view

    def ask(self, question: str, **fields: Any) -> dict[str, Any]:
        body = {"question": question, "stream": False, "max_tokens": 4, **fields}
        response = self.http.post("/questions", json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def events(self, question: str, **fields: Any) -> list[tuple[str, Any]]:
        """All events of a streamed answer."""
        with self.http.stream("POST", "/questions", json={"question": question, **fields}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            return parse_events("".join(response.iter_text()))


@dataclass(frozen=True)
class RunningRag:
    url: str
    key: str
    store: Store

    def tenant(self, key: str | None = None) -> Tenant:
        headers = {"Authorization": f"Bearer {key or self.key}"}
        return Tenant(
            httpx.Client(
                base_url=f"{self.url}/api/v1",
                headers=headers,
                limits=httpx.Limits(keepalive_expiry=2),
                timeout=300,
            )
        )


@contextmanager
def serving(settings: RagSettings, embedder: Embedder) -> Iterator[RunningRag]:
    """The service on a port of 127.0.0.1, with a first tenant where there is none."""
    store = open_store(settings)
    index = PassageIndex(settings.collection, embedder.dimensions, path=settings.folder / "qdrant")
    key = first_key(store) or store.add_key("default")
    app = create_app(settings, Parts(store, index, embedder))
    server = uvicorn.Server(
        uvicorn.Config(
            app, host=settings.host, port=settings.port, log_level="warning", timeout_graceful_shutdown=2
        )
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the service did not start"
            time.sleep(0.02)
        yield RunningRag(f"http://{settings.host}:{settings.port}", key, store)
    finally:
        server.should_exit = True
        thread.join(timeout=30)
        assert not thread.is_alive(), "the service did not end"


def parse_events(text: str) -> list[tuple[str, Any]]:
    events = []
    for block in filter(None, text.split("\n\n")):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
        if fields:
            events.append((fields["event"], json.loads(fields["data"])))
    return events
