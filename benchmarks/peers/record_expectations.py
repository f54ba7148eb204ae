"""Records what kvpress keeps of tiny random caches, with everything needed to compute it again.

Run in the peers' environment, from the repository's root:

    "$(python -m benchmarks.peers.environment)" -m benchmarks.peers.record_expectations

writes ``tests/core/expected_selections.json``. A one-layer random Llama gives the tensors; kvpress's presses
run on it with a window of 8 and their other defaults. No choice hangs on rounding: seeds are searched until
every head's last kept and first dropped score differ by `MARGIN` of the kept one, and until SnapKV's
relatives differ from it.

Fields (lists nest like the shapes; floats have the 9 digits that float32 needs; H query heads in groups of G,
Hkv KV heads, so query head h belongs to KV head h // G; m tokens of KVzip's repetition):

    kvpress           str, version
    n_heads, n_kv_heads, head_dim, hidden_size   int
    rope              {"theta": float, "inv_freq": [head_dim / 2]}; halves are rotated, not pairs:
                      x * cos + concat(-x[d/2:], x[:d/2]) * sin, angle position * inv_freq, twice concatenated
    window, kernel    int: SnapKV's window and the width of its mean pooling (stride 1, zeros beyond both
                      ends, always divided by the width)
    alpha_safeguard   float: AdaKV's and CriticalAdaKV's; a head keeps at least max(1, int(alpha * c)) tokens
                      (fewer than the window here, so it never decides)
    epsilon, first_stage_ratio   float: of CriticalKV and CriticalAdaKV
    expected_attention {"n_future_positions", "n_sink", "epsilon"}: with covariance and value norm
    kvzip             {"n_sink"}: the first tokens, which KVzip never evicts
    cases             one per length:
      n               int
      context_ids     [n]
      seed            int: of the model and its tokens
      q_weight        [H * head_dim, hidden_size]: pre-RoPE queries are hidden_states @ q_weight.T
      o_weight        [hidden_size, H * head_dim]: output projection W_o
      hidden_states   [n, hidden_size]: the attention layer's input
      keys            [Hkv, n, head_dim], after RoPE at positions 0 ... n - 1
      values          [Hkv, n, head_dim]
      window_queries  [H, window, head_dim], after RoPE: of the last tokens
      window_attention [H, window, n - window]: their causal softmax over all n keys, the window's columns
                      left out
      kvzip_queries   [H, m, head_dim], after RoPE at positions n ... n + m - 1: of the repetition (an
                      instruction's tokens, then the context's again)
      kvzip_keys      [Hkv, m, head_dim]: their own keys; the softmax runs over the n keys of the context and,
                      causally, over these
      scores          {"snapkv", "expected_attention", "kvzip", "value_projection"}: [Hkv, n]. The
                      window's tokens (SnapKV) and the sinks (the next two) carry the largest other score of
                      all heads plus 1;
                      "value_projection" is the mean over a group of ||W_o^h v||_1
      kept            {budget: {method: [Hkv][positions]}}, ascending, for snapkv, criticalkv, adakv,
                      critical_adakv, expected_attention, kvzip_even; c = max(1, int(n * (1 - (1 - budget))))
                      tokens a head, or Hkv * c in all for adakv and critical_adakv
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.worker import Recorder, build_press, kvzip_mask, kvzip_scores

TARGET = Path(__file__).resolve().parents[2] / "tests" / "core" / "expected_selections.json"
LENGTHS = (40, 53)
BUDGETS = (0.3, 0.5)
N_HEADS, N_KV_HEADS, HEAD_DIM, HIDDEN_SIZE = 4, 2, 8, 16
WINDOW = 8
VOCABULARY = 256  # the tokenizer's: one token per byte
MARGIN = 1e-3
METHODS = ("snapkv", "criticalkv", "adakv", "critical_adakv", "expected_attention")


def rounded(tensor: Tensor) -> Any:
    """Nested lists of a float tensor, every number with the 9 digits that identify a float32."""
    if tensor.ndim == 0:
        return float(f"{tensor.item():.9g}")
    return [rounded(part) for part in tensor]


def tiny_model(folder: Path, seed: int) -> Any:
    """A random one-layer Llama whose folder has a tokenizer of single bytes (KVzip loads one by its path)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=HIDDEN_SIZE,
        num_hidden_layers=1,
        num_attention_heads=N_HEADS,
        num_key_value_heads=N_KV_HEADS,
        head_dim=HEAD_DIM,
        # Wide enough that attention is not flat: flat scores lie too close together to be ranked safely.
        initializer_range=0.3,
        attn_implementation="sdpa",
    )
    config.save_pretrained(folder)
    model = LlamaForCausalLM(config).eval()
    model.config._name_or_path = str(folder)
    return model


