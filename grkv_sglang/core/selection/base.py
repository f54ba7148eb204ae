"""What a selection method is: a score per KV head and token, and a choice made from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from grkv_sglang.core.rope import RotaryTable

QueryKind = Literal["window", "strata"]
"""Queries of the probe. "window": the last positions of the span, where they are. "strata": one in the middle
of each of some equal strata of the span, moved to the span's last position if the profile says so."""

PassKind = Literal["span", "repetition", "questions"]
"""A forward pass beyond the probe. "span": every token of the span once more. "repetition": the model repeats
the span, whose KV it sees. "questions": a few generic requests, as they may follow the span; only this one
does not cost a prefill of the span."""

Statistic = Literal["total", "square", "maximum"]
"""What can be counted of a pass's attention weights: the fields of `PassStatistics`."""

ALL_STATISTICS: frozenset[Statistic] = frozenset({"total", "square", "maximum"})

Storage = Literal["even", "per_head", "per_layer"]
"""Which budgets a method uses. "even": every KV head of every layer keeps as many tokens; any server can hold
it. "per_head": the heads of a layer keep different numbers, with the same total in every layer. "per_layer":
the totals of the layers differ: not for serving, where one slot index exists in all layers."""


@dataclass(frozen=True)
class PassStatistics:
    """What a pass leaves of its attention weights `a` (joint with everything else that a query sees): for
    every KV head and token s of the span, over all counting queries i and the G query heads of the group.
    What is not counted has no columns, so that reading it fails.

    Attributes:
        total: [Hkv, n] float32, the mean over the group of `sum_i a_is`.
        square: [Hkv, n] float32, the mean over the group of `sum_i a_is^2`.
        maximum: [Hkv, n] float32, the largest `a_is`.
    """

    total: Tensor
    square: Tensor
    maximum: Tensor

    @classmethod
    def nothing(
        cls,
        n_kv_heads: int,
        n_tokens: int,
        device: torch.device,
        counted: frozenset[Statistic] = ALL_STATISTICS,
    ) -> PassStatistics:
        """Of no query; `counted` of all that come."""

        def zeros(name: Statistic) -> Tensor:
            return torch.zeros(n_kv_heads, n_tokens if name in counted else 0, device=device)

        return cls(zeros("total"), zeros("square"), zeros("maximum"))

    def count(
        self,
        weights: Tensor,
        group: int,
        attended: Sequence[tuple[int, int]] | None = None,
        heads: slice = slice(None),
    ) -> None:
        """Add some more query rows.

        Args:
            weights: [h, N, k] float32 of the KV heads `heads`, N a multiple of `group`; may be overwritten.
            group: G.
            attended: ranges of the k tokens that the weights are over; None for all n.
            heads: which; all of them unless given.
        """
        ones = weights.new_full((weights.shape[0], 1, weights.shape[1]), 1 / group)
        # As products with a row of ones: sums over a dimension that is not the last are slow on a CPU.
        found: list[tuple[Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]]] = []
        if self.total.shape[-1]:
            found.append((self.total, torch.bmm(ones, weights).squeeze(1), torch.add))
        if self.maximum.shape[-1]:
            found.append((self.maximum, weights.amax(dim=1), torch.maximum))
        if self.square.shape[-1]:
            found.append((self.square, torch.bmm(ones, weights.mul_(weights)).squeeze(1), torch.add))
        at = 0
        for low, high in attended if attended is not None else ((0, weights.shape[-1]),):
            here = slice(at, at + high - low)
            at = here.stop
            for so_far, new, joined in found:
                so_far[heads, low:high] = joined(so_far[heads, low:high], new[:, here])


@dataclass(frozen=True)
class ScoringContext:
    """What a selection method may look at, for one layer of one span of n tokens.

    Attributes:
        keys: [Hkv, n, d] float32, post-RoPE.
        values: [Hkv, n, dv] float32.
        attention: by kind, [Hkv, n] float32: causal softmax weights over ancestors and span together, the
            mean over the m probed queries and the G heads of a group. Holds the kinds that the method names
            in `queries`.
        queries: by kind, [Hkv, m, G, d] float32: these queries, at the positions that they are used at.
        passes: by kind, what a pass over many tokens left. Holds the kinds that the method names in `passes`.
        output_projection: [hidden, Hq * dv], the layer's output projection, or None where the engine
            does not offer it. Set by methods with `needs_output_projection` only.
        rotary: the model's rotary table, or None.
        scale: factor on the logits.
        n_window: how many tokens at the end of the span are always kept.
        n_sinks: how many of the span's first tokens are attention sinks, which are always kept.
        pool_kernel: odd width of the average pool that smooths scores along the tokens.
        layer, n_layers: which layer this is, and of how many.
    """

    keys: Tensor
    values: Tensor
    attention: Mapping[QueryKind, Tensor]
    queries: Mapping[QueryKind, Tensor] = field(default_factory=dict)
    passes: Mapping[PassKind, PassStatistics] = field(default_factory=dict)
    output_projection: Tensor | None = None
    rotary: RotaryTable | None = None
    scale: float = 1.0
    n_window: int = 0
    n_sinks: int = 0
    pool_kernel: int = 1
    layer: int = 0
    n_layers: int = 1


