"""Several scores at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from grkv_sglang.core.selection.base import Scorer, ScoringContext


class RankSum(Scorer):
    """The sum of other methods' scores, each replaced by its rank among the tokens of its head: "a+b".

    Scores of different kinds (a mean, a maximum, a product with a norm) have no common scale; their ranks do.
    A method that is named twice counts twice.
    Ties share no rank: the earlier token of two equal ones ranks lower. Selects by the sum alone, with even
    budgets.

    Args:
        parts: methods that keep a head's highest scores and nothing else.

    Raises:
        ValueError: a part chooses in another way or has budgets of its own. Its rule would not take part, and
            the sum would silently be that of the method whose scores it starts from.
    """

    separator = "+"

    def __init__(self, parts: Sequence[Scorer]) -> None:
        weights = Counter(part.name for part in parts)
        self.parts = tuple({part.name: part for part in parts}.values())
        self.weights = tuple(weights[part.name] for part in self.parts)
        for part in self.parts:
            reason = _why_not_in_a_sum(part)
            if reason is not None:
                raise ValueError(
                    "expected parts of a sum that keep a head's highest scores and nothing else, got "
                    f"{part.name!r}, which {reason}: a sum would drop that rule"
                )
        self.name = self.separator.join(part.name for part in parts)
        self.queries = frozenset().union(*(part.queries for part in parts))
        self.passes = frozenset().union(*(part.passes for part in parts))
        self.statistics = frozenset().union(*(part.statistics for part in parts if part.passes))
        self.needs_output_projection = any(part.needs_output_projection for part in parts)

    def score(self, ctx: ScoringContext) -> Tensor:
        return self._sum(ctx, ranks)

    def _sum(self, ctx: ScoringContext, scaled: Callable[[Tensor], Tensor]) -> Tensor:
        weighted = zip(self.weights, self.parts, strict=True)
        return torch.stack([scaled(part.score(ctx)) * weight for weight, part in weighted]).sum(dim=0)


def _why_not_in_a_sum(part: Scorer) -> str | None:
    if part.storage != "even":
        return f"has {part.storage} budgets"
    if type(part).select is not Scorer.select:
        return "does not select by its score alone"
    return None


class ShareSum(RankSum):
    """The sum of other methods' scores, each divided by its total over the tokens of its head: "a~b".

    Unlike ranks, shares keep how much better a token is: one that a method finds far above all others stays,
    however little the other methods think of it. For scores that are not negative.
    """

    separator = "~"

    def score(self, ctx: ScoringContext) -> Tensor:
        return self._sum(ctx, shares)


def shares(scores: Tensor) -> Tensor:
    """[Hkv, n] float32, each row scaled to a sum of 1 (an all-zero row stays zero). NaN counts as zero."""
    known = torch.nan_to_num(scores.float(), nan=0.0)
    return known / known.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)


def ranks(scores: Tensor) -> Tensor:
    """[Hkv, n] float32: 0 for the lowest score of a head, 1 for the highest. NaN counts as lowest."""
    order = torch.nan_to_num(scores, nan=-torch.inf, neginf=-torch.inf).argsort(dim=-1, stable=True)
    n_tokens = scores.shape[-1]
    rank = torch.arange(n_tokens, device=scores.device, dtype=torch.float32) / max(1, n_tokens - 1)
    return torch.empty_like(scores, dtype=torch.float32).scatter_(-1, order, rank.expand_as(scores))
