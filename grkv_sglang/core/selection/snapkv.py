"""SnapKV: attention of the last queries, smoothed along the tokens; and carried on along them."""

from __future__ import annotations

import torch
from torch import Tensor

from grkv_sglang.core.selection.base import Scorer, ScoringContext

CARRIED_SHARE = 0.5
HALF_LIFE_TOKENS = 16
REACH_TOKENS = 64
"""A power of two."""


class SnapKV(Scorer):
    """Mean attention of the observation window, average-pooled, mean over the group.

    Source: SnapKV, arXiv 2404.14469, as GRKV uses it. As in the code published with it, the pool
    covers the tokens before the window only (zeros beyond both ends, counted in the mean): the
    window's own, large weights do not leak into the tokens before it.

    Deviations: the mean over the group is GRKV's (SnapKV scores every query head by itself). The
    softmax covers cached ancestors of the span too. A window query sees nothing behind itself.
    """

    name = "snapkv"
    queries = frozenset({"window"})

    def score(self, ctx: ScoringContext) -> Tensor:
        # The pool is linear, so the mean over queries and group may come first.
        mean = ctx.attention["window"]
        before = mean.shape[-1] - ctx.n_window
        if before <= 0:
            return mean
        return torch.cat((pooled(mean[:, :before], ctx.pool_kernel), mean[:, before:]), dim=-1)


def pooled(scores: Tensor, kernel: int) -> Tensor:
    """[Hkv, n]: average pool along the tokens, of odd width, with zeros beyond both ends."""
    return torch.nn.functional.avg_pool1d(scores, kernel, stride=1, padding=kernel // 2)


class SnapKVOnward(SnapKV):
    """SnapKV whose scores carry on to the tokens behind the attended ones.

    A model that repeats or paraphrases a passage attends to the tokens behind the ones that it attended to
    last, so text that continues the span will look at places that the window itself did not reach yet. A
    token gets the largest of its own score and `CARRIED_SHARE` of the scores of the tokens before it, which
    halves every `HALF_LIFE_TOKENS` and ends after `REACH_TOKENS`. The window neither gives nor
    gets anything: it is always kept. (Ours; measured in docs/quality.md.)
    """

    name = "snapkv_onward"

    def score(self, ctx: ScoringContext) -> Tensor:
        scores = super().score(ctx)
        before = max(0, scores.shape[-1] - ctx.n_window)
        carried = torch.maximum(scores[:, :before], CARRIED_SHARE * onward(scores[:, :before]))
        return torch.cat((carried, scores[:, before:]), dim=-1)


def onward(scores: Tensor) -> Tensor:
    """[Hkv, n], not negative: the largest of ``scores[:, t - d] * 2 ** (-d / HALF_LIFE_TOKENS)`` with
    d in 1 to `REACH_TOKENS`, zero where there is no such token."""
    best, covered = _delayed(scores, 1), 1
    while covered < REACH_TOKENS:  # the best of 1 .. 2k is that of 1 .. k, now or k tokens earlier
        best = torch.maximum(best, _delayed(best, covered))
        covered *= 2
    return best


def _delayed(scores: Tensor, tokens: int) -> Tensor:
    decayed = scores * 0.5 ** (tokens / HALF_LIFE_TOKENS)
    return torch.nn.functional.pad(decayed, (tokens, 0))[:, : scores.shape[-1]]
