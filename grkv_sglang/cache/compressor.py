"""Compress the tokens of one path into new KV slots: a probe forward for queries, then the core per layer.

The probe is one forward pass over a few sampled tokens of the cached prefix. Each attends to the cached
KV up to its own position, nothing is written, and its queries equal those of the prefill. Some profiles
add a pass over as many tokens as the span has, in chunks that write nothing either. With the queries of
every layer at hand (a few MiB) the layers are independent of each other: they are compressed a few per
scheduler step, so that running requests keep their pace.

Written against SGLang 0.5.23: ``model_executor/forward_batch_info.py: ForwardBatch``,
``model_executor/forward_context.py: forward_context``, ``layers/radix_attention.py: RadixAttention.forward``
(which calls ``get_attn_backend().forward(q, k, v, layer, forward_batch, save_kv_cache)``).
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from grkv_kernels import bits, copy_slots, read_slots, write_slots
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from torch import Tensor

from grkv_sglang.attention.kv_scales import KVScales, attention_layers, kv_scales
from grkv_sglang.attention.ragged import (
    RaggedRegion,
    ordinary_ranges,
    pack_heads,
    pad_heads,
    unpack_heads,
)
from grkv_sglang.cache.span import SpanOrigin
from grkv_sglang.core import (
    CUE_TOKENS,
    LayerInputs,
    LayerResult,
    PassChunk,
    PassKind,
    PassResults,
    Profile,
    QueryPlan,
    RotaryTable,
    SpanQuality,
    Storage,
    WindowAttention,
    always_kept_tokens,
    attend_probe,
    compress_layer,
    fitted_queries,
    get_profile,
    get_scorer,
    plan_queries,
    rotate_forward,
)
from grkv_sglang.policy.prompts import PassPrompts, longest_prompt, pass_chunks

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.model_runner import ModelRunner


CHUNK_TOKENS = 256
"""Tokens of one forward pass beyond the probe: one scheduler step."""


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
    merged_token_ids: Sequence[int]
    """``[start_tokens, exact_start_tokens)``: what the merged spans stand for."""
    merged_slots: Tensor
    """[j], slots of older spans that the new one takes in; none in general."""
    protected: tuple[tuple[int, int], ...]
    """Ranges of positions in the prompt whose tokens are kept as they are."""
    ancestor_slots: Tensor
    """[p], slots of everything before the span; all are visible to every query of the span."""
    ancestor_regions: tuple[RaggedRegion, ...] = ()
    """Which of `ancestor_slots`, as columns, hold other tokens for each head."""

    @property
    def end_tokens(self) -> int:
        return self.exact_start_tokens + len(self.token_ids)

    def protected_candidates(self) -> Tensor | None:
        """[j + k] bool, the candidates that stand for a protected token; None where there is none."""
        mask = torch.zeros(self.num_candidates, dtype=torch.bool)
        for start, end in self.protected:
            low, high = (max(0, at - self.exact_start_tokens) for at in (start, end))
            mask[self.merged_slots.numel() :][low:high] = True
        return mask if mask.any() else None

    @property
    def num_candidates(self) -> int:
        return self.merged_slots.numel() + self.slots.numel()

    @cached_property
    def candidates(self) -> Tensor:
        return torch.cat([self.merged_slots, self.slots])

    @cached_property
    def path(self) -> PathKV:
        """From the sequence's start to the span's end."""
        return self.path_with(self.candidates)

    def path_with(self, slots: Tensor) -> PathKV:
        """What lies before the span, then these slots of it."""
        before, regions = self.ancestor_slots, self.ancestor_regions
        ordinary = [before[first:end] for first, end in ordinary_ranges(0, before.numel(), regions)]
        return PathKV(
            slots=torch.cat([*ordinary, slots]),
            n_before=sum(part.numel() for part in ordinary),
            regions=tuple((before[r.first_column : r.end_column], r.counts) for r in regions),
        )


@dataclass(frozen=True, eq=False)
class PathKV:
    """Cached KV in the order in which a probe looks at it: regions of older spans whose heads hold tokens of
    their own, other slots before the span, the span's."""

    slots: Tensor
    """Int64, those that hold a token for every head."""
    n_before: int
    """How many of them lie before the span."""
    regions: tuple[tuple[Tensor, Tensor], ...]
    """Slots and counts [layers, Hkv] of each region."""

    def gather(self, buffer: Tensor, layer_id: int) -> Tensor:
        """[p' + n, Hkv, d] out of a layer's keys or values: where a head holds fewer tokens of the regions
        than others, rows of zeros."""
        rows = _by_head(buffer, self.slots)
        if not self.regions:
            return rows
        regions = [unpack_heads(bits(read_slots(buffer, s)), counts[layer_id]) for s, counts in self.regions]
        return torch.cat([pad_heads(regions), bits(rows)]).view(buffer.dtype)

    def held(self, layer_id: int) -> Tensor | None:
        """[Hkv, p'] bool, which head holds a token in a gathered row before the span; None: every head."""
        if not self.regions:
            return None
        counts = torch.stack([counts[layer_id] for _, counts in self.regions]).sum(dim=0)
        column = torch.arange(int(counts.max()) + self.n_before)
        held = (column < counts.unsqueeze(1)) | (column >= counts.max())
        return held.to(self.slots.device)


