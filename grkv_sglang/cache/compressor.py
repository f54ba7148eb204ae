"""Compress the tokens of one path into new KV slots: a probe forward for queries, then the core per layer.

The probe is one forward pass over a few sampled tokens of the cached prefix. Each attends to the cached
KV up to its own position, nothing is written, and its queries equal those of the prefill. Every layer is
compressed as the probe passes through it, so that one layer's workspace lives at a time.

Written against SGLang 0.5.23: ``model_executor/forward_batch_info.py: ForwardBatch``,
``model_executor/forward_context.py: forward_context``, ``layers/radix_attention.py: RadixAttention.forward``
(which calls ``get_attn_backend().forward(q, k, v, layer, forward_batch, save_kv_cache)``).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from grkv_kernels import copy_slots, write_slots
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from grkv_sglang.cache.span import SpanOrigin
from grkv_sglang.core import (
    LayerInputs,
    Profile,
    QueryPlan,
    RotaryTable,
    SpanQuality,
    compress_layer,
    get_profile,
    get_scorer,
    plan_queries,
)

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.model_runner import ModelRunner


class CompressionError(RuntimeError):
    """A compression cannot be done; `reason` is its name among the counters."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class SpanSource:
    """The cached KV to compress. Slots are [k] int64 on the pool's device."""

    token_ids: Sequence[int]
    """The span's tokens, ``[start, end)``."""
    start_tokens: int
    slots: Tensor
    """One slot per token of the span, in order."""
    ancestor_slots: Tensor
    """Slots of everything before the span; all are visible to every query of the span."""


class Compressor:
    """Turns a SpanSource into compressed KV. Holds what it needs to know of the model; no request state."""

    def __init__(self, model_runner: ModelRunner) -> None:
        self._runner = model_runner
        self._pool = model_runner.token_to_kv_pool
        self._rotary = _find_rotary(model_runner.model)
        self._output_projections = _find_output_projections(model_runner.model)

    def check_profile(self, name: str) -> Profile:
        """The profile, if this model can be compressed with it. Raises ValueError saying why not."""
        profile = get_profile(name)
        if profile.rerotate and self._rotary is None:
            raise ValueError(
                f"profile {name!r} re-rotates queries, but the model has no single RoPE table; "
                "serve it without --radix-cache-backend grkv"
            )
        if get_scorer(profile.scorer).needs_output_projection and not self._output_projections:
            raise ValueError(
                f"profile {name!r} scores by the output projection, but the model's o_proj weights are not "
                "plain matrices; use profile 'default' or 'paper'"
            )
        return profile

    @torch.no_grad()
    def compress(self, source: SpanSource, profile: Profile, new_slots: Tensor) -> SpanOrigin:
        """Write the compressed span into `new_slots` ([c] int64, owned by the caller).

        Raises CompressionError; then the contents of `new_slots` are undefined and nothing else changed.
        """
        started = time.perf_counter()
        n_tokens, n_slots = len(source.token_ids), new_slots.numel()
        always_kept = profile.n_window + (profile.sinks if source.start_tokens == 0 else 0)
        if n_slots < n_tokens and n_slots <= always_kept:
            raise CompressionError(
                "budget_too_small",
                f"{n_slots} slots leave nothing to select beyond {always_kept} tokens that are always kept",
            )
        try:
            plan = plan_queries(n_tokens, profile)
        except ValueError as error:
            raise CompressionError("too_short", str(error)) from error
        backend = _ProbeBackend(
            self._pool, source, plan, profile, new_slots, self._rotary, self._output_projections
        )
        with self._on_forward_stream():
            self._forward(source, plan, backend)
        total_s = time.perf_counter() - started
        expected = self._runner.model_config.num_hidden_layers
        if backend.layers_done != expected:
            raise CompressionError(
                "incomplete", f"{backend.layers_done} of {expected} layers were compressed"
            )
        quality = backend.quality
        return SpanOrigin(
            profile=profile.name,
            quality=quality.quality,
            error_before=quality.error_before,
            error_after=quality.error_after,
            probe_s=total_s - backend.select_s - backend.regress_s - backend.copy_s,
            select_s=backend.select_s,
            regress_s=backend.regress_s,
            copy_s=backend.copy_s,
            compress_s=total_s,
        )

    @torch.no_grad()
    def copy(self, source: SpanSource, new_slots: Tensor) -> SpanOrigin:
        """A forced span that keeps every token: a plain copy of the KV."""
        started = time.perf_counter()
        with self._on_forward_stream():
            for buffers in (self._pool.get_key_buffer, self._pool.get_value_buffer):
                for layer_id in range(self._runner.model_config.num_hidden_layers):
                    copy_slots(buffers(layer_id), source.slots, new_slots)
        elapsed = time.perf_counter() - started
        return SpanOrigin("copy", 1.0, 0.0, 0.0, forced=True, copy_s=elapsed, compress_s=elapsed)

    def _forward(self, source: SpanSource, plan: QueryPlan, backend: _ProbeBackend) -> None:
        device = self._runner.device
        relative = plan.positions
        ids = torch.tensor([source.token_ids[i] for i in relative.tolist()], dtype=torch.int64, device=device)
        positions = (relative + source.start_tokens).to(device)
        num_queries = ids.numel()
        end = source.start_tokens + len(source.token_ids)
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=1,
            input_ids=ids,
            req_pool_indices=torch.zeros(1, dtype=torch.int64, device=device),
            seq_lens=torch.tensor([end], device=device),
            out_cache_loc=torch.zeros(num_queries, dtype=torch.int64, device=device),
            seq_lens_sum=end,
            positions=positions,
            seq_lens_cpu=torch.tensor([end]),
            extend_num_tokens=num_queries,
            extend_seq_lens=torch.tensor([num_queries], device=device),
            extend_prefix_lens=torch.tensor([end - num_queries], device=device),
            extend_seq_lens_cpu=[num_queries],
            extend_prefix_lens_cpu=[end - num_queries],
        )
        with forward_context(ForwardContext(attn_backend=backend), forward_batch=batch):
            # The inner model: hidden states only, no logits.
            self._runner.model.model(ids, positions, batch)

    def _on_forward_stream(self) -> contextlib.AbstractContextManager[Any]:
        """On CUDA, work behind the forward passes already queued: one of them may still write a slot that
        was just freed. (Not run on a GPU yet.)"""
        if torch.device(self._runner.device).type != "cuda":
            return contextlib.nullcontext()
        stream = self._runner.forward_stream
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)


