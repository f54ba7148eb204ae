"""Mean attention of queries spread over the span: this project's own scores."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from grkv_sglang.core.selection.base import Scorer, ScoringContext


class Stratified(Scorer):
    """Mean attention of the score queries, over queries and group; not pooled.

    Meant for strata queries that were re-rotated to the span's last position: then every query sees
    every key, and no token is favoured for having been visible to more queries.
    """

    name: ClassVar[str] = "stratified"

    def score(self, ctx: ScoringContext) -> Tensor:
        return ctx.weights.mean(dim=(1, 2))


class StratifiedValue(Stratified):
    """The same, times the L2 norm of the token's value: how much of the output it makes up."""

    name: ClassVar[str] = "stratified_value"

    def score(self, ctx: ScoringContext) -> Tensor:
        size: Tensor = torch.linalg.vector_norm(ctx.values, dim=-1)
        return super().score(ctx) * size
