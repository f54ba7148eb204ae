"""Server-sent events."""

from __future__ import annotations

import json

MEDIA_TYPE = "text/event-stream"

HEADERS = {
    "Cache-Control": "no-store",
    # nginx holds back what it does not know to be a stream.
    "X-Accel-Buffering": "no",
}
"""Of a response that is a stream of events."""

PING = b": ping\n\n"
"""A comment: keeps a silent stream open through proxies, and shows when the other side is gone."""


def event(name: str, data: object) -> bytes:
    """One event of type `name` whose data is `data` as JSON.

    Raises:
        ValueError: `name` is empty or has more than one line.
        TypeError: `data` has no JSON.
    """
    if not name or "\n" in name or "\r" in name:
        raise ValueError(f"the name of an event is one line, got {name!r}")
    # JSON has no bare line ends, so one data line holds it.
    return f"event: {name}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n".encode()
