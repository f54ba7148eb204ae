"""A way to the engine that a test can cut, or make as slow as it likes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from grkv_sglang.serving import free_port

_EVENT_END = b"\n\n"  # neither headers nor JSON have one


@dataclass
class _Answer:
    """What came back so far for a connection's newest request."""

    events: int = 0


_Pump = Callable[[socket.socket, socket.socket, _Answer], None]


class BreakableProxy:
    """A TCP proxy in front of the engine: while it is broken, connections are refused and open ones cut; a
    stream can be held back after some of its events, so that its answer does not end before the test wants
    it to."""

    def __init__(self, target_url: str) -> None:
        parts = urlsplit(target_url)
        self._target = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._port = free_port()
        self._open: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self._gate = threading.Condition()
        self._events: int | None = None
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
        self.hold_back(None)  # what waits finds its connection closed

    def hold_back(self, events: int | None) -> None:
        """Pass on so many events of every answer from now on; None for all."""
        with self._gate:
            self._events = events
            self._gate.notify_all()

    def let_through(self, events: int) -> None:
        """So many events more than up to now of an answer that is held back."""
        with self._gate:
            assert self._events is not None, "nothing is held back"
            self._events += events
            self._gate.notify_all()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            self._open |= {near, far}
            answer = _Answer()
            for source, pump in ((near, self._pump_requests), (far, self._pump_answers)):
                arguments = (source, pump, near, far, answer)
                threading.Thread(target=self._until_closed, args=arguments, daemon=True).start()

    def _until_closed(
        self, source: socket.socket, pump: _Pump, near: socket.socket, far: socket.socket, answer: _Answer
    ) -> None:
        try:
            pump(near, far, answer)
        except OSError:
            pass
        finally:
            for end in (near, far):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            self._open.discard(source)
            source.close()

    def _pump_requests(self, near: socket.socket, far: socket.socket, answer: _Answer) -> None:
        while data := near.recv(65536):
            with self._gate:
                answer.events = 0
            far.sendall(data)

    def _pump_answers(self, near: socket.socket, far: socket.socket, answer: _Answer) -> None:
        last = b""  # of an event whose two line ends may come in two pieces
        while data := far.recv(65536):
            while data:
                with self._gate:
                    while self._events is not None and answer.events >= self._events:
                        self._gate.wait()
                end = (last + data).find(_EVENT_END)
                size = len(data) if end < 0 else end + len(_EVENT_END) - len(last)
                near.sendall(data[:size])
                last = data[:size][-1:] if end < 0 else b""
                data = data[size:]
                with self._gate:
                    answer.events += end >= 0
