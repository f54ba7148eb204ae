"""H2O: attention summed over every query of the span."""

from __future__ import annotations

from torch import Tensor

from grkv_sglang.core.selection.base import Scorer, ScoringContext


class H2O(Scorer):
    """All the attention that a token got from the span's own queries: the "heavy hitters".

    Source: H2O, arXiv 2306.14048, as GRKV uses it: sums over all queries of the span, mean over the group,
    not pooled, the recent window kept.

    Deviations: the tokens are chosen once, behind the span, not one by one while it grows, so an evicted
    token's attention was never given to others. The recent tokens are the profile's window, not half of the
    budget.
    """

    name = "h2o"
    passes = frozenset({"span"})
    statistics = frozenset({"total"})

    def score(self, ctx: ScoringContext) -> Tensor:
        return ctx.passes["span"].total
