"""Attention of queries from all over the span."""

from __future__ import annotations

import torch
from torch import Tensor

from grkv_sglang.core.selection.base import Scorer, ScoringContext


class Stratified(Scorer):
    """Mean attention of the strata queries, over queries and group; not pooled.

    Meant for strata queries that were re-rotated to the span's last position: then every query sees
    every key, and no token is favoured for having been visible to more queries.
    """

    name = "stratified"
    queries = frozenset({"strata"})

    def score(self, ctx: ScoringContext) -> Tensor:
        return ctx.attention["strata"]


class StratifiedValue(Stratified):
    """The same, times the L2 norm of the token's value: how much of the output it makes up."""

    name = "stratified_value"

    def score(self, ctx: ScoringContext) -> Tensor:
        size: Tensor = torch.linalg.vector_norm(ctx.values, dim=-1)
        return super().score(ctx) * size
