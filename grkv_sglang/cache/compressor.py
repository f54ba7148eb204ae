"""Compress the tokens of one path into new KV slots: a probe forward for queries, then the core per layer.

The probe is one forward pass over a few sampled tokens of the cached prefix. Each attends to the cached
KV up to its own position, nothing is written, and its queries equal those of the prefill. With the queries
of every layer at hand (a few MiB) the layers are independent of each other: they are compressed a few per
scheduler step, so that running requests keep their pace.

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
    LayerResult,
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
    """The cached KV to compress. Slots are int64 on the pool's device.

    The candidates of the new span are `merged_slots` followed by `slots`.
    """

    start_tokens: int
    """Where the new span starts."""
    token_ids: Sequence[int]
    """The span's tokens that are held exactly: all of them, or those behind the merged spans."""
    exact_start_tokens: int
    """Position of the first of `token_ids`; `start_tokens` unless spans are merged."""
    slots: Tensor
    """[k], one per token of `token_ids`."""
    merged_slots: Tensor
    """[j], slots of older spans that the new one takes in; none in general."""
    ancestor_slots: Tensor
    """[p], slots of everything before the span; all are visible to every query of the span."""

    @property
    def end_tokens(self) -> int:
        return self.exact_start_tokens + len(self.token_ids)

    @property
    def num_candidates(self) -> int:
        return self.merged_slots.numel() + self.slots.numel()

    @property
    def candidates(self) -> Tensor:
        return torch.cat([self.merged_slots, self.slots])


class Compressor:
    """Turns a SpanSource into compressed KV. Holds what it needs to know of the model; no request state."""

    def __init__(self, model_runner: ModelRunner) -> None:
        self._runner = model_runner
        self._pool = model_runner.token_to_kv_pool
        self._rotary = _find_rotary(model_runner.model)
        self._output_projections = _find_output_projections(model_runner.model)

    @property
    def num_layers(self) -> int:
        return int(self._runner.model_config.num_hidden_layers)

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
        if get_scorer(profile.scorer).needs_output_projection and self._runner.lora_manager is not None:
            raise ValueError(
                f"profile {name!r} scores by the output projection, which LoRA adapters change; "
                "use profile 'default' or 'paper'"
            )
        return profile

    @torch.no_grad()
    def start(
        self, source: SpanSource, profile: Profile, new_slots: Tensor, lora_id: str | None = None
    ) -> Compression:
        """Run the probe; the layers are done by `Compression.advance`.

        Args:
            source: what to compress.
            profile: how.
            new_slots: [c] int64, owned by the caller, where the span goes.
            lora_id: the adapter that computed the KV.

        Raises:
            CompressionError: it cannot be done.
        """
        started = time.perf_counter()
        n_candidates, n_slots = source.num_candidates, new_slots.numel()
        always_kept = profile.n_window + (profile.sinks if source.start_tokens == 0 else 0)
        if n_slots < n_candidates and n_slots <= always_kept:
            raise CompressionError(
                "budget_too_small",
                f"{n_slots} slots leave nothing to select beyond {always_kept} tokens that are always kept",
            )
        try:
            plan = plan_queries(n_candidates, profile, first=source.merged_slots.numel())
        except ValueError as error:
            raise CompressionError("too_short", str(error)) from error
        probe = _ProbeBackend(self._pool, source, plan)
        with self.on_forward_stream():
            self._forward(source, plan, probe, lora_id)
        if len(probe.queries) != self.num_layers:
            raise CompressionError(
                "incomplete", f"the probe passed {len(probe.queries)} of {self.num_layers} layers"
            )
        return Compression(self, source, profile, plan, new_slots, probe, time.perf_counter() - started)

    @torch.no_grad()
    def copy(self, source: SpanSource, new_slots: Tensor) -> SpanOrigin:
        """A forced span that keeps every token: a plain copy of the KV."""
        started = time.perf_counter()
        with self.on_forward_stream():
            for buffers in (self._pool.get_key_buffer, self._pool.get_value_buffer):
                for layer_id in range(self.num_layers):
                    copy_slots(buffers(layer_id), source.candidates, new_slots)
        elapsed = time.perf_counter() - started
        return SpanOrigin("copy", 1.0, 0.0, 0.0, forced=True, copy_s=elapsed, compress_s=elapsed)

    def compress_layer(self, work: Compression, layer_id: int) -> LayerResult:
        """Compress one layer of `work` and write it to the pool.

        Raises CompressionError for a non-finite result; then the layer's new slots are left as they were.
        """
        source = work.source
        keys = self._pool.get_key_buffer(layer_id)
        values = self._pool.get_value_buffer(layer_id)
        candidates, ancestors = source.candidates, source.ancestor_slots
        queries, scale = work.probe.queries[layer_id]
        result = compress_layer(
            LayerInputs(
                keys=keys[candidates],
                values=values[candidates],
                queries=queries,
                scale=scale,
                ancestor_keys=keys[ancestors] if ancestors.numel() else None,
                ancestor_values=values[ancestors] if ancestors.numel() else None,
                output_projection=self._output_projections.get(layer_id),
            ),
            work.plan,
            work.profile,
            n_slots=work.new_slots.numel(),
            starts_sequence=source.start_tokens == 0,
            rotary=self._rotary if work.profile.rerotate else None,
        )
        if not (torch.isfinite(result.keys).all() and torch.isfinite(result.values).all()):
            raise CompressionError("non_finite", f"layer {layer_id} gave a non-finite key or value")
        started = time.perf_counter()
        write_slots(keys, work.new_slots, result.keys)
        write_slots(values, work.new_slots, result.values)
        work.copy_s += time.perf_counter() - started
        return result

    def _forward(
        self, source: SpanSource, plan: QueryPlan, probe: _ProbeBackend, lora_id: str | None
    ) -> None:
        device = self._runner.device
        relative = plan.positions - source.merged_slots.numel()
        ids = torch.tensor([source.token_ids[i] for i in relative.tolist()], dtype=torch.int64, device=device)
        positions = (relative + source.exact_start_tokens).to(device)
        num_queries = ids.numel()
        end = source.end_tokens
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
            lora_ids=[lora_id],
        )
        self._prepare_lora(batch, lora_id)
        with forward_context(ForwardContext(attn_backend=probe), forward_batch=batch):
            # The inner model: hidden states only, no logits.
            self._runner.model.model(ids, positions, batch)

    def _prepare_lora(self, batch: ForwardBatch, lora_id: str | None) -> None:
        """What ``ForwardBatch.init_new`` does: LoRA layers otherwise apply the adapters of the last batch."""
        manager = self._runner.lora_manager
        if manager is None:
            return
        if lora_id is not None and lora_id not in manager.loras:
            raise CompressionError("adapter_gone", f"LoRA adapter {lora_id} was unloaded")
        manager.fetch_new_loras({lora_id})
        manager.prepare_lora_batch(batch)

    def on_forward_stream(self) -> contextlib.AbstractContextManager[Any]:
        """On CUDA, work behind the forward passes already queued: one of them may still write a slot that
        was just freed. (Not run on a GPU yet.)"""
        if torch.device(self._runner.device).type != "cuda":
            return contextlib.nullcontext()
        stream = self._runner.forward_stream
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)


