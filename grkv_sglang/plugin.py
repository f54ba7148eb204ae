"""Registration with SGLang: a radix cache, three attention backends and nine hooks. Entry point
``sglang.srt.plugins: grkv``.

Runs in every SGLang process before anything is built. Nothing is served by it: unless the server is
started with ``--radix-cache-backend grkv`` (or one of our attention backends) the hooks return what
SGLang would have returned.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from grkv_sglang import contract
from grkv_sglang.config import (
    ATTENTION_BACKENDS,
    FLASHINFER_ATTENTION,
    RADIX_BACKEND,
    TORCH_ATTENTION,
    TRITON_ATTENTION,
)
from grkv_sglang.policy.options import OPTIONS_KEY

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

    from grkv_sglang.policy.boundaries import MessageMarkers

logger = logging.getLogger(__name__)


def register() -> None:
    """Register backends and hooks. Must not raise: SGLang would swallow it and serve uncompressed.

    A broken contract is kept for the cache factory, whose errors stop the server.
    """
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.mem_cache.registry import register_radix_cache_backend
    from sglang.srt.server_args import add_attention_backend_choices

    register_radix_cache_backend(RADIX_BACKEND, create_cache)
    register_attention_backend(TORCH_ATTENTION)(_create_torch)
    register_attention_backend(TRITON_ATTENTION)(_create_triton)
    register_attention_backend(FLASHINFER_ATTENTION)(_create_flashinfer)
    add_attention_backend_choices(list(ATTENTION_BACKENDS.values()))
    if not contract.contract_problems():
        _register_hooks()


def create_cache(ctx: TreeCacheBuildContext) -> BasePrefixCache:
    """Factory of ``--radix-cache-backend grkv``.

    Raises ContractError, UnsupportedError or ConfigError, each of which stops the server.
    """
    contract.check_contract()
    contract.check_hooks_applied()

    from sglang.srt.arg_groups.overrides import resolved_view

    from grkv_sglang.cache.compressor import Compressor
    from grkv_sglang.cache.grkv_cache import GrkvRadixCache
    from grkv_sglang.cache.ranks import Ranks
    from grkv_sglang.config import load_config
    from grkv_sglang.policy.acceptance import with_possible_spans
    from grkv_sglang.policy.prompts import pass_prompts
    from grkv_sglang.refusals import check_server, per_head_refusal

    config = load_config()
    row_gaps = check_server(ctx)
    tokenizer, runner = ctx.tp_worker.tokenizer, ctx.tp_worker.model_runner
    per_head = per_head_refusal(
        runner.prefill_attention_backend_str,
        runner.decode_attention_backend_str,
        tp_size=ctx.tp_size,
        head_dim=ctx.model_config.head_dim,
        cuda_graphs=not resolved_view(ctx.server_args).disable_cuda_graph,
        narrow_kv=runner.token_to_kv_pool.dtype.itemsize == 1,
    )
    prompts = None if tokenizer is None else pass_prompts(tokenizer)
    compressor = Compressor(runner, prompts, per_head)
    profile = compressor.check_profile(config.profile)
    always_kept = profile.n_window + profile.sinks
    possible = with_possible_spans(config, always_kept)
    if possible is not config:
        logger.warning(
            "grkv: min_span_tokens is %d instead of %d: the budget keeps of shorter stretches no more than "
            "the %d tokens that profile %r always keeps",
            possible.min_span_tokens, config.min_span_tokens, always_kept, profile.name,
        )  # fmt: skip
    return GrkvRadixCache(
        ctx.params,
        possible,
        row_gaps,
        compressor,
        markers=_template_markers(tokenizer),
        ranks=Ranks(ctx.params.tp_cache_group, ctx.tp_size),
    )


def _template_markers(tokenizer: Any) -> MessageMarkers | None:
    """The chat template's markers, where there is one that has any: boundaries are found without it too."""
    from grkv_sglang.policy.boundaries import BoundaryError, learn_markers

    if tokenizer is None:
        return None
    try:
        return learn_markers(tokenizer)
    except BoundaryError as error:
        logger.info("grkv: no message boundaries from the chat template: %s", error)
        return None


