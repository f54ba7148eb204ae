"""KVzip: what the model looks at when it repeats the span."""

from __future__ import annotations

from torch import Tensor

from grkv_sglang.core.selection.base import Scorer, ScoringContext, top_mask_pooled


class KVzip(Scorer):
    """The largest softmax attention that any query of the repetition gives a token.

    Source: KVzip, arXiv 2505.23416, with even budgets. The published default pools the scores of all heads
    and layers, which one slot index for all layers cannot hold.

    Deviations: the queries of the tokens that ask for the repetition do not count (`PassChunk.n_prompt`). The
    softmax covers everything that a query sees; the published one leaves out those chunks of the span that
    are not being repeated, sinks aside.
    """

    name = "kvzip"
    passes = frozenset({"repetition"})
    statistics = frozenset({"maximum"})

    def score(self, ctx: ScoringContext) -> Tensor:
        return ctx.passes["repetition"].maximum


class KVzipPerHead(KVzip):
    """KVzip whose heads of a layer share one budget."""

    name = "kvzip_per_head"
    storage = "per_head"

    def select(self, ctx: ScoringContext, scores: Tensor, always_kept: Tensor, n_slots: int) -> Tensor:
        kept = always_kept.expand_as(scores)
        return kept | top_mask_pooled(scores, ~kept, scores.shape[0] * (n_slots - int(always_kept.sum())))