class Compression:
    """One span in the making: its queries are known, its layers are done a few at a time."""

    def __init__(
        self,
        compressor: Compressor,
        source: SpanSource,
        profile: Profile,
        plan: QueryPlan,
        new_slots: Tensor,
        probe: _ProbeBackend,
        probe_s: float,
    ) -> None:
        self.source, self.profile, self.plan, self.new_slots = source, profile, plan, new_slots
        self.probe = probe
        self.quality = SpanQuality()
        self.layers_done = 0
        self.copy_s = 0.0
        self._compressor = compressor
        self._probe_s = probe_s
        self._advance_s = self._select_s = self._regress_s = 0.0

    @property
    def done(self) -> bool:
        return self.layers_done == self._compressor.num_layers

    @torch.no_grad()
    def advance(self, max_layers: int) -> None:
        """Do the next layers. Raises CompressionError; then the span cannot be finished."""
        started = time.perf_counter()
        end = min(self.layers_done + max_layers, self._compressor.num_layers)
        with self._compressor.on_forward_stream(), _small_operations(self.new_slots.device):
            while self.layers_done < end:
                result = self._compressor.compress_layer(self, self.layers_done)
                self._select_s += result.select_s
                self._regress_s += result.regress_s
                self.quality.add(result)
                self.layers_done += 1
        self._advance_s += time.perf_counter() - started

    def origin(self, quality: SpanQuality) -> SpanOrigin:
        """How the finished span was made; `quality` is this rank's or, with several, that of all."""
        # What is neither selection, regression nor copy is the gathering of KV: counted with the probe.
        total_s = self._probe_s + self._advance_s
        return SpanOrigin(
            profile=self.profile.name,
            quality=quality.quality,
            error_before=quality.error_before,
            error_after=quality.error_after,
            probe_s=total_s - self._select_s - self._regress_s - self.copy_s,
            select_s=self._select_s,
            regress_s=self._regress_s,
            copy_s=self.copy_s,
            compress_s=total_s,
        )


class _ProbeBackend:
    """Attention backend of one probe pass: attends to cached KV, writes none, keeps each layer's queries."""

    def __init__(self, pool: Any, source: SpanSource, plan: QueryPlan) -> None:
        self.token_to_kv_pool = pool
        self.queries: dict[int, tuple[Tensor, float]] = {}
        """Layer id -> queries [m, Hq, d] after RoPE, attention scale."""
        device = source.slots.device
        span_visible = (
            torch.arange(source.num_candidates, device=device)[None, :] <= plan.positions.to(device)[:, None]
        )
        ancestors = torch.ones(
            plan.positions.numel(), source.ancestor_slots.numel(), dtype=torch.bool, device=device
        )
        self._mask = torch.cat([ancestors, span_visible], dim=1)
        self._slots = torch.cat([source.ancestor_slots, source.candidates])

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
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)[self._slots]
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)[self._slots]
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        # A copy: the tensor is a view of the layer's whole QKV projection.
        self.queries[layer.layer_id] = queries.clone(), layer.scaling
        output = scaled_dot_product_attention(
            queries.movedim(0, 1)[None], keys.movedim(0, 1)[None], values.movedim(0, 1)[None],
            attn_mask=self._mask, scale=layer.scaling, enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
        )  # fmt: skip
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
