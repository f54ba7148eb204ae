"""AdaKV: the heads of a layer share one budget; with CriticalKV's two stages too, and over other scores."""

from __future__ import annotations

from torch import Tensor

from grkv_sglang.core.selection.base import Scorer, ScoringContext, top_mask, top_mask_pooled, top_masks
from grkv_sglang.core.selection.criticalkv import CriticalKV
from grkv_sglang.core.selection.snapkv import SnapKV

# The share of an even budget that every head has for sure.
ALPHA = 0.2


class AdaKV(SnapKV):
    """SnapKV scores; a floor for every head, and the rest to the layer's best scores, whatever their head.

    Of the c' slots per head that are not always kept, the best `floor(0.2 * c')` scores of every head are
    safe; the layer's other slots go to the highest scores left in all heads together.

    Source: Ada-KV, arXiv 2407.11550, with scores pooled over the group.

    Deviations: the safeguard is a floor, as in GRKV and kvpress. The code published with Ada-KV mixes
    instead: it gives a head 0.8 times what it would get without a safeguard, plus 0.2 times the even share.
    In kvpress the floor is a share of the whole budget and the window is part of it: a window of as many
    tokens leaves it nothing to decide.
    """

    name = "adakv"
    storage = "per_head"

    def select(self, ctx: ScoringContext, scores: Tensor, always_kept: Tensor, n_slots: int) -> Tensor:
        return adaptive_mask(scores, always_kept, n_slots)


class CriticalAdaKV(CriticalKV):
    """AdaKV's number of tokens for every head, each head's choice in CriticalKV's two stages.

    A head whose AdaKV budget is b tokens, the a always-kept ones among them, gives the best SnapKV scores
    `floor(b / 2) - a` (but no fewer than its floor, see `AdaKV`) and spends the rest, among the tokens left,
    on the best `(score + 1e-4) * mean over the group of ||W_o^h v||_1`.

    Source: arXiv 2502.03805, as kvpress 0.5.5 combines the two: the budgets come from the scores alone, the
    first stage is half of a head's whole budget, the safe tokens of the floor are kept whatever the second
    stage says. The deviations are those of `AdaKV` and `CriticalKV`.
    """

    name = "critical_adakv"
    storage = "per_head"

    def select(self, ctx: ScoringContext, scores: Tensor, always_kept: Tensor, n_slots: int) -> Tensor:
        always = always_kept.expand_as(scores)
        n_always_kept = int(always_kept.sum())
        budgets = adaptive_mask(scores, always_kept, n_slots).sum(dim=-1)
        # A floor is never negative, and no head's budget is below it.
        n_first = (budgets // 2 - n_always_kept).clamp(min=_floor(n_slots - n_always_kept))
        kept = always | top_masks(scores, ~always, n_first)
        return kept | top_masks(self.second_stage(ctx, scores), ~kept, budgets - n_always_kept - n_first)


class PerHead(Scorer):
    """Another method's scores, chosen from as AdaKV does: "per_head:a".

    For scores that are comparable between the heads of a layer: shares of a head's total ("a~b") are, as the
    attention weights are that AdaKV itself starts from; ranks ("a+b") are not, every head has the same ones.

    Raises:
        ValueError: the method chooses in another way or has budgets of its own, which would be dropped.
    """

    prefix = "per_head:"
    storage = "per_head"

    def __init__(self, scores: Scorer) -> None:
        if scores.storage != "even" or type(scores).select is not Scorer.select:
            raise ValueError(
                f"expected a method that keeps a head's highest scores and nothing else behind "
                f"{self.prefix!r}, got {scores.name!r}"
            )
        self._scores = scores
        self.name = self.prefix + scores.name
        self.queries, self.passes, self.statistics = scores.queries, scores.passes, scores.statistics
        self.needs_output_projection = scores.needs_output_projection

    def score(self, ctx: ScoringContext) -> Tensor:
        return self._scores.score(ctx)

    def select(self, ctx: ScoringContext, scores: Tensor, always_kept: Tensor, n_slots: int) -> Tensor:
        return adaptive_mask(scores, always_kept, n_slots)


def adaptive_mask(scores: Tensor, always_kept: Tensor, n_slots: int) -> Tensor:
    """[Hkv, n] bool with Hkv * n_slots tokens set: AdaKV's choice.

    Args:
        scores: [Hkv, n], comparable between heads.
        always_kept: [n] bool.
        n_slots: tokens per head on average.
    """
    kept = always_kept.expand_as(scores)
    n_free = n_slots - int(always_kept.sum())
    floor = _floor(n_free)
    kept = kept | top_mask(scores, ~kept, floor)
    return kept | top_mask_pooled(scores, ~kept, scores.shape[0] * (n_free - floor))


def _floor(n_free: int) -> int:
    # 0.2 is a little more than a fifth in binary, so that whole fifths stay whole.
    return int(ALPHA * n_free)
