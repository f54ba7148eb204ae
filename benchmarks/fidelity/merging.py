"""Published methods that merge evicted tokens into kept ones, to compare with: CaM, D2O and AsymKV.

All three were made for a cache that is cut while it grows. Here each is applied once, to a whole span, with
the same number of slots in every head of every layer. What a method reads off attention weights comes from
the queries of the profile's window, averaged over them and over the group: a compression knows no others.
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

from grkv_sglang.core import (
    KEY_AND_VALUE,
    VALUE_ONLY,
    Attention,
    LayerInputs,
    LayerResult,
    Profile,
    QueryPlan,
    RotaryTable,
    attend,
    compress_layer,
    group_rows,
    rotate_forward,
)
from grkv_sglang.core.selection.base import always_kept_tokens

MergingMethod = Literal["cam", "d2o", "asymkv"]
MERGING_METHODS: tuple[MergingMethod, ...] = ("cam", "d2o", "asymkv")

# CaM: how many kept tokens an evicted one is spread over. The published code's value.
CAM_TARGETS = 32


@dataclass(frozen=True)
class MergedLayer(LayerResult):
    """A layer after merging.

    `error_before` is that of the profile's own selection without merging, also for AsymKV, which selects
    nothing; `error_after` that of the merged tokens, with `log_counts` in their logits.

    Attributes:
        log_counts: [Hkv, c] float32, what attention must add to the logits of the kept tokens (the logarithm
            of how many tokens each stands for); None where it needs to add nothing.
    """

    log_counts: Tensor | None = None


def merge_layer(
    method: MergingMethod,
    inputs: LayerInputs,
    plan: QueryPlan,
    profile: Profile,
    *,
    n_slots: int,
    starts_sequence: bool,
    rotary: RotaryTable | None,
) -> MergedLayer:
    """Compress one layer of a span of n tokens into `n_slots` slots per KV head by selection and merging.

    Args:
        method: one of `MERGING_METHODS`; see `cam_values`, `d2o_merged`, `asymkv_merged`.
        inputs, plan, n_slots, starts_sequence, rotary: as for `compress_layer`.
        profile: what selects the kept tokens (with even budgets), and whose window's queries are looked at.
            Its regression does not run.

    Returns:
        As `compress_layer`, in the storage dtype of the inputs.

    Raises:
        ValueError: as `compress_layer`; the method is unknown; the profile scores by no window queries, or
            selects unevenly; AsymKV has no rotary table.
    """
    if method not in MERGING_METHODS:
        raise ValueError(f"expected a merging method, one of {', '.join(MERGING_METHODS)}, got {method!r}")
    if not plan.score_window.any():
        raise ValueError(f"expected a profile that scores by window queries, got {profile.name!r}")
    plain = replace(profile, value_step=False, key_step=False)
    selected = compress_layer(
        inputs, plan, plain, n_slots=n_slots, starts_sequence=starts_sequence, rotary=rotary
    )
    base = MergedLayer(**{field.name: getattr(selected, field.name) for field in fields(selected)})
    n_tokens = len(inputs.keys)
    if n_slots == n_tokens:
        return base
    if bool((selected.kept < 0).any()) or selected.kept.shape[1] != n_slots:
        raise ValueError(f"expected a selection with even budgets, got profile {profile.name!r}")
    started = time.perf_counter()
    window = _Rows.of(inputs, plan.score_window, plan, None)
    keys, values = inputs.keys.transpose(0, 1).float(), inputs.values.transpose(0, 1).float()
    attention = window.attend(keys, values)
    n_kv_heads = len(keys)
    mass = attention.weights.mean(dim=1)
    if method == "cam":
        generator = torch.Generator().manual_seed(inputs.layer)
        new_values, merged = cam_values(values, mass, selected.kept, generator)
        new_keys = _taken(keys, selected.kept)
        base = replace(base, states=merged.to(torch.int8) * VALUE_ONLY)
    elif method == "d2o":
        new_keys, new_values, merged = d2o_merged(keys, values, selected.kept)
        base = replace(base, states=merged.to(torch.int8) * KEY_AND_VALUE)
    else:
        if rotary is None:
            raise ValueError("expected a rotary table, which 'asymkv' needs to merge keys, got None")
        apart = always_kept_tokens(
            n_tokens,
            n_slots=n_slots,
            n_window=profile.n_window,
            sinks=profile.sinks,
            starts_sequence=starts_sequence,
            device=torch.device("cpu"),
        )
        groups = adjacent_groups(mass.sum(dim=0).tolist(), apart.tolist(), n_slots)
        curvature = key_curvature(window.queries, attention, values, scale=inputs.scale, rotary=rotary)
        new_keys, new_values, counts = asymkv_merged(keys, values, curvature, groups, rotary)
        last = torch.tensor([group.stop - 1 for group in groups], device=keys.device)
        base = replace(
            base,
            kept=last.expand(n_kv_heads, -1).clone(),
            states=torch.full_like(base.states, KEY_AND_VALUE),
            log_counts=counts.log().expand(n_kv_heads, -1).clone(),
        )
    dtype = inputs.keys.dtype
    new_keys, new_values = new_keys.to(dtype).float(), new_values.to(dtype).float()
    held = _Rows.of(inputs, plan.held_out, plan, rotary if profile.rerotate else None)
    target = held.attend(keys, values).output
    visible = base.kept.unsqueeze(1) <= held.positions[:, None]
    error = held.attend(new_keys, new_values, visible, base.log_counts).output - target
    return replace(
        base,
        keys=new_keys.transpose(0, 1).to(dtype).contiguous(),
        values=new_values.transpose(0, 1).to(dtype).contiguous(),
        error_after=float(error.double().square().sum()),
        regress_s=base.regress_s + time.perf_counter() - started,
    )


def cam_values(
    values: Tensor, mass: Tensor, kept: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """CaM: an evicted token's value is spread over the kept tokens behind it, or dropped, by lot.

    For an evicted token i with attention `a_i`, and the m = 32 kept tokens that follow it, whose mean
    attention is A: with probability `min(1, a_i / A)` each of their values grows by `v_i / m`. In expectation
    the output then has what the token contributed. Keys stay. (That the weights of the kept tokens grow, too,
    when others leave the softmax, is not made up for: where evicted ones had much, outputs get too large.)

    Source: "CaM: Cache Merging for Memory-efficient LLMs Inference", ICML 2024, and its published code.

    Deviations: there, one token is evicted per decoding step, here all at once, each merged on its own by the
    attention before any merge. Where fewer than 32 kept tokens follow, m is their number. One lot per KV
    head, not per query head, and `a` is the mean of the window's queries instead of the current one's.

    Args:
        values: [Hkv, n, dv].
        mass: [Hkv, n], a.
        kept: [Hkv, c] int64, ascending.
        generator: of the lots, on the CPU.

    Returns:
        The kept tokens' values [Hkv, c, dv], and which heads merged anything, [Hkv] bool.
    """
    n_kv_heads, n_tokens, _ = values.shape
    n_kept = kept.shape[1]
    evicted = _others(kept, n_tokens)
    # [Hkv, e]: the kept tokens behind an evicted one are kept[first : end].
    first = torch.searchsorted(kept, evicted)
    end = (first + CAM_TARGETS).clamp(max=n_kept)
    count = end - first
    kept_mass = torch.nn.functional.pad(mass.gather(1, kept).double().cumsum(dim=1), (1, 0))
    mean = (kept_mass.gather(1, end) - kept_mass.gather(1, first)) / count.clamp(min=1)
    own = mass.gather(1, evicted).double()
    # Nothing to nothing is dropped, something to nothing merged.
    probability = torch.where(own > 0, (own / mean).clamp(max=1.0), 0.0)
    probability = torch.where(count > 0, probability, 0.0)
    lot = torch.rand(probability.shape, generator=generator, dtype=torch.float64).to(values.device)
    share = (lot < probability) / count.clamp(min=1)
    # Add at the first target and take off behind the last: its running sum is what each target gets.
    spread = share.unsqueeze(-1).double() * _taken(values, evicted).double()
    change = spread.new_zeros(n_kv_heads, n_kept + 1, values.shape[-1])
    index = torch.arange(n_kv_heads, device=values.device).unsqueeze(1).expand_as(evicted)
    change.index_put_((index, first), spread, accumulate=True)
    change.index_put_((index, end), -spread, accumulate=True)
    grown = _taken(values, kept).double() + change.cumsum(dim=1)[:, :n_kept]
    merged = share.gt(0).any(dim=1)
    return torch.where(merged[:, None, None], grown.to(values.dtype), _taken(values, kept)), merged


def d2o_merged(keys: Tensor, values: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """D2O: an evicted token joins the kept token with the most similar key, if that is similar enough.

    With `u_i` the largest cosine similarity of evicted key i to a kept one, and tau their mean over the
    evicted tokens: those with `u_i >= tau` join their nearest kept token j, for keys and values alike:

        k_j' = (e k_j + sum_i exp(u_i) k_i) / (e + sum_i exp(u_i)) .

    Source: D2O, arXiv 2406.13035: its token-level part, the weights as in the paper (the code published with
    it takes the mean of `k_j` and the `u_i k_i` instead).

    Deviations: no layer-level budgets, which also spare the first two layers and the last one: one slot
    index exists in all layers. The threshold's moving average over decoding steps has one step. The
    similarity is compared per KV head. The kept tokens are the profile's (there: H2O's score).

    Args:
        keys: [Hkv, n, d], post-RoPE, as there.
        values: [Hkv, n, dv].
        kept: [Hkv, c] int64, ascending, c < n.

    Returns:
        Keys [Hkv, c, d] and values [Hkv, c, dv] of the kept tokens, and which heads merged anything.
    """
    evicted = _others(kept, keys.shape[1])
    directions = torch.nn.functional.normalize(keys, dim=-1)
    similarity = torch.bmm(_taken(directions, evicted), _taken(directions, kept).transpose(1, 2))
    nearest, target = similarity.max(dim=-1)
    joins = nearest >= nearest.mean(dim=-1, keepdim=True)
    weight = torch.where(joins, nearest.exp(), 0.0)
    total = torch.full(kept.shape, torch.e, dtype=keys.dtype, device=keys.device)
    total.scatter_add_(1, target, weight)

    def joined(tensor: Tensor) -> Tensor:
        own = _taken(tensor, kept)
        added = weight.unsqueeze(-1) * _taken(tensor, evicted)
        summed = (own * torch.e).scatter_add_(1, target.unsqueeze(-1).expand_as(added), added)
        return torch.where(total.unsqueeze(-1) > torch.e, summed / total.unsqueeze(-1), own)

    return joined(keys), joined(values), joins.any(dim=1)


def adjacent_groups(mass: list[float], apart: list[bool], n_groups: int) -> list[slice]:
    """AsymKV's choice: merge neighbours until `n_groups` groups are left, those of the smallest weight first.

    The weight of two neighbouring groups is the sum of their attention times the number of tokens that they
    would stand for together; of equal ones the earlier two merge.

    Args:
        mass: per token, its attention.
        apart: per token, whether it stays alone.
        n_groups: more than the tokens that stay alone.

    Returns:
        `n_groups` slices of tokens, ascending, without gaps.
    """
    n_tokens = len(mass)
    total, size = list(mass), [1] * n_tokens
    # Of the group that starts at a token: the first tokens of the groups around it.
    after, before = list(range(1, n_tokens + 1)), list(range(-1, n_tokens - 1))
    alive = [True] * n_tokens

    def pair(left: int) -> tuple[float, int, int, int] | None:
        right = after[left]
        if right >= n_tokens or apart[left] or apart[right]:
            return None
        count = size[left] + size[right]
        return (total[left] + total[right]) * count, left, right, count

    heap = [found for left in range(n_tokens) if (found := pair(left)) is not None]
    heapq.heapify(heap)
    left_over = n_tokens
    while left_over > n_groups:
        if not heap:
            raise ValueError(
                f"expected at least {left_over} groups, so many cannot be merged, got {n_groups}"
            )
        _, left, right, count = heapq.heappop(heap)
        if not (alive[left] and alive[right] and after[left] == right and count == size[left] + size[right]):
            continue
        alive[right] = False
        total[left] += total[right]
        size[left] = count
        after[left] = after[right]
        if after[left] < n_tokens:
            before[after[left]] = left
        for start in (before[left], left):
            if start >= 0 and (found := pair(start)) is not None:
                heapq.heappush(heap, found)
        left_over -= 1
    return [slice(start, start + size[start]) for start in range(n_tokens) if alive[start]]


def key_curvature(
    queries: Tensor, attention: Attention, values: Tensor, *, scale: float, rotary: RotaryTable
) -> Tensor:
    """[Hkv, n, d]: how much the layer's outputs move with each component of a key: the Gauss-Newton diagonal

        H_sj = sum_i (scale a_is)^2 ||v_s - o_i||^2 q_ij^2 ,

    averaged over the two components of a rotary pair, which makes it the same before and after RoPE.

    Args:
        queries: q, [Hkv, N, d] rows.
        attention: of these rows: weights a and outputs o.
        values: v, [Hkv, n, dv].
        scale: factor on the logits.
        rotary: which components are pairs.
    """
    # [Hkv, N, n]
    distance = (
        attention.output.square().sum(dim=-1, keepdim=True)
        - 2 * torch.bmm(attention.output, values.transpose(1, 2))
        + values.square().sum(dim=-1).unsqueeze(1)
    ).clamp(min=0.0)
    square = queries.square()
    pairs = square[..., : rotary.rotary_dim]
    if rotary.is_neox:
        mean = pairs.unflatten(-1, (2, -1)).mean(dim=-2, keepdim=True).expand(-1, -1, 2, -1)
    else:
        mean = pairs.unflatten(-1, (-1, 2)).mean(dim=-1, keepdim=True).expand(-1, -1, -1, 2)
    square = torch.cat([mean.flatten(-2), square[..., rotary.rotary_dim :]], dim=-1)
    pull = (attention.weights * scale).square() * distance
    return torch.bmm(pull.transpose(1, 2), square)


def asymkv_merged(
    keys: Tensor, values: Tensor, curvature: Tensor, groups: list[slice], rotary: RotaryTable
) -> tuple[Tensor, Tensor, Tensor]:
    """AsymKV: neighbours merge, keys to their curvature-weighted mean, values without loss.

    A group's key is `sum_s H_s k_s / sum_s H_s` of the keys before RoPE, rotated to the position of the
    group's last token. Its value is the sum of the values, and the softmax counts it as often as it has
    tokens ("locally merged attention"): `sum_g exp(l_g) sum_s v_s / sum_g count_g exp(l_g)`. That is an
    ordinary softmax with the mean value and the logarithm of the count added to the logit, as returned here.

    Source: AsymKV, arXiv 2506.05410, and the code published with it.

    Deviations: the code merges the pairs of least attention of every 512 new tokens, with a preference by
    position, and cuts counts at 5; here one pair after the other merges until the budget is met, and counts
    are not cut. H is there the squared gradient of the language-model loss, which serving does not have;
    here it is `key_curvature`, the mean square of the gradient of a random linear function of the outputs.
    The tokens that stay alone are the sinks and the window, there the first 32. As there, all heads of a
    layer merge the same tokens.

    Args:
        keys: [Hkv, n, d] post-RoPE.
        values: [Hkv, n, dv].
        curvature: H, [Hkv, n, d].
        groups: neighbouring tokens, without gaps.
        rotary: the model's rotary table.

    Returns:
        Keys [Hkv, c, d], mean values [Hkv, c, dv], counts [c] float32.
    """
    n_tokens, device = keys.shape[1], keys.device
    counts = torch.tensor([group.stop - group.start for group in groups], device=device)
    group_of = torch.arange(len(groups), device=device).repeat_interleave(counts)
    last = torch.tensor([group.stop - 1 for group in groups], device=device)
    to_last = last[group_of] - torch.arange(n_tokens, device=device)
    # [n, Hkv, d]
    moved = rotate_forward(keys.transpose(0, 1), to_last, rotary)
    # The published code's constant; a group that no query looks at gets the mean.
    weight = curvature.transpose(0, 1) + 1e-21

    def by_group(tensor: Tensor) -> Tensor:
        return tensor.new_zeros(len(groups), *tensor.shape[1:]).index_add_(0, group_of, tensor)

    merged_keys = by_group(weight * moved) / by_group(weight)
    # A token that stays alone stays as it is, bit for bit.
    merged_keys = torch.where((counts == 1)[:, None, None], keys.transpose(0, 1)[last], merged_keys)
    mean_values = by_group(values.transpose(0, 1)) / counts[:, None, None]
    return merged_keys.transpose(0, 1), mean_values.transpose(0, 1), counts.float()


@dataclass(frozen=True)
class _Rows:
    """Some of the plan's queries where they are used.

    Attributes:
        queries: [Hkv, N, d] float32 rows.
        positions: [m] int64, the last token that each query sees.
        past: keys and values of the ancestors, [Hkv, p, ...] float32, or None.
        scale: factor on the logits.
    """

    queries: Tensor
    positions: Tensor
    past: tuple[Tensor, Tensor] | None
    scale: float

    @classmethod
    def of(cls, inputs: LayerInputs, chosen: Tensor, plan: QueryPlan, rotary: RotaryTable | None) -> _Rows:
        """The queries `chosen` [m] bool; with a rotary table moved to the span's last position."""
        n_tokens, n_kv_heads, _ = inputs.keys.shape
        device = inputs.keys.device
        index = chosen.nonzero().squeeze(1)
        at = plan.positions[index]
        queries = inputs.queries[index.to(device)].float()
        if rotary is not None:
            last = torch.full_like(at, n_tokens - 1)
            queries, at = rotate_forward(queries, last - at, rotary), last
        past = None
        if inputs.ancestor_keys is not None and inputs.ancestor_values is not None:
            past = (
                inputs.ancestor_keys.transpose(0, 1).float(),
                inputs.ancestor_values.transpose(0, 1).float(),
            )
            past = past if past[0].shape[1] else None
        return cls(group_rows(queries, n_kv_heads), at.to(device), past, inputs.scale)

    def attend(
        self, keys: Tensor, values: Tensor, visible: Tensor | None = None, log_counts: Tensor | None = None
    ) -> Attention:
        """Joint attention over the ancestors and these tokens: all of the span's, unless `visible` says which
        of them a query sees."""
        beside = None if self.past is None else attend(self.queries, *self.past, scale=self.scale)
        if visible is None:
            visible = torch.arange(keys.shape[1], device=keys.device) <= self.positions[:, None]
        queries = self.queries
        if log_counts is not None:
            # One more component that adds log_counts to the logits.
            queries = torch.nn.functional.pad(queries, (0, 1), value=1 / self.scale)
            keys = torch.cat([keys, log_counts.unsqueeze(-1)], dim=-1)
        return attend(queries, keys, values, scale=self.scale, visible=visible, beside=beside)


def _taken(tensor: Tensor, tokens: Tensor) -> Tensor:
    """[Hkv, k, x]: the tokens [Hkv, k] of `tensor` [Hkv, n, x]."""
    return tensor[torch.arange(len(tensor), device=tensor.device).unsqueeze(1), tokens]


def _others(kept: Tensor, n_tokens: int) -> Tensor:
    """[Hkv, n - c]: the tokens that are not `kept` [Hkv, c], ascending."""
    rest = torch.ones(len(kept), n_tokens, dtype=torch.bool, device=kept.device).scatter_(1, kept, False)
    return rest.nonzero()[:, 1].view(len(kept), -1)
