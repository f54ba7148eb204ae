"""How much a token is used when the span is: when the model repeats it, or is asked about it."""

from __future__ import annotations

import torch
from torch import Tensor

from grkv_sglang.core.selection.base import Scorer, ScoringContext


class QuestionMass(Scorer):
    """The attention that the tokens of a few generic requests behind the span give a token together, times
    the L2 norm of its value.

    They come from where real requests will come from: behind the chat template's change of turns, at
    positions behind the span. About a hundred of them cost a few per cent of a prefill. (Ours; nobody's
    paper.)
    """

    name = "question_mass"
    passes = frozenset({"questions"})
    statistics = frozenset({"total"})

    def score(self, ctx: ScoringContext) -> Tensor:
        return ctx.passes["questions"].total * _norms(ctx.values)


class RepetitionMass(Scorer):
    """The attention that all repeating queries give a token together, times the L2 norm of its value.

    The repetition is KVzip's (arXiv 2505.23416), the reduction is not: KVzip takes the largest weight, which
    finds a token that matters once as surely as one that matters always. The sum keeps what is used most,
    which follows the full cache's predictions more closely.
    """

    name = "repetition_mass"
    passes = frozenset({"repetition"})
    statistics = frozenset({"total"})

    def score(self, ctx: ScoringContext) -> Tensor:
        return ctx.passes["repetition"].total * _norms(ctx.values)


class RepetitionEnergy(Scorer):
    """The sum of the squares of these weights, times the same norm: between KVzip's maximum and the sum.

    Dropping a token changes a query's output by about `a (o - v)`, so that squares are what a squared error
    adds up.
    """

    name = "repetition_energy"
    passes = frozenset({"repetition"})
    statistics = frozenset({"square"})

    def score(self, ctx: ScoringContext) -> Tensor:
        return ctx.passes["repetition"].square * _norms(ctx.values)


def _norms(values: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(values, dim=-1)
    return norms
