"""A random Llama of a few megabytes, and LoRA adapters for it: what the engine is tested with where the
real model does not fit (its 9 query and 3 KV heads cannot be split over two tensor-parallel ranks).

The weights are larger than a usual initialisation: attention is peaked and what it returns outweighs the
token's own embedding, so greedy output depends on the whole prompt and ties are unlikely.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import torch
from filelock import FileLock
from safetensors.torch import save_file
from torch import Tensor

HIDDEN = 64
LAYERS = 4
QUERY_HEADS = 4
KV_HEADS = 2
HEAD_DIM = 16
INTERMEDIATE = 128
MAX_POSITIONS = 8192

TOKENIZER_FILES = (
    "chat_template.jinja",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
ADAPTER_RANK = 4
ADAPTER_ALPHA = 8
# Name of a projection -> its output width; every input is HIDDEN wide but o_proj's.
_ADAPTED = {
    "q_proj": QUERY_HEADS * HEAD_DIM,
    "k_proj": KV_HEADS * HEAD_DIM,
    "v_proj": KV_HEADS * HEAD_DIM,
    "o_proj": HIDDEN,
}

# Standard deviation of a weight, times the square root of the number of inputs it sums over.
_GAINS = {"q_proj": 2.0, "k_proj": 2.0, "v_proj": 3.0, "o_proj": 3.0}
_OTHER_GAIN = 1.0
_EMBEDDING_STD = 0.5
_ADAPTER_B_STD = 0.5


def ensure_tiny_model(folder: Path, tokenizer_source: Path, *, seed: int = 0) -> Path:
    """Build the model in `folder` with the tokenizer of `tokenizer_source`; a finished one is kept."""
    with FileLock(folder.with_suffix(".lock")):  # tests run in several processes
        if not (folder / "model.safetensors").is_file():
            _build_model(folder, tokenizer_source, seed)
    return folder


def _build_model(folder: Path, tokenizer_source: Path, seed: int) -> None:
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_source)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=QUERY_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        intermediate_size=INTERMEDIATE,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = LlamaForCausalLM(config).float()
    _randomise(model, seed)
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (tokenizer_source / name).is_file():
            shutil.copyfile(tokenizer_source / name, folder / name)
    model.save_pretrained(folder)


def ensure_tiny_adapter(folder: Path, model: Path, *, seed: int) -> Path:
    """Write a LoRA adapter of all attention projections in PEFT's format; a finished one is kept."""
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "adapter_model.safetensors").is_file():
            _build_adapter(folder, model, seed)
    return folder


def _build_adapter(folder: Path, model: Path, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for layer in range(LAYERS):
        for name, n_outputs in _ADAPTED.items():
            n_inputs = QUERY_HEADS * HEAD_DIM if name == "o_proj" else HIDDEN
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            down = torch.randn(ADAPTER_RANK, n_inputs, generator=generator) / math.sqrt(n_inputs)
            up = torch.randn(n_outputs, ADAPTER_RANK, generator=generator) * _ADAPTER_B_STD
            weights |= {f"{prefix}.lora_A.weight": down, f"{prefix}.lora_B.weight": up}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": ADAPTER_RANK,
        "lora_alpha": ADAPTER_ALPHA,
        "lora_dropout": 0.0,
        "target_modules": list(_ADAPTED),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def _randomise(model: torch.nn.Module, seed: int) -> None:
    """Draw every matrix of the model anew; its norms stay at one."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim != 2:
            continue
        if "embed_tokens" in name:
            std = _EMBEDDING_STD
        else:
            std = _GAINS.get(name.split(".")[-2], _OTHER_GAIN) / math.sqrt(parameter.shape[1])
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
