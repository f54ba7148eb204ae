"""What is served and what is refused, by name, with the way out. Checked when the cache is built.

The allow-list is plain causal RoPE attention with one KV layout per layer (MHA or GQA). Everything else
either keeps KV we do not understand or reads rows in a way that ignores gaps. The cache factory is the
place for these checks because its errors stop the server; errors of plugins are logged and swallowed.

Written against SGLang 0.5.23: ``mem_cache/registry.py: TreeCacheBuildContext``,
``configs/model_config.py: ModelConfig``, the argument groups' resolved values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grkv_sglang.attention.kv_scales import kv_pool_problems
from grkv_sglang.attention.rows import RowGaps, row_gaps_of
from grkv_sglang.config import (
    ATTENTION_BACKENDS,
    FLASHINFER_ATTENTION,
    TORCH_ATTENTION,
    TRITON_ATTENTION,
)

if TYPE_CHECKING:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext


class UnsupportedError(ValueError):
    """The server's settings or model are outside what compressed prefixes are served with."""


@dataclass(frozen=True)
class Refusal:
    """One combination that is refused: how to see it, what it is called, what to do instead."""

    applies: Callable[[Any, Any], bool]
    """(resolved server arguments, model config) -> bool"""
    what: str
    way_out: str


def _text(model: Any, name: str, default: Any = None) -> Any:
    return getattr(model.hf_text_config, name, default)


KV_CACHE_DTYPES = ("auto", "bfloat16", "bf16", "fp8_e4m3", "fp8_e5m2")
"""Of SGLang's ``--kv-cache-dtype``; ``auto`` is the model's, float32, float16 or bfloat16."""

_NO_GRKV = "serve it without --radix-cache-backend grkv"

