"""States for tests, as a cache without an engine says them."""

from __future__ import annotations

from typing import Any

from grkv_sglang.client import GrkvState
from tests.cache.harness import Harness

DOC = [1, 2, 3, 1, 1, 2, 2, 3, 3, 1, 2, 1]


def raw_state(**options: Any) -> dict[str, Any]:
    """With one span over `DOC`, of 5 slots."""
    h = Harness()
    h.run([*DOC, 7, 8], {"prefix_end_tokens": len(DOC), **options})
    return h.cache.state()


def state(**changes: Any) -> GrkvState:
    """`raw_state` with top-level parts replaced."""
    return GrkvState.model_validate({**raw_state(), **changes})
