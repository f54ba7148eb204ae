"""Expected Attention: what queries like the span's will look at from the positions behind it."""

from __future__ import annotations

import torch
from torch import Tensor

from grkv_sglang.core.rope import mean_rotation
from grkv_sglang.core.selection.base import Scorer, ScoringContext

# Positions behind the span that the rotation is averaged over.
N_FUTURE = 512

# Added to the expected attention before it is multiplied by the value's norm. kvpress's default; its
# leaderboard's 1e-2 is for budgets that the heads share.
EPSILON = 0.0


class ExpectedAttention(Scorer):
    """Expected attention of normally distributed queries, times the L2 norm of the token's value.

    The queries of a head, taken to the span's last position, have mean mu and covariance C. R is the mean of
    the rotations by 1 .. 512 positions more. Then `E[exp(scale q.k)]` of a query from `N(R mu, R C R^T)` is
    `exp(scale k.R mu + scale^2 k.R C R^T k / 2)`. It is normalised over the span's tokens, averaged over the
    group, and `(that + 0) * ||v||_2` is the score. Attention sinks take no part: they get the largest score.

    Source: Expected Attention, arXiv 2510.00636, as kvpress 0.5.5 computes it with even budgets.

    Deviations: mean and covariance are those of the sampled strata queries instead of all of the span's
    hidden states. (The covariance divides by their number there too.) Models that normalise their queries are
    no exception, because these come from behind the normalisation. A rotary table with fewer positions gives
    the mean over those that it has. The strata queries should be re-rotated (`Profile.rerotate`).
    """

    name = "expected_attention"
    queries = frozenset({"strata"})

    def score(self, ctx: ScoringContext) -> Tensor:
        """[Hkv, n] float32.

        Raises:
            ValueError: there is no rotary table.
        """
        if ctx.rotary is None:
            raise ValueError(f"selection {self.name!r} needs the model's rotary table, got None")
        queries = ctx.queries["strata"]
        n_kv_heads, m, group, d = queries.shape
        # R C R^T needs no matrix: R is linear, so it is the covariance of the rotated queries.
        turned = mean_rotation(queries.reshape(-1, group, d), ctx.rotary, n_positions=N_FUTURE)
        rows = turned.reshape(n_kv_heads, m * group, d)
        # [Hkv, m, G, n]
        logits = torch.bmm(rows * ctx.scale, ctx.keys.transpose(1, 2)).view(n_kv_heads, m, group, -1)
        variance, mean = torch.var_mean(logits, dim=1, correction=0)
        expected = mean + variance / 2
        expected[..., : ctx.n_sinks] = -torch.inf
        norms: Tensor = torch.linalg.vector_norm(ctx.values, dim=-1)
        scores = (expected.softmax(dim=-1).mean(dim=1) + EPSILON) * norms
        scores[:, : ctx.n_sinks] = scores.amax()
        return scores