class Compressor:
    """Turns a SpanSource into compressed KV. Holds what it needs to know of the model; no request state."""

    def __init__(
        self,
        model_runner: ModelRunner,
        prompts: PassPrompts | None = None,
        per_head_refusal: str | None = None,
    ) -> None:
        """`prompts`: what passes put behind a span; None where the server has no tokenizer.
        `per_head_refusal`: why the server does not hold budgets per head; None where it does."""
        self._runner = model_runner
        self._prompts = prompts
        self._per_head_refusal = per_head_refusal
        self._pool = model_runner.token_to_kv_pool
        self._rotary = _find_rotary(model_runner.model)
        self._output_projections = _find_output_projections(model_runner.model)
        # What decoding multiplies the stored numbers by.
        self._scales = {
            layer.layer_id: kv_scales(layer, model_runner.decode_attention_backend_str)
            for layer in attention_layers(model_runner.model)
        }

    @property
    def num_layers(self) -> int:
        return int(self._runner.model_config.num_hidden_layers)

    @property
    def num_kv_heads(self) -> int:
        """Of this rank."""
        return int(self._pool.get_key_buffer(0).shape[1])

    def check_profile(self, name: str) -> Profile:
        """The profile, if this model can be compressed with it. Raises ValueError saying why not."""
        profile = get_profile(name)
        if profile.rerotate and self._rotary is None:
            raise ValueError(
                f"profile {name!r} re-rotates queries, but the model has no single RoPE table; "
                "serve it without --radix-cache-backend grkv"
            )
        if profile.storage == "per_layer":
            raise ValueError(
                f"profile {name!r} selects with {profile.scorer!r}, whose budgets differ between layers: a "
                "slot exists in every layer; use profile 'default' or 'best'"
            )
        if profile.storage == "per_head" and self._per_head_refusal is not None:
            raise ValueError(f"profile {name!r} {self._per_head_refusal}")
        if profile.passes - {"span"} and self._prompts is None:
            raise ValueError(
                f"profile {name!r} puts requests behind the prefix, which takes a tokenizer "
                "(--skip-tokenizer-init is set); use profile 'paper'"
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
        """Run the probe; passes and layers are done by `Compression.advance_pass` and `advance`.

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
        protected = source.protected_candidates()
        if n_slots < n_candidates:
            try:
                always_kept_tokens(
                    n_candidates, n_slots=n_slots, n_window=profile.n_window, sinks=profile.sinks,
                    starts_sequence=source.start_tokens == 0, device=torch.device("cpu"), protected=protected,
                )  # fmt: skip
            except ValueError as error:
                raise CompressionError("budget_too_small", str(error)) from error
        try:
            plan = plan_queries(n_candidates, profile, first=source.merged_slots.numel())
        except ValueError as error:
            raise CompressionError("too_short", str(error)) from error
        probe = _Probe(source, plan, self._rotary if profile.rerotate else None)
        work = Compression(self, source, profile, plan, new_slots, probe, protected, lora_id)
        if n_slots < n_candidates:
            work.chunks.extend(self._chunks(source, profile))
        relative = plan.positions - source.merged_slots.numel()
        ids = [source.token_ids[i] for i in relative.tolist()]
        positions = relative + source.exact_start_tokens
        parts: list[tuple[int, _Reader]] = [(len(ids), probe)]
        if work.chunks and work.chunks[0][0] == "questions":
            # As few tokens as the probe's: in its forward pass, which mostly reads the model's weights.
            kind, chunk = work.chunks.popleft()
            parts.append((len(chunk.token_ids), _PassReader(source, work.results[kind], chunk)))
            ids += chunk.token_ids
            positions = torch.cat([positions, self._positions(source, chunk)])
        with self.on_forward_stream():
            self._forward(ids, positions, parts, lora_id)
        if len(probe.queries) != self.num_layers:
            raise CompressionError(
                "incomplete", f"the probe passed {len(probe.queries)} of {self.num_layers} layers"
            )
        work.probe_s = time.perf_counter() - started
        return work

    def _chunks(self, source: SpanSource, profile: Profile) -> Iterator[tuple[PassKind, PassChunk]]:
        """The forward passes that the profile needs beyond the probe."""
        tokens = [*source.merged_token_ids, *source.token_ids]
        if "span" in profile.passes and source.merged_slots.numel():
            raise CompressionError("unsupported", "merged spans hold no tokens for a pass over the span")
        repeated_tokens = CHUNK_TOKENS
        # The span's own tokens take no positions behind it, and no tokenizer.
        if profile.passes - {"span"} and self._prompts is not None:
            room = self._runner.model_config.context_len - source.end_tokens - longest_prompt(self._prompts)
            least = CUE_TOKENS if "repetition" in profile.passes else 0
            if room < least:
                raise CompressionError(
                    "no_positions",
                    f"profile {profile.name!r} puts requests behind the prefix: {least - room} positions of "
                    "the model's are missing",
                )
            repeated_tokens = min(CHUNK_TOKENS, room)
        for kind in sorted(profile.passes):
            for chunk in pass_chunks(
                kind,
                tokens,
                self._prompts,
                chunk_tokens=repeated_tokens if kind == "repetition" else CHUNK_TOKENS,
                # The slots of merged spans stand for no tokens in particular: look at all of them.
                reach_tokens=None if source.merged_slots.numel() else profile.repetition_reach_tokens,
            ):
                yield kind, chunk

    def run_chunk(self, work: Compression, kind: PassKind, chunk: PassChunk) -> None:
        """One forward pass of `work`."""
        parts = [(len(chunk.token_ids), _PassReader(work.source, work.results[kind], chunk))]
        with self.on_forward_stream():
            positions = self._positions(work.source, chunk)
            self._forward(list(chunk.token_ids), positions, parts, work.lora_id)

    @staticmethod
    def _positions(source: SpanSource, chunk: PassChunk) -> Tensor:
        """Of a chunk's tokens in the sequence."""
        return torch.arange(len(chunk.token_ids)) + source.start_tokens + chunk.first_position

    @torch.no_grad()
    def copy(self, source: SpanSource, new_slots: Tensor) -> SpanOrigin:
        """A forced span that keeps every token: a plain copy of the KV."""
        started = time.perf_counter()
        with self.on_forward_stream():
            for buffers in (self._pool.get_key_buffer, self._pool.get_value_buffer):
                for layer_id in range(self.num_layers):
                    copy_slots(buffers(layer_id), source.candidates, new_slots)
        return _copied(started)

    @torch.no_grad()
    def copy_packed(self, source: SpanSource, new_slots: Tensor) -> tuple[SpanOrigin, Tensor]:
        """The same, stored head by head as a span with budgets per head is; its counts [layers, Hkv]."""
        if self._per_head_refusal is not None:
            raise CompressionError("unsupported", f"forced='packed' {self._per_head_refusal}")
        started = time.perf_counter()
        counts = torch.full((self.num_layers, self.num_kv_heads), source.num_candidates)
        with self.on_forward_stream():
            for buffers in (self._pool.get_key_buffer, self._pool.get_value_buffer):
                for layer_id in range(self.num_layers):
                    rows = read_slots(buffers(layer_id), source.candidates)
                    write_slots(buffers(layer_id), new_slots, pack_heads(rows, counts[layer_id]))
        return _copied(started), counts

    def compress_layer(self, work: Compression, layer_id: int) -> LayerResult:
        """Compress one layer of `work` and write it to the pool.

        Raises CompressionError for a non-finite result; then the layer's new slots are left as they were.
        """
        source = work.source
        keys = self._pool.get_key_buffer(layer_id)
        values = self._pool.get_value_buffer(layer_id)
        path_keys, path_values = (source.path.gather(buffer, layer_id) for buffer in (keys, values))
        n_before = len(path_keys) - source.num_candidates
        scales = self._scales[layer_id]
        queries, scale = work.probe.queries[layer_id]
        pass_queries, pass_outputs = fitted_queries(work.results, work.profile.fitted_of_passes, layer_id)
        result = compress_layer(
            LayerInputs(
                keys=path_keys[n_before:],
                values=path_values[n_before:],
                queries=queries,
                scale=scale,
                ancestor_keys=path_keys[:n_before] if n_before else None,
                ancestor_values=path_values[:n_before] if n_before else None,
                ancestor_held=source.path.held(layer_id),
                output_projection=self._output_projections.get(layer_id),
                passes={kind: results.statistics(layer_id) for kind, results in work.results.items()},
                pass_queries=pass_queries,
                pass_outputs=pass_outputs,
                window=work.probe.window.get(layer_id),
                held_out=work.probe.held_out.get(layer_id),
                layer=layer_id,
                n_layers=self.num_layers,
                key_scale=scales.key,
                value_scale=scales.value,
            ),
            work.plan,
            work.profile,
            n_slots=work.new_slots.numel(),
            starts_sequence=source.start_tokens == 0,
            rotary=self._rotary if work.profile.rerotate else None,
            protected=work.protected,
        )
        if not result.is_finite:
            raise CompressionError("non_finite", f"layer {layer_id} gave a non-finite key or value")
        started = time.perf_counter()
        new_keys, new_values = result.keys, result.values
        if work.counts is not None:
            held = (result.kept >= 0).sum(dim=-1).cpu()
            new_keys, new_values = (pack_heads(rows, held) for rows in (new_keys, new_values))
            work.counts[layer_id] = held
        write_slots(keys, work.new_slots, new_keys)
        write_slots(values, work.new_slots, new_values)
        work.copy_s += time.perf_counter() - started
        return result

    def _forward(
        self,
        token_ids: list[int],
        positions: Tensor,
        parts: Sequence[tuple[int, _Reader]],
        lora_id: str | None,
    ) -> None:
        """The model's layers over these tokens at these positions: so many for each reader."""
        backend = _CachedAttention(self._pool, self._scales, parts)
        device = self._runner.device
        ids = torch.tensor(token_ids, dtype=torch.int64, device=device)
        end = int(positions[-1]) + 1
        positions = positions.to(device)
        num_queries = ids.numel()
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
        with forward_context(ForwardContext(attn_backend=backend), forward_batch=batch):
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
        probe: _Probe,
        protected: Tensor | None,
        lora_id: str | None,
    ) -> None:
        self.source, self.profile, self.plan, self.new_slots = source, profile, plan, new_slots
        self.probe, self.protected, self.lora_id = probe, protected, lora_id
        self.chunks: deque[tuple[PassKind, PassChunk]] = deque()
        """Of passes, still to do."""
        counted = get_scorer(profile.scorer).statistics
        self.results: defaultdict[PassKind, PassResults] = defaultdict(lambda: PassResults(counted))
        """Of the passes that were begun: none where all tokens are kept."""
        self.quality = SpanQuality()
        self.counts: Tensor | None = None
        """[layers, Hkv] int64 on the host, how many tokens each head keeps; None where all keep as many."""
        if profile.storage == "per_head" and new_slots.numel() < source.num_candidates:
            self.counts = torch.zeros(compressor.num_layers, compressor.num_kv_heads, dtype=torch.int64)
        self.layers_done = 0
        self.copy_s = 0.0
        self._compressor = compressor
        self.probe_s = self._pass_s = 0.0
        self._advance_s = self._select_s = self._regress_s = 0.0

    @property
    def done(self) -> bool:
        return self.layers_done == self._compressor.num_layers

    @torch.no_grad()
    def advance_pass(self) -> None:
        """Do the next chunk of a pass. Raises CompressionError; then the span cannot be finished."""
        started = time.perf_counter()
        self._compressor.run_chunk(self, *self.chunks.popleft())
        self._pass_s += time.perf_counter() - started

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
        total_s = self.probe_s + self._pass_s + self._advance_s
        return SpanOrigin(
            profile=self.profile.name,
            quality=quality.quality,
            error_before=quality.error_before,
            error_after=quality.error_after,
            probe_s=total_s - self._pass_s - self._select_s - self._regress_s - self.copy_s,
            pass_s=self._pass_s,
            select_s=self._select_s,
            regress_s=self._regress_s,
            copy_s=self.copy_s,
            compress_s=total_s,
        )


