"""Whether the plugin serves a model, and how much of it fits. Reads its configuration, no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from grkv_sglang.commands.doctor.findings import Finding
from grkv_sglang.commands.doctor.machine import GIB
from grkv_sglang.config import RADIX_BACKEND

EXAMPLE_DOCUMENT_TOKENS = 8192
CPU_MEMORY_GIB = 8.0
"""For KV, where nobody says how much and no GPU tells."""


@dataclass(frozen=True)
class ModelFigures:
    """What decides how much fits; all tensor-parallel ranks together. In tokens, numbers and bytes."""

    context_tokens: int
    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    number_bytes: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers."""
        return self.layers * self.kv_heads * (self.key_dim + self.value_dim) * self.number_bytes


def check_model(model: str, *, memory_gib: float | None, budget: float) -> list[Finding]:
    """Unsupported features by name, limits, and what fits.

    Args:
        model: a checkpoint folder, or a name on Hugging Face, whose configuration is then downloaded.
        memory_gib: GiB for KV; None: what the first GPU has free, less the weights of a checkpoint folder.
        budget: kept share of a document's tokens.
    """
    topic = f"model {model}"
    try:
        import torch
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.server_args import ServerArgs

        from grkv_sglang.refusals import refusals_for
    except ImportError as error:
        return [Finding("problem", topic, f"SGLang cannot be imported: {error}", "install it again")]
    try:
        arguments = ServerArgs(model_path=model, radix_cache_backend=RADIX_BACKEND)
        config = ModelConfig.from_server_args(arguments)
    except (OSError, ValueError, KeyError) as error:  # what transformers raises for a bad configuration
        found = f"its configuration cannot be read: {str(error).strip().splitlines()[0]}"
        todo = "give a folder with a config.json, or a name that this machine can download"
        return [Finding("problem", topic, found, todo)]
    refused = refusals_for(arguments, config)
    if refused:
        return [Finding("problem", topic, f"not served: {one.what}", one.way_out) for one in refused]
    on_gpu = torch.cuda.is_available()
    figures = ModelFigures(
        context_tokens=config.context_len,
        layers=config.num_hidden_layers,
        kv_heads=config.get_total_num_kv_heads(),
        key_dim=config.head_dim,
        value_dim=config.v_head_dim,
        number_bytes=config.dtype.itemsize if on_gpu else torch.float32.itemsize,
    )
    if memory_gib is None and on_gpu:
        memory_gib = (torch.cuda.mem_get_info()[0] - weight_bytes(Path(model))) / GIB
    served = Finding("ok", topic, "served: none of its features is unsupported")
    return [served, *capacity(topic, figures, CPU_MEMORY_GIB if memory_gib is None else memory_gib, budget)]


def weight_bytes(folder: Path) -> int:
    """Size of a checkpoint's weights; 0 for a name, whose weights are not here."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def capacity(topic: str, figures: ModelFigures, memory_gib: float, budget: float) -> list[Finding]:
    """What fits into so much memory for KV, at full size and compressed."""
    per_token = figures.kv_bytes_per_token
    if memory_gib <= 0:
        todo = "a larger GPU, or tensor parallelism"
        return [Finding("problem", topic, f"no memory for KV: {-memory_gib:.1f} GiB short", todo)]
    tokens = int(memory_gib * GIB / per_token)
    document = min(EXAMPLE_DOCUMENT_TOKENS, figures.context_tokens)
    limits = (
        f"context of {figures.context_tokens:,} tokens; {per_token / 1024:,.1f} KiB of KV per token "
        f"({figures.layers} layers, {figures.kv_heads} KV heads, {figures.number_bytes} bytes per number)"
    )
    fits = (
        f"{memory_gib:.1f} GiB for KV hold {tokens:,} tokens: {tokens // document:,} documents of "
        f"{document:,} tokens, or {int(tokens / (document * budget)):,} at budget {budget:g}"
    )
    return [Finding("ok", topic, limits), Finding("ok", topic, fits)]