def _create_torch(model_runner: Any) -> Any:
    contract.check_attention_contract(TORCH_ATTENTION)

    from grkv_sglang.attention.torch_backend import GrkvTorchAttnBackend

    return GrkvTorchAttnBackend(model_runner)


def _create_triton(model_runner: Any) -> Any:
    _check_gpu(TRITON_ATTENTION, model_runner)
    contract.check_attention_contract(TRITON_ATTENTION)

    from grkv_sglang.attention.triton_backend import GrkvTritonAttnBackend

    return GrkvTritonAttnBackend(model_runner)


def _create_flashinfer(model_runner: Any) -> Any:
    _check_gpu(FLASHINFER_ATTENTION, model_runner)
    contract.check_attention_contract(FLASHINFER_ATTENTION)

    from grkv_sglang.attention.flashinfer_backend import GrkvFlashInferAttnBackend

    return GrkvFlashInferAttnBackend(model_runner, model_runner.init_new_workspace)


def _check_gpu(backend: str, model_runner: Any) -> None:
    if model_runner.device == "cpu":
        raise ValueError(f"{backend} needs a GPU: set --attention-backend {TORCH_ATTENTION}")


def _register_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(contract.HOOK_TOKENIZED, _validate_options, HookType.AFTER)
    HookRegistry.register(contract.HOOK_REQUEST_LEVEL, _is_request_level, HookType.AROUND)
    HookRegistry.register(contract.HOOK_INTERNAL_STATE, _add_state, HookType.AFTER)
    HookRegistry.register(contract.HOOK_ON_IDLE, _work_at_idle, HookType.AROUND)
    HookRegistry.register(contract.HOOK_COMMAND, _command, HookType.AROUND)
    HookRegistry.register(contract.HOOK_WEIGHTS, _weights_changed, HookType.AFTER)
    HookRegistry.register(contract.HOOK_TOKENIZER, _add_routes, HookType.AFTER)
    HookRegistry.register(contract.HOOK_DEFAULT_ATTENTION, _default_attention, HookType.AROUND)
    HookRegistry.register(contract.HOOK_FORWARD_BATCH, _note_gaps, HookType.AFTER)


