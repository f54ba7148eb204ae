"""Named settings of one compression: which queries, which selection, how much regression.

`paper` and `release` are the two published settings of GRKV (arXiv 2605.31105): the text of the
paper and the code published with it. `default` and `copy` are this project's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from grkv_sglang.core.selection import get_scorer

QueryKind = Literal["window", "strata"]


@dataclass(frozen=True)
class Profile:
    """Everything that decides how one layer of a span is compressed, except the budget.

    Attributes:
        name: shown in reports.
        scorer: name of the selection method (`grkv_sglang.core.selection.scorer_names`).
        score_queries: the queries that the selection sees. "window" is the last `n_window`
            positions of the span, "strata" one in the middle of each of `n_strata` equal strata.
        fit_queries: the queries that the regression fits, named the same way.
        n_window: the last positions of the span; they are always kept and never changed.
        n_strata: number of strata (ignored where neither kind is "strata").
        n_held_out: queries that only measure quality; at least 1, because a quality that was never
            measured would have to be guessed.
        rerotate: strata and held-out queries are rotated to the span's last position, from where
            they see every key. Window queries stay where they are.
        query_weight: the weight `w` of every fitted query in the loss `sum_i w ||O_i - Y_i||^2`.
        lambda_k, lambda_v: ridge of the key and of the value step.
        cap_k, cap_v: upper bound on `||dK||_F / ||K_F||_F` and `||dV||_F / ||V_F||_F` per KV head
            over the changeable tokens `F`; None for no bound.
        fixed_share: the share (beta) of the retained tokens, best scores first, that never changes.
        steps: number of value + key rounds.
        guard: keep, per KV head, whichever of {unchanged, value only, key and value} has the
            smallest penalised loss.
        value_step, key_step: which of the two steps run.
        cg_iterations: most conjugate-gradient iterations of a key step.
        cg_tolerance: residual norm of the normal equations, relative to the first one, at which a head stops.
        sinks: first tokens of a span that starts at position 0; always kept and never changed.
        pool_kernel: width (odd) of the average pool over SnapKV scores.

    Raises:
        ValueError: a field is out of range, not finite, or names an unknown method.
    """

    name: str
    scorer: str
    score_queries: QueryKind
    fit_queries: QueryKind
    n_window: int
    n_strata: int
    n_held_out: int
    rerotate: bool
    query_weight: float
    lambda_k: float
    lambda_v: float
    cap_k: float | None
    cap_v: float | None
    fixed_share: float
    steps: int = 1
    guard: bool = True
    value_step: bool = True
    key_step: bool = True
    cg_iterations: int = 16
    cg_tolerance: float = 1e-6
    sinks: int = 4
    pool_kernel: int = 5

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"profile {self.name!r}: expected a finite {field.name}, got {value}")
        for kind in ("score_queries", "fit_queries"):
            if getattr(self, kind) not in get_args(QueryKind):
                raise ValueError(
                    f"profile {self.name!r}: expected {kind} to be one of {get_args(QueryKind)}, "
                    f"got {getattr(self, kind)!r}"
                )
        get_scorer(self.scorer)
        self._at_least("n_window", 1 if self.uses("window") else 0)
        self._at_least("n_strata", 1 if self.uses("strata") else 0)
        self._at_least("n_held_out", 1)
        self._at_least("steps", 1)
        self._at_least("cg_iterations", 1)
        self._at_least("sinks", 0)
        self._at_least("lambda_k", 0.0)
        self._at_least("lambda_v", 0.0)
        self._at_least("cg_tolerance", 0.0)
        for name in ("cap_k", "cap_v"):
            if getattr(self, name) is not None:
                self._at_least(name, 0.0)
        if self.query_weight <= 0:
            raise ValueError(f"profile {self.name!r}: expected query_weight > 0, got {self.query_weight}")
        if not 0 <= self.fixed_share <= 1:
            raise ValueError(
                f"profile {self.name!r}: expected fixed_share between 0 and 1, got {self.fixed_share}"
            )
        if self.pool_kernel < 1 or self.pool_kernel % 2 == 0:
            raise ValueError(
                f"profile {self.name!r}: expected pool_kernel to be odd and positive, got {self.pool_kernel}"
            )

    def _at_least(self, field: str, least: float) -> None:
        if getattr(self, field) < least:
            raise ValueError(
                f"profile {self.name!r}: expected {field} >= {least}, got {getattr(self, field)}"
            )

    @property
    def regresses(self) -> bool:
        """Whether any step changes keys or values at all."""
        return self.value_step or self.key_step

    def uses(self, kind: QueryKind) -> bool:
        """Whether queries of this kind are needed, for the selection or for the regression."""
        return self.score_queries == kind or (self.regresses and self.fit_queries == kind)


# The paper gives 1e-2 for Llama and 1e-1 for Mistral and Qwen: `dataclasses.replace` the lambdas. Its
# queries are window queries, which never move; re-rotation here only concerns the held-out ones, so that
# its quality means the same as the other profiles'. (At their own positions they would mostly miss their
# neighbours, which nothing behind the span attends to: a relative error near 1 for any selection.)
_PAPER = Profile(
    name="paper",
    scorer="snapkv",
    score_queries="window",
    fit_queries="window",
    n_window=32,
    n_strata=0,
    n_held_out=16,
    rerotate=True,
    query_weight=1.0,
    lambda_k=1e-2,
    lambda_v=1e-2,
    cap_k=None,
    cap_v=None,
    fixed_share=0.1,
    guard=False,
)

# Even budgets only: every KV head keeps the same number of tokens (the published code also has a
# ragged variant, whose heads share one budget). beta is Llama's; Mistral uses 0.
_RELEASE = Profile(
    name="release",
    scorer="criticalkv",
    score_queries="window",
    fit_queries="strata",
    n_window=32,
    n_strata=32,
    n_held_out=16,
    rerotate=True,
    query_weight=6 / 32,
    lambda_k=1e-2,
    lambda_v=1e-2,
    cap_k=0.025,
    cap_v=0.1,
    fixed_share=0.1,
    guard=True,
)

# The probe's own queries score and fit, so that nothing else has to be computed. Their number is most of
# what a compression costs, and on ten passages of a small model more of them gained little: mean KL
# divergence of continuations at a tenth of the tokens 0.091 with 24 strata, 0.089 with 32, 0.088 with 48 (and
# 0.113 without regression). 4 iterations of the key step did as well as 16. The weights add up to
# `release`'s 6, which keeps its balance between loss and ridge.
_DEFAULT = Profile(
    name="default",
    scorer="stratified_value",
    score_queries="strata",
    fit_queries="strata",
    n_window=32,
    n_strata=24,
    n_held_out=8,
    rerotate=True,
    query_weight=6 / 24,
    lambda_k=1e-2,
    lambda_v=1e-2,
    cap_k=0.025,
    cap_v=0.1,
    fixed_share=0.1,
    guard=True,
    cg_iterations=4,
)

# `default`'s selection with the selected tokens stored as they are.
_COPY = replace(_DEFAULT, name="copy", value_step=False, key_step=False)

_PROFILES = {profile.name: profile for profile in (_DEFAULT, _PAPER, _RELEASE, _COPY)}


def profile_names() -> tuple[str, ...]:
    """Names that `get_profile` knows, the default first."""
    return tuple(_PROFILES)


def get_profile(name: str) -> Profile:
    """The built-in profile of this name.

    Raises:
        ValueError: no such profile; the message lists the valid names.
    """
    if name not in _PROFILES:
        raise ValueError(f"expected a profile name, one of {', '.join(_PROFILES)}, got {name!r}")
    return _PROFILES[name]
