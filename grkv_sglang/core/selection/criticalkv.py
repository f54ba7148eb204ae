"""CriticalKV: SnapKV's choice for half of the budget, the projected value's size for the rest."""

from __future__ import annotations

import torch
from torch import Tensor

from grkv_sglang.core.selection.base import ScoringContext, top_mask
from grkv_sglang.core.selection.snapkv import SnapKV

# Keeps a token with a large value in the race when no query looked at it.
EPSILON = 1e-4

# Bounds the workspace of the projection, [tokens, G * hidden] per KV head.
_TOKENS_PER_CHUNK = 2048


class CriticalKV(SnapKV):
    """Two stages: one by attention, one by how much of the output a token makes up.

    The first stage fills half of the budget c: the always-kept tokens, which count, and the best SnapKV
    scores up to `floor(c / 2)` tokens in all (none where the always-kept ones are as many). The second stage
    fills the rest, among the tokens left, with the best `(score + 1e-4) * mean over the group of
    ||W_o^h v||_1`, with `W_o^h` the columns of the output projection that belong to query head h.

    Source: "Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective",
    arXiv 2502.03805, with SnapKV scores and even budgets, as kvpress 0.5.5 computes it: there, the window's
    tokens rank first and are part of the first stage.

    Deviation: all always-kept tokens count like the window's, sinks and protected ones too, and none of them
    ever competes. (In kvpress a window of more than half of the budget is partly left to the second stage.)
    """

    name = "criticalkv"
    needs_output_projection = True

    def score(self, ctx: ScoringContext) -> Tensor:
        """The first stage's score, after checking that the second will have its projection.

        Raises:
            ValueError: there is no output projection, or its shape does not fit.
        """
        self._projection(ctx)
        return super().score(ctx)

    def select(self, ctx: ScoringContext, scores: Tensor, always_kept: Tensor, n_slots: int) -> Tensor:
        n_always_kept = int(always_kept.sum())
        n_first = max(0, n_slots // 2 - n_always_kept)
        kept = always_kept.expand_as(scores)
        kept = kept | top_mask(scores, ~kept, n_first)
        return kept | top_mask(self.second_stage(ctx, scores), ~kept, n_slots - n_always_kept - n_first)

    def second_stage(self, ctx: ScoringContext, scores: Tensor) -> Tensor:
        """[Hkv, n] scores of the second stage."""
        return (scores + EPSILON) * projected_norms(ctx.values, self._projection(ctx))

    def _projection(self, ctx: ScoringContext) -> Tensor:
        if ctx.output_projection is None:
            raise ValueError(
                f"selection {self.name!r} needs the layer's output projection, got None: pass an unquantised "
                "weight [hidden, Hq * dv], or choose a selection that does without, such as 'snapkv'"
            )
        n_kv_heads, _, group, _ = ctx.queries["window"].shape
        columns = n_kv_heads * group * ctx.values.shape[-1]
        if ctx.output_projection.ndim != 2 or ctx.output_projection.shape[1] != columns:
            raise ValueError(
                f"expected an output projection [hidden, {columns}], got {list(ctx.output_projection.shape)}"
            )
        return ctx.output_projection


def projected_norms(values: Tensor, output_projection: Tensor) -> Tensor:
    """[Hkv, n]: the mean over a KV head's query heads h of `||W_o^h v||_1`.

    Args:
        values: [Hkv, n, dv].
        output_projection: [hidden, Hq * dv], any float dtype.
    """
    n_kv_heads, n_tokens, dv = values.shape
    hidden = output_projection.shape[0]
    # [Hkv, dv, G * hidden]
    per_head = output_projection.to(values.dtype).reshape(hidden, n_kv_heads, -1, dv)
    group = per_head.shape[2]
    per_head = per_head.permute(1, 3, 2, 0).reshape(n_kv_heads, dv, group * hidden)
    norms = values.new_empty(n_kv_heads, n_tokens)
    for start in range(0, n_tokens, _TOKENS_PER_CHUNK):
        chunk = slice(start, start + _TOKENS_PER_CHUNK)
        norms[:, chunk] = torch.bmm(values[:, chunk], per_head).abs_().sum(dim=-1) / group
    return norms
