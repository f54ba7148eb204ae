"""SnapKV: attention of the last queries, smoothed along the tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from grkv_sglang.core.selection.base import Scorer, ScoringContext


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
