"""A chat server in a thread or a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from grkv_sglang.services.chat.app import create_app
from grkv_sglang.services.chat.settings import ChatSettings
from grkv_sglang.serving import free_port

START_S = 60.0

LONG_ANSWER = "Tell me a very long story about a clock maker and her seven clocks."


@contextmanager
def chat_server(settings: ChatSettings) -> Iterator[str]:
    """The real server on a thread; gives its URL."""
    port = free_port()
    server = uvicorn.Server(
        uvicorn.Config(create_app(settings), port=port, log_level="warning", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        deadline = time.monotonic() + START_S
        while not server.started:
            assert thread.is_alive(), "the chat server did not start"
            assert time.monotonic() < deadline, "the chat server took too long to start"
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


class ChatProcess:
    """``python -m grkv_sglang.services.chat``, so that it can be killed."""

    def __init__(self, log: Path, **settings: Any) -> None:
        self._log, self._settings = log, {"port": free_port(), **settings}
        self.url = f"http://127.0.0.1:{self._settings['port']}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        arguments = [f"--{name.replace('_', '-')}={value}" for name, value in self._settings.items()]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "grkv_sglang.services.chat", *arguments], stdout=log, stderr=log
            )
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self._process.poll() is None, self._log.read_text()
            with contextlib.suppress(httpx.TransportError):
                httpx.get(f"{self.url}/api/session")
                return
            time.sleep(0.1)
        raise AssertionError(f"the chat server took too long to start:\n{self._log.read_text()}")

    def end(self, how: signal.Signals) -> int:
        """Send a signal; returns the exit status."""
        assert self._process is not None
        os.kill(self._process.pid, how)
        status = self._process.wait(30)
        self._process = None
        return status

    def close(self) -> None:
        if self._process is not None:
            self.end(signal.SIGKILL)


def answering_at_length(settings: ChatSettings, folder: Path) -> ChatProcess:
    """A process on the engine and database of `settings`, whose answers last long enough to be cut off."""
    return ChatProcess(
        folder / "chat.log",
        engine_url=settings.engine_url,
        database_url=settings.database_url,
        max_tokens=400,
        temperature=0,
    )