REFUSALS: tuple[Refusal, ...] = (
    # Models
    Refusal(
        lambda a, m: m.attention_arch.name != "MHA",
        "attention that is not MHA or GQA (MLA, state space)",
        _NO_GRKV,
    ),
    Refusal(
        lambda a, m: m.is_hybrid_swa or (m.sliding_window_size or -1) > 0,
        "sliding-window attention",
        _NO_GRKV,
    ),
    Refusal(lambda a, m: m.is_encoder_decoder, "encoder-decoder models and cross attention", _NO_GRKV),
    Refusal(
        lambda a, m: m.is_local_attention_model or bool(m.attention_chunk_size),
        "chunked local attention",
        _NO_GRKV,
    ),
    Refusal(
        lambda a, m: bool(_text(m, "attn_logit_softcapping")) or bool(_text(m, "attn_logit_cap")),
        "attention logit soft-capping",
        _NO_GRKV,
    ),
    Refusal(
        lambda a, m: bool(_text(m, "no_rope_layers")) or bool(_text(m, "no_rope_layer_interval")),
        "layers without RoPE",
        _NO_GRKV,
    ),
    Refusal(
        lambda a, m: any("GptOss" in name for name in m.hf_config.architectures),
        "attention sinks as parameters",
        _NO_GRKV,
    ),
    Refusal(lambda a, m: bool(_text(m, "num_kv_shared_layers")), "KV shared across layers", _NO_GRKV),
    Refusal(lambda a, m: m.is_multimodal, "multimodal models", _NO_GRKV),
    Refusal(
        lambda a, m: "mrope_section" in (_text(m, "rope_scaling") or _text(m, "rope_parameters") or {}),
        "multimodal RoPE",
        _NO_GRKV,
    ),
    Refusal(lambda a, m: not m.is_generation, "embedding and reward models", _NO_GRKV),
    # Servers
    Refusal(
        lambda a, m: a.disable_radix_cache,
        "--disable-radix-cache",
        "drop either it or --radix-cache-backend grkv",
    ),
    Refusal(
        lambda a, m: bool(a.speculative_algorithm), "speculative decoding", "drop --speculative-algorithm"
    ),
    Refusal(
        lambda a, m: a.enable_hierarchical_cache,
        "HiCache (hierarchical cache)",
        "drop --enable-hierarchical-cache",
    ),
    Refusal(lambda a, m: a.enable_lmcache, "LMCache", "drop --enable-lmcache"),
    Refusal(lambda a, m: a.enable_flexkv, "FlexKV", "drop --enable-flexkv"),
    Refusal(
        lambda a, m: a.enable_unified_cache_external_linker,
        "an external cache linker",
        "drop --enable-unified-cache-external-linker",
    ),
    Refusal(lambda a, m: a.enable_unified_memory, "unified KV memory", "drop --enable-unified-memory"),
    Refusal(lambda a, m: a.enable_streaming_session, "streaming sessions", "drop --enable-streaming-session"),
    Refusal(
        lambda a, m: a.enable_session_radix_cache, "session radix cache", "drop --enable-session-radix-cache"
    ),
    Refusal(
        lambda a, m: a.disaggregation_mode not in (None, "null"),
        "prefill-decode disaggregation",
        "drop --disaggregation-mode",
    ),
    Refusal(
        lambda a, m: a.enable_mixed_chunk,
        "mixed chunks (not tested yet)",
        "drop --enable-mixed-chunk",
    ),
    Refusal(
        lambda a, m: a.enable_deterministic_inference,
        "deterministic inference",
        "drop --enable-deterministic-inference",
    ),
    Refusal(
        lambda a, m: a.enable_two_batch_overlap,
        "two-batch overlap (its halves share one plan of slots)",
        "drop --enable-two-batch-overlap",
    ),
    Refusal(lambda a, m: a.enable_pdmux, "prefill-decode multiplexing", "drop --enable-pdmux"),
    Refusal(lambda a, m: a.enable_hisparse, "HiSparse", "drop --enable-hisparse"),
    Refusal(lambda a, m: bool(a.dllm_algorithm), "diffusion LLMs", "drop --dllm-algorithm"),
    Refusal(lambda a, m: a.pp_size > 1, "pipeline parallelism", "set --pp-size 1"),
    Refusal(
        lambda a, m: a.dp_size > 1 or a.enable_dp_attention,
        "data-parallel attention",
        "set --dp-size 1 and run several servers behind a router",
    ),
    Refusal(lambda a, m: a.ep_size > 1, "expert parallelism", "set --ep-size 1"),
    Refusal(lambda a, m: a.attn_cp_size > 1, "context parallelism", "set --attn-cp-size 1"),
    Refusal(lambda a, m: a.dcp_size > 1, "decode context parallelism", "set --dcp-size 1"),
    Refusal(
        lambda a, m: bool(a.kv_events_config),
        "KV cache events (a span has no per-block hashes)",
        "drop --kv-events-config",
    ),
    Refusal(
        lambda a, m: a.enable_lora_overlap_loading,
        "LoRA overlap loading (a probe cannot load an adapter beside it)",
        "drop --enable-lora-overlap-loading",
    ),
    Refusal(
        lambda a, m: a.kv_cache_dtype not in KV_CACHE_DTYPES,
        "a KV cache of 4 bits or with scales per block",
        f"set --kv-cache-dtype to one of {', '.join(KV_CACHE_DTYPES)}",
    ),
)


def refusals_for(arguments: Any, model_config: Any) -> list[Refusal]:
    """The refusals that apply to resolved server arguments and a model."""
    return [r for r in REFUSALS if r.applies(arguments, model_config)]


def attention_problems(prefill: str, decode: str, device: str, cuda_graphs: bool) -> list[str]:
    """What is wrong with resolved attention backends, in sentences, each with the flag to set.

    `cuda_graphs`: whether SGLang may capture any.
    """
    on_gpu = f"{FLASHINFER_ATTENTION} or {TRITON_ATTENTION}"
    problems = []
    for phase, name in (("prefill", prefill), ("decode", decode)):
        if name not in ATTENTION_BACKENDS.values():
            ours = TORCH_ATTENTION if device == "cpu" else ATTENTION_BACKENDS.get(name, on_gpu)
            problems.append(
                f"the {phase} attention backend {name!r} would read sentinel slots as KV: "
                f"set --attention-backend {ours}"
            )
    if TORCH_ATTENTION in (prefill, decode) and device != "cpu" and cuda_graphs:
        problems.append(
            f"{TORCH_ATTENTION} cannot be captured in a CUDA graph: set --disable-cuda-graph, or "
            f"--attention-backend {on_gpu}"
        )
    return problems


