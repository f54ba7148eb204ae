"""The parts of a compression in torch, as the core has them for other devices, and with kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from grkv_kernels import key_jvp, key_vjp, ridged_gram, transposed_product, window_scores
from grkv_kernels.gram import ridged_gram_reference, transposed_product_reference
from grkv_kernels.key_step import key_jvp_reference, key_vjp_reference
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.compression import PROFILE, Span
from benchmarks.gpu.correctness import dtype_name
from benchmarks.gpu.rows import Figure, Row
from benchmarks.gpu.setup import Setup
from benchmarks.gpu.synthetic import Regression, make_regression
from benchmarks.gpu.timing import Step, copy_bandwidth, timed
from grkv_sglang.core import group_rows, kernels
from grkv_sglang.core.regression import key_step, value_step

TORCH, KERNEL = "torch", "kernel"


def in_torch(action: Callable[[], object]) -> Callable[[], object]:
    """The same without the core's kernels."""

    def call() -> object:
        has_kernels = kernels.has_kernels
        kernels.has_kernels = lambda device, *head_dims: False
        try:
            return action()
        finally:
            kernels.has_kernels = has_kernels

    return call


def scoring(setup: Setup) -> Iterator[Row]:
    """Scores of the window: from weights in memory, which give the outputs as well, or without them."""
    part, sizes = "compression/scoring", setup.sizes
    n_tokens, dtype = sizes.compression_span, sizes.pool_dtypes[0]
    row, bytes_per_s = copy_bandwidth(setup, part)
    yield row
    span = Span.make(setup, n_tokens, dtype)
    positions = span.plan.positions[span.plan.score_window].to(setup.device)
    chosen = span.queries[span.plan.score_window.to(setup.device)]
    rows = group_rows(chosen, sizes.kv_heads).contiguous()
    moved = rows.float()
    keys, values = (tensor.transpose(0, 1) for tensor in (span.layer.keys, span.layer.values))
    behind = torch.arange(n_tokens, device=setup.device) > positions.repeat_interleave(sizes.group)[:, None]

    def scores(queries: Tensor) -> Tensor:
        return window_scores(
            queries, keys, positions,
            scale=sizes.scale, n_window=PROFILE.n_window, pool_kernel=PROFILE.pool_kernel,
        )[0]  # fmt: skip

    def outputs() -> Tensor:
        return scaled_dot_product_attention(
            rows[None], keys[None], values[None], attn_mask=~behind, scale=sizes.scale
        )

    bound_ms = _bytes(keys) / bytes_per_s * 1e3
    steps = [
        Step(f"scores and outputs, {TORCH}", in_torch(span.attend_window), bound_ms=2 * bound_ms),
        Step(f"scores and outputs, {KERNEL}", span.attend_window, bound_ms=2 * bound_ms),
        Step(f"scores, {KERNEL}", lambda: scores(rows), True, bound_ms),
        Step(
            f"scores of float32 queries, {KERNEL}",
            lambda: scores(moved),
            True,
            bound_ms,
        ),
        Step("outputs, torch SDPA", outputs, True, 2 * bound_ms),
    ]
    case = f"{rows.shape[1]} rows, {n_tokens} tokens, {dtype_name(dtype)}"
    yield from timed(setup, part, case, steps, {})


def regression(setup: Setup) -> Iterator[Row]:
    """The four products, then the two steps that are made of them."""
    part, sizes = "compression/regression", setup.sizes
    row, bytes_per_s = copy_bandwidth(setup, part)
    yield row
    problem = make_regression(setup, sizes.compression_span, sizes.pool_dtypes[0])
    steps = _Steps(problem, sizes.scale)
    case = f"{problem.queries.shape[1]} rows, {problem.n_free} free tokens, float32"
    # Each reads the weights; the rest is smaller.
    bound_ms = _bytes(problem.weights) / bytes_per_s * 1e3
    medians_ms: dict[str, float] = {}
    yield from timed(setup, part, case, steps.products(bound_ms), medians_ms)
    yield from timed(setup, part, case, steps.whole(), medians_ms)
    for name in ("gram", "transposed product", "J dK", "J^T u", "value step", "key step"):
        torch_ms, kernel_ms = (medians_ms.get(f"{name}, {who}") for who in (TORCH, KERNEL))
        if torch_ms is not None and kernel_ms:
            yield Figure(part, f"{name}: torch / kernel", case, torch_ms / kernel_ms, "")


class _Steps:
    """One regression's products and steps, both ways."""

    def __init__(self, problem: Regression, scale: float) -> None:
        self._problem = problem
        self._scale = scale
        self._values = problem.values[:, : problem.n_free].contiguous()
        self._residual = problem.target - problem.output
        self._given = problem.queries, problem.weights, self._values, problem.output
        self._ridge_v = PROFILE.lambda_v / PROFILE.query_weight
        self._ridge_k = PROFILE.lambda_k / PROFILE.query_weight

    def products(self, bound_ms: float) -> list[Step]:
        weights, residual, given, scale = self._problem.weights, self._residual, self._given, self._scale
        delta = key_vjp_reference(*given, residual, scale=scale)
        pairs = {
            "gram": (
                lambda: ridged_gram_reference(weights, ridge=self._ridge_v),
                lambda: ridged_gram(weights, ridge=self._ridge_v),
            ),
            "transposed product": (
                lambda: transposed_product_reference(weights, residual),
                lambda: transposed_product(weights, residual),
            ),
            "J dK": (
                lambda: key_jvp_reference(*given, delta, scale=scale),
                lambda: key_jvp(*given, delta, scale=scale),
            ),
            "J^T u": (
                lambda: key_vjp_reference(*given, residual, scale=scale),
                lambda: key_vjp(*given, residual, scale=scale),
            ),
        }
        return [
            Step(f"{name}, {who}", action, True, bound_ms)
            for name, pair in pairs.items()
            for who, action in zip((TORCH, KERNEL), pair, strict=True)
        ]

    def whole(self) -> list[Step]:
        """They wait for the device, so no graph."""
        weights, residual, values = self._problem.weights, self._residual, self._values
        iterations, tolerance = PROFILE.cg_iterations, PROFILE.cg_tolerance

        def values_moved() -> Tensor:
            return value_step(weights, residual, ridge=self._ridge_v)

        def keys_moved() -> Tensor:
            return key_step(
                self._problem.queries, weights, values, self._problem.output, residual,
                scale=self._scale, ridge=self._ridge_k, iterations=iterations, tolerance=tolerance,
            )  # fmt: skip

        return [
            Step(f"value step, {TORCH}", in_torch(values_moved)),
            Step(f"value step, {KERNEL}", values_moved),
            Step(f"key step, {TORCH}", in_torch(keys_moved)),
            Step(f"key step, {KERNEL}", keys_moved),
        ]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
