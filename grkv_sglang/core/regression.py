"""Changing the retained keys and values so that attention over them reproduces the full span's.

Source: GRKV, arXiv 2605.31105. For one KV head with query rows i, retained tokens s, joint softmax
weights `a_is` over ancestors and retained tokens, outputs `o_i` and targets `y_i`, the loss is

    E(K, V) = sum_i w ||o_i - y_i||^2 .

Only the rows of a free set F change. The value step minimises E plus a ridge exactly, in its dual, whose
size does not depend on the number of tokens. The key step does so after one linearisation of o in K, with
a few conjugate-gradient iterations. All queries have the same weight w, so a step depends on its ridge and
on w only through the ratio `lambda / w`, which is what both take as `ridge`.

Settings that the paper's text does not have, off in `paper`: caps on the size of the change, and a guard
that keeps the best state per KV head.

Deviations, whatever the profile:

- Conjugate gradients run on the primal normal equations `(J^T J + ridge) dK = J^T r` instead of the dual
  `(J J^T + ridge) u = r, dK = J^T u`. After k iterations both are in the same k-dimensional space, at the
  same cost, and in the limit they agree. But the primal iterate minimises the objective over that space,
  while a truncated dual one can be worse than no step at all. With a small model's own keys and queries,
  the held-out error after 8 primal iterations was that after 16 dual ones to about 1%.
- The change is rounded to what can be stored before it is judged.
- A head whose step fails (a singular system, a result that is not finite or that the storage cannot hold)
  skips that step.

Shapes: H KV heads, N query rows, c retained tokens of which f are free, head sizes d and dv.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grkv_sglang.core.attention import Attention, Partial, attend
from grkv_sglang.core.kernels import gram_with_ridge, jacobian, transposed_times
from grkv_sglang.core.profiles import Profile
from grkv_sglang.core.storage import Storage

UNCHANGED, VALUE_ONLY, KEY_AND_VALUE = 0, 1, 2

# Rounding to what can be stored can push a change that was scaled to its cap slightly above it again; each
# attempt aims a little lower. Two are enough in practice.
_CAP_ATTEMPTS = 5
_SHRINK = 0.999
# Norms are float32 sums: this keeps their own rounding on the safe side of the cap.
_BELOW_CAP = 1 - 1e-5


@dataclass(frozen=True)
class Problem:
    """What attention over the retained tokens has to reproduce.

    Attributes:
        queries: [H, N, d] query rows.
        target: [H, N, dv] outputs over ancestors and the full span.
        visible: [H, m, c] bool, which retained token a query may see (m queries, N = m * G), or None
            when all is visible.
        beside: attention of the same rows over the ancestors, or None.
        scale: factor on the logits.
        group: G, query rows per query.
    """

    queries: Tensor
    target: Tensor
    visible: Tensor | None
    beside: Partial | None
    scale: float
    group: int = 1

    @property
    def n_queries(self) -> int:
        """m."""
        return self.queries.shape[1] // self.group

    def split(self, share: float) -> tuple[Problem, Problem]:
        """Two problems of disjoint queries, all heads of a query together: the second has every so many-th
        query, about `share` of them, and at least one. There must be two queries or more."""
        step = max(2, round(1 / share))
        held = (torch.arange(self.n_queries, device=self.queries.device) % step) == step - 1
        if not held.any():
            held[-1] = True
        return self._some(~held), self._some(held)

    def _some(self, chosen: Tensor) -> Problem:
        rows = chosen.repeat_interleave(self.group)
        beside = self.beside
        return replace(
            self,
            queries=self.queries[:, rows],
            target=self.target[:, rows],
            visible=None if self.visible is None else self.visible[:, chosen],
            beside=None if beside is None else Partial(beside.output[:, rows], beside.lse[:, rows]),
        )

    def attend(self, keys: Tensor, values: Tensor) -> Attention:
        """Joint attention over the ancestors and these retained tokens."""
        return attend(self.queries, keys, values, scale=self.scale, visible=self.visible, beside=self.beside)


@dataclass(frozen=True)
class Regressed:
    """Retained tokens after the regression.

    Attributes:
        keys: [H, c, d], exactly representable in their storage.
        values: [H, c, dv], likewise.
        states: [H] int8, what differs from the selected tokens. UNCHANGED: nothing. VALUE_ONLY: values
            alone. KEY_AND_VALUE: keys, and with them the values, unless the value step is off or its
            change was too small for their storage.
    """

    keys: Tensor
    values: Tensor
    states: Tensor


@dataclass(frozen=True)
class _State:
    """The free tokens at some stage: keys [H, f, d], values [H, f, dv]; and output [H, N, dv] over
    ancestors and all retained tokens."""

    keys: Tensor
    values: Tensor
    output: Tensor


def regress(
    problem: Problem,
    keys: Tensor,
    values: Tensor,
    n_free: int,
    profile: Profile,
    key_storage: Storage,
    value_storage: Storage,
) -> Regressed:
    """Run the profile's steps on the retained tokens of one layer.

    A round takes the value step, then the key step from where that led, then (with the guard) keeps per
    head whichever of {state before the round, value only, key and value} has the smallest
    `E + lambda_k ||dK||^2 + lambda_v ||dV||^2`. Caps and penalties count from the selected tensors; with
    several rounds, the ridge inside a step counts from the round before.

    Args:
        problem: queries and targets. With a `guard_share` some of several queries only judge.
        keys: [H, c, d] selected keys, exactly representable in `key_storage`.
        values: [H, c, dv] selected values, likewise in `value_storage`.
        n_free: the first this many tokens of every head may change, the others may not.
        profile: steps, ridges, caps, guard.
        key_storage, value_storage: what the result will be stored in.

    Returns:
        Tokens that are not free, and all tokens of an unchanged head, are bit-identical to the input.
        Free tokens are finite wherever the input was.
    """
    judge: Problem | None = None
    judged = 1.0
    if profile.guard and profile.guard_share and problem.n_queries > 1:
        n_queries = problem.n_queries
        problem, judge = problem.split(profile.guard_share)
        # The few that judge stand for all: the ridges keep their weight against the loss.
        judged = (n_queries / judge.n_queries) ** 0.5
    keys_0, values_0 = keys[:, :n_free], values[:, :n_free]

    def whole(state: _State) -> tuple[Tensor, Tensor]:
        return (
            torch.cat((state.keys, keys[:, n_free:]), dim=1),
            torch.cat((state.values, values[:, n_free:]), dim=1),
        )

    def loss(state: _State) -> Tensor:
        error = state.output - problem.target
        if judge is not None:
            error = (judge.attend(*whole(state)).output - judge.target) * judged
        return penalised_loss(error, state.keys - keys_0, state.values - values_0, profile)

    attention = problem.attend(keys, values)
    state = _State(keys_0, values_0, attention.output)
    for step in range(profile.steps):
        if step > 0:
            attention = problem.attend(*whole(state))
        weights = attention.weights[:, :, :n_free]
        candidates = [state]
        if profile.value_step:
            state = _after_value_step(problem, weights, state, values_0, profile, value_storage)
            candidates.append(state)
        if profile.key_step:
            state = _after_key_step(problem, weights, state, keys_0, profile, key_storage)
            state = replace(state, output=problem.attend(*whole(state)).output)
            candidates.append(state)
        state = _choose(candidates, torch.stack([loss(candidate) for candidate in candidates]), profile.guard)
    new_keys, new_values = whole(state)
    states = torch.full(keys.shape[:1], UNCHANGED, dtype=torch.int8, device=keys.device)
    states.masked_fill_(_differ(new_values, values), VALUE_ONLY)
    states.masked_fill_(_differ(new_keys, keys), KEY_AND_VALUE)
    return Regressed(keys=new_keys, values=new_values, states=states)


def penalised_loss(error: Tensor, moved_keys: Tensor, moved_values: Tensor, profile: Profile) -> Tensor:
    """[H]: `w ||O - Y||^2 + lambda_k ||dK||^2 + lambda_v ||dV||^2`.

    Args:
        error: O - Y, [H, N, dv].
        moved_keys: dK, [H, f, d].
        moved_values: dV, [H, f, dv].
        profile: the weight w of a query and the two lambdas.
    """
    return (
        profile.query_weight * _square(error)
        + profile.lambda_k * _square(moved_keys)
        + profile.lambda_v * _square(moved_values)
    )


def _after_value_step(
    problem: Problem, weights: Tensor, state: _State, values_0: Tensor, profile: Profile, storage: Storage
) -> _State:
    delta = value_step(weights, problem.target - state.output, ridge=profile.lambda_v / profile.query_weight)
    moved, usable = displace(values_0, (state.values - values_0) + delta, profile.cap_v, storage)
    moved = torch.where(usable[:, None, None], moved, state.values)
    # Exact: with the keys as they are, the output is linear in the values.
    output = state.output + torch.bmm(weights, moved - state.values)
    return _State(state.keys, moved, output)


def _after_key_step(
    problem: Problem, weights: Tensor, state: _State, keys_0: Tensor, profile: Profile, storage: Storage
) -> _State:
    """The output of the result is still that of the keys before."""
    delta = key_step(
        problem.queries,
        weights,
        state.values,
        state.output,
        problem.target - state.output,
        scale=problem.scale,
        ridge=profile.lambda_k / profile.query_weight,
        iterations=profile.cg_iterations,
        tolerance=profile.cg_tolerance,
    )
    moved, usable = displace(keys_0, (state.keys - keys_0) + delta, profile.cap_k, storage)
    return replace(state, keys=torch.where(usable[:, None, None], moved, state.keys))


def _choose(candidates: list[_State], losses: Tensor, guard: bool) -> _State:
    """Per head: the candidate of the smallest loss, or without a guard the last one of a finite loss.

    `losses` is [number of candidates, H]. The first candidate wins ties, and where nothing is finite.
    """
    finite = losses.isfinite()
    if guard:
        chosen = torch.where(finite, losses, torch.inf).argmin(dim=0)
    else:
        order = torch.arange(len(candidates), device=losses.device).unsqueeze(-1)
        chosen = torch.where(finite, order, 0).amax(dim=0)

    def pick(tensors: list[Tensor]) -> Tensor:
        picked = tensors[0]
        for index, tensor in enumerate(tensors[1:], start=1):
            here = (chosen == index).view(-1, *[1] * (tensor.ndim - 1))
            picked = torch.where(here, tensor, picked)
        return picked

    return _State(
        keys=pick([candidate.keys for candidate in candidates]),
        values=pick([candidate.values for candidate in candidates]),
        output=pick([candidate.output for candidate in candidates]),
    )


def value_step(weights: Tensor, residual: Tensor, *, ridge: float) -> Tensor:
    """The change of the free values that minimises `||X dV - r||^2 + ridge ||dV||^2`, in its dual:

        dV = X^T (X X^T + ridge I)^{-1} r

    Args:
        weights: X, [H, N, f] softmax weights of the free tokens.
        residual: r, [H, N, dv] target minus output.
        ridge: lambda_v / w.

    Returns:
        dV [H, f, dv]; zero for a head whose system has no Cholesky factor in this precision.
    """
    factor, info = torch.linalg.cholesky_ex(gram_with_ridge(weights, ridge))
    delta = transposed_times(weights, torch.cholesky_solve(residual, factor))
    return torch.where((info == 0)[:, None, None], delta, 0.0)


def key_step(
    queries: Tensor,
    weights: Tensor,
    values: Tensor,
    output: Tensor,
    residual: Tensor,
    *,
    scale: float,
    ridge: float,
    iterations: int,
    tolerance: float,
) -> Tensor:
    """The change of the free keys that minimises `||J dK - r||^2 + ridge ||dK||^2`, with J the Jacobian of
    the outputs in the free keys (`kernels.jacobian`).

    Args:
        queries: q, [H, N, d].
        weights: a, [H, N, f] softmax weights of the free tokens.
        values: v, [H, f, dv] of the free tokens.
        output: o, [H, N, dv] over ancestors and all retained tokens.
        residual: r, [H, N, dv] target minus output.
        scale: factor on the logits.
        ridge: lambda_k / w.
        iterations, tolerance: as in `conjugate_gradients`.

    Returns:
        dK [H, f, d].
    """
    at = jacobian(queries, weights, values, output, scale)

    def normal(delta: Tensor) -> Tensor:
        return at.transposed(at.product(delta)).add_(delta, alpha=ridge)

    return conjugate_gradients(normal, at.transposed(residual), iterations=iterations, tolerance=tolerance)


def conjugate_gradients(
    operator: Callable[[Tensor], Tensor], right: Tensor, *, iterations: int, tolerance: float
) -> Tensor:
    """Solve `operator(x) = right` for every head at once, from x = 0.

    Args:
        operator: [H, f, d] -> [H, f, d], linear, symmetric and positive definite on each head.
        right: [H, f, d].
        iterations: most iterations.
        tolerance: a head stops when its residual norm is at most this share of its right-hand side's.

    Returns:
        x [H, f, d]. Each head has its own step lengths, and rests once it has converged or its curvature
        is no longer positive (round-off). A non-finite head may get a non-finite x, the others do not.
    """
    solution = torch.zeros_like(right)
    residual = right.clone()
    direction = residual
    square = _square(residual)
    enough = tolerance**2 * square
    active = square > enough
    for _ in range(iterations):
        if not bool(active.any()):
            break
        image = operator(direction)
        curvature = (direction * image).sum(dim=(1, 2))
        active = active & (curvature > 0)
        step = torch.where(active, square / curvature, 0.0)[:, None, None]
        solution.addcmul_(step, direction)
        # Updated, not recomputed: it keeps falling where round-off stops the true one, so the loop ends.
        residual = torch.addcmul(residual, step, image, value=-1)
        new_square = _square(residual)
        # Zero, not 0 / 0, for a resting head: a NaN here would reach its solution through 0 * NaN.
        turn = torch.where(active, new_square / square, 0.0)[:, None, None]
        direction = torch.addcmul(residual, turn, direction)
        square = new_square
        active = active & (square > enough)
    return solution


def displace(origin: Tensor, shift: Tensor, cap: float | None, storage: Storage) -> tuple[Tensor, Tensor]:
    """Add a shift that is scaled down to a cap, rounded to what can be stored.

    Args:
        origin: [H, f, d], exactly representable in `storage`.
        shift: [H, f, d].
        cap: bound on `||moved - origin||_F / ||origin||_F` per head, after rounding; None for no bound.
        storage: what the result will be stored in.

    Returns:
        moved [H, f, d] in the dtype of `origin`, with values that `storage` holds exactly, and usable [H]
        bool: False for a head whose result is not finite, or not within the cap, and must not be used.
    """
    if cap is None:
        moved = storage.rounded(origin + shift)
        return moved, moved.isfinite().all(dim=-1).all(dim=-1)
    limit = cap * _norm(origin) * _BELOW_CAP
    size = _norm(shift)
    shrink = torch.ones_like(size)
    moved = origin
    for _ in range(_CAP_ATTEMPTS):
        shrink = torch.where(size > limit, shrink * (limit / size) * _SHRINK, shrink)
        moved = storage.rounded(origin + shift * shrink[:, None, None])
        size = _norm(moved - origin)
        if bool((size <= limit).all()):
            break
    # False for NaN as well
    return moved, size <= limit


def _differ(new: Tensor, old: Tensor) -> Tensor:
    """[H] bool: whether any number changed. NaN, which only an input can hold, counts as unchanged."""
    return ((new != old) & ~old.isnan()).flatten(1).any(dim=1)


def _norm(tensor: Tensor) -> Tensor:
    """[H] Frobenius norms."""
    norm: Tensor = torch.linalg.vector_norm(tensor.flatten(1), dim=1)
    return norm


def _square(tensor: Tensor) -> Tensor:
    """[H] squared Frobenius norms."""
    return (tensor * tensor).sum(dim=(1, 2))
