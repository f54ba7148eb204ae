"""Any Hugging Face decoder-only model as a host for compressed prefixes, without an engine.

The model's own layers run; only attention is ours, through transformers' attention interface: a prefill that
records what compression needs, passes over a cached prefix, and continuations of a cached prefix, full or
compressed, evenly per head or not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from grkv_sglang.core import (
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
    compress_layer,
    fitted_queries,
    get_scorer,
    plan_queries,
)
from grkv_sglang.policy.prompts import pass_chunks, pass_prompts

ATTENTION = "grkv_host"


class _Handler(Protocol):
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q [B, Hq, t, d], k and v [B, Hkv, t, ...] of the new tokens -> output [B, Hq, t, dv]."""


@dataclass
class LayerCache:
    """One layer's cached KV.

    Attributes:
        keys: [Hkv, c, d].
        values: [Hkv, c, dv].
        valid: [Hkv, c] bool, False for padding of a head with fewer tokens; None when there is none.
        log_counts: [Hkv, c], added to the logits, for a merging method whose tokens count several times; no
            server holds that.
    """

    keys: Tensor
    values: Tensor
    valid: Tensor | None = None
    log_counts: Tensor | None = None

    def bias(self) -> Tensor | None:
        """[Hkv, c] to be added to the logits; None for nothing."""
        if self.valid is None:
            return self.log_counts
        masked = torch.zeros_like(self.keys[..., 0]).masked_fill(~self.valid, -torch.inf)
        return masked if self.log_counts is None else masked + self.log_counts


@dataclass
class Prefix:
    """A prefilled prefix of n tokens.

    Attributes:
        token_ids: the prefix.
        layers: its KV.
        queries: per layer [n, Hq, d] post-RoPE.
        scales: per layer, the factor on the logits.
        prefill_s: seconds.
        passes: what passes have left, their seconds in `pass_s` and how far they looked in `reach_tokens`.
    """

    token_ids: list[int]
    layers: list[LayerCache]
    queries: list[Tensor]
    scales: list[float]
    prefill_s: float
    passes: dict[PassKind, PassResults] = field(default_factory=dict)
    pass_s: dict[PassKind, float] = field(default_factory=dict)
    reach_tokens: dict[PassKind, int | None] = field(default_factory=dict)

    @property
    def n_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class Compressed:
    """A compressed prefix.

    Attributes:
        n_tokens: tokens that it stands for; what follows goes on at this position.
        layers: its KV.
        error_before, error_after: relative error of attention outputs on held-out queries, with the
            selection alone and after the regression; NaN where unknown.
        select_s, regress_s: seconds. `pass_s`: of the passes that the profile needs.
    """

    n_tokens: int
    layers: list[LayerCache]
    error_before: float = float("nan")
    error_after: float = float("nan")
    select_s: float = 0.0
    regress_s: float = 0.0
    pass_s: float = 0.0


