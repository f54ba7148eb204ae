"""How an attention backend refuses what its gap arithmetic does not cover."""

from __future__ import annotations

from collections.abc import Mapping


def refuse(backend: str, uncovered: Mapping[str, bool], instead: str) -> None:
    """Raise ValueError naming all of `uncovered` that applies, and the stock backend to use instead."""
    named = [what for what, applies in uncovered.items() if applies]
    if named:
        raise ValueError(
            f"{backend} does not serve {', '.join(named)}; use --attention-backend {instead}, "
            "without --radix-cache-backend grkv"
        )
