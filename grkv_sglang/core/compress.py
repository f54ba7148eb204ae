"""One layer of one span: selection, regression and the measurement of what they cost."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from grkv_sglang.core import kernels
from grkv_sglang.core.attention import Attention, Partial, attend, blocks, by_token, group_rows
from grkv_sglang.core.profiles import Profile
from grkv_sglang.core.queries import QueryPlan
from grkv_sglang.core.regression import UNCHANGED, Problem, regress
from grkv_sglang.core.rope import RotaryTable, rotate_forward
from grkv_sglang.core.selection import PassKind, PassStatistics, QueryKind, Scorer, ScoringContext, get_scorer
from grkv_sglang.core.selection.base import always_kept_tokens, top_masks
from grkv_sglang.core.storage import STORAGE_DTYPES, Storage


@dataclass(frozen=True)
class WindowAttention:
    """Attention of the plan's scoring window queries, where they are, over ancestors and the full span.

    Attributes:
        mean: [Hkv, n] float32, the weights over the span, the mean over queries and group.
        output: [m, Hq, dv] float32, in the order of the plan.
    """

    mean: Tensor
    output: Tensor


def attend_probe(
    window: Tensor,
    others: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    positions: Tensor,
    visible: Tensor,
    n_tokens: int,
    scale: float,
    held: Tensor | None = None,
) -> tuple[WindowAttention, Tensor]:
    """What a probe computes for its queries in any case, kept so that nothing computes it again.

    All queries in the same products: a few queries cost little more than reading a long span's keys and
    values once more.

    Args:
        window: [m, Hq, d] post-RoPE queries that score as the window; there may be none.
        others: [k, Hq, d], any others.
        keys, values: [p + n, Hkv, ...] of what lies before the span, all visible, and then of the span.
        positions: [m] int64, where the window's queries are in the span, ascending.
        visible: [j, n] bool, what of the span each of the first j others sees, one token at least; those
            behind them see all of it.
        n_tokens: n.
        scale: factor on the logits.
        held: [Hkv, p] bool, which head holds a token in a row before the span; None: every head in each.

    Returns:
        Of the window queries, and the outputs [k, Hq, dv] of the others in float32.
    """
    n_before, n_kv_heads = len(keys) - n_tokens, keys.shape[1]
    n_window, n_heads, _ = window.shape
    group = n_heads // n_kv_heads
    keys, values = keys.transpose(0, 1), values.transpose(0, 1)
    if n_window and held is None and kernels.has_kernels(keys.device, keys.shape[2], values.shape[2]):
        mean, output = kernels.window_mean_and_output(
            group_rows(window, n_kv_heads), keys, values, positions, n_tokens=n_tokens, scale=scale
        )
        _, of_others = attend_probe(
            window[:0], others, keys.transpose(0, 1), values.transpose(0, 1),
            positions=positions[:0], visible=visible, n_tokens=n_tokens, scale=scale,
        )  # fmt: skip
        return WindowAttention(mean, by_token(output, group)), of_others
    rows = group_rows(torch.cat([window, others]).float() * scale, n_kv_heads)
    n_window_rows = n_window * group
    keys, values = keys.float(), values.float()
    first = int(positions[0]) + 1 if n_window else n_tokens
    hidden = torch.arange(first, n_tokens, device=keys.device) > positions.to(keys.device)[:, None]
    mean = rows.new_zeros(n_kv_heads, n_tokens)
    output = rows.new_empty(*rows.shape[:2], values.shape[-1])
    for heads, some in blocks(n_kv_heads, rows.shape[1], keys.shape[1], multiple=group, device=rows.device):
        logits = torch.bmm(rows[heads, some], keys[heads].transpose(1, 2))
        at, end = some.start // group, some.stop // group
        by_query = logits.unflatten(1, (-1, group))
        in_window = max(0, min(end, n_window) - at)
        tail = by_query[:, :in_window, :, n_before + first :]
        tail.masked_fill_(hidden[at : at + in_window].unsqueeze(1), -torch.inf)
        of_others = visible[max(0, at - n_window) : max(0, end - n_window)]
        masked = by_query[:, in_window : in_window + len(of_others), :, n_before:]
        masked.masked_fill_(~of_others.unsqueeze(1), -torch.inf)
        if held is not None:
            logits[..., :n_before].masked_fill_(~held[heads].unsqueeze(1), -torch.inf)
        weights = logits.softmax(dim=-1)
        output[heads, some] = torch.bmm(weights, values[heads])
        if in_window:
            mean[heads] += kernels.sum_over_rows(weights[:, : in_window * group, n_before:]) / n_window_rows
    outputs = by_token(output, group)
    return WindowAttention(mean, outputs[:n_window]), outputs[n_window:]


@dataclass(frozen=True)
class LayerInputs:
    """One layer's tensors for a span of n tokens and m probed queries, all on one device.

    Attributes:
        keys: [n, Hkv, d] post-RoPE, as stored: in a dtype of `STORAGE_DTYPES`.
        values: [n, Hkv, dv], same dtype.
        queries: [m, Hq, d] post-RoPE queries at the plan's positions, any float dtype. Query head h
            reads KV head h // (Hq / Hkv).
        scale: the layer's attention scaling.
        ancestor_keys: [p, Hkv, d] cached tokens before the span, all visible to every query; None or
            p = 0 when there are none.
        ancestor_values: [p, Hkv, dv], given exactly when `ancestor_keys` is. Stored like the span's.
        ancestor_held: [Hkv, p] bool, which head holds a token in a row of these two (the others' rows are not
            looked at, but finite); None: every head in each.
        output_projection: [hidden, Hq * dv], for selection methods that need it.
        passes: by kind, what the profile's passes left of this layer.
        pass_queries: by kind, [k, Hq, d] post-RoPE queries out of a pass, from behind the span; those that
            the profile fits.
        pass_outputs: by kind, [k, Hq, dv] their attention over ancestors and the full span where it is known
            already; it is computed for the others.
        window: attention of the plan's window queries where it is known already; None: it is computed.
        held_out: [k, Hq, dv] float32, likewise of the plan's held-out queries, where the profile uses them.
        layer, n_layers: which layer this is, and of how many.
        key_scale, value_scale: what attention multiplies stored keys and values by.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor
    scale: float
    ancestor_keys: Tensor | None = None
    ancestor_values: Tensor | None = None
    ancestor_held: Tensor | None = None
    output_projection: Tensor | None = None
    passes: Mapping[PassKind, PassStatistics] = field(default_factory=dict)
    pass_queries: Mapping[PassKind, Tensor] = field(default_factory=dict)
    pass_outputs: Mapping[PassKind, Tensor] = field(default_factory=dict)
    window: WindowAttention | None = None
    held_out: Tensor | None = None
    layer: int = 0
    n_layers: int = 1
    key_scale: float = 1.0
    value_scale: float = 1.0

    @property
    def key_storage(self) -> Storage:
        return Storage(self.keys.dtype, self.key_scale)

    @property
    def value_storage(self) -> Storage:
        return Storage(self.values.dtype, self.value_scale)


