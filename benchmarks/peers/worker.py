"""Which tokens kvpress's methods keep, exported case by case. Runs inside the peers' own environment.

Imports nothing of the project, and kvpress and transformers only when something is computed, so that the
tables and the packing below can be read from any environment.

    python worker.py --model DIR --cases cases.json --out DIR --budgets 0.1,0.3 --methods snapkv,kvzip

``cases.json`` holds ``{"cases": [{"id": str, "context_ids": [int, ...], "continuation_ids": [int, ...]}]}``;
the continuation is optional and only used by ``--check``. Every case becomes ``OUT/<id>.pt``, a plain dict
(`torch.load` with ``weights_only=True`` reads it):

    fingerprint      str: digest of the tokens, the model's name and size, dtype, seed and versions
    n_tokens, n_layers, n_kv_heads   int
    prefill_seconds  float: the prefill without any press
    seconds          {method: float}: computing one budget, all layers together (the mean over the budgets);
                     of the KVzip methods the second pass that all three share
    methods          {method: {budget: {"kept": uint8, "values": ..., "keys": ...}}}, budget as ``str(float)``

``kept`` is `numpy.packbits` in its default bit order (the first flag is the highest bit of the first byte,
the last byte is padded with zeros) over the flattened bool mask ``[n_layers, n_kv_heads, n_tokens]``.
``values`` (and ``keys``, which no method here changes) is there only where a method changes what it keeps:
``[n_layers, n_kv_heads, c, head_dim]`` in the model's dtype, rows in ascending token order.

A budget b keeps ``max(1, int(n * (1 - (1 - b))))`` tokens: kvpress's own rounding of its compression ratio
1 - b, which can be one token fewer than ``ceil(b * n)`` and, where 1 - (1 - b) falls below b, than ``b * n``.

How each method can be stored (`STORAGE`):

    even      every KV head of every layer keeps the same number: one slot index per layer suffices
    per_head  the heads of a layer keep different numbers, the layers' totals are equal
    none      the layers' totals differ as well

    snapkv            even      SnapKVPress: window 64, kernel 5
    criticalkv        even      CriticalKVPress over SnapKV: epsilon 1e-4, first stage 0.5
    adakv             per_head  AdaKVPress over SnapKV: safeguard 0.2
    critical_adakv    per_head  CriticalAdaKVPress over SnapKV
    expected_attention even     ExpectedAttentionPress: 512 future positions, 4 sinks, covariance, value norm
    kvzip_even        even      KVzipPress's scores, the best of every KV head by itself
    kvzip_layerwise   per_head  KVzipPress(layerwise=True)
    kvzip             none      KVzipPress: the best over all layers and heads
    cam               even      CAMPress over SnapKV: merge budget 32 (a layer's heads all keep the same)
    streaming         even      StreamingLLMPress: 4 sinks
    random            even      RandomPress with a seed (kvpress then draws the same positions in every layer)

CaM: kvpress has it for decoding only. There, every ``compression_interval`` steps (512), it evicts down to a
target size, merges the values of as many evicted tokens as there were steps into the kept tokens behind them,
and weighs by the attention summed over these steps. A prefix is given to it as the case where its last
``min(512, n - 1)`` tokens were these steps and the one compression comes at the end. This equals prefilling
the tokens before them and feeding the others one by one, which ``--check`` does, except that SnapKV gets the
window's rotary angles (kvpress gives a decoding press only the newest token's).

SnapKV scores its whole window alike, above all else: a budget of fewer tokens than the window keeps whatever
`torch.topk` makes of the tie. Compare with it only where more than 64 tokens are kept.

KVzip takes the chat template's beginning for a prefix that is not to be scored (and evicts it first). Where
a case's tokens do not begin with it, the whole context is scored.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

STORAGE: dict[str, str] = {
    "snapkv": "even",
    "criticalkv": "even",
    "adakv": "per_head",
    "critical_adakv": "per_head",
    "expected_attention": "even",
    "kvzip_even": "even",
    "kvzip_layerwise": "per_head",
    "kvzip": "none",
    "cam": "even",
    "streaming": "even",
    "random": "even",
}
SECOND_PASS = ("kvzip_even", "kvzip_layerwise", "kvzip")
"""Methods that read the context a second time, behind an instruction to repeat it."""
MASKING = ("adakv", "critical_adakv")
"""Methods that leave the cache whole and list what attention is to ignore."""
DEFAULT_SEED = 0
FORMAT = 1
"""Of a case's file; raised whenever the same case would be exported differently."""
QUERY_ROWS = 256
"""Rows of attention weights held at a time while summing them: bounds the memory of a long context."""


