"""CriticalKV: SnapKV's choice for half of the budget, the projected value's size for the rest."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from grkv_sglang.core.selection.base import ScoringContext, indices_of, top_mask
from grkv_sglang.core.selection.snapkv import SnapKV

# Keeps a token with a large value in the race when no query looked at it.
EPSILON = 1e-4

# Bounds the workspace of the projection, [tokens, G * hidden] per KV head.
_TOKENS_PER_CHUNK = 2048


class CriticalKV(SnapKV):
    """Two stages over the tokens that are not always kept.

    The first half of the budget goes to the best SnapKV scores; the second half, among the tokens
    left, to the best `(score + 1e-4) * mean over the group of ||W_o^h v||_1`, with `W_o^h` the columns
    of the output projection that belong to query head h.

    Source: "Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective",
    arXiv 2502.03805, with SnapKV scores and even budgets. An odd budget gives the second stage the
    extra token.
    """

    name: ClassVar[str] = "criticalkv"
    needs_output_projection: ClassVar[bool] = True

    def score(self, ctx: ScoringContext) -> Tensor:
        """The first stage's score, after checking that the second will have its projection.

        Raises:
            ValueError: there is no output projection, or its shape does not fit.
        """
        self._projection(ctx)
        return super().score(ctx)

    def select(self, ctx: ScoringContext, scores: Tensor, always_kept: Tensor, n_slots: int) -> Tensor:
        free_slots = n_slots - int(always_kept.sum())
        kept = always_kept.expand_as(scores)
        kept = kept | top_mask(scores, ~kept, free_slots // 2)
        second = (scores + EPSILON) * projected_norms(ctx.values, self._projection(ctx))
        kept = kept | top_mask(second, ~kept, free_slots - free_slots // 2)
        return indices_of(kept, n_slots)

    def _projection(self, ctx: ScoringContext) -> Tensor:
        if ctx.output_projection is None:
            raise ValueError(
                "selection 'criticalkv' needs the layer's output projection, got None: pass an unquantised "
                "weight [hidden, Hq * dv], or choose a selection that does without, such as 'snapkv'"
            )
        n_kv_heads, _, group, _ = ctx.weights.shape
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
