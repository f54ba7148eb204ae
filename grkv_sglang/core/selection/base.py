"""What a selection method is: a score per KV head and token, and a choice made from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class ScoringContext:
    """What a selection method may look at, for one layer of one span of n tokens.

    Attributes:
        weights: [Hkv, m, G, n] float32, attention of the m score queries of each of the G heads of a
            group over the span: causal softmax weights over ancestors and span together.
        values: [Hkv, n, dv] float32.
        output_projection: [hidden, Hq * dv], the layer's output projection, or None where the engine
            does not offer it. Set by methods with `needs_output_projection` only.
        n_window: length of the observation window at the end of the span, which is always kept.
        pool_kernel: odd width of the average pool that smooths scores along the tokens.
    """

    weights: Tensor
    values: Tensor
    output_projection: Tensor | None
    n_window: int
    pool_kernel: int


class Scorer(ABC):
    """One selection method. Stateless; one instance serves all layers."""

    name: ClassVar[str]
    needs_output_projection: ClassVar[bool] = False

    @abstractmethod
    def score(self, ctx: ScoringContext) -> Tensor:
        """[Hkv, n] float32, higher is more worth keeping."""

    def select(self, ctx: ScoringContext, scores: Tensor, always_kept: Tensor, n_slots: int) -> Tensor:
        """Choose the same number of tokens for every KV head.

        Args:
            ctx: what `score` saw.
            scores: [Hkv, n], the result of `score`.
            always_kept: [n] bool, tokens that are kept whatever their score.
            n_slots: how many tokens to keep, those included; more than their number.

        Returns:
            [Hkv, n_slots] int64 indices, ascending.
        """
        kept = always_kept.expand_as(scores)
        return indices_of(kept | top_mask(scores, ~kept, n_slots - int(always_kept.sum())), n_slots)


def top_mask(scores: Tensor, candidates: Tensor, n_top: int) -> Tensor:
    """[Hkv, n] bool, the `n_top` highest scores among `candidates` [Hkv, n]; NaN counts as the lowest.

    There must be at least `n_top` candidates in each head.
    """
    # Infinities and NaN become finite so that a candidate always ranks above a token that is none.
    ranked = torch.nan_to_num(scores, nan=torch.finfo(scores.dtype).min)
    ranked = torch.where(candidates, ranked, -torch.inf)
    chosen = ranked.topk(n_top, dim=-1, sorted=False).indices
    return torch.zeros_like(candidates).scatter_(-1, chosen, True)


def indices_of(mask: Tensor, n_set: int) -> Tensor:
    """[Hkv, n_set] int64, ascending: the positions set in `mask` [Hkv, n], `n_set` in every row."""
    return mask.nonzero()[:, 1].view(mask.shape[0], n_set)


def always_kept_tokens(
    n_tokens: int, *, n_slots: int, n_window: int, sinks: int, starts_sequence: bool, device: torch.device
) -> Tensor:
    """[n] bool, the tokens that are kept whatever their score: the window, and the attention sinks.

    The sinks are the first `sinks` tokens of the sequence, so only a span that starts at position 0 has
    any.

    Raises:
        ValueError: `n_slots` leaves nothing to select beyond these tokens.
    """
    if not starts_sequence:
        sinks = 0
    if n_slots <= n_window + sinks:
        raise ValueError(
            f"expected a budget of more than {n_window + sinks} slots ({n_window} window + {sinks} sink "
            f"tokens are always kept, which would leave nothing to select), got {n_slots}"
        )
    position = torch.arange(n_tokens, device=device)
    return (position < sinks) | (position >= n_tokens - n_window)