class Host:
    """A model and its tokenizer.

    Attributes:
        storage: how a prefix's KV is held, the model's dtype unless set. A prefill computes with its own KV
            as it is (as engines do within a chunk); everything after it reads what was stored.
    """

    def __init__(self, model: Path | str, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        # transformers keeps such functions by name for the whole process: one for each host.
        attention = f"{ATTENTION}_{id(self)}"
        AttentionInterface.register(attention, self._dispatch)
        self.storage = Storage(dtype)
        self.device = torch.device(device)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model)
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation=attention)
        self.model: Any = loaded.eval().to(self.device)
        self.config: Any = loaded.config
        self.n_layers = int(self.config.num_hidden_layers)
        self.max_position = int(self.config.max_position_embeddings)
        self.rotary = _rotary_table(self.model, self.max_position)
        self._handler: _Handler | None = None
        self.output_projections = {
            module.layer_idx: module.o_proj.weight
            for module in self.model.modules()
            if hasattr(module, "o_proj") and hasattr(module, "layer_idx")
        }
        self._prompts = pass_prompts(self.tokenizer)

    # -- prefill and passes ------------------------------------------------------------------------

    @torch.inference_mode()
    def prefill(self, token_ids: Sequence[int]) -> Prefix:
        """Full attention over the prefix; keeps KV and the queries of every token."""
        recorder = _Prefill()
        started = time.perf_counter()
        self._forward(torch.tensor([list(token_ids)]), torch.arange(len(token_ids))[None], recorder)
        self._synchronise()
        elapsed = time.perf_counter() - started
        rounded = self.storage.rounded
        layers = [LayerCache(rounded(layer.keys), rounded(layer.values)) for layer in recorder.layers]
        return Prefix(list(token_ids), layers, recorder.queries, recorder.scales, elapsed)

    @torch.inference_mode()
    def run_pass(
        self,
        prefix: Prefix,
        kind: PassKind,
        *,
        chunk_tokens: int = 256,
        reach_tokens: int | None = 256,
    ) -> None:
        """Do a pass over the prefix unless it was done, a repetition with the same reach."""
        if kind != "repetition":
            reach_tokens = None
        if kind in prefix.passes and prefix.reach_tokens[kind] == reach_tokens:
            return
        prefix.reach_tokens[kind] = reach_tokens
        started = time.perf_counter()
        chunks = pass_chunks(
            kind,
            prefix.token_ids,
            self._prompts,
            chunk_tokens=chunk_tokens,
            reach_tokens=reach_tokens,
        )
        state = _Pass(prefix)
        for chunk in chunks:
            state.chunk = chunk
            ids = torch.tensor([chunk.token_ids])
            positions = chunk.first_position + torch.arange(ids.shape[1])[None]
            self._forward(ids, positions, state)
        self._synchronise()
        prefix.passes[kind] = state.results
        prefix.pass_s[kind] = time.perf_counter() - started

    # -- compression -------------------------------------------------------------------------------

    @torch.inference_mode()
    def compress(
        self, prefix: Prefix, profile: Profile, n_slots: int, protected: Tensor | None = None
    ) -> Compressed:
        """Compress every layer of the prefix into `n_slots` slots per KV head (on average, where the method
        has budgets of its own per head or layer)."""
        for kind in profile.passes:
            self.run_pass(prefix, kind, reach_tokens=profile.repetition_reach_tokens)
        plan = plan_queries(prefix.n_tokens, profile)
        results = [
            compress_layer(
                self.layer_inputs(prefix, layer, plan, profile),
                plan,
                profile,
                n_slots=n_slots,
                starts_sequence=True,
                rotary=self.rotary,
                protected=protected,
            )
            for layer in range(self.n_layers)
        ]
        self._synchronise()
        compressed = compressed_of(
            prefix.n_tokens, results, sum(prefix.pass_s[kind] for kind in profile.passes)
        )
        for layer in compressed.layers:
            layer.keys, layer.values = (
                self.storage.load(stored).to(prefix.layers[0].keys.dtype)
                for stored in (layer.keys, layer.values)
            )
        return compressed

    def layer_inputs(self, prefix: Prefix, layer: int, plan: QueryPlan, profile: Profile) -> LayerInputs:
        """What the core needs of one layer."""
        cached = prefix.layers[layer]
        pass_queries, pass_outputs = fitted_queries(prefix.passes, profile.fitted_of_passes, layer)
        return LayerInputs(
            keys=self.storage.store(cached.keys.transpose(0, 1)),
            values=self.storage.store(cached.values.transpose(0, 1)),
            key_scale=self.storage.scale,
            value_scale=self.storage.scale,
            queries=prefix.queries[layer][plan.positions.to(self.device)],
            scale=prefix.scales[layer],
            output_projection=self.output_projections.get(layer)
            if get_scorer(profile.scorer).needs_output_projection
            else None,
            passes={kind: prefix.passes[kind].statistics(layer) for kind in profile.passes},
            pass_queries=pass_queries,
            pass_outputs=pass_outputs,
            layer=layer,
            n_layers=self.n_layers,
        )

    # -- continuations -----------------------------------------------------------------------------

    @torch.inference_mode()
    def log_probs(
        self, cache: Compressed, sequences: Sequence[Sequence[int]], first: Sequence[int]
    ) -> list[Tensor]:
        """Teacher-forced log-probabilities behind a cached prefix, all sequences in one forward pass.

        Args:
            cache: what the sequences continue.
            sequences: token ids, each of its own length.
            first: per sequence, the first token whose prediction is wanted, at least 1 (token 0 is predicted
                by the prefix itself).

        Returns:
            Per sequence [len - first, vocabulary] float32: entry j predicts token `first + j`.
        """
        lengths = [len(ids) for ids in sequences]
        positions = torch.cat([cache.n_tokens + torch.arange(length) for length in lengths])
        packed = torch.tensor([[token for ids in sequences for token in ids]])
        hidden = self._forward(packed, positions[None], _Packed(cache, lengths, self.device))[0]
        result = []
        for ids, start, rows in zip(sequences, first, hidden.split(lengths), strict=True):
            logits = self.model.lm_head(rows[start - 1 : len(ids) - 1])
            result.append(logits.float().log_softmax(dim=-1))
        return result

    @torch.inference_mode()
    def generate(
        self, cache: Compressed, prompts: Sequence[Sequence[int]], max_new_tokens: int
    ) -> list[list[int]]:
        """Greedy continuations of a cached prefix, all prompts in one batch, up to an end-of-sequence token
        (which is left out)."""
        state = _Continuation(cache)
        hidden = self._continue(cache, prompts, state)
        ends = set(self._end_ids())
        answers: list[list[int]] = [[] for _ in prompts]
        open_rows = set(range(len(prompts)))
        next_position = torch.tensor([[cache.n_tokens + len(prompt)] for prompt in prompts])
        for _ in range(max_new_tokens):
            tokens = self.model.lm_head(hidden[:, -1]).argmax(dim=-1)
            for row in sorted(open_rows):
                token = int(tokens[row])
                if token in ends:
                    open_rows.discard(row)
                else:
                    answers[row].append(token)
            if not open_rows:
                break
            hidden = self._forward(tokens[:, None], next_position, state)
            next_position = next_position + 1
        return answers

    def full(self, prefix: Prefix) -> Compressed:
        """The prefix as it is."""
        return Compressed(prefix.n_tokens, prefix.layers, 0.0, 0.0)

    # -- the model ---------------------------------------------------------------------------------

    def _continue(
        self, cache: Compressed, sequences: Sequence[Sequence[int]], state: _Continuation
    ) -> Tensor:
        width = max(len(ids) for ids in sequences)
        padded = [[0] * (width - len(ids)) + list(ids) for ids in sequences]
        pads = torch.tensor([width - len(ids) for ids in sequences])
        # Padding sits before a sequence, at whatever position, and is never attended to.
        positions = cache.n_tokens + (torch.arange(width)[None] - pads[:, None]).clamp(min=0)
        state.pads = pads.to(self.device)
        return self._forward(torch.tensor(padded), positions, state)

    def _forward(self, ids: Tensor, positions: Tensor, handler: _Handler) -> Tensor:
        """Hidden states [B, t, hidden] behind the last norm."""
        self._handler = handler
        try:
            output = self.model.model(
                input_ids=ids.to(self.device), position_ids=positions.to(self.device), use_cache=False
            )
        finally:
            self._handler = None
        return output.last_hidden_state

    def _dispatch(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        if self._handler is None:
            raise RuntimeError("the model was called past its host")
        output = self._handler(module.layer_idx, query, key, value, scaling)
        return output.transpose(1, 2).contiguous(), None

    def _end_ids(self) -> list[int]:
        ends = getattr(self.model.generation_config, "eos_token_id", None) or self.tokenizer.eos_token_id
        return list(ends) if isinstance(ends, list | tuple) else [ends]

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def compressed_of(n_tokens: int, results: Sequence[LayerResult], pass_s: float = 0.0) -> Compressed:
    """A compressed prefix out of its layers."""
    quality = SpanQuality()
    layers = []
    for result in results:
        quality.add(result)
        valid = result.kept >= 0
        layers.append(
            LayerCache(
                result.keys.transpose(0, 1), result.values.transpose(0, 1), None if valid.all() else valid
            )
        )
    return Compressed(
        n_tokens,
        layers,
        error_before=quality.error_before,
        error_after=quality.error_after,
        select_s=sum(result.select_s for result in results),
        regress_s=sum(result.regress_s for result in results),
        pass_s=pass_s,
    )


class _Prefill:
    """Causal attention of one sequence; records KV and queries."""

    def __init__(self) -> None:
        self.layers: list[LayerCache] = []
        self.queries: list[Tensor] = []
        self.scales: list[float] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        self.layers.append(LayerCache(k[0].clone(), v[0].clone()))
        self.queries.append(q[0].transpose(0, 1).clone())
        self.scales.append(scale)
        return scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )


