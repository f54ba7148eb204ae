"""Which spans may serve a request: never one that is worse than it asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from grkv_sglang.config import GrkvConfig, MatchMode
from grkv_sglang.core import slots_for_budget
from grkv_sglang.policy.options import NO_OPTIONS, RequestOptions
from grkv_sglang.policy.ranges import Ranges, covers, parse_ranges, size, within
from grkv_sglang.settings import ConfigError


@dataclass(frozen=True)
class Budget:
    """How much of a span is kept: a share of its tokens, or a number of tokens."""

    share: float | None
    tokens: int | None

    def slots(self, n_tokens: int, page_size: int, protected_tokens: int = 0) -> int:
        """KV slots of a span of `n_tokens` tokens, a multiple of `page_size` unless all are kept.

        The budget is for the tokens that are not protected; those that are come on top.
        """
        free_tokens = n_tokens - protected_tokens
        if free_tokens == 0:
            return n_tokens
        wanted = protected_tokens + slots_for_budget(free_tokens, share=self.share, tokens=self.tokens)
        return slots_for_budget(n_tokens, share=None, tokens=wanted, page_size=page_size)

    def least_tokens(self, always_kept: int) -> int | None:
        """The shortest span whose budget is more than `always_kept` tokens; None if there is none."""
        if self.share is None:
            return always_kept + 2 if self.tokens is not None and self.tokens > always_kept else None
        # The decimal that was written is meant, as in `slots_for_budget`.
        return math.floor(always_kept / Fraction(str(float(self.share)))) + 1


@dataclass(frozen=True)
class Acceptance:
    """What a request may be served from: its own options where given, the server's otherwise."""

    mode: MatchMode
    budget: Budget
    min_quality: float
    protected: Ranges = ()
    """Positions of the prompt that must be kept as they are."""

    def accepts(
        self,
        *,
        start_tokens: int,
        n_tokens: int,
        n_slots: int,
        quality: float,
        forced: bool,
        page_size: int,
        protected: Ranges = (),
    ) -> bool:
        """Whether a span of `n_tokens` tokens from `start_tokens` on in `n_slots` slots is good enough.

        `protected`: what it keeps as it is. A forced span (a test option the server must allow) is taken at
        any size.
        """
        if self.mode == "exact" or quality < self.min_quality:
            return False
        if forced or n_slots == n_tokens:
            return True
        mine = within(self.protected, start_tokens, start_tokens + n_tokens)
        if not covers(protected, mine):
            return False
        return n_slots >= self.budget.slots(n_tokens, page_size, size(mine))


def acceptance_of(options: RequestOptions, config: GrkvConfig) -> Acceptance:
    """Combine a request's options with the server's settings."""
    return Acceptance(
        mode=options.mode or config.mode,
        budget=budget_of(options, config),
        min_quality=config.min_quality if options.min_quality is None else options.min_quality,
        protected=parse_ranges(options.protected) if options.protected else (),
    )


def budget_of(options: RequestOptions, config: GrkvConfig) -> Budget:
    """The budget a request asks for, or the server's."""
    if options.budget is not None or options.budget_tokens is not None:
        return Budget(options.budget, options.budget_tokens)
    if config.budget_tokens is not None:
        return Budget(None, config.budget_tokens)
    return Budget(config.budget, None)


def with_possible_spans(config: GrkvConfig, always_kept: int) -> GrkvConfig:
    """`config` with a `min_span_tokens` at which its budget leaves something to select beside the
    `always_kept` tokens of its profile: anything shorter would be begun and fail.

    Raises:
        ConfigError: no span is long enough.
    """
    least = budget_of(NO_OPTIONS, config).least_tokens(always_kept)
    if least is None:
        raise ConfigError(
            f"grkv configuration: budget_tokens {config.budget_tokens} is not more than the {always_kept} "
            f"tokens that profile {config.profile!r} always keeps; set a larger one, or a share (budget)"
        )
    if least <= config.min_span_tokens:
        return config
    return config.model_copy(update={"min_span_tokens": least})