def safe_choice(scores: Tensor, mask: Tensor) -> bool:
    """True when every head's worst kept and best dropped score (``[Hkv, n]``) are `MARGIN` apart."""
    worst_kept = scores.masked_fill(~mask, torch.inf).amin(-1)
    best_dropped = scores.masked_fill(mask, -torch.inf).amax(-1)
    return bool((worst_kept - best_dropped > MARGIN * worst_kept).all())


@torch.no_grad()
def record_case(n_tokens: int, seed: int) -> dict[str, Any] | None:
    """One entry of ``cases``, or None when a choice hangs on rounding or two methods agree."""
    from kvpress import SnapKVPress  # type: ignore[import-not-found]
    from kvpress.utils import get_prerope_query_states  # type: ignore[import-not-found]
    from transformers import DynamicCache
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder), seed)
        context_ids = torch.randint(VOCABULARY, (1, n_tokens))
        recorder = Recorder(METHODS, BUDGETS, window=WINDOW)
        seen: list[dict[str, Tensor]] = []

        def look(module: Any, _arguments: Any, kwargs: dict[str, Any], _output: Any) -> None:
            cos, sin = kwargs["position_embeddings"]
            queries = get_prerope_query_states(module, kwargs["hidden_states"])
            queries, _ = apply_rotary_pos_emb(queries, queries, cos, sin)
            layer = kwargs["past_key_values"].layers[0]
            seen.append(
                {
                    "hidden_states": kwargs["hidden_states"][0],
                    "queries": queries[0],
                    "keys": layer.keys[0].clone(),
                    "values": layer.values[0].clone(),
                    "cos": cos,
                    "sin": sin,
                }
            )

        module = model.model.layers[0].self_attn
        hook = module.register_forward_hook(look, with_kwargs=True)
        with kvzip_scores(model, context_ids) as zip_scores, recorder.press()(model):
            model.model(input_ids=context_ids, past_key_values=DynamicCache())
        hook.remove()
        first, second = seen  # the prefill, and KVzip's repetition behind it
        keys, values = first["keys"], first["values"]
        inputs = (module, first["hidden_states"][None], keys[None], values[None], None)
        kwargs = {"position_embeddings": (first["cos"], first["sin"])}
        window_attention = SnapKVPress.compute_window_attention(
            module, first["hidden_states"][None], keys[None], WINDOW, kwargs["position_embeddings"]
        )
        scores = {
            name: build_press(name, ratio=0.5, window=WINDOW).score(*inputs, kwargs)[0]
            for name in ("snapkv", "expected_attention")
        }
        scores["kvzip"] = zip_scores[0][0, 0]
        scores["value_projection"] = build_press("criticalkv", ratio=0.5).vwl1norm(values[None], module)[0]

        kept: dict[str, dict[str, list[list[int]]]] = {}
        for budget in BUDGETS:
            masks = {name: recorder.masks[name, budget][0] for name in METHODS}
            masks["kvzip_even"] = kvzip_mask("kvzip_even", zip_scores[0], model, budget)[0]
            second_stage = (scores["snapkv"] + 1e-4) * scores["value_projection"]
            second_stage[:, -WINDOW:] = torch.inf  # kept by the first stage, or by their score
            pooled = scores["snapkv"].reshape(1, -1), masks["adakv"].reshape(1, -1)
            safe = (
                safe_choice(scores["snapkv"], masks["snapkv"])
                and safe_choice(*pooled)
                and safe_choice(scores["expected_attention"], masks["expected_attention"])
                and safe_choice(scores["kvzip"], masks["kvzip_even"])
                and safe_stages(scores["snapkv"], second_stage, masks)
            )
            telling = all(
                not masks[name].equal(masks[other])
                for name, other in (
                    ("criticalkv", "snapkv"),
                    ("adakv", "snapkv"),
                    ("critical_adakv", "adakv"),
                )
            )
            if not (safe and telling):
                return None
            kept[str(budget)] = {
                name: [row.nonzero().flatten().tolist() for row in mask] for name, mask in masks.items()
            }
    return {
        "n": n_tokens,
        "context_ids": context_ids[0].tolist(),
        "seed": seed,
        "q_weight": rounded(module.q_proj.weight),
        "o_weight": rounded(module.o_proj.weight),
        "hidden_states": rounded(first["hidden_states"]),
        "keys": rounded(keys),
        "values": rounded(values),
        "window_queries": rounded(first["queries"][:, -WINDOW:]),
        "window_attention": rounded(window_attention[0]),
        "kvzip_queries": rounded(second["queries"]),
        "kvzip_keys": rounded(second["keys"][:, n_tokens:]),
        "scores": {name: rounded(score) for name, score in scores.items()},
        "kept": kept,
    }