class _Pass:
    """Chunk after chunk over a cached prefix."""

    def __init__(self, prefix: Prefix) -> None:
        self._prefix = prefix
        self.chunk: PassChunk
        self.results = PassResults()

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        cached = self._prefix.layers[layer]
        keys, values = cached.keys.transpose(0, 1), cached.values.transpose(0, 1)
        n_tokens, attended = len(keys), self.chunk.attended_tokens(keys.device)
        if attended is not None:
            keys, values = keys[attended], values[attended]
        output = self.results.attend(
            layer,
            self.chunk,
            queries=q[0].transpose(0, 1),
            own_keys=k[0].transpose(0, 1),
            own_values=v[0].transpose(0, 1),
            keys=keys,
            values=values,
            n_tokens=n_tokens,
            scale=scale,
        )
        return output.to(q.dtype).transpose(0, 1)[None]


class _Packed:
    """Sequences behind a cached prefix, packed into one row; each sees the prefix and itself."""

    def __init__(self, cache: Compressed, lengths: Sequence[int], device: torch.device) -> None:
        self._cache = cache
        sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
        causal = torch.ones(len(sequence), len(sequence), dtype=torch.bool, device=device).tril()
        self._mask = causal & (sequence[:, None] == sequence)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return _behind(self._cache.layers[layer], q, k, v, self._mask[None, None], scale)


