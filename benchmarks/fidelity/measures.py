"""What a compressed prefix changes, token by token, against the full one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Deviation:
    """Per predicted token, [t] float64 each.

    Attributes:
        kl: KL(full || compressed) in nats.
        top1: 1 where both find the same token likeliest.
        nll_increase: compressed minus full negative log-likelihood of the token that came, in nats.
    """

    kl: Tensor
    top1: Tensor
    nll_increase: Tensor


def deviation(full: Tensor, compressed: Tensor, tokens: Tensor) -> Deviation:
    """Compare log-probabilities [t, vocabulary] at the tokens [t] that came."""
    at = tokens.unsqueeze(-1)
    return Deviation(
        kl=(full.exp() * (full - compressed)).sum(dim=-1, dtype=torch.float64),
        top1=(full.argmax(dim=-1) == compressed.argmax(dim=-1)).double(),
        nll_increase=(full.gather(-1, at) - compressed.gather(-1, at)).squeeze(-1).double(),
    )


def exact_match(log_probs: Tensor, tokens: Tensor) -> bool:
    """Whether greedy decoding would give just these tokens: log-probabilities [t, vocabulary], tokens [t]."""
    return bool(torch.equal(log_probs.argmax(dim=-1), tokens))