def pack_mask(mask: Tensor) -> Tensor:
    """Bool mask of any shape -> uint8 ``[ceil(numel / 8)]``; the first flag is the highest bit."""
    return torch.from_numpy(np.packbits(mask.cpu().numpy().reshape(-1)))


def unpack_mask(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """The bool mask of `shape` that `pack_mask` packed.

    Raises:
        ValueError: `packed` is not uint8, or has not the length that `shape` needs.
    """
    count = math.prod(shape)
    if packed.dtype != torch.uint8 or packed.shape != (math.ceil(count / 8),):
        raise ValueError(
            f"expected {math.ceil(count / 8)} bytes for a mask {list(shape)}, "
            f"got {packed.dtype} {list(packed.shape)}"
        )
    flags = np.unpackbits(packed.numpy(), count=count).astype(bool)
    return torch.from_numpy(flags).view(*shape)


def build_press(name: str, *, ratio: float, seed: int = DEFAULT_SEED, window: int = 64) -> Any:
    """The kvpress press behind `name`, with kvpress's defaults apart from `ratio`, `seed` and `window`.

    Raises:
        KeyError: no such method.
    """
    import kvpress  # type: ignore[import-not-found]

    def snapkv() -> Any:
        return kvpress.SnapKVPress(compression_ratio=ratio, window_size=window)

    factories: dict[str, Any] = {
        "snapkv": snapkv,
        "criticalkv": lambda: kvpress.CriticalKVPress(snapkv()),
        "adakv": lambda: kvpress.AdaKVPress(snapkv()),
        "critical_adakv": lambda: kvpress.CriticalAdaKVPress(snapkv()),
        "expected_attention": lambda: kvpress.ExpectedAttentionPress(compression_ratio=ratio),
        "kvzip": lambda: kvpress.KVzipPress(compression_ratio=ratio),
        "kvzip_layerwise": lambda: kvpress.KVzipPress(compression_ratio=ratio, layerwise=True),
        # A ratio of its base press would only be overridden, with a warning.
        "cam": lambda: kvpress.CAMPress(base_press=kvpress.SnapKVPress(window_size=window)),
        "streaming": lambda: kvpress.StreamingLLMPress(compression_ratio=ratio),
        "random": lambda: kvpress.RandomPress(compression_ratio=ratio, seed=seed),
    }
    return factories[name]()


@contextmanager
def fixed_scores(press: Any, scores: Tensor) -> Iterator[None]:
    """Within it `press` finds `scores` whatever it is given, so that it can be run on token positions."""
    press.score = lambda *_args, **_kwargs: scores
    try:
        yield
    finally:
        del press.score


def position_rows(module: Any, n_heads: int, n_tokens: int) -> Tensor:
    """In place of keys: every row is its own position. int64 ``[1, n_heads, n_tokens, head_dim]``."""
    return torch.arange(n_tokens).view(1, 1, -1, 1).expand(1, n_heads, n_tokens, module.head_dim)


def mask_of(positions: Tensor, n_tokens: int) -> Tensor:
    """Bool ``[Hkv, n_tokens]`` that is true at `positions`, int64 ``[Hkv, c]``."""
    return torch.zeros(positions.shape[0], n_tokens, dtype=torch.bool).scatter_(1, positions, True)


def top_of_each_head(press: Any, module: Any, scores: Tensor) -> Tensor:
    """What a scorer press keeps of a layer with `scores` ``[1, Hkv, n]``: bool ``[Hkv, n]``."""
    _, n_heads, n_tokens = scores.shape
    rows = position_rows(module, n_heads, n_tokens)
    with fixed_scores(press, scores):
        kept, _ = press.compress(module, None, rows, rows, None, {})
    return mask_of(kept[0, :, :, 0], n_tokens)


def take_masked(module: Any, n_heads: int, n_tokens: int) -> Tensor:
    """Bool ``[Hkv, n]`` of what a masking press left, and the module without its list.

    The list must go: attention of any later pass that is not a prefill would act on it.
    """
    _, heads, positions = module.masked_key_indices
    module.masked_key_indices = None
    kept = torch.ones(n_heads, n_tokens, dtype=torch.bool)
    kept[heads, positions] = False
    return kept


def take_all_masked(model: Any, n_heads: int, n_tokens: int) -> Tensor:
    """`take_masked` of all layers: bool ``[L, Hkv, n]``."""
    return torch.stack([take_masked(layer.self_attn, n_heads, n_tokens) for layer in model.model.layers])


def summed_attention(
    module: Any, hidden_states: Tensor, keys: Tensor, kwargs: dict[str, Any], *, n_queries: int
) -> Tensor:
    """Attention that every token got from the last queries, mean over a group: ``[1, Hkv, n]``.

    Args:
        module: the attention layer.
        hidden_states: its input, ``[1, n, hidden]``.
        keys: its cached keys after RoPE, ``[1, Hkv, n, head_dim]``.
        kwargs: its forward's arguments, with the rotary angles of all n positions.
        n_queries: how many, at most n.
    """
    from kvpress.utils import get_prerope_query_states  # type: ignore[import-not-found]
    from transformers.models.llama.modeling_llama import rotate_half

    _, n_heads, n_tokens, head_dim = keys.shape
    cos, sin = (angles.unsqueeze(1) for angles in kwargs["position_embeddings"])
    queries = get_prerope_query_states(module, hidden_states)
    queries = queries * cos + rotate_half(queries) * sin
    queries = queries[0].view(n_heads, -1, n_tokens, head_dim)
    total = torch.zeros(n_heads, n_tokens)
    for start in range(n_tokens - n_queries, n_tokens, QUERY_ROWS):
        end = min(start + QUERY_ROWS, n_tokens)
        logits = queries[:, :, start:end] @ keys[0, :, None, :end].transpose(2, 3) / math.sqrt(head_dim)
        future = torch.arange(end) > torch.arange(start, end).unsqueeze(1)
        weights = logits.float().masked_fill_(future, -math.inf).softmax(-1)
        total[:, :end] += weights.mean(1).sum(1)
    return total.unsqueeze(0).to(keys.dtype)


def merging_steps(press: Any, n_tokens: int) -> int:
    """How many of the last tokens count as decoding steps for CaM."""
    return min(int(press.compression_interval), n_tokens - 1)


def seed_merging(seed: int, layer: int, n_kept: int) -> None:
    """Seeds CaM's draws by layer and size, so that they depend on nothing that was drawn before."""
    torch.manual_seed((seed * 4099 + layer) * 65537 + n_kept)


class Recorder:
    """Runs presses on what the hook of a layer sees, and keeps what they would keep.

    Args:
        methods: names of methods that need no second pass.
        budgets: shares of tokens to keep, between 0 and 1.
        seed: of RandomPress and of CaM's draws.
        window: SnapKV's.

    `masks` are bool ``[Hkv, n]`` and `values` ``[Hkv, c, head_dim]``, a list with an entry per layer for each
    (method, budget); `seconds` holds the time spent on a method, all budgets and layers together.
    """

    def __init__(
        self, methods: Sequence[str], budgets: Sequence[float], *, seed: int = DEFAULT_SEED, window: int = 64
    ) -> None:
        # The ratio is set before every use; 0.5 only has to be valid.
        self.presses = {name: build_press(name, ratio=0.5, seed=seed, window=window) for name in methods}
        self.budgets = list(budgets)
        self.seed = seed
        self.masks: dict[tuple[str, float], list[Tensor]] = {}
        self.values: dict[tuple[str, float], list[Tensor]] = {}
        self.seconds = dict.fromkeys(methods, 0.0)

    def press(self) -> Any:
        """A press to prefill with: kvpress's own hook calls `compress`, and the cache stays whole."""
        import kvpress

        hook = kvpress.BasePress()
        hook.compress = self.compress
        return hook

    def compress(
        self,
        module: Any,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """BasePress.compress: keys and values ``[1, Hkv, n, head_dim]`` come back as they are."""
        for name, press in self.presses.items():
            started = time.perf_counter()
            attention = None
            if name == "cam":
                steps = merging_steps(press, keys.shape[2])
                attention = summed_attention(module, hidden_states, keys, kwargs, n_queries=steps)
            for budget in self.budgets:
                entry = (name, budget)
                if attention is not None:
                    mask, changed = self._merge(
                        press, module, hidden_states, keys, values, attention, kwargs, budget
                    )
                    self.values.setdefault(entry, []).append(changed)
                elif name in MASKING:
                    press.compression_ratio = 1 - budget
                    press.compress(module, hidden_states, keys, values, attentions, kwargs)
                    mask = take_masked(module, keys.shape[1], keys.shape[2])
                else:
                    press.compression_ratio = 1 - budget
                    scores = press.score(module, hidden_states, keys, values, attentions, kwargs)
                    mask = top_of_each_head(press, module, scores)
                self.masks.setdefault(entry, []).append(mask)
            self.seconds[name] += time.perf_counter() - started
        return keys, values

    def _merge(
        self,
        press: Any,
        module: Any,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attention: Tensor,
        kwargs: dict[str, Any],
        budget: float,
    ) -> tuple[Tensor, Tensor]:
        """CaM on one layer: kept tokens, bool ``[Hkv, n]``, and their new values ``[Hkv, c, head_dim]``."""
        from kvpress.utils import compute_n_kept

        n_heads, n_tokens = keys.shape[1:3]
        layer = int(module.layer_idx)
        press.target_size = compute_n_kept(n_tokens, 1 - budget)
        press.layer_step_counts[layer] = merging_steps(press, n_tokens)
        press._running_attn_sum[layer] = attention
        scores = press.base_press.score(module, hidden_states, keys, values, None, kwargs)
        with fixed_scores(press.base_press, scores), torch.random.fork_rng(devices=[]):
            seed_merging(self.seed, layer, press.target_size)
            # It adds to the values in place; the next budget needs them as they were.
            kept, changed = press.compress(
                module,
                hidden_states,
                position_rows(module, n_heads, n_tokens),
                values.clone(),
                attention,
                kwargs,
            )
        return mask_of(kept[0, :, :, 0], n_tokens), changed[0]


def chat_prefix_length(model: Any, context_ids: Tensor) -> int:
    """Tokens of the chat template's beginning if `context_ids` ``[1, n]`` begin with it, else 0."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model.config.name_or_path)
    if tokenizer.chat_template is None:
        return 0
    marker = "dummy context"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": marker}], add_generation_prompt=True, tokenize=False
    )
    prefix = tokenizer.encode(chat.split(marker)[0], add_special_tokens=False)
    return len(prefix) if context_ids[0, : len(prefix)].tolist() == prefix else 0


@contextmanager
def kvzip_scores(model: Any, context_ids: Tensor) -> Iterator[list[Tensor]]:
    """Around a prefill: KVzip's second pass follows it, and its scores are put into the list.

    The scores ``[L, 1, Hkv, n]`` come with the sinks' top score; the model's cache is left whole.
    """
    press = build_press("kvzip", ratio=0.5)  # any ratio: the scores do not depend on it
    recorded: list[Tensor] = []
    finish = press.compress_post

    def compress_post(pressed: Any) -> None:
        finish(pressed)
        recorded.append(press.score_val.clone())
        take_all_masked(pressed, *press.score_val.shape[2:])

    press.compress_post = compress_post
    prefix_length = chat_prefix_length(model, context_ids)
    with press(model):
        yield recorded
        press.prefix_length = prefix_length


def kvzip_mask(name: str, scores: Tensor, model: Any, budget: float) -> Tensor:
    """What a KVzip method keeps, by kvpress's rules on `scores` ``[L, 1, Hkv, n]``: bool ``[L, Hkv, n]``."""
    import kvpress

    n_heads, n_tokens = scores.shape[2:]
    if name == "kvzip_even":
        rule = kvpress.ScorerPress(compression_ratio=1 - budget)
        layers = [layer.self_attn for layer in model.model.layers]
        return torch.stack([top_of_each_head(rule, layer, scores[layer.layer_idx]) for layer in layers])
    press = build_press(name, ratio=1 - budget)
    press.score_val = scores.clone()  # it raises the sinks' scores in place
    press.compress_post(model)
    return take_all_masked(model, n_heads, n_tokens)


def export_case(
    model: Any, context_ids: Tensor, *, methods: Sequence[str], budgets: Sequence[float], seed: int
) -> dict[str, Any]:
    """One case's file without its fingerprint (see the module's docstring).

    Args:
        model: a Hugging Face causal language model with sdpa attention.
        context_ids: int64 ``[1, n]``.
        methods: names in `STORAGE`.
        budgets: shares of tokens to keep, between 0 and 1.
        seed: of the methods that draw.
    """
    from transformers import DynamicCache

    recorder = Recorder([name for name in methods if name not in SECOND_PASS], budgets, seed=seed)
    second_pass = [name for name in methods if name in SECOND_PASS]
    scoring: AbstractContextManager[list[Tensor]] = nullcontext([])
    if second_pass:
        scoring = kvzip_scores(model, context_ids)
    with scoring as scores:
        with recorder.press()(model):
            started = time.perf_counter()
            model.model(input_ids=context_ids, past_key_values=DynamicCache())
            prefill_seconds = time.perf_counter() - started - sum(recorder.seconds.values())
        started = time.perf_counter()
    seconds = {name: spent / len(budgets) for name, spent in recorder.seconds.items()}
    seconds |= dict.fromkeys(second_pass, time.perf_counter() - started)

    exported: dict[str, dict[str, dict[str, Tensor]]] = {name: {} for name in methods}
    for name in methods:
        for budget in budgets:
            if name in SECOND_PASS:
                mask = kvzip_mask(name, scores[0], model, budget)
            else:
                mask = torch.stack(recorder.masks[name, budget])
            entry = {"kept": pack_mask(mask)}
            if (name, budget) in recorder.values:
                entry["values"] = torch.stack(recorder.values[name, budget])
            exported[name][str(budget)] = entry
    return {
        "n_tokens": context_ids.shape[1],
        "n_layers": model.config.num_hidden_layers,
        "n_kv_heads": model.config.num_key_value_heads,
        "prefill_seconds": prefill_seconds,
        "seconds": seconds,
        "methods": exported,
    }


# --- the check against kvpress itself ---


def match_rows(kept: Tensor, full: Tensor) -> Tensor:
    """Which rows of `full` ``[Hkv, n, d]`` are the rows of `kept` ``[Hkv, c, d]``: bool ``[Hkv, n]``.

    Raises:
        AssertionError: a row of `kept` is none of `full`'s, or two of them.
    """
    masks = []
    for kept_rows, full_rows in zip(kept, full, strict=True):
        equal = (full_rows.unsqueeze(1) == kept_rows.unsqueeze(0)).all(-1)  # [n, c]
        assert (equal.sum(0) == 1).all(), "a row of the pressed cache is not one row of the full cache"
        masks.append(equal.any(1))
    return torch.stack(masks)


def cache_of(keys: Sequence[Tensor], values: Sequence[Tensor]) -> Any:
    """A new cache with these layers, each ``[1, Hkv, c, d]``."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for layer, (layer_keys, layer_values) in enumerate(zip(keys, values, strict=True)):
        cache.update(layer_keys.clone(), layer_values.clone(), layer)
    return cache


def continuation_log_probs(model: Any, cache: Any, continuation_ids: Tensor, n_tokens: int) -> Tensor:
    """Log-probabilities after each token of the continuation, ``[m, vocabulary]``.

    It is read at positions n, n + 1, ...: a compressed cache is shorter than n, but as in kvpress's pipeline
    the positions go on where the text did.
    """
    count = continuation_ids.shape[1]
    position_ids = torch.arange(n_tokens, n_tokens + count).unsqueeze(0)
    try:
        output = model(input_ids=continuation_ids, past_key_values=cache, position_ids=position_ids)
        return output.logits[0].float().log_softmax(-1)
    except ValueError as error:
        # The masked keys are hidden from all queries of a pass by one fake key; for many there may be none.
        if "fake keys" not in str(error):
            raise
    steps = []
    for layer in cache.layers:  # the failed pass had begun to append
        layer.keys, layer.values = layer.keys[:, :, :n_tokens], layer.values[:, :, :n_tokens]
    for step in range(count):
        output = model(
            input_ids=continuation_ids[:, step : step + 1],
            past_key_values=cache,
            position_ids=position_ids[:, step : step + 1],
        )
        steps.append(output.logits[0, -1].float().log_softmax(-1))
    return torch.stack(steps)


def exported_log_probs(
    model: Any,
    full: tuple[Sequence[Tensor], Sequence[Tensor]],
    mask: Tensor,
    changed_values: Tensor | None,
    continuation_ids: Tensor,
) -> Tensor:
    """Log-probabilities as `continuation_log_probs` has them, from what was exported: the full cache, masked.

    Args:
        model: the model.
        full: keys and values of all layers, each ``[1, Hkv, n, d]``.
        mask: kept tokens, bool ``[L, Hkv, n]``.
        changed_values: ``[L, Hkv, c, d]``, or None where they stay as they are.
        continuation_ids: int64 ``[1, m]``.
    """
    keys, values = full
    n_tokens, count = mask.shape[2], continuation_ids.shape[1]
    group = model.config.num_attention_heads // mask.shape[1]
    if changed_values is not None:
        values = [layer.clone() for layer in values]
        for layer_values, flags, rows in zip(values, mask, changed_values, strict=True):
            layer_values[0][flags] = rows.reshape(-1, rows.shape[-1])
    causal = (
        torch.ones(count, count, dtype=torch.bool).tril().expand(model.config.num_attention_heads, -1, -1)
    )

    def with_mask(layer_mask: Tensor) -> Any:
        kept = layer_mask.repeat_interleave(group, 0).unsqueeze(1).expand(-1, count, -1)
        visible = torch.cat([kept, causal], -1).unsqueeze(0)  # [1, H, m, n + m]
        return lambda _module, arguments, kwargs: (arguments, {**kwargs, "attention_mask": visible})

    hooks = [
        layer.self_attn.register_forward_pre_hook(with_mask(flags), with_kwargs=True)
        for layer, flags in zip(model.model.layers, mask, strict=True)
    ]
    try:
        return continuation_log_probs(model, cache_of(keys, values), continuation_ids, n_tokens)
    finally:
        for hook in hooks:
            hook.remove()


def mean_divergence(reference: Tensor, found: Tensor) -> float:
    """Mean KL(reference || found) in nats of log-probabilities ``[m, vocabulary]``."""
    return (reference.exp() * (reference - found)).sum(-1).mean().item()


def genuine_cam(model: Any, context_ids: Tensor, budget: float, seed: int) -> tuple[Any, Tensor]:
    """CAMPress fed its last tokens one by one: its cache, and which tokens are left, bool ``[L, Hkv, n]``."""
    import kvpress
    from kvpress.utils import compute_n_kept
    from transformers import DynamicCache

    n_tokens = context_ids.shape[1]
    press = kvpress.CAMPress(
        base_press=kvpress.SnapKVPress(), target_size=compute_n_kept(n_tokens, 1 - budget)
    )
    press.compression_interval = steps = merging_steps(press, n_tokens)
    score, compress = press.base_press.score, press.compress
    masks: list[Tensor] = []

    def windowed(
        module: Any, hidden: Tensor, keys: Tensor, values: Tensor, attentions: Any, kwargs: Any
    ) -> Any:
        # The buffered inputs are those of the last tokens, but the angles are only the very last one's.
        angles = module.rotary_emb(hidden, torch.arange(n_tokens - hidden.shape[1], n_tokens).unsqueeze(0))
        return score(module, hidden, keys, values, attentions, {**kwargs, "position_embeddings": angles})

    def seeded(
        module: Any, hidden: Tensor, keys: Tensor, values: Tensor, attentions: Any, kwargs: Any
    ) -> Any:
        seed_merging(seed, int(module.layer_idx), press.target_size)
        full = keys.clone()
        kept_keys, kept_values = compress(module, hidden, keys, values, attentions, kwargs)
        masks.append(match_rows(kept_keys[0], full[0]))
        return kept_keys, kept_values

    press.base_press.score, press.compress = windowed, seeded
    cache = DynamicCache()
    with press(model):
        model.model(input_ids=context_ids[:, : n_tokens - steps], past_key_values=cache)
        for position in range(n_tokens - steps, n_tokens):
            model.model(input_ids=context_ids[:, position : position + 1], past_key_values=cache)
    return cache, torch.stack(masks)


def check_case(
    model: Any, case: dict[str, Any], exported: dict[str, dict[str, Any]], *, budget: float, seed: int
) -> dict[str, dict[str, float | None]]:
    """Compare an exported case with the genuine presses at one budget, method by method.

    Args:
        model: the model.
        case: an entry of cases.json.
        exported: methods of its file.
        budget: one of the file's.
        seed: with which it was exported.

    Returns:
        {method: {"differing": share of flags that differ, "kl": mean KL(full || compressed) in nats after
        each token of the continuation, by what was exported and exact masks, "genuine_kl": the same by what
        the press left in cache and model}}. A continuation is needed for the last two, and kvpress has no
        kvzip_even to compare with: None instead.

    Raises:
        AssertionError: the genuine press keeps other tokens. CaM is fed token by token, which rounds
            otherwise: there up to 0.5 % of the flags may differ.
    """
    from transformers import DynamicCache

    context_ids = torch.tensor([case["context_ids"]])
    n_tokens, n_heads = context_ids.shape[1], model.config.num_key_value_heads
    full = DynamicCache()
    model.model(input_ids=context_ids, past_key_values=full)
    full_keys, full_values = [x.keys for x in full.layers], [x.values for x in full.layers]
    continuation = torch.tensor([case["continuation_ids"]]) if case.get("continuation_ids") else None
    reference = None
    if continuation is not None:
        reference = continuation_log_probs(model, cache_of(full_keys, full_values), continuation, n_tokens)

    results: dict[str, dict[str, float | None]] = {}
    for name, entries in exported.items():
        entry = entries[str(budget)]
        mask = unpack_mask(entry["kept"], (len(full_keys), n_heads, n_tokens))
        differing: float | None = None
        masked = None  # what attention is to ignore, layer by layer
        cache = None
        if name == "kvzip_even":
            pass
        elif name == "cam":
            cache, genuine = genuine_cam(model, context_ids, budget, seed)
            differing = (genuine != mask).float().mean().item()
            assert differing <= 0.005, f"cam: {differing:.2%} of the flags differ from the genuine press"
        else:
            press = build_press(name, ratio=1 - budget, seed=seed)
            prefix_length = chat_prefix_length(model, context_ids) if name in SECOND_PASS else None
            cache = DynamicCache()
            with press(model):
                model.model(input_ids=context_ids, past_key_values=cache)
                if prefix_length is not None:
                    press.prefix_length = prefix_length
            if STORAGE[name] == "even":
                pairs = zip(cache.layers, full_keys, strict=True)
                genuine = torch.stack([match_rows(layer.keys[0], keys[0]) for layer, keys in pairs])
            else:
                masked = [layer.self_attn.masked_key_indices for layer in model.model.layers]
                genuine = take_all_masked(model, n_heads, n_tokens)
            differing = (genuine != mask).float().mean().item()
            assert differing == 0, f"{name}: {differing:.2%} of the flags differ from the genuine press"
        kl = genuine_kl = None
        if continuation is not None and reference is not None:
            found = exported_log_probs(
                model, (full_keys, full_values), mask, entry.get("values"), continuation
            )
            kl = mean_divergence(reference, found)
        if continuation is not None and reference is not None and cache is not None:
            for layer, indices in zip(model.model.layers, masked or [], strict=False):
                layer.self_attn.masked_key_indices = indices
            found = continuation_log_probs(model, cache, continuation, n_tokens)
            for layer in model.model.layers:
                layer.self_attn.masked_key_indices = None
            genuine_kl = mean_divergence(reference, found)
        results[name] = {"differing": differing, "kl": kl, "genuine_kl": genuine_kl}
    return results


# --- command line ---


def fingerprint(model_dir: Path, context_ids: Sequence[int], dtype: str, seed: int) -> str:
    """Digest of everything but methods and budgets that a case's file depends on."""
    import kvpress
    import transformers

    weights = [(path.name, path.stat().st_size) for path in sorted(model_dir.glob("*.safetensors"))]
    versions = [getattr(kvpress, "__version__", ""), transformers.__version__, torch.__version__]
    parts = json.dumps([FORMAT, model_dir.name, weights, list(context_ids), dtype, seed, versions])
    return hashlib.sha256(parts.encode()).hexdigest()


def read_exported(path: Path, digest: str) -> dict[str, Any]:
    """The file if it is of this very case, else (absent, broken, of another case) ``{}``."""
    if not path.is_file():
        return {}
    try:
        found: dict[str, Any] = torch.load(path, weights_only=True)
        return found if found["fingerprint"] == digest and found["methods"] is not None else {}
    except Exception:  # noqa: BLE001 (whatever is wrong with it, it is written anew)
        return {}


def is_complete(found: dict[str, Any], methods: Sequence[str], budgets: Sequence[float]) -> bool:
    """True when what `read_exported` found has these methods at these budgets."""
    there = found.get("methods", {})
    return all(str(budget) in there.get(name, {}) for name in methods for budget in budgets)


def merged(found: dict[str, Any], exported: dict[str, Any]) -> dict[str, Any]:
    """`exported` with the methods and budgets that only `found`, of the same case, has."""
    old = found.get("methods", {})
    names = old.keys() | exported["methods"].keys()
    methods = {
        name: {**old.get(name, {}), **exported["methods"].get(name, {})} for name in STORAGE if name in names
    }
    return {**exported, "methods": methods, "seconds": {**found.get("seconds", {}), **exported["seconds"]}}


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, with lists split and checked."""

    def methods(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in STORAGE]:
            raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}; there are {', '.join(STORAGE)}")
        return names

    def budgets(text: str) -> list[float]:
        shares = [float(part) for part in text.split(",")]
        if not all(0 < share < 1 for share in shares):
            raise argparse.ArgumentTypeError(f"budgets lie between 0 and 1, got {text}")
        return shares

    parser = argparse.ArgumentParser(description="Export which tokens kvpress's methods keep.")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face model folder")
    parser.add_argument("--cases", type=Path, required=True, help="cases.json")
    parser.add_argument("--out", type=Path, required=True, help="folder for a file per case")
    parser.add_argument("--budgets", type=budgets, default=[0.1, 0.2, 0.3, 0.5])
    parser.add_argument("--methods", type=methods, default=list(STORAGE))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED, help="of random and cam")
    parser.add_argument(
        "--check", action="store_true", help="compare the first case with the genuine presses"
    )
    parser.add_argument("--check-budget", type=float, help="by default the last of --budgets")
    return parser.parse_args(argv)


def read_cases(path: Path) -> list[dict[str, Any]]:
    """The cases of a file.

    Raises:
        SystemExit: an id is no plain file name or comes twice, or a context is too short for the methods.
    """
    cases: list[dict[str, Any]] = json.loads(path.read_text())["cases"]
    ids = [case["id"] for case in cases]
    for case in cases:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", case["id"]):
            raise SystemExit(f"case id {case['id']!r} is no file name of letters, digits, '.', '_' and '-'")
        if len(case["context_ids"]) <= 64:
            raise SystemExit(f"case {case['id']}: SnapKV's window of 64 tokens needs a longer context")
    if len(set(ids)) < len(ids):
        raise SystemExit("case ids must differ")
    return cases


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> None:
    """Export all cases that are not there yet.

    Raises:
        SystemExit: the arguments or the cases are not usable; the message says why.
    """
    arguments = parse_arguments(argv)
    cases = read_cases(arguments.cases)
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    logging.getLogger("kvpress").setLevel(logging.ERROR)  # KVzip says at every call that it is slow
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=getattr(torch, arguments.dtype), attn_implementation="sdpa"
    ).eval()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for number, case in enumerate(cases, 1):
        label = f"[{number}/{len(cases)}] {case['id']}: {len(case['context_ids'])} tokens"
        path: Path = arguments.out / f"{case['id']}.pt"
        digest = fingerprint(arguments.model, case["context_ids"], arguments.dtype, arguments.seed)
        found = read_exported(path, digest)
        if is_complete(found, arguments.methods, arguments.budgets):
            print(f"{label}, there already", file=sys.stderr, flush=True)
        else:
            started = time.perf_counter()
            exported = export_case(
                model,
                torch.tensor([case["context_ids"]]),
                methods=arguments.methods,
                budgets=arguments.budgets,
                seed=arguments.seed,
            )
            partial = path.with_suffix(".partial")
            torch.save({"fingerprint": digest, **merged(found, exported)}, partial)
            partial.replace(path)
            spent = time.perf_counter() - started
            print(
                f"{label}, prefill {exported['prefill_seconds']:.1f} s, all {spent:.1f} s",
                file=sys.stderr,
                flush=True,
            )
        if arguments.check and number == 1:
            budget = arguments.check_budget or arguments.budgets[-1]
            exported = torch.load(path, weights_only=True)
            chosen = {name: exported["methods"][name] for name in arguments.methods}
            results = check_case(model, case, chosen, budget=budget, seed=arguments.seed)
            print(f"budget {budget}; flags that differ from the genuine press; KL in nats; seconds")
            print(f"{'method':20}{'differing':>12}{'KL':>12}{'genuine KL':>12}{'seconds':>10}")
            for name, result in results.items():
                columns = ["-" if value is None else f"{value:.6f}" for value in result.values()]
                print(f"{name:20}{''.join(f'{c:>12}' for c in columns)}{exported['seconds'][name]:10.2f}")


if __name__ == "__main__":
    main()
