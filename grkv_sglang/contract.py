"""Every SGLang symbol this package relies on, in one table, checked before anything is served.

SGLang's plugin loader logs and swallows exceptions, so a plugin that no longer fits would serve
uncompressed without a word. Here a symbol that is missing or takes other parameters turns
``--radix-cache-backend grkv`` into a clear error instead.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass

from grkv_sglang.config import FLASHINFER_ATTENTION, TORCH_ATTENTION, TRITON_ATTENTION

TESTED_SGLANG = "0.5.23"


class ContractError(RuntimeError):
    """The installed SGLang is not the one this package was written against."""


@dataclass(frozen=True)
class HostSymbol:
    """One thing we call, override or hook: its path and the parameters we count on."""

    path: str
    parameters: tuple[str, ...]
    used_by: str


_SRT = "sglang.srt"
_RADIX = f"{_SRT}.mem_cache.radix_cache.RadixCache"
_BASE = f"{_SRT}.mem_cache.base_prefix_cache.BasePrefixCache"

HOOK_INTERNAL_STATE = f"{_SRT}.managers.scheduler.Scheduler.get_internal_state"
HOOK_ON_IDLE = f"{_SRT}.managers.scheduler.Scheduler.on_idle"
HOOK_TOKENIZED = f"{_SRT}.managers.tokenizer_manager.TokenizerManager._create_tokenized_object"
HOOK_REQUEST_LEVEL = (
    f"{_SRT}.managers.scheduler_components.output_streamer."
    "SchedulerOutputStreamer.is_request_level_customized_info_key"
)
HOOK_COMMAND = f"{_SRT}.managers.scheduler.Scheduler.set_internal_state"
HOOK_WEIGHTS = (
    f"{_SRT}.managers.scheduler_components.weight_updater."
    "SchedulerWeightUpdaterManager.record_weight_version_after_update"
)
HOOK_TOKENIZER = f"{_SRT}.managers.tokenizer_manager.TokenizerManager.__init__"
HOOK_DEFAULT_ATTENTION = f"{_SRT}.arg_groups.model_override_base.get_default_attn_backend"
HOOK_FORWARD_BATCH = f"{_SRT}.model_executor.forward_batch_info.ForwardBatch.init_new"
HOOKS = (
    HOOK_INTERNAL_STATE,
    HOOK_ON_IDLE,
    HOOK_TOKENIZED,
    HOOK_REQUEST_LEVEL,
    HOOK_COMMAND,
    HOOK_WEIGHTS,
    HOOK_TOKENIZER,
    HOOK_DEFAULT_ATTENTION,
    HOOK_FORWARD_BATCH,
)

HOST_SYMBOLS: tuple[HostSymbol, ...] = (
    HostSymbol(HOOK_INTERNAL_STATE, ("self", "recv_req"), "plugin: state in /server_info"),
    HostSymbol(HOOK_ON_IDLE, ("self",), "plugin: waiting compressions and the census run at idle"),
    HostSymbol(
        HOOK_TOKENIZED,
        ("self", "obj", "input_text", "input_ids"),
        "plugin: request options are validated (400)",
    ),
    HostSymbol(HOOK_COMMAND, ("self", "recv_req"), "plugin: an operator's commands reach the cache"),
    HostSymbol(HOOK_WEIGHTS, ("self", "weight_version"), "plugin: spans of older weights are not served"),
    HostSymbol(HOOK_TOKENIZER, ("self", "server_args"), "plugin: HTTP routes for operators"),
    HostSymbol(
        HOOK_DEFAULT_ATTENTION,
        ("server_args", "use_mla_backend", "model_config"),
        "plugin: the attention backend where none was named",
    ),
    HostSymbol(HOOK_FORWARD_BATCH, ("batch", "model_runner"), "plugin: gaps on the host"),
    HostSymbol(
        f"{_SRT}.arg_groups.model_override_base.attention_backends_of",
        ("cfg",),
        "plugin: which backends a request's budgets per head would meet",
    ),
    HostSymbol(f"{_SRT}.utils.auth.auth_level", ("level",), "admin: the routes' protection"),
    HostSymbol(HOOK_REQUEST_LEVEL, ("self", "key"), "plugin: meta_info['grkv'] is one value per request"),
    HostSymbol(f"{_SRT}.managers.scheduler.Scheduler.is_fully_idle", ("self",), "plugin: census"),
    HostSymbol(f"{_SRT}.mem_cache.registry.register_radix_cache_backend", ("name", "factory"), "plugin"),
    HostSymbol(f"{_SRT}.layers.attention.attention_registry.register_attention_backend", ("name",), "plugin"),
    HostSymbol(f"{_SRT}.server_args.add_attention_backend_choices", (), "plugin"),
    HostSymbol(f"{_RADIX}.reset", ("self",), "cache.tree: super"),
    HostSymbol(f"{_RADIX}.match_prefix", ("self", "params"), "cache.tree: override"),
    HostSymbol(f"{_RADIX}.touch_prefix", ("self", "key"), "cache.tree: override"),
    HostSymbol(f"{_RADIX}.checkpoint", ("self", "req", "up_to"), "cache.tree: override"),
    HostSymbol(
        f"{_RADIX}._insert_helper",
        ("self", "node", "key", "value", "priority", "inserted_len"),
        "cache.tree: called from the request's own node",
    ),
    HostSymbol(f"{_RADIX}._split_node", ("self", "key", "child", "split_len"), "cache.tree: override, super"),
    HostSymbol(f"{_RADIX}._delete_leaf", ("self", "node"), "cache.tree: override, super"),
    HostSymbol(f"{_RADIX}._update_leaf_status", ("self", "node"), "cache.tree: called"),
    HostSymbol(f"{_RADIX}._inc_hit_count", ("self", "node"), "cache.grkv_cache: called"),
    HostSymbol(f"{_RADIX}._total_size_helper", ("self",), "cache.tree: override"),
    HostSymbol(f"{_RADIX}._print_helper", ("self", "node", "indent"), "cache.tree: override"),
    HostSymbol(f"{_RADIX}.path_device_indices", ("self", "node"), "cache.tree: override, super"),
    HostSymbol(f"{_RADIX}.evict", ("self", "params"), "cache.tree: override"),
    HostSymbol(f"{_RADIX}.inc_lock_ref", ("self", "node"), "cache.tree: override"),
    HostSymbol(f"{_RADIX}.dec_lock_ref", ("self", "node", "params"), "cache.tree: override"),
    HostSymbol(f"{_RADIX}.all_values_flatten", ("self",), "cache.tree: override"),
    HostSymbol(f"{_BASE}.prefix_device_indices", ("self", "req"), "cache.tree: override"),
    HostSymbol(f"{_BASE}.maybe_hand_to_session", ("self", "req"), "cache.tree: sets a row's gap"),
    HostSymbol(f"{_BASE}.on_release", ("self", "req", "checkpointed"), "cache.grkv_cache: queues work"),
    HostSymbol(f"{_BASE}.flush_pending_backups", ("self",), "cache.grkv_cache: does the work"),
    HostSymbol(f"{_BASE}.lock", ("self", "node"), "cache: called"),
    HostSymbol(f"{_BASE}.unlock", ("self", "lock"), "cache: called"),
    HostSymbol(
        f"{_SRT}.mem_cache.radix_cache.RadixKey.match_at", ("self", "other", "offset", "page_size"), "cache"
    ),
    HostSymbol(
        f"{_SRT}.mem_cache.radix_cache.RadixKey.child_key_at", ("self", "offset", "page_size"), "cache"
    ),
    HostSymbol(f"{_SRT}.mem_cache.common.evict_from_tree_cache", ("tree_cache", "num_tokens"), "cache"),
    HostSymbol(f"{_SRT}.mem_cache.allocation.alloc_for_extend", ("batch",), "calls maybe_hand_to_session"),
    HostSymbol(
        f"{_SRT}.layers.radix_attention.RadixAttention.forward",
        ("self", "q", "k", "v", "forward_batch", "save_kv_cache"),
        "cache.compressor: the probe's attention",
    ),
    HostSymbol(f"{_SRT}.lora.lora_manager.LoRAManager.fetch_new_loras", ("new_loras",), "cache.compressor"),
    HostSymbol(
        f"{_SRT}.lora.lora_manager.LoRAManager.prepare_lora_batch", ("forward_batch",), "cache.compressor"
    ),
    HostSymbol(f"{_SRT}.managers.io_struct.SetInternalStateReq", ("server_args",), "admin: carries commands"),
    HostSymbol(
        f"{_SRT}.model_executor.forward_context.forward_context", ("ctx", "forward_batch"), "cache.compressor"
    ),
    HostSymbol(
        f"{_SRT}.model_executor.forward_context.ForwardContext", ("attn_backend",), "cache.compressor"
    ),
)

_ATTENTION = f"{_SRT}.layers.attention"
_TORCH = f"{_ATTENTION}.torch_native_backend.TorchNativeAttnBackend"
_TRITON = f"{_ATTENTION}.triton_backend.TritonAttnBackend"
_FLASHINFER = f"{_ATTENTION}.flashinfer_backend"

_PACK_READ_STREAM = HostSymbol(
    f"{_SRT}.mem_cache.kv_index_translator.KVIndexTranslator.pack_read_stream",
    ("self", "plan", "req_pool_indices", "seq_lens", "indptr", "out", "kv_start_idx"),
    "attention: gathers slots from a first column on",
)

ATTENTION_SYMBOLS: dict[str, tuple[HostSymbol, ...]] = {
    TORCH_ATTENTION: (
        HostSymbol(f"{_TORCH}.__init__", ("self", "model_runner"), "attention.torch_backend: super"),
        HostSymbol(
            f"{_TORCH}.init_forward_metadata",
            ("self", "forward_batch"),
            "attention.torch_backend: override, super",
        ),
        *(
            HostSymbol(
                f"{_TORCH}.{name}",
                ("self", "q", "k", "v", "layer", "forward_batch"),
                "attention.torch_backend: override, super",
            )
            for name in ("forward_extend", "forward_decode")
        ),
        HostSymbol(
            f"{_TORCH}._run_sdpa_forward_extend",
            (
                "self",
                "query",
                "output",
                "k_cache",
                "v_cache",
                "req_to_token",
                "req_pool_indices",
                "seq_lens",
                "extend_prefix_lens",
                "extend_seq_lens",
            ),
            "attention.torch_backend: override",
        ),
        HostSymbol(
            f"{_TORCH}._run_sdpa_forward_decode",
            ("self", "query", "output", "k_cache", "v_cache", "req_to_token", "req_pool_indices", "seq_lens"),
            "attention.torch_backend: override",
        ),
    ),
    TRITON_ATTENTION: (
        HostSymbol(f"{_TRITON}.__init__", ("self", "model_runner"), "attention.triton_backend: super"),
        HostSymbol(
            f"{_TRITON}.init_forward_metadata",
            ("self", "forward_batch"),
            "attention.triton_backend: override, super",
        ),
        HostSymbol(
            f"{_TRITON}.init_forward_metadata_out_graph",
            ("self", "forward_batch", "in_capture"),
            "attention.triton_backend: override, super",
        ),
        HostSymbol(
            f"{_TRITON}.forward_decode",
            ("self", "q", "k", "v", "layer", "forward_batch"),
            "attention.triton_backend: override, super",
        ),
        HostSymbol(
            f"{_TRITON}._forward_extend_kernel",
            ("self", "layer"),
            "attention.triton_backend: override, super",
        ),
        HostSymbol(
            "sglang.kernels.ops.attention.extend_attention.extend_attention_fwd",
            ("q_extend", "k_extend", "v_extend", "o_extend", "lse_extend"),
            "attention.triton_backend: log-sum-exps of an extend",
        ),
        HostSymbol(
            "sglang.kernels.ops.attention.decode_attention.decode_attention_fwd",
            ("q", "attn_lse", "enable_lean"),
            "attention.triton_backend: log-sum-exps of a decode",
        ),
        HostSymbol(
            f"{_TRITON}._fill_kv_indptr_and_indices",
            ("self", "plan", "bs", "seq_lens", "req_pool_indices", "kv_indices", "kv_indptr"),
            "attention.triton_backend: override",
        ),
        HostSymbol(
            f"{_TRITON}.get_num_kv_splits",
            ("self", "num_kv_splits", "seq_lens", "uneven_batch"),
            "attention.triton_backend: override, super",
        ),
        _PACK_READ_STREAM,
    ),
    FLASHINFER_ATTENTION: (
        HostSymbol(
            f"{_FLASHINFER}.FlashInferAttnBackend.__init__",
            ("self", "model_runner", "init_new_workspace"),
            "attention.flashinfer_backend: super",
        ),
        HostSymbol(
            f"{_FLASHINFER}.FlashInferAttnBackend.init_forward_metadata",
            ("self", "forward_batch"),
            "attention.flashinfer_backend: override, super",
        ),
        HostSymbol(
            f"{_FLASHINFER}.FlashInferAttnBackend.init_forward_metadata_out_graph",
            ("self", "forward_batch", "in_capture"),
            "attention.flashinfer_backend: override, super",
        ),
        HostSymbol(
            f"{_FLASHINFER}.FlashInferAttnBackend.forward_decode",
            ("self", "q", "k", "v", "layer", "forward_batch"),
            "attention.flashinfer_backend: override, super",
        ),
        HostSymbol(
            "flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper.forward_return_lse",
            ("self", "q", "paged_kv_cache", "k_scale", "v_scale", "logits_soft_cap", "sm_scale"),
            "attention.flashinfer_backend: log-sum-exps of a decode",
        ),
        HostSymbol(
            f"{_FLASHINFER}.FlashInferAttnBackend._check_kv_attention_access",
            ("self", "phase", "access"),
            "attention.flashinfer_backend: called",
        ),
        HostSymbol(
            f"{_FLASHINFER}.FlashInferIndicesUpdaterDecode.call_begin_forward",
            (
                "self",
                "wrapper",
                "paged_kernel_lens",
                "paged_kernel_lens_sum",
                "kv_indptr",
                "kv_start_idx",
                "spec_info",
                "seq_lens_cpu",
                "plan",
                "req_pool_indices",
            ),
            "attention.flashinfer_backend: override, super",
        ),
        HostSymbol(
            f"{_FLASHINFER}.FlashInferIndicesUpdaterPrefill.call_begin_forward",
            (
                "self",
                "wrapper_ragged",
                "wrapper_paged",
                "req_pool_indices",
                "paged_kernel_lens",
                "paged_kernel_lens_sum",
                "seq_lens",
                "prefix_lens",
                "kv_start_idx",
                "kv_indptr",
                "qo_indptr",
                "use_ragged",
                "spec_info",
            ),
            "attention.flashinfer_backend: override, super",
        ),
        HostSymbol(
            f"{_SRT}.model_executor.runner.decode_cuda_graph_runner.build_replay_fb_view",
            ("forward_batch", "buffers", "bs", "raw_bs"),
            "attention.rows: a replay has the plan of its batch, padded lanes come last",
        ),
        _PACK_READ_STREAM,
    ),
}
"""What each attention backend relies on, by its name; checked when it is built, because a process that does
not build it should not import its kernels."""


def installed_sglang() -> str:
    return importlib.metadata.version("sglang")


def contract_problems(symbols: Sequence[HostSymbol] | None = None) -> list[str]:
    """What does not fit, in sentences; empty when everything does. `symbols`: HOST_SYMBOLS unless given."""
    problems = []
    version = installed_sglang()
    if version != TESTED_SGLANG:
        problems.append(
            f"SGLang {version} is installed, this package was written against {TESTED_SGLANG}: "
            f"pip install 'sglang=={TESTED_SGLANG}'"
        )
    for symbol in HOST_SYMBOLS if symbols is None else symbols:
        try:
            target = pkgutil.resolve_name(symbol.path)
        except (ImportError, AttributeError) as error:
            problems.append(f"{symbol.path} is missing ({error}); needed by {symbol.used_by}")
            continue
        have = list(inspect.signature(inspect.unwrap(target)).parameters)
        missing = [name for name in symbol.parameters if name not in have]
        if missing:
            problems.append(f"{symbol.path} takes {have}, expected {missing} too; needed by {symbol.used_by}")
    return problems


def check_contract() -> None:
    """Raise ContractError listing every problem."""
    _raise_if(contract_problems())


def check_attention_contract(backend: str) -> None:
    """Raise ContractError listing what an attention backend of ours, by name, does not find as it expects."""
    _raise_if(contract_problems(ATTENTION_SYMBOLS[backend]))


def _raise_if(problems: list[str]) -> None:
    if problems:
        raise ContractError("grkv_sglang does not fit the installed SGLang:\n  " + "\n  ".join(problems))


def check_hooks_applied() -> None:
    """Raise ContractError unless SGLang applied each of our hooks (it swallows errors when it does not)."""
    missing = [path for path in HOOKS if not getattr(pkgutil.resolve_name(path), "__wrapped__", None)]
    if missing:
        raise ContractError(
            f"SGLang did not apply these hooks of grkv_sglang: {missing}. "
            "Look for 'Failed to apply hooks' in the log; SGLANG_PLUGINS, if set, must name 'grkv' "
            "(and, without a GPU, 'grkv_cpu')."
        )