@dataclass(frozen=True)
class LayerResult:
    """What to store for one layer, and how good it is.

    The three sums run over KV heads, their query heads and the held-out queries, of the squared norm of
    a head's attention output `O`, with the target `Y` over ancestors and the full span. They are not
    finite where an input was not.

    Attributes:
        kept: [Hkv, c] int64, ascending, relative to the span's start. With per-head budgets c is the largest
            head's number, and behind the last token of a head comes -1.
        keys: [c, Hkv, d] to be stored, like the inputs' in dtype and scale; row j of head h stands for token
            `kept[h, j]`; zero where there is none.
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

    @property
    def is_finite(self) -> bool:
        """Whether every stored number is."""
        # Converted: torch 2.14 cannot ask this of all dtypes.
        return all(bool(stored.float().isfinite().all()) for stored in (self.keys, self.values))


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
    """Some queries, each at the position that it is used at.

    Attributes:
        queries: [Hkv, N, d] float32 query rows.
        positions: [m] int64, the last token of the span that each query sees.
        see_all: every query sees the whole span.
        ancestors: keys [Hkv, p, d] and values [Hkv, p, dv] before the span, if there are any, and which of
            them each head has: [Hkv, 1, p] bool, None for all.
        scale: factor on the logits.
    """

    queries: Tensor
    positions: Tensor
    see_all: bool
    ancestors: tuple[Tensor, Tensor, Tensor | None] | None
    scale: float

    @cached_property
    def beside(self) -> Partial | None:
        """Their attention over the ancestors."""
        if self.ancestors is None:
            return None
        keys, values, held = self.ancestors
        return attend(self.queries, keys, values, scale=self.scale, visible=held)

    def concatenated(self, others: Sequence[_Rows]) -> _Rows:
        parts = (self, *others)
        return replace(
            self,
            queries=torch.cat([part.queries for part in parts], dim=1),
            positions=torch.cat([part.positions for part in parts]),
            see_all=all(part.see_all for part in parts),
        )


@dataclass(frozen=True)
class _Seen:
    """Queries and their attention over ancestors and the full span: `mean` [Hkv, n], the weights' mean over
    all rows; `output` [Hkv, N, dv]."""

    rows: _Rows
    mean: Tensor
    output: Tensor

    def some(self, chosen: Tensor) -> tuple[_Rows, Tensor]:
        """Rows and outputs of the queries `chosen` [m] bool."""
        if chosen.all():
            return self.rows, self.output
        rows = self.rows
        group = rows.queries.shape[1] // len(rows.positions)
        index = chosen.repeat_interleave(group).to(rows.queries.device)
        positions = rows.positions[chosen.to(rows.positions.device)]
        return replace(rows, queries=rows.queries[:, index], positions=positions), self.output[:, index]


class _Layer:
    """The inputs as the mathematics wants them: float32, KV heads first."""

    def __init__(
        self, inputs: LayerInputs, plan: QueryPlan, profile: Profile, rotary: RotaryTable | None
    ) -> None:
        # Contiguous: every product with them would copy them again.
        key_storage, value_storage = inputs.key_storage, inputs.value_storage
        self.keys = key_storage.load(inputs.keys.transpose(0, 1)).contiguous()
        self.values = value_storage.load(inputs.values.transpose(0, 1)).contiguous()
        self.scale = inputs.scale
        self.group = inputs.queries.shape[1] // inputs.keys.shape[1]
        self._queries = inputs.queries
        self._ancestors: tuple[Tensor, Tensor, Tensor | None] | None = None
        keys, values = inputs.ancestor_keys, inputs.ancestor_values
        if keys is not None and values is not None and len(keys):
            held = None if inputs.ancestor_held is None else inputs.ancestor_held.unsqueeze(1)
            self._ancestors = (
                key_storage.load(keys.transpose(0, 1)),
                value_storage.load(values.transpose(0, 1)),
                held,
            )
        self._positions = plan.positions
        self._profile = profile
        self._inputs = inputs
        self.rotary = rotary

    def context(self, seen: Mapping[QueryKind, _Seen], *, n_sinks: int) -> ScoringContext:
        """What the selection may look at."""
        inputs = self._inputs
        return ScoringContext(
            keys=self.keys,
            values=self.values,
            attention={kind: of.mean for kind, of in seen.items()},
            queries={k: of.rows.queries.unflatten(1, (len(of.rows.positions), -1)) for k, of in seen.items()},
            passes=inputs.passes,
            output_projection=inputs.output_projection,
            rotary=self.rotary,
            scale=self.scale,
            n_window=self._profile.n_window,
            n_sinks=n_sinks,
            pool_kernel=self._profile.pool_kernel,
            layer=inputs.layer,
            n_layers=inputs.n_layers,
        )

    def rows(self, chosen: Tensor, kind: QueryKind) -> _Rows:
        """The queries `chosen` [m] bool of the plan, moved to where queries of this kind are used."""
        index = chosen.nonzero().squeeze(1)
        at = self._positions[index]
        queries = self._queries[index.to(self._queries.device)].float()
        if kind == "strata" and self._profile.rerotate:
            if self.rotary is None:
                raise ValueError(
                    f"expected a rotary table, which profile {self._profile.name!r} needs to move queries "
                    "to the span's last position, got None"
                )
            last = torch.full_like(at, self.keys.shape[1] - 1)
            return self._grouped(rotate_forward(queries, last - at, self.rotary), last)
        return self._grouped(queries, at)

    def seen(self, plan: QueryPlan, kind: QueryKind) -> _Seen:
        """The scoring queries of a kind."""
        rows, known = self.rows(plan.scoring(kind), kind), self._inputs.window
        if kind == "window" and known is not None:
            return _Seen(rows, known.mean, group_rows(known.output, self.keys.shape[0]))
        attention = self.attend(rows)
        return _Seen(
            rows, kernels.sum_over_rows(attention.weights) / attention.weights.shape[1], attention.output
        )

    def fitted(self, plan: QueryPlan, seen: Mapping[QueryKind, _Seen]) -> tuple[_Rows, Tensor]:
        """What the regression fits, any mixture of kinds, and the outputs [Hkv, N, dv] over the full span.

        `seen` holds what the selection has looked at already, to be used again where it is the same.
        """
        parts: list[tuple[_Rows, Tensor]] = []
        wanted: dict[QueryKind, Tensor] = {"window": plan.fit_window, "strata": plan.fit_strata}
        for kind, chosen in wanted.items():
            if not chosen.any():
                continue
            if kind in seen and not (chosen & ~plan.scoring(kind)).any():
                parts.append(seen[kind].some(chosen[plan.scoring(kind)]))
            else:
                rows = self.rows(chosen, kind)
                parts.append((rows, self.attend(rows).output))
        for pass_kind, count in self._profile.fitted_of_passes.items():
            queries = self._inputs.pass_queries.get(pass_kind)
            if queries is None or not len(queries):
                raise ValueError(
                    f"expected {count} queries of pass {pass_kind!r}, which profile "
                    f"{self._profile.name!r} fits, got none"
                )
            # They come from behind the span: every one sees all of it.
            last = torch.full((len(queries),), self.keys.shape[1] - 1)
            rows = self._grouped(queries.float(), last)
            parts.append((rows, self.outputs(rows, self._inputs.pass_outputs.get(pass_kind))))
        if not parts:
            raise ValueError(
                f"expected a plan with queries to fit, because profile {self._profile.name!r} has a value or "
                "key step, got none in fit_window and fit_strata, and no queries of passes"
            )
        rows, *others = (rows for rows, _ in parts)
        return rows.concatenated(others), torch.cat([output for _, output in parts], dim=1)

    def _grouped(self, queries: Tensor, positions: Tensor) -> _Rows:
        see_all = bool((positions >= self.keys.shape[1] - 1).all())
        rows = group_rows(queries, self.keys.shape[0])
        return _Rows(rows, positions.to(self.keys.device), see_all, self._ancestors, self.scale)

    def attend(self, rows: _Rows) -> Attention:
        """Over ancestors and the full span."""
        visible = None
        if not rows.see_all:
            token = torch.arange(self.keys.shape[1], device=self.keys.device)
            visible = token <= rows.positions[:, None]
        return attend(
            rows.queries, self.keys, self.values, scale=self.scale, visible=visible, beside=rows.beside
        )

    def outputs(self, rows: _Rows, known: Tensor | None) -> Tensor:
        """[Hkv, N, dv] over ancestors and the full span; `known` [k, Hq, dv] if a pass or probe computed
        them."""
        return self.attend(rows).output if known is None else group_rows(known, self.keys.shape[0])

    def retained(self, chosen: _Chosen) -> tuple[Tensor, Tensor]:
        """Keys and values [Hkv, c, ...] of the chosen tokens; zero where there is none."""
        head = torch.arange(chosen.tokens.shape[0], device=chosen.tokens.device).unsqueeze(1)
        keys, values = self.keys[head, chosen.tokens], self.values[head, chosen.tokens]
        if chosen.valid is not None:
            keys, values = (tensor * chosen.valid.unsqueeze(-1) for tensor in (keys, values))
        return keys, values

    def problem(self, rows: _Rows, target: Tensor, chosen: _Chosen) -> Problem:
        """Reproducing the outputs `target` [Hkv, N, dv] for these rows from the chosen tokens."""
        visible = None
        if not rows.see_all:
            visible = chosen.tokens.unsqueeze(1) <= rows.positions[:, None]
        if chosen.valid is not None:
            valid = chosen.valid.unsqueeze(1).expand(-1, len(rows.positions), -1)
            visible = valid if visible is None else visible & valid
        return Problem(rows.queries, target, visible, rows.beside, self.scale, self.group)


@dataclass(frozen=True)
class _Chosen:
    """The retained tokens, those that the regression may change first: which spares it all indexing.

    Attributes:
        tokens: [Hkv, c] int64 positions in the span; both the changeable and the other ones ascend.
        valid: [Hkv, c] bool, False where a head with fewer tokens than others holds none; None if all hold
            one.
        n_free: the first this many of each head may change.
    """

    tokens: Tensor
    valid: Tensor | None
    n_free: int

    @classmethod
    def of(cls, kept: Tensor, scores: Tensor, always_kept: Tensor, fixed_share: float) -> _Chosen:
        """From kept [Hkv, n] bool.

        Fixed are the tokens that are always kept (they did not compete by score) and, of the rest, the
        `floor(fixed_share * c)` of a head's c tokens with the highest scores.
        """
        changeable = kept & ~always_kept
        counts, n_changeable = kept.sum(dim=-1), changeable.sum(dim=-1)
        # The tiny term makes 0.29 of 100 tokens 29, as written.
        n_fixed = torch.minimum((counts.double() * fixed_share + 1e-9).long(), n_changeable)
        free = changeable & ~top_masks(scores, changeable, n_fixed)
        fixed = kept & ~free
        n_free, n_other = free.sum(dim=-1), fixed.sum(dim=-1)
        tokens = torch.cat([_first(free, int(n_free.max())), _first(fixed, int(n_other.max()))], dim=1)
        valid = None
        if tokens.shape[1] > int(counts.min()):
            valid = torch.cat([_up_to(n_free), _up_to(n_other)], dim=1)
        return cls(tokens, valid, int(n_free.max()))

    def ascending(self) -> tuple[Tensor, Tensor]:
        """Positions [Hkv, c'] ascending, -1 behind a head's last one, and where each is in `tokens`."""
        tokens = self.tokens
        if self.valid is None:
            ascending, order = tokens.sort(dim=-1)
            return ascending, order
        end = torch.iinfo(tokens.dtype).max
        ascending, order = tokens.masked_fill(~self.valid, end).sort(dim=-1)
        width = int(self.valid.sum(dim=-1).max())
        return ascending[:, :width].masked_fill(ascending[:, :width] == end, -1), order[:, :width]


def _first(mask: Tensor, width: int) -> Tensor:
    """[Hkv, width] int64: the positions set in `mask` [Hkv, n], ascending, then any others."""
    # Each position's place in that order, counted: far cheaper than a sort.
    place = torch.where(mask, mask.cumsum(-1), mask.sum(-1, keepdim=True) + (~mask).cumsum(-1)) - 1
    position = torch.arange(mask.shape[-1], device=mask.device).expand_as(place)
    return torch.empty_like(place).scatter_(-1, place, position)[:, :width]


def _up_to(counts: Tensor) -> Tensor:
    """[Hkv, largest count] bool: the first `counts` [Hkv] of each row."""
    return torch.arange(int(counts.max()), device=counts.device) < counts.unsqueeze(-1)


def compress_layer(
    inputs: LayerInputs,
    plan: QueryPlan,
    profile: Profile,
    *,
    n_slots: int,
    starts_sequence: bool,
    rotary: RotaryTable | None,
    protected: Tensor | None = None,
) -> LayerResult:
    """Compress one layer of a span of n tokens into `n_slots` slots per KV head.

    Everything is computed in float32. The largest tensors are the softmax weights, m * Hq * n float32
    numbers for the span and m * Hq * p for the ancestors.

    Args:
        inputs: the layer's tensors.
        plan: the positions that `inputs.queries` belong to, from `plan_queries(n, profile)`.
        profile: what to do.
        n_slots: c, from 1 to n. At n all tokens are returned bit for bit and nothing is computed. Methods
            with per-head budgets keep Hkv * c tokens in the layer, those with per-layer budgets as many on
            average.
        starts_sequence: the span starts at position 0, so its first tokens are attention sinks.
        rotary: the model's rotary table, needed where the profile re-rotates queries.
        protected: [n] bool, tokens that are kept as they are whatever their score; None for none.

    Returns:
        See `LayerResult`. A head with a non-finite input keeps its selected tokens as they were.

    Raises:
        ValueError: shapes do not fit each other or the plan; the plan has no queries that the selection or
            the regression needs; the budget leaves nothing to select; the rotary table is missing or too
            short; the selection lacks its output projection or a pass.
    """
    scorer = get_scorer(profile.scorer)
    _check(inputs, plan, scorer, n_slots)
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
        protected=protected,
    )
    missing = scorer.passes - set(inputs.passes)
    if missing:
        raise ValueError(
            f"expected the results of pass {', '.join(sorted(missing))}, "
            f"which selection {scorer.name!r} needs"
        )
    layer = _Layer(inputs, plan, profile, rotary)
    seen = {kind: layer.seen(plan, kind) for kind in scorer.queries}
    ctx = layer.context(seen, n_sinks=profile.sinks if starts_sequence else 0)
    scores = scorer.score(ctx)
    n_always_kept = int(always_kept.sum())
    layer_slots = scorer.layer_slots(
        inputs.layer, inputs.n_layers, n_tokens=n_tokens, n_slots=n_slots, n_always_kept=n_always_kept
    )
    kept = scorer.select(ctx, scores, always_kept, layer_slots)
    chosen = _Chosen.of(kept, scores, always_kept, profile.fixed_share)
    keys, values = layer.retained(chosen)
    held_rows = layer.rows(plan.held_out, "strata")
    held_out = layer.problem(held_rows, layer.outputs(held_rows, inputs.held_out), chosen)
    selected = time.perf_counter()

    new_keys, new_values = keys, values
    states = torch.full((n_kv_heads,), UNCHANGED, dtype=torch.int8, device=device)
    if profile.regresses and chosen.n_free:
        fit = layer.problem(*layer.fitted(plan, seen), chosen)
        regressed = regress(
            fit, keys, values, chosen.n_free, profile, inputs.key_storage, inputs.value_storage
        )
        new_keys, new_values, states = regressed.keys, regressed.values, regressed.states

    before = held_out.attend(keys, values).output - held_out.target
    after = held_out.attend(new_keys, new_values).output - held_out.target
    sums = [tensor.double().square().sum() for tensor in (before, after, held_out.target)]
    error_before, error_after, reference = torch.stack(sums).tolist()

    ascending, order = chosen.ascending()
    head = torch.arange(n_kv_heads, device=device)
    return LayerResult(
        kept=ascending,
        # [c, Hkv, d]
        keys=inputs.key_storage.store(new_keys[head, order.t()]).contiguous(),
        values=inputs.value_storage.store(new_values[head, order.t()]).contiguous(),
        error_before=error_before,
        error_after=error_after,
        reference=reference,
        states=states,
        select_s=selected - started,
        regress_s=time.perf_counter() - selected,
    )


def _check(inputs: LayerInputs, plan: QueryPlan, scorer: Scorer, n_slots: int) -> None:
    """Raise ValueError where the inputs do not fit each other or the plan, or the plan not the selection."""
    keys, values, queries = inputs.keys, inputs.values, inputs.queries
    if keys.ndim != 3 or values.ndim != 3 or keys.shape[:2] != values.shape[:2]:
        raise ValueError(
            "expected keys [n, Hkv, d] and values [n, Hkv, dv], "
            f"got {list(keys.shape)} and {list(values.shape)}"
        )
    n_tokens, n_kv_heads, d = keys.shape
    if keys.dtype not in STORAGE_DTYPES or values.dtype != keys.dtype:
        raise ValueError(
            f"expected keys and values of one dtype out of {', '.join(map(str, STORAGE_DTYPES))}, "
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
    for kind in sorted(scorer.queries):
        if not plan.scoring(kind).any():
            raise ValueError(
                f"expected a plan with {kind} queries, which selection {scorer.name!r} looks at, "
                f"got none in score_{kind}"
            )
    known, n_scoring = inputs.window, int(plan.score_window.sum())
    if known is not None and (
        known.mean.shape != (n_kv_heads, n_tokens) or known.output.shape[:2] != (n_scoring, queries.shape[1])
    ):
        raise ValueError(
            f"expected attention of a window with a mean [{n_kv_heads}, {n_tokens}] and an output "
            f"[{n_scoring}, {queries.shape[1]}, dv], got {list(known.mean.shape)} and "
            f"{list(known.output.shape)}"
        )
    n_held_out = int(plan.held_out.sum())
    if inputs.held_out is not None and inputs.held_out.shape[:2] != (n_held_out, queries.shape[1]):
        raise ValueError(
            f"expected attention of held-out queries [{n_held_out}, {queries.shape[1]}, dv], "
            f"got {list(inputs.held_out.shape)}"
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
    held = inputs.ancestor_held
    if held is not None:
        p = 0 if inputs.ancestor_keys is None else inputs.ancestor_keys.shape[0]
        if held.shape != (n_kv_heads, p) or held.dtype != torch.bool:
            raise ValueError(
                f"expected ancestor_held [{n_kv_heads}, {p}] bool, got {list(held.shape)} {held.dtype}"
            )
    if not 1 <= n_slots <= n_tokens:
        raise ValueError(f"expected between 1 and {n_tokens} slots for {n_tokens} tokens, got {n_slots}")
