"""How long a compression takes, beside the least that a prefill of the same tokens takes.

The floor counts one layer's matrix products and its attention, each as fast as torch has it, and nothing
else. Of a compression everything is counted that one layer costs: the probed and the asked tokens' own
matrix products, their attention over the span, selection and regression.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.correctness import dtype_name
from benchmarks.gpu.rows import Figure, Row
from benchmarks.gpu.setup import Setup
from benchmarks.gpu.synthetic import Layer, make_layer
from benchmarks.gpu.timing import Step, float32_products, timed
from grkv_sglang.core import (
    LayerInputs,
    LayerResult,
    PassKind,
    PassResults,
    QueryPlan,
    WindowAttention,
    attend_probe,
    compress_layer,
    fitted_queries,
    get_profile,
    plan_queries,
    question_chunks,
    slots_for_budget,
)

BUDGET = 0.1
QUESTION_TOKENS = 40
"""About what two generic requests have in a chat template."""

PROFILE = get_profile("default")


def layer(setup: Setup) -> Iterator[Row]:
    """One layer by its parts, and what all layers cost beside the floor of their prefill."""
    part, sizes = "compression/layer", setup.sizes
    n_tokens, dtype = sizes.compression_span, sizes.pool_dtypes[0]
    case = f"{n_tokens} tokens, {dtype_name(dtype)}, one layer"
    medians_ms: dict[str, float] = {}
    floor = [
        Step("prefill floor: matrix products", _products(setup, n_tokens, dtype)),
        Step("prefill floor: attention", _prefill_attention(setup, n_tokens, dtype)),
    ]
    yield from timed(setup, part, case, floor, medians_ms)
    span = Span.make(setup, n_tokens, dtype)
    n_probed = len(span.plan.positions) + QUESTION_TOKENS
    compression = [
        Step(f"matrix products of {n_probed} probed and asked tokens", _products(setup, n_probed, dtype)),
        Step("attention of the window queries", span.attend_window),
        Step("attention of the asked tokens", span.attend_questions),
        Step("selection and regression", span.compress),
    ]
    yield from timed(setup, part, case, compression, medians_ms)
    wanted = [step.name for step in (*floor, *compression)]
    if all(name in medians_ms for name in wanted):
        floor_ms = sum(medians_ms[step.name] for step in floor)
        compress_ms = sum(medians_ms[step.name] for step in compression)
        model = f"{n_tokens} tokens, {sizes.layers} layers"
        yield Figure(part, "prefill floor", model, floor_ms * sizes.layers, "ms")
        yield Figure(part, "compression", model, compress_ms * sizes.layers, "ms")
        yield Figure(part, "compression / prefill floor", model, compress_ms / floor_ms, "")
        result = span.compress()
        yield Figure(part, "error of the selection", case, _relative(result, result.error_before), "")
        yield Figure(part, "error after the regression", case, _relative(result, result.error_after), "")
    with float32_products("high"):
        tf32 = [Step("selection and regression, TF32 products", span.compress)]
        yield from timed(setup, part, case, tf32, medians_ms)
        if tf32[0].name in medians_ms:
            result = span.compress()
            yield Figure(part, "error with TF32 products", case, _relative(result, result.error_after), "")


def _relative(result: LayerResult, error: float) -> float:
    return float((error / result.reference) ** 0.5)


def _products(setup: Setup, n_tokens: int, dtype: torch.dtype) -> Callable[[], Tensor]:
    """The four matrix products of a Llama layer: query, key and value; output; gate and up; down."""
    sizes, generator = setup.sizes, setup.generator()

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=setup.device, dtype=dtype)

    qkv_columns = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
    attended = draw(n_tokens, sizes.heads * sizes.head_dim)
    hidden, activated = draw(n_tokens, sizes.hidden), draw(n_tokens, sizes.intermediate)
    qkv = draw(sizes.hidden, qkv_columns)
    out = draw(sizes.heads * sizes.head_dim, sizes.hidden)
    gate_up, down = draw(sizes.hidden, 2 * sizes.intermediate), draw(sizes.intermediate, sizes.hidden)

    def multiply() -> Tensor:
        for left, right in ((hidden, qkv), (attended, out), (hidden, gate_up)):
            torch.mm(left, right)
        return torch.mm(activated, down)

    return multiply


def _prefill_attention(setup: Setup, n_tokens: int, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Causal flash attention; keys and values repeated for each query head, which adds no arithmetic."""
    sizes, generator = setup.sizes, setup.generator()
    shape = (1, sizes.heads, n_tokens, sizes.head_dim)
    queries, keys, values = (
        torch.randn(shape, generator=generator, device=setup.device, dtype=dtype) for _ in range(3)
    )

    def attend() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if setup.on_gpu else nullcontext():
            return scaled_dot_product_attention(queries, keys, values, is_causal=True)

    return attend


