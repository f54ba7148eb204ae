"""Bodies as SGLang 0.5.23 with the plugin sends them. `tests/engine/test_commands.py` compares their fields
with those of a running server, and leaves its own bodies in its folder to record them anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def body(name: str) -> Any:
    """A recorded JSON body."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def stream(name: str) -> bytes:
    """A recorded stream of server-sent events."""
    return (FOLDER / f"{name}.txt").read_bytes()