def _validate_options(tokenized: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
    """After ``TokenizerManager._create_tokenized_object``: check a request's options where a ValueError
    becomes a 400, and replace ``prefix_end`` by the token count it means."""
    if manager.server_args.radix_cache_backend != RADIX_BACKEND:
        return
    params: Any = getattr(tokenized, "sampling_params", None)
    if (getattr(params, "beam_width", None) or 1) > 1:
        # Rows of beam members are copied without passing through the radix cache: their gaps are not set.
        raise ValueError("beam search is not served with --radix-cache-backend grkv; leave beam_width unset")
    custom = getattr(params, "custom_params", None)
    if not isinstance(custom, dict) or OPTIONS_KEY not in custom:
        return
    from grkv_sglang.policy.resolve import resolve_options

    if getattr(tokenized, "session_params", None) is not None:
        raise ValueError("custom_params.grkv is not served together with session_params")
    token_ids = list(tokenized.input_ids or [])
    options = resolve_options(custom, token_ids, manager.tokenizer)
    _check_per_head(options, manager)
    params.custom_params = {**custom, OPTIONS_KEY: options}


def _check_per_head(options: Mapping[str, Any], manager: Any) -> None:
    """Raise OptionsError where a request asks for budgets per head of a server that cannot hold them."""
    from sglang.srt.arg_groups.model_override_base import attention_backends_of
    from sglang.srt.arg_groups.overrides import resolved_view

    from grkv_sglang.policy.options import OptionsError, asks_per_head
    from grkv_sglang.refusals import per_head_refusal

    asked = asks_per_head(options)
    if asked is None:
        return
    arguments = resolved_view(manager.server_args)
    prefill, decode = attention_backends_of(arguments)
    refusal = per_head_refusal(
        prefill,
        decode,
        tp_size=arguments.tp_size,
        head_dim=manager.model_config.head_dim,
        cuda_graphs=not arguments.disable_cuda_graph,
        narrow_kv=arguments.kv_cache_dtype.startswith("fp8"),
    )
    if refusal is not None:
        raise OptionsError(f"custom_params.grkv: {asked} {refusal}")


def _is_request_level(original: Any, streamer: Any, key: str) -> bool:
    """Around ``SchedulerOutputStreamer.is_request_level_customized_info_key``: our entry is one value per
    request, not one per token."""
    return key == OPTIONS_KEY or bool(original(streamer, key))


def _add_state(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """After ``Scheduler.get_internal_state``: ``/server_info`` -> ``internal_states[0]["grkv"]``."""
    from grkv_sglang.cache.grkv_cache import GrkvRadixCache

    if isinstance(scheduler.tree_cache, GrkvRadixCache):
        result.internal_state[OPTIONS_KEY] = scheduler.tree_cache.state()


def _work_at_idle(original: Any, scheduler: Any) -> None:
    """Around ``Scheduler.on_idle``, which calls no tree method of its own: steps of waiting work come first,
    one per turn of the loop, so that a request that arrives meanwhile is seen at once."""
    from grkv_sglang.cache.grkv_cache import GrkvRadixCache

    cache = scheduler.tree_cache
    if isinstance(cache, GrkvRadixCache) and cache.on_idle(fully_idle=scheduler.is_fully_idle()):
        return
    original(scheduler)


def _command(original: Any, scheduler: Any, recv_req: Any) -> Any:
    """Around ``Scheduler.set_internal_state``, which every rank runs: an operator's command for the cache."""
    from grkv_sglang import admin

    raw = admin.command_in(recv_req.server_args)
    if raw is None:
        return original(scheduler, recv_req)
    return admin.run(scheduler.tree_cache, raw)


def _weights_changed(result: Any, updater: Any, weight_version: Any) -> None:
    """After ``SchedulerWeightUpdaterManager.record_weight_version_after_update``, which ends every successful
    update of weights."""
    from grkv_sglang.cache.grkv_cache import GrkvRadixCache

    if isinstance(updater.scheduler.tree_cache, GrkvRadixCache):
        updater.scheduler.tree_cache.weights_changed()


def _add_routes(result: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
    """After ``TokenizerManager.__init__``: the routes for operators, if this process is the HTTP server."""
    if manager.server_args.radix_cache_backend == RADIX_BACKEND:
        from grkv_sglang import admin

        admin.add_routes(manager)


def _default_attention(original: Any, server_args: Any, use_mla_backend: bool, model_config: Any) -> Any:
    """Around ``get_default_attn_backend``, asked where no attention backend was named: our subclass of
    SGLang's choice, or where it has none (FA3 on Hopper, TRT-LLM on Blackwell) of the one that SGLang would
    choose between FlashInfer and Triton."""
    theirs = original(server_args, use_mla_backend, model_config)
    if server_args.radix_cache_backend != RADIX_BACKEND:
        return theirs
    ours = ATTENTION_BACKENDS.get(theirs)
    if ours is None:
        from sglang.srt.runtime_context import get_platform

        flashinfer = get_platform().has_flashinfer and not model_config.has_attention_sinks
        ours = FLASHINFER_ATTENTION if flashinfer else TRITON_ATTENTION
    logger.info("grkv: attention backend %s in place of SGLang's choice %s", ours, theirs)
    return ours


def _note_gaps(result: Any, cls: Any, batch: Any, model_runner: Any, *args: Any, **kwargs: Any) -> None:
    """After ``ForwardBatch.init_new``: a batch's gaps on the host, where plans are made on the host. SGLang
    keeps the rows of a decode batch on the host, but does not pass them on."""
    from grkv_sglang.attention.rows import row_gaps_of

    gaps, rows = row_gaps_of(model_runner.req_to_token_pool), batch.req_pool_indices_cpu
    if gaps is not None and rows is not None and rows.numel() == result.batch_size:
        gaps.note_batch(result.kv_loc_plan, rows, result.seq_lens_cpu)