@dataclass(frozen=True)
class Span:
    """A layer of a span with all that a server has by the time it compresses it."""

    layer: Layer
    plan: QueryPlan
    queries: Tensor
    """[m, Hq, d] at the plan's positions."""
    asked: Tensor
    """[q, Hq, d] of the requests behind the span; their own keys and values are [q, Hkv, d]."""
    asked_keys: Tensor
    asked_values: Tensor
    scale: float

    @classmethod
    def make(cls, setup: Setup, n_tokens: int, dtype: torch.dtype) -> Span:
        layer, plan = make_layer(setup, n_tokens, dtype), plan_queries(n_tokens, PROFILE)
        behind = torch.arange(n_tokens, n_tokens + QUESTION_TOKENS, device=setup.device)
        # Text like the span's own: its last tokens once more.
        keys, values = layer.keys[-QUESTION_TOKENS:], layer.values[-QUESTION_TOKENS:]
        queries = layer.queries(plan.positions.to(setup.device))
        return cls(layer, plan, queries, layer.queries(behind), keys, values, setup.sizes.scale)

    @property
    def n_tokens(self) -> int:
        return len(self.layer.keys)

    def attend_window(self) -> WindowAttention:
        chosen = self.plan.score_window
        window = self.queries[chosen.to(self.queries.device)]
        attention, _ = attend_probe(
            window, window[:0], self.layer.keys, self.layer.values, positions=self.plan.positions[chosen],
            visible=chosen.new_ones(0, self.n_tokens, device=window.device), n_tokens=self.n_tokens,
            scale=self.scale,
        )  # fmt: skip
        return attention

    def attend_questions(self) -> PassResults:
        results = PassResults()
        (chunk,) = question_chunks(range(QUESTION_TOKENS), n_tokens=self.n_tokens)
        results.attend(
            0, chunk, queries=self.asked, own_keys=self.asked_keys, own_values=self.asked_values,
            keys=self.layer.keys, values=self.layer.values, n_tokens=self.n_tokens, scale=self.scale,
        )  # fmt: skip
        return results

    def compress(self) -> LayerResult:
        """With the window's and the requests' attention known, as they are in a server."""
        return compress_layer(
            self._inputs, self.plan, PROFILE,
            n_slots=slots_for_budget(self.n_tokens, share=BUDGET, tokens=None),
            starts_sequence=True, rotary=self.layer.rotary,
        )  # fmt: skip

    @cached_property
    def _inputs(self) -> LayerInputs:
        passes: dict[PassKind, PassResults] = {"questions": self.attend_questions()}
        pass_queries, pass_outputs = fitted_queries(passes, PROFILE.fitted_of_passes, 0)
        return LayerInputs(
            keys=self.layer.keys,
            values=self.layer.values,
            queries=self.queries,
            scale=self.scale,
            passes={kind: results.statistics(0) for kind, results in passes.items()},
            pass_queries=pass_queries,
            pass_outputs=pass_outputs,
            window=self.attend_window(),
        )