def per_head_refusal(
    prefill: str, decode: str, *, tp_size: int, head_dim: int, cuda_graphs: bool, narrow_kv: bool
) -> str | None:
    """Why a server refuses what makes spans whose heads keep different numbers of tokens, with the way out,
    to be read behind what is refused; None where it serves them.

    Args:
        prefill, decode: names of the resolved attention backends.
        tp_size: tensor-parallel ranks.
        head_dim: the model's head size.
        cuda_graphs: whether SGLang may capture any.
        narrow_kv: whether the pool stores numbers of eight bits.
    """
    from grkv_kernels.dispatch import MAX_HEAD_DIM

    backends = {prefill, decode}
    problems = [
        f"{backend} reads the same slots for every head: set --attention-backend {TRITON_ATTENTION} or "
        f"{TORCH_ATTENTION}"
        for backend in sorted(backends - {TORCH_ATTENTION, TRITON_ATTENTION})
    ]
    if TRITON_ATTENTION in backends and cuda_graphs:
        problems.append(f"{TRITON_ATTENTION} reads them outside CUDA graphs: set --disable-cuda-graph")
    if TRITON_ATTENTION in backends and narrow_kv:
        problems.append(f"{TRITON_ATTENTION} reads them at 16 bits or more: set --kv-cache-dtype bfloat16")
    if TRITON_ATTENTION in backends and head_dim > MAX_HEAD_DIM:
        problems.append(
            f"{TRITON_ATTENTION} reads them up to a head size of {MAX_HEAD_DIM}, the model's is {head_dim}: "
            f"set --attention-backend {TORCH_ATTENTION}"
        )
    if tp_size > 1:
        problems.append("each tensor-parallel rank would share out its own heads' budget: set --tp-size 1")
    if not problems:
        return None
    return (
        "lets KV heads keep different numbers of tokens, which this server does not hold "
        f"({'; '.join(problems)}), or use another profile: 'default' or 'best'"
    )


def check_server(ctx: TreeCacheBuildContext) -> RowGaps:
    """Refuse what is not served; return the gaps that both attention backends read.

    Raises UnsupportedError listing every refusal and its way out.
    """
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.environ import envs

    arguments = resolved_view(ctx.server_args)
    problems = [f"{r.what}: {r.way_out}" for r in refusals_for(arguments, ctx.model_config)]
    runner = ctx.tp_worker.model_runner
    problems += attention_problems(
        runner.prefill_attention_backend_str,
        runner.decode_attention_backend_str,
        runner.device,
        cuda_graphs=not arguments.disable_cuda_graph,
    )
    if not problems:  # the pool of anything else is of a kind that we do not know
        backends = (runner.prefill_attention_backend_str, runner.decode_attention_backend_str)
        problems += kv_pool_problems(runner.token_to_kv_pool, runner.model, backends)
    gaps = row_gaps_of(ctx.params.req_to_token_pool)
    if not problems and gaps is None:
        problems.append("the attention backend did not set up row gaps: report this as a bug of grkv_sglang")
    if envs.SGLANG_RUST_SERVER.get():
        problems.append("the Rust frontend (options are validated in Python): unset SGLANG_RUST_SERVER")
    if ctx.params.is_eagle:
        problems.append("bigram keys of speculative decoding: drop --speculative-algorithm")
    if problems or gaps is None:
        raise UnsupportedError("--radix-cache-backend grkv does not serve:\n  " + "\n  ".join(problems))
    return gaps
