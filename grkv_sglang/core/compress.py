"""One layer of one span: selection, regression and the measurement of what they cost."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from grkv_sglang.core.attention import Attention, Partial, attend, group_rows
from grkv_sglang.core.profiles import Profile, QueryKind
from grkv_sglang.core.queries import QueryPlan
from grkv_sglang.core.regression import UNCHANGED, Problem, regress
from grkv_sglang.core.rope import RotaryTable, rotate_forward
from grkv_sglang.core.selection import ScoringContext, get_scorer
from grkv_sglang.core.selection.base import always_kept_tokens, indices_of, top_mask

_STORAGE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class LayerInputs:
    """One layer's tensors for a span of n tokens and m probed queries, all on one device.

    Attributes:
        keys: [n, Hkv, d] post-RoPE, in the storage dtype (float16, bfloat16 or float32).
        values: [n, Hkv, dv], same dtype.
        queries: [m, Hq, d] post-RoPE queries at the plan's positions, any float dtype. Query head h
            reads KV head h // (Hq / Hkv).
        scale: the layer's attention scaling.
        ancestor_keys: [p, Hkv, d] cached tokens before the span, all visible to every query; None or
            p = 0 when there are none.
        ancestor_values: [p, Hkv, dv], given exactly when `ancestor_keys` is.
        output_projection: [hidden, Hq * dv], for selection methods that need it.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor
    scale: float
    ancestor_keys: Tensor | None = None
    ancestor_values: Tensor | None = None
    output_projection: Tensor | None = None


@dataclass(frozen=True)
class LayerResult:
    """What to store for one layer, and how good it is.

    The three sums run over KV heads, their query heads and the held-out queries, of the squared norm of
    a head's attention output `O`, with the target `Y` over ancestors and the full span. They are not
    finite where an input was not.

    Attributes:
        kept: [Hkv, c] int64, ascending, relative to the span's start.
        keys: [c, Hkv, d] in the storage dtype; row j of head h stands for token `kept[h, j]`.
        values: [c, Hkv, dv] likewise.
        error_before: sum of `||O - Y||^2` with the selected tokens as they were.
        error_after: the same with the tokens of this result.
        reference: sum of `||Y||^2`.
        states: [Hkv] int8, what the regression changed: 0 nothing, 1 values only, 2 keys and values (the
            constants and their fine print are in `grkv_sglang.core.regression`).
        select_s: seconds for the attention over the full span and the selection. On a GPU these are
            launch times up to the first wait; only the sum of the two is exact.
        regress_s: seconds for the regression and the measurement.
    """

    kept: Tensor
    keys: Tensor
    values: Tensor
    error_before: float
    error_after: float
    reference: float
    states: Tensor
    select_s: float
    regress_s: float


def relative_error(error: float, reference: float) -> float:
    """`sqrt(error / reference)` of two sums of squares; 0 for no error at all, inf where it is unknown
    (a NaN, or an error against a zero reference)."""
    if error == 0:
        return 0.0
    ratio = error / reference if reference else math.inf
    return math.sqrt(ratio) if ratio >= 0 else math.inf


def quality(error: float, reference: float) -> float:
    """`1 - sqrt(error / reference)` between 0 and 1; 0 where the error is unknown."""
    return max(0.0, 1.0 - relative_error(error, reference))


class SpanQuality:
    """Errors of a whole span, summed over its layers before they are related to each other."""

    def __init__(self) -> None:
        self._before = 0.0
        self._after = 0.0
        self._reference = 0.0

    def add(self, result: LayerResult) -> None:
        """Count one layer."""
        self.add_sums(result.error_before, result.error_after, result.reference)

    def add_sums(self, error_before: float, error_after: float, reference: float) -> None:
        """Count sums of squares that were taken elsewhere: over the heads of another rank."""
        self._before += error_before
        self._after += error_after
        self._reference += reference

    @property
    def sums(self) -> tuple[float, float, float]:
        """Squared error before and after the regression, squared reference."""
        return self._before, self._after, self._reference

    @property
    def error_before(self) -> float:
        """Relative error of the attention outputs with the selection alone."""
        return relative_error(self._before, self._reference)

    @property
    def error_after(self) -> float:
        """Relative error of the attention outputs after the regression."""
        return relative_error(self._after, self._reference)

    @property
    def quality(self) -> float:
        """1 for a span that reproduces the held-out attention outputs exactly, down to 0."""
        return quality(self._after, self._reference)


@dataclass(frozen=True)
class _Rows:
    """Some of the plan's queries, each at the position that it is used at.

    Attributes:
        queries: [Hkv, N, d] float32 query rows.
        positions: [m] int64, the last token that each query sees; None when all see the whole span.
        beside: their attention over the ancestors.
    """

    queries: Tensor
    positions: Tensor | None
    beside: Partial | None


