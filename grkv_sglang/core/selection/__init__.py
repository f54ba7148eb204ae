"""Selection methods by name. A new method is one file with one `Scorer` and one entry here."""

from __future__ import annotations

from grkv_sglang.core.selection.base import Scorer, ScoringContext
from grkv_sglang.core.selection.criticalkv import CriticalKV
from grkv_sglang.core.selection.snapkv import SnapKV
from grkv_sglang.core.selection.stratified import Stratified, StratifiedValue

__all__ = ["Scorer", "ScoringContext", "get_scorer", "scorer_names"]

_SCORERS: dict[str, Scorer] = {
    scorer.name: scorer for scorer in (SnapKV(), Stratified(), StratifiedValue(), CriticalKV())
}


def scorer_names() -> tuple[str, ...]:
    """Names that `get_scorer` knows."""
    return tuple(_SCORERS)


def get_scorer(name: str) -> Scorer:
    """The selection method of this name.

    Raises:
        ValueError: no such method; the message lists the valid names.
    """
    if name not in _SCORERS:
        raise ValueError(f"expected a selection method, one of {', '.join(_SCORERS)}, got {name!r}")
    return _SCORERS[name]