class Scorer(ABC):
    """One selection method. Stateless; one instance serves all layers."""

    name: str
    """What configurations call it."""
    queries: frozenset[QueryKind] = frozenset()
    """The kinds of probed queries that it looks at."""
    passes: frozenset[PassKind] = frozenset()
    """The passes that it needs."""
    statistics: frozenset[Statistic] = ALL_STATISTICS
    """What it reads of them; the others need not be counted."""
    storage: Storage = "even"
    needs_output_projection: bool = False

    @abstractmethod
    def score(self, ctx: ScoringContext) -> Tensor:
        """[Hkv, n] float32, higher is more worth keeping."""

    def layer_slots(
        self, layer: int, n_layers: int, *, n_tokens: int, n_slots: int, n_always_kept: int
    ) -> int:
        """Slots per KV head of this layer when the layers have `n_slots` on average: more than
        `n_always_kept`, at most `n_tokens`."""
        return n_slots

    def select(self, ctx: ScoringContext, scores: Tensor, always_kept: Tensor, n_slots: int) -> Tensor:
        """Choose tokens: the same number for every KV head unless `storage` says otherwise.

        Args:
            ctx: what `score` saw.
            scores: [Hkv, n], the result of `score`.
            always_kept: [n] bool, tokens that are kept whatever their score.
            n_slots: how many tokens to keep per head (on average), those included; more than their number.

        Returns:
            [Hkv, n] bool with Hkv * n_slots tokens set.
        """
        kept = always_kept.expand_as(scores)
        return kept | top_mask(scores, ~kept, n_slots - int(always_kept.sum()))


def top_mask(scores: Tensor, candidates: Tensor, n_top: int) -> Tensor:
    """[Hkv, n] bool, the `n_top` highest scores among `candidates` [Hkv, n]; NaN counts as the lowest.

    There must be at least `n_top` candidates in each head.
    """
    chosen = _ranked(scores, candidates).topk(n_top, dim=-1, sorted=False).indices
    return torch.zeros_like(candidates).scatter_(-1, chosen, True)


def top_masks(scores: Tensor, candidates: Tensor, n_top: Tensor) -> Tensor:
    """`top_mask` with a number for each head: `n_top` [Hkv] int64."""
    order = _ranked(scores, candidates).argsort(dim=-1, descending=True, stable=True)
    first = torch.arange(scores.shape[-1], device=scores.device) < n_top.unsqueeze(-1)
    return torch.zeros_like(candidates).scatter_(-1, order, first)


def top_mask_pooled(scores: Tensor, candidates: Tensor, n_top: int) -> Tensor:
    """[Hkv, n] bool, the `n_top` highest scores of all heads together."""
    return top_mask(scores.reshape(1, -1), candidates.reshape(1, -1), n_top).view_as(scores)


def _ranked(scores: Tensor, candidates: Tensor) -> Tensor:
    # Infinities and NaN become finite so that a candidate always ranks above a token that is none.
    ranked = torch.nan_to_num(scores, nan=torch.finfo(scores.dtype).min)
    return torch.where(candidates, ranked, -torch.inf)


def always_kept_tokens(
    n_tokens: int,
    *,
    n_slots: int,
    n_window: int,
    sinks: int,
    starts_sequence: bool,
    device: torch.device,
    protected: Tensor | None = None,
) -> Tensor:
    """[n] bool, the tokens that are kept whatever their score: window, attention sinks, protected ones.

    The sinks are the first `sinks` tokens of the sequence, so only a span that starts at position 0 has
    any. `protected` is [n] bool, on any device.

    Raises:
        ValueError: `n_slots` leaves nothing to select beyond these tokens.
    """
    if not starts_sequence:
        sinks = 0
    position = torch.arange(n_tokens, device=device)
    kept = (position < sinks) | (position >= n_tokens - n_window)
    if protected is not None:
        kept |= protected.to(device)
    n_kept = int(kept.sum())
    if n_slots <= n_kept:
        raise ValueError(
            f"expected a budget of more than {n_kept} slots ({n_window} window + {sinks} sink tokens"
            f"{'' if protected is None else ' and the protected ones'} are always kept, which would leave "
            f"nothing to select), got {n_slots}"
        )
    return kept