class _Layer:
    """The inputs as the mathematics wants them: float32, KV heads first."""

    def __init__(
        self, inputs: LayerInputs, plan: QueryPlan, profile: Profile, rotary: RotaryTable | None
    ) -> None:
        self.keys = inputs.keys.transpose(0, 1).float()
        self.values = inputs.values.transpose(0, 1).float()
        self.scale = inputs.scale
        self._queries = inputs.queries
        self._ancestors: tuple[Tensor, Tensor] | None = None
        keys, values = inputs.ancestor_keys, inputs.ancestor_values
        if keys is not None and values is not None and len(keys):
            self._ancestors = keys.transpose(0, 1).float(), values.transpose(0, 1).float()
        self._positions = plan.positions
        self._profile = profile
        self._rotary = rotary

    def rows(self, chosen: Tensor, kind: QueryKind) -> _Rows:
        """The queries `chosen` [m] bool of the plan, moved to where queries of this kind are used."""
        n_kv_heads, n_tokens, _ = self.keys.shape
        index = chosen.nonzero().squeeze(1)
        at = self._positions[index]
        queries = self._queries[index.to(self._queries.device)].float()
        positions: Tensor | None = at.to(self.keys.device)
        if kind == "strata" and self._profile.rerotate:
            if self._rotary is None:
                raise ValueError(
                    f"expected a rotary table, which profile {self._profile.name!r} needs to move queries "
                    "to the span's last position, got None"
                )
            queries = rotate_forward(queries, n_tokens - 1 - at, self._rotary)
            positions = None
        rows = group_rows(queries, n_kv_heads)
        beside = None if self._ancestors is None else attend(rows, *self._ancestors, scale=self.scale)
        return _Rows(rows, positions, beside)

    def attend(self, rows: _Rows) -> Attention:
        """Over ancestors and the full span."""
        visible = None
        if rows.positions is not None:
            token = torch.arange(self.keys.shape[1], device=self.keys.device)
            visible = token <= rows.positions[:, None]
        return attend(
            rows.queries, self.keys, self.values, scale=self.scale, visible=visible, beside=rows.beside
        )

    def retained(self, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [Hkv, c, ...] of the tokens `kept` [Hkv, c]."""
        head = torch.arange(kept.shape[0], device=kept.device).unsqueeze(1)
        return self.keys[head, kept], self.values[head, kept]

    def problem(self, rows: _Rows, target: Tensor, kept: Tensor) -> Problem:
        """Reproducing `target` [Hkv, N, dv] for these rows from the tokens `kept` [Hkv, c]."""
        visible = None
        if rows.positions is not None:
            visible = kept.unsqueeze(1) <= rows.positions[:, None]
        return Problem(rows.queries, target, visible, rows.beside, self.scale)


def compress_layer(
    inputs: LayerInputs,
    plan: QueryPlan,
    profile: Profile,
    *,
    n_slots: int,
    starts_sequence: bool,
    rotary: RotaryTable | None,
) -> LayerResult:
    """Compress one layer of a span of n tokens into `n_slots` slots per KV head.

    Everything is computed in float32. The largest tensors are the softmax weights, m * Hq * n float32
    numbers for the span and m * Hq * p for the ancestors.

    Args:
        inputs: the layer's tensors.
        plan: the positions that `inputs.queries` belong to, from `plan_queries(n, profile)`.
        profile: what to do.
        n_slots: c, from 1 to n. At n all tokens are returned bit for bit and nothing is computed.
        starts_sequence: the span starts at position 0, so its first tokens are attention sinks.
        rotary: the model's rotary table, needed where the profile re-rotates queries.

    Returns:
        See `LayerResult`. A head with a non-finite input keeps its selected tokens as they were.

    Raises:
        ValueError: shapes do not fit each other or the plan; the budget leaves nothing to select; the
            rotary table is missing or too short; the selection lacks its output projection.
    """
    _check(inputs, plan, n_slots)
    started = time.perf_counter()
    n_tokens, n_kv_heads, _ = inputs.keys.shape
    device = inputs.keys.device
    if n_slots == n_tokens:
        return LayerResult(
            kept=torch.arange(n_tokens, device=device).expand(n_kv_heads, -1).clone(),
            keys=inputs.keys.clone(),
            values=inputs.values.clone(),
            error_before=0.0,
            error_after=0.0,
            reference=0.0,
            states=torch.full((n_kv_heads,), UNCHANGED, dtype=torch.int8, device=device),
            select_s=time.perf_counter() - started,
            regress_s=0.0,
        )
    always_kept = always_kept_tokens(
        n_tokens,
        n_slots=n_slots,
        n_window=profile.n_window,
        sinks=profile.sinks,
        starts_sequence=starts_sequence,
        device=device,
    )
    scorer = get_scorer(profile.scorer)
    layer = _Layer(inputs, plan, profile, rotary)
    score_rows = layer.rows(plan.score, profile.score_queries)
    scored = layer.attend(score_rows)
    ctx = ScoringContext(
        weights=scored.weights.view(n_kv_heads, int(plan.score.sum()), -1, n_tokens),
        values=layer.values,
        output_projection=inputs.output_projection,
        n_window=profile.n_window,
        pool_kernel=profile.pool_kernel,
    )
    scores = scorer.score(ctx)
    # Until the end the tokens that may change come first, which spares the regression all indexing.
    kept, n_free = _free_first(
        scorer.select(ctx, scores, always_kept, n_slots), scores, always_kept, profile.fixed_share
    )
    keys, values = layer.retained(kept)
    held_rows = layer.rows(plan.held_out, "strata")
    held_out = layer.problem(held_rows, layer.attend(held_rows).output, kept)
    selected = time.perf_counter()

    new_keys, new_values = keys, values
    states = torch.full((n_kv_heads,), UNCHANGED, dtype=torch.int8, device=device)
    if profile.regresses and n_free:
        if profile.fit_queries == profile.score_queries and torch.equal(plan.fit, plan.score):
            fit = layer.problem(score_rows, scored.output, kept)
        else:
            fit_rows = layer.rows(plan.fit, profile.fit_queries)
            fit = layer.problem(fit_rows, layer.attend(fit_rows).output, kept)
        regressed = regress(fit, keys, values, n_free, profile, inputs.keys.dtype)
        new_keys, new_values, states = regressed.keys, regressed.values, regressed.states

    before = held_out.attend(keys, values).output - held_out.target
    after = held_out.attend(new_keys, new_values).output - held_out.target
    sums = [tensor.double().square().sum() for tensor in (before, after, held_out.target)]
    error_before, error_after, reference = torch.stack(sums).tolist()

    ascending, order = kept.sort(dim=-1)
    head = torch.arange(n_kv_heads, device=device)
    return LayerResult(
        kept=ascending,
        # [c, Hkv, d]
        keys=new_keys[head, order.t()].to(inputs.keys.dtype).contiguous(),
        values=new_values[head, order.t()].to(inputs.values.dtype).contiguous(),
        error_before=error_before,
        error_after=error_after,
        reference=reference,
        states=states,
        select_s=selected - started,
        regress_s=time.perf_counter() - selected,
    )


def _free_first(kept: Tensor, scores: Tensor, always_kept: Tensor, fixed_share: float) -> tuple[Tensor, int]:
    """Order the retained tokens [Hkv, c] so that those that the regression may change come first.

    Fixed are the tokens that are always kept (sinks and window: they did not compete by score) and, of the
    rest, the `floor(fixed_share * c)` with the highest scores.

    Returns:
        kept [Hkv, c] int64, reordered, and the number of changeable tokens, the same for every head.
    """
    n_slots = kept.shape[1]
    changeable = ~always_kept[kept]
    n_changeable = n_slots - int(always_kept.sum())
    # The tiny term makes 0.29 of 100 tokens 29, as written.
    n_fixed = min(int(fixed_share * n_slots + 1e-9), n_changeable)
    free = changeable & ~top_mask(scores.gather(1, kept), changeable, n_fixed)
    n_free = n_changeable - n_fixed
    order = torch.cat((indices_of(free, n_free), indices_of(~free, n_slots - n_free)), dim=1)
    return kept.gather(1, order), n_free


def _check(inputs: LayerInputs, plan: QueryPlan, n_slots: int) -> None:
    """Raise ValueError where the inputs do not fit each other or the plan."""
    keys, values, queries = inputs.keys, inputs.values, inputs.queries
    if keys.ndim != 3 or values.ndim != 3 or keys.shape[:2] != values.shape[:2]:
        raise ValueError(
            "expected keys [n, Hkv, d] and values [n, Hkv, dv], "
            f"got {list(keys.shape)} and {list(values.shape)}"
        )
    n_tokens, n_kv_heads, d = keys.shape
    if keys.dtype not in _STORAGE_DTYPES or values.dtype != keys.dtype:
        raise ValueError(
            f"expected keys and values of one dtype out of {', '.join(map(str, _STORAGE_DTYPES))}, "
            f"got {keys.dtype} and {values.dtype}"
        )
    m = len(plan.positions)
    if queries.ndim != 3 or queries.shape[0] != m or queries.shape[2] != d or queries.shape[1] % n_kv_heads:
        raise ValueError(
            f"expected queries [{m}, a multiple of {n_kv_heads}, {d}] for this plan and these keys, "
            f"got {list(queries.shape)}"
        )
    if m == 0 or int(plan.positions.min()) < 0 or int(plan.positions.max()) >= n_tokens:
        raise ValueError(
            f"expected a plan for a span of {n_tokens} tokens, got positions {plan.positions.tolist()}"
        )
    if (inputs.ancestor_keys is None) != (inputs.ancestor_values is None):
        raise ValueError("expected ancestor_keys and ancestor_values together, got only one of them")
    if inputs.ancestor_keys is not None and inputs.ancestor_values is not None:
        p = inputs.ancestor_keys.shape[0]
        expected = (p, n_kv_heads, d), (p, n_kv_heads, values.shape[2])
        if (inputs.ancestor_keys.shape, inputs.ancestor_values.shape) != expected:
            raise ValueError(
                f"expected ancestor keys and values {expected}, "
                f"got {list(inputs.ancestor_keys.shape)} and {list(inputs.ancestor_values.shape)}"
            )
    if not 1 <= n_slots <= n_tokens:
        raise ValueError(f"expected between 1 and {n_tokens} slots for {n_tokens} tokens, got {n_slots}")