class _ProbeBackend:
    """Attention backend of one probe pass: attends to cached KV, writes none, compresses each layer."""

    def __init__(
        self,
        pool: Any,
        source: SpanSource,
        plan: QueryPlan,
        profile: Profile,
        new_slots: Tensor,
        rotary: RotaryTable | None,
        output_projections: dict[int, Tensor],
    ) -> None:
        self.token_to_kv_pool = pool
        self._source = source
        self._plan = plan
        self._profile = profile
        self._new_slots = new_slots
        self._rotary = rotary if profile.rerotate else None
        self._output_projections = output_projections
        device = source.slots.device
        span_visible = (
            torch.arange(source.slots.numel(), device=device)[None, :] <= plan.positions.to(device)[:, None]
        )
        ancestors = torch.ones(
            plan.positions.numel(), source.ancestor_slots.numel(), dtype=torch.bool, device=device
        )
        self._mask = torch.cat([ancestors, span_visible], dim=1)
        self._slots = torch.cat([source.ancestor_slots, source.slots])
        self.quality = SpanQuality()
        self.layers_done = 0
        self.select_s = self.regress_s = self.copy_s = 0.0

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **unexpected: Any,
    ) -> Tensor:
        if unexpected:
            raise CompressionError(
                "unsupported_model", f"attention arguments {sorted(unexpected)} are not served"
            )
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        all_keys, all_values = keys[self._slots], values[self._slots]
        output = scaled_dot_product_attention(
            queries.movedim(0, 1)[None], all_keys.movedim(0, 1)[None], all_values.movedim(0, 1)[None],
            attn_mask=self._mask, scale=layer.scaling, enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
        )  # fmt: skip

        before = self._source.ancestor_slots.numel()
        with _small_operations(queries.device):
            result = compress_layer(
                LayerInputs(
                    keys=all_keys[before:],
                    values=all_values[before:],
                    queries=queries,
                    scale=layer.scaling,
                    ancestor_keys=all_keys[:before] if before else None,
                    ancestor_values=all_values[:before] if before else None,
                    output_projection=self._output_projections.get(layer.layer_id),
                ),
                self._plan,
                self._profile,
                n_slots=self._new_slots.numel(),
                starts_sequence=self._source.start_tokens == 0,
                rotary=self._rotary,
            )
        if not (torch.isfinite(result.keys).all() and torch.isfinite(result.values).all()):
            raise CompressionError("non_finite", f"layer {layer.layer_id} gave a non-finite key or value")
        started = time.perf_counter()
        write_slots(keys, self._new_slots, result.keys)
        write_slots(values, self._new_slots, result.values)
        self.copy_s += time.perf_counter() - started
        self.select_s += result.select_s
        self.regress_s += result.regress_s
        self.quality.add(result)
        self.layers_done += 1
        return output[0].movedim(0, 1).reshape(-1, layer.tp_q_head_num * layer.v_head_dim)


@contextlib.contextmanager
def _small_operations(device: torch.device) -> Iterator[None]:
    """Run on one thread where that is a choice.

    A layer is hundreds of operations of a fraction of a millisecond. On a CPU a second thread saves a third
    of them on an idle machine; beside any other load its spinning at every barrier costs a hundredfold.
    """
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _find_rotary(model: torch.nn.Module) -> RotaryTable | None:
    """The model's RoPE table (SGLang: ``RotaryEmbedding.cos_sin_cache``); None if it has none or several."""
    found: dict[int, Any] = {}
    for module in model.modules():
        rotary = getattr(module, "rotary_emb", None)
        if rotary is not None and hasattr(rotary, "cos_sin_cache"):
            found[id(rotary)] = rotary
    if len(found) != 1:
        return None
    rotary = next(iter(found.values()))
    return RotaryTable(
        cos_sin=rotary.cos_sin_cache.float(), rotary_dim=rotary.rotary_dim, is_neox=rotary.is_neox_style
    )


def _find_output_projections(model: torch.nn.Module) -> dict[int, Tensor]:
    """Layer id -> o_proj weight [hidden, heads * head_dim]; empty unless all are plain matrices."""
    projections: dict[int, Tensor] = {}
    for module in model.modules():
        attention, o_proj = getattr(module, "attn", None), getattr(module, "o_proj", None)
        if attention is None or o_proj is None or not hasattr(attention, "tp_q_head_num"):
            continue
        weight = getattr(o_proj, "weight", None)
        width = attention.tp_q_head_num * attention.v_head_dim
        if weight is None or weight.ndim != 2 or weight.shape[1] != width or not weight.is_floating_point():
            return {}
        projections[attention.layer_id] = weight
    return projections
