"""Named settings of one compression: which queries, which selection, how much regression.

`paper` and `release` are the two published settings of GRKV (arXiv 2605.31105): the text of the
paper and the code published with it. `default`, `best` and `copy` are this project's own. Where a name ends
with `per_head`, the heads of a layer share one budget.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from grkv_sglang.core.selection import PassKind, Storage, get_scorer


@dataclass(frozen=True)
class Profile:
    """Everything that decides how one layer of a span is compressed, except the budget.

    Attributes:
        name: shown in reports.
        scorer: name of the selection method (`grkv_sglang.core.selection.scorer_names`).
        n_window: the last positions of the span, which are always kept and never changed.
        n_strata: number of strata whose middle queries strata methods select by.
        window_tokens: the last positions that window queries are taken from; None: `n_window`.
        window_queries: how many of their queries window methods select by, evenly spaced; None: all.
        fit_window: how many of their queries the regression fits, evenly spaced; all where there are fewer.
        fit_strata: number of strata whose middle queries the regression fits.
        fit_repetition: number of queries that the regression fits out of the repetition of the span, evenly
            spaced (free where the selection repeats the span anyhow, else it costs that pass).
        fit_questions: number of queries that the regression fits out of generic requests behind the span.
        n_held_out: queries that only measure quality; at least 1, because a quality that was never
            measured would have to be guessed.
        rerotate: strata and held-out queries are rotated to the span's last position, from where
            they see every key. Window queries stay where they are.
        repetition_reach_tokens: how far on either side of what it repeats a repetition looks into the span;
            None: everywhere.
        query_weight: the weight `w` of every fitted query in the loss `sum_i w ||O_i - Y_i||^2`.
        lambda_k, lambda_v: ridge of the key and of the value step.
        cap_k, cap_v: upper bound on `||dK||_F / ||K_F||_F` and `||dV||_F / ||V_F||_F` per KV head
            over the changeable tokens `F`; None for no bound.
        fixed_share: the share (beta) of the retained tokens, best scores first, that never changes.
        steps: number of value + key rounds.
        guard: keep, per KV head, whichever of {unchanged, value only, key and value} has the
            smallest penalised loss.
        guard_share: the share of the fitted queries that the steps do not see and the guard judges by; 0: it
            judges by the queries that were fitted.
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
    n_window: int
    n_held_out: int
    rerotate: bool
    query_weight: float
    lambda_k: float
    lambda_v: float
    cap_k: float | None
    cap_v: float | None
    fixed_share: float
    n_strata: int = 0
    window_tokens: int | None = None
    window_queries: int | None = None
    fit_window: int = 0
    fit_strata: int = 0
    fit_repetition: int = 0
    fit_questions: int = 0
    repetition_reach_tokens: int | None = 256
    steps: int = 1
    guard: bool = True
    guard_share: float = 0.0
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
        scorer = get_scorer(self.scorer)
        self._at_least("n_window", 0)
        least = 1 if "window" in scorer.queries or self.fit_window else 0
        if self.window_tokens is None:
            self._at_least("n_window", least)
        else:
            self._at_least("window_tokens", least)
        if self.window_queries is not None:
            self._at_least("window_queries", 1)
        self._at_least("n_strata", 1 if "strata" in scorer.queries else 0)
        self._at_least("fit_window", 0)
        self._at_least("fit_strata", 0)
        self._at_least("fit_questions", 0)
        if self.repetition_reach_tokens is not None:
            self._at_least("repetition_reach_tokens", 0)
        self._at_least("fit_repetition", 0)
        counts = (self.fit_window, self.fit_strata, self.fit_repetition, self.fit_questions)
        if self.regresses and not any(counts):
            raise ValueError(
                f"profile {self.name!r}: a value or key step needs queries to fit: set fit_window, "
                "fit_strata, fit_repetition or fit_questions"
            )
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
        if not 0 <= self.guard_share <= 0.5:
            raise ValueError(
                f"profile {self.name!r}: expected guard_share between 0 and 0.5, got {self.guard_share}"
            )
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

    @property
    def storage(self) -> Storage:
        """Which budgets its selection uses."""
        return get_scorer(self.scorer).storage

    @property
    def passes(self) -> frozenset[PassKind]:
        """The passes beyond the probe that a compression needs."""
        return get_scorer(self.scorer).passes | frozenset(self.fitted_of_passes)

    @property
    def fitted_of_passes(self) -> dict[PassKind, int]:
        """How many queries of which passes the regression fits."""
        wanted: dict[PassKind, int] = {"repetition": self.fit_repetition, "questions": self.fit_questions}
        return {kind: count for kind, count in wanted.items() if self.regresses and count}

    @property
    def extra_prefills(self) -> int:
        """How many of the passes cost about a prefill of the span each."""
        return len(self.passes - {"questions"})