def _behind(cached: LayerCache, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention of q [B, Hq, t, d] over a cached prefix, shared by the batch, and own k, v [B, Hkv, u, ...]
    where mask [B, 1, t, u] allows."""
    batch, n_heads, n_new, _ = q.shape
    group = n_heads // k.shape[1]
    keys = torch.cat([cached.keys.expand(batch, -1, -1, -1), k], dim=2)
    values = torch.cat([cached.values.expand(batch, -1, -1, -1), v], dim=2)
    bias = cached.bias()
    if bias is None:
        allowed = torch.cat([mask.new_ones(batch, 1, n_new, cached.keys.shape[1]), mask], dim=-1)
    else:
        ahead = bias.to(q.dtype).repeat_interleave(group, dim=0)[None, :, None].expand(batch, -1, n_new, -1)
        own = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, -torch.inf)
        allowed = torch.cat([ahead, own.expand(-1, n_heads, -1, -1)], dim=-1)
    return scaled_dot_product_attention(q, keys, values, attn_mask=allowed, scale=scale, enable_gqa=group > 1)


class _Continuation:
    """Sequences (left-padded) behind a cached prefix; keeps their own KV, so that it can go on."""

    def __init__(self, cache: Compressed) -> None:
        self._cache = cache
        self.pads: Tensor
        self._own: dict[int, tuple[Tensor, Tensor]] = {}
        self._masks: dict[tuple[int, int], Tensor] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        if layer in self._own:
            k = torch.cat([self._own[layer][0], k], dim=2)
            v = torch.cat([self._own[layer][1], v], dim=2)
        self._own[layer] = k, v
        mask = self._mask(q.shape[2], k.shape[2])
        return _behind(self._cache.layers[layer], q, k, v, mask, scale)

    def _mask(self, n_new: int, n_own: int) -> Tensor:
        """[B, 1, n_new, n_own] bool: causal, without padding. A padding row sees itself: no NaN."""
        if (n_new, n_own) not in self._masks:
            device = self.pads.device
            query = torch.arange(n_own - n_new, n_own, device=device)[:, None]
            key = torch.arange(n_own, device=device)
            mask = (key <= query) & ((key >= self.pads[:, None, None]) | (key == query))
            self._masks = {(n_new, n_own): mask[:, None]}
        return self._masks[n_new, n_own]


def _rotary_table(model: Any, max_position: int) -> RotaryTable:
    """Cosines and sines of the model's own rotary embedding (transformers pairs the two halves)."""
    embedding = next(module for name, module in model.named_modules() if name.endswith("rotary_emb"))
    positions = torch.arange(max_position, device=next(model.parameters()).device)[None]
    cos, sin = embedding(torch.zeros(1, device=positions.device), positions)
    half = cos.shape[-1] // 2
    return RotaryTable(torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=1).float(), 2 * half, is_neox=True)
