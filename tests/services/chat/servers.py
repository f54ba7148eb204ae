"""A chat server in a thread or a process of its own, and a way to the engine that a test can cut."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import uvicorn

from grkv_sglang.services.chat.app import create_app
from grkv_sglang.services.chat.settings import ChatSettings
from grkv_sglang.serving import free_port

START_S = 60.0


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


class BreakableProxy:
    """A TCP proxy in front of the engine: while it is broken, connections are refused and open ones cut."""

    def __init__(self, target_url: str) -> None:
        parts = urlsplit(target_url)
        self._target = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._port = free_port()
        self._open: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self.mend()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def mend(self) -> None:
        listener = socket.create_server(("127.0.0.1", self._port))
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def break_off(self) -> None:
        if self._listener is not None:
            # Closing alone leaves a waiting accept() to take one more connection.
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            self._open |= {near, far}
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
        except OSError:
            pass
        finally:
            for end in (source, sink):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            self._open.discard(source)
            source.close()