def safe_stages(first: Tensor, second: Tensor, masks: dict[str, Tensor]) -> bool:
    """True when both stages of CriticalKV and CriticalAdaKV choose with a margin; scores ``[Hkv, n]``.

    The first stage takes half of what a head's mask keeps by `first`, the second the rest by `second`.
    """
    for name in ("criticalkv", "critical_adakv"):
        for head, mask in enumerate(masks[name]):
            half = int(mask.sum()) // 2
            ranked = first[head].sort(descending=True).values
            # Equal scores, the window's, are all kept either way.
            if (
                ranked[half - 1] < first[head].max()
                and ranked[half - 1] - ranked[half] < MARGIN * ranked[half - 1]
            ):
                return False
            stage = second[head].clone()
            stage[first[head] >= ranked[half - 1]] = torch.inf
            worst_kept, best_dropped = stage[mask].amin(), stage[~mask].amax()
            if worst_kept - best_dropped <= MARGIN * worst_kept:
                return False
    return True


def record(lengths: Sequence[int] = LENGTHS) -> dict[str, Any]:
    """The whole file as a dict.

    Raises:
        RuntimeError: no seed below 1000 gives choices with a margin.
    """
    import importlib.metadata

    cases = []
    for n_tokens in lengths:
        found = (case for seed in range(1000) if (case := record_case(n_tokens, seed)) is not None)
        case = next(found, None)
        if case is None:
            raise RuntimeError(f"no seed gives {n_tokens} tokens choices that are {MARGIN} apart")
        cases.append(case)
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder), 0)
    expected_attention = build_press("expected_attention", ratio=0.5)
    critical = build_press("critical_adakv", ratio=0.5)
    return {
        "kvpress": importlib.metadata.version("kvpress"),
        "n_heads": N_HEADS,
        "n_kv_heads": N_KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_size": HIDDEN_SIZE,
        "rope": {
            "theta": float(model.config.rope_parameters["rope_theta"]),
            "inv_freq": rounded(model.model.rotary_emb.inv_freq),
        },
        "window": WINDOW,
        "kernel": build_press("snapkv", ratio=0.5).kernel_size,
        "alpha_safeguard": critical.alpha_safeguard,
        "epsilon": critical.epsilon,
        "first_stage_ratio": critical.first_stage_ratio,
        "expected_attention": {
            name: getattr(expected_attention, name) for name in ("n_future_positions", "n_sink", "epsilon")
        },
        "kvzip": {"n_sink": build_press("kvzip", ratio=0.5).n_sink},
        "cases": cases,
    }


def main() -> None:
    """Write the file, or with ``--out`` another one."""
    parser = argparse.ArgumentParser(description="Record what kvpress keeps of tiny random caches.")
    parser.add_argument("--out", type=Path, default=TARGET)
    target: Path = parser.parse_args().out
    torch.set_num_threads(1)
    logging.getLogger("kvpress").setLevel(logging.ERROR)  # KVzip says at every call that it is slow
    target.write_text(json.dumps(record(), separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{target}: {target.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
