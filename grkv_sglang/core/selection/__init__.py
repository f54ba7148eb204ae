"""Selection methods by name. A new method is one file with one `Scorer` and one entry here, or an entry point
of the group `grkv_sglang.scorers` in another package."""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import entry_points

from grkv_sglang.core.selection.adakv import AdaKV, CriticalAdaKV, PerHead
from grkv_sglang.core.selection.base import (
    ALL_STATISTICS,
    PassKind,
    PassStatistics,
    QueryKind,
    Scorer,
    ScoringContext,
    Statistic,
    Storage,
)
from grkv_sglang.core.selection.combined import RankSum, ShareSum
from grkv_sglang.core.selection.criticalkv import CriticalKV
from grkv_sglang.core.selection.expected_attention import ExpectedAttention
from grkv_sglang.core.selection.h2o import H2O
from grkv_sglang.core.selection.kvzip import KVzip, KVzipPerHead
from grkv_sglang.core.selection.pyramidkv import PyramidKV
from grkv_sglang.core.selection.snapkv import SnapKV, SnapKVOnward
from grkv_sglang.core.selection.stratified import Stratified, StratifiedValue
from grkv_sglang.core.selection.usage import QuestionMass, RepetitionEnergy, RepetitionMass

__all__ = [
    "ALL_STATISTICS",
    "PassKind",
    "PassStatistics",
    "QueryKind",
    "RankSum",
    "Scorer",
    "ScoringContext",
    "ShareSum",
    "Statistic",
    "Storage",
    "get_scorer",
    "scorer_names",
]

ENTRY_POINT_GROUP = "grkv_sglang.scorers"
"""Entry points of other packages: the name is the method's, the object a `Scorer` subclass."""

_BUILT_IN: dict[str, Scorer] = {
    scorer.name: scorer
    for scorer in (
        SnapKV(),
        SnapKVOnward(),
        Stratified(),
        StratifiedValue(),
        CriticalKV(),
        KVzip(),
        KVzipPerHead(),
        QuestionMass(),
        RepetitionMass(),
        RepetitionEnergy(),
        H2O(),
        AdaKV(),
        CriticalAdaKV(),
        PyramidKV(),
        ExpectedAttention(),
    )
}


def scorer_names() -> tuple[str, ...]:
    """Names that `get_scorer` knows, combinations aside."""
    return (*_BUILT_IN, *_registered())


@lru_cache(maxsize=256)
def get_scorer(name: str) -> Scorer:
    """The selection method of this name, or several: "a+b" sums the ranks of a's and b's scores, "a~b" their
    shares of the head's total. "~" binds tighter: "a+b~c" sums the ranks of a and of "b~c". "per_head:a" lets
    the heads of a layer share one budget, whatever a is.

    Raises:
        ValueError: no such method; the message lists the valid names.
    """
    if name.startswith(PerHead.prefix):
        return PerHead(get_scorer(name.removeprefix(PerHead.prefix)))
    for combination in (RankSum, ShareSum):
        parts = name.split(combination.separator)
        if len(parts) > 1:
            return combination([get_scorer(part) for part in parts])
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    if name in _registered():
        return _load(name)
    raise ValueError(
        f"expected a selection method, one of {', '.join(scorer_names())}, or several joined by '+' or "
        f"'~', with {PerHead.prefix!r} in front or without, got {name!r}"
    )


@lru_cache(maxsize=1)
def _registered() -> tuple[str, ...]:
    return tuple(sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)} - set(_BUILT_IN)))


def _load(name: str) -> Scorer:
    (point, *_) = entry_points(group=ENTRY_POINT_GROUP, name=name)
    kind = point.load()
    if not (isinstance(kind, type) and issubclass(kind, Scorer) and getattr(kind, "name", None) == name):
        raise ValueError(
            f"entry point {name!r} of {ENTRY_POINT_GROUP} ({point.value}) must be a subclass of "
            f"grkv_sglang.core.Scorer whose name is {name!r}, got {kind!r}"
        )
    return kind()