# The paper gives 1e-2 for Llama and 1e-1 for Mistral and Qwen: `dataclasses.replace` the lambdas. Its
# queries are window queries, which never move; re-rotation here only concerns the held-out ones, so that
# its quality means the same as the other profiles'. (At their own positions they would mostly miss their
# neighbours, which nothing behind the span attends to: a relative error near 1 for any selection.)
_PAPER = Profile(
    name="paper",
    scorer="snapkv",
    n_window=32,
    fit_window=32,
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

# Even budgets: every KV head keeps the same number of tokens. The published code also has a variant whose
# heads share one budget: `release_per_head`. beta is Llama's; Mistral uses 0.
_RELEASE = Profile(
    name="release",
    scorer="criticalkv",
    n_window=32,
    fit_strata=32,
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

# No pass over the span: queries of its end and two short requests behind it score and fit, so that hardly
# anything else has to be computed. The last 64 queries, as text that repeats itself is copied from places
# that the last 32 do not look at, and what follows the tokens that they look at, because that is copied next.
# They count twice: that helps the text that follows more than it costs answers. What each part adds is
# measured in docs/quality.md.
# The weights add up to about `release`'s 6, which keeps its balance between loss and ridge; 4 iterations of
# the key step did as well as 16.
_DEFAULT = Profile(
    name="default",
    scorer="question_mass~snapkv_onward~snapkv_onward",
    n_window=32,
    window_tokens=64,
    fit_window=16,
    fit_questions=12,
    n_held_out=8,
    rerotate=True,
    query_weight=6 / 28,
    lambda_k=1e-2,
    lambda_v=1e-2,
    cap_k=0.025,
    cap_v=0.1,
    fixed_share=0.1,
    guard=True,
    cg_iterations=4,
)

# One repetition of the span more: about a prefill. Three ways to read it, because each finds tokens that the
# others miss: the sum of the attention follows the text, the sum of its squares helps answers, its maximum
# finds single facts.
_BEST = replace(
    _DEFAULT,
    name="best",
    fit_window=32,
    scorer="repetition_mass~repetition_energy~kvzip~question_mass~snapkv_onward~snapkv_onward",
    fit_strata=24,
    fit_repetition=24,
    fit_questions=24,
    query_weight=6 / 104,
    repetition_reach_tokens=None,
)

# `default`'s selection with the selected tokens stored as they are.
_COPY = replace(_DEFAULT, name="copy", value_step=False, key_step=False)

# The heads of a layer share one budget: what holds the largest shares of their attention stays, whichever
# head's it is.
_PER_HEAD = replace(_DEFAULT, name="per_head", scorer=f"per_head:{_DEFAULT.scorer}")
_RELEASE_PER_HEAD = replace(_RELEASE, name="release_per_head", scorer="critical_adakv")

_PROFILES = {
    profile.name: profile
    for profile in (_DEFAULT, _BEST, _PAPER, _RELEASE, _COPY, _PER_HEAD, _RELEASE_PER_HEAD)
}


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