def _copied(started: float) -> SpanOrigin:
    elapsed = time.perf_counter() - started
    return SpanOrigin("copy", 1.0, 0.0, 0.0, forced=True, copy_s=elapsed, compress_s=elapsed)


class _Reader:
    """Some tokens of a forward pass over a cached prefix, and what is noted of their attention."""

    path: PathKV
    """What they attend to, in the pool."""

    def attend(
        self, layer: RadixAttention, queries: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """[m, Hq, dv] for queries [m, Hq, d] and their own k and v, over keys and values [s, Hkv, ...] of
        `path`."""
        raise NotImplementedError


def _by_head(buffer: Tensor, slots: Tensor) -> Tensor:
    """[s, Hkv, d] of a pool's buffer [slots, Hkv, d]; head by head in memory, as every product reads it."""
    n_kv_heads, dim = buffer.shape[1:]
    cells = slots * n_kv_heads + torch.arange(n_kv_heads, device=slots.device).unsqueeze(1)
    by_head = read_slots(buffer.view(-1, 1, dim), cells.flatten())
    return by_head.view(n_kv_heads, -1, dim).transpose(0, 1)


class _CachedAttention:
    """Attention backend of a forward pass over a cached prefix, whose tokens belong to one reader after the
    other: writes no KV."""

    def __init__(
        self, pool: Any, scales: Mapping[int, KVScales], parts: Sequence[tuple[int, _Reader]]
    ) -> None:
        self.token_to_kv_pool = pool
        self._scales = scales
        self._sizes, self._readers = zip(*parts, strict=True)

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
        buffers = (
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
        )
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        split = (tensor.split(self._sizes) for tensor in (queries, k, v))
        outputs = []
        gathered: tuple[PathKV, Tensor, Tensor] | None = None
        for reader, *own in zip(self._readers, *split, strict=True):
            # Gathering a long prefix costs as much as attending to it: once for readers of the same slots.
            if gathered is None or gathered[0] is not reader.path:
                keys, values = (
                    _attended(reader.path.gather(buffer, layer.layer_id), scale)
                    for buffer, scale in zip(buffers, self._scales[layer.layer_id], strict=True)
                )
                gathered = reader.path, keys, values
            outputs.append(reader.attend(layer, *own, *gathered[1:]))
        return torch.cat(outputs).reshape(-1, layer.tp_q_head_num * layer.v_head_dim)


class _Probe(_Reader):
    """The plan's queries, each at its own position: keeps each layer's queries, and what of their attention
    the core would compute again."""

    def __init__(self, source: SpanSource, plan: QueryPlan, rotary: RotaryTable | None) -> None:
        """`rotary`: moves the held-out queries to the span's last position; None where they stay."""
        self.queries: dict[int, tuple[Tensor, float]] = {}
        """Layer id -> queries [m, Hq, d] after RoPE, attention scale."""
        self.window: dict[int, WindowAttention] = {}
        """Layer id -> attention of the plan's scoring window queries."""
        self.held_out: dict[int, Tensor] = {}
        """Layer id -> [k, Hq, dv], attention of the held-out queries where they are used."""
        self.path = source.path
        device = self.path.slots.device
        self._n_tokens = source.num_candidates
        self._in_window = plan.score_window.to(device)
        self._window_positions = plan.positions[plan.score_window]
        others = plan.positions[~plan.score_window].to(device)
        self._visible = torch.arange(self._n_tokens, device=device) <= others[:, None]
        self._held_out = plan.held_out.to(device)
        self._to_the_end = self._n_tokens - 1 - plan.positions[plan.held_out]
        self._rotary = rotary

    def attend(
        self, layer: RadixAttention, queries: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        # A copy: the tensor is a view of the layer's whole QKV projection.
        self.queries[layer.layer_id] = queries.clone(), layer.scaling
        others = queries[~self._in_window]
        moved = []
        if self._rotary is not None:
            moved.append(rotate_forward(queries[self._held_out].float(), self._to_the_end, self._rotary))
        self.window[layer.layer_id], of_others = attend_probe(
            queries[self._in_window], torch.cat([others.float(), *moved]), keys, values,
            positions=self._window_positions, visible=self._visible, n_tokens=self._n_tokens,
            scale=layer.scaling, held=self.path.held(layer.layer_id),
        )  # fmt: skip
        output = queries.new_empty(*queries.shape[:2], layer.v_head_dim)
        output[self._in_window] = self.window[layer.layer_id].output.to(output.dtype)
        output[~self._in_window] = of_others[: len(others)].to(output.dtype)
        self.held_out[layer.layer_id] = (
            of_others[len(others) :] if moved else of_others[self._held_out[~self._in_window]]
        )
        return output


class _PassReader(_Reader):
    """One chunk of a pass: attends to cached KV and its own tokens; their attention is counted."""

    def __init__(self, source: SpanSource, results: PassResults, chunk: PassChunk) -> None:
        self._n_tokens = source.num_candidates
        self._results, self._chunk = results, chunk
        self.path = source.path
        attended = chunk.attended_tokens(self.path.slots.device)
        if attended is not None:
            self.path = source.path_with(source.candidates[attended])

    def attend(
        self, layer: RadixAttention, queries: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        output = self._results.attend(
            layer.layer_id,
            self._chunk,
            queries=queries,
            own_keys=k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
            own_values=v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
            keys=keys,
            values=values,
            n_tokens=self._n_tokens,
            scale=layer.scaling,
            held=self.path.held(layer.layer_id),
        )
        return output.to(queries.dtype)


def _attended(stored: Tensor, scale: float) -> Tensor:
    """Keys or values of a pool as attention sees them: in the pool's dtype, or in float32 if that is narrow
    or scaled."""
    return stored if stored.dtype.itemsize > 1 and scale == 1 else Storage(stored.dtype, scale).load(stored)


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
