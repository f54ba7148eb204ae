"""The hooks: what they add when the backend is selected, and that they add nothing when it is not."""

from __future__ import annotations

import copy
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.arg_groups import model_override_base, overrides
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.managers.io_struct import SetInternalStateReq
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.plugins.hook_registry import HookRegistry, HookType, _wrap_fn
from sglang.srt.runtime_context import get_context, get_parallel, override_platform
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from grkv_sglang import contract, plugin
from grkv_sglang.admin import encode_command
from grkv_sglang.attention.rows import attach_row_gaps, host_lens
from grkv_sglang.config import GrkvConfig
from grkv_sglang.policy.boundaries import learn_markers
from grkv_sglang.policy.options import OptionsError
from tests.cache.harness import Harness


def tokenized(options, **changes):
    custom = None if options is None else {"grkv": options, "other": 1}
    params = SamplingParams(custom_params=custom, **changes)
    return SimpleNamespace(sampling_params=params, input_ids=array("q", range(50)), session_params=None)


def manager(backend):
    return SimpleNamespace(server_args=SimpleNamespace(radix_cache_backend=backend), tokenizer=None)


def test_options_are_validated_and_resolved_only_when_selected():
    request = tokenized({"prefix_end_tokens": 40})
    plugin._validate_options(request, manager("grkv"), None, None, None)
    assert request.sampling_params.custom_params == {"grkv": {"prefix_end_tokens": 40}, "other": 1}
    bad = tokenized({"no_such_option": 1})
    with pytest.raises(ValueError, match="unknown field 'no_such_option'; valid fields are mode"):
        plugin._validate_options(bad, manager("grkv"), None, None, None)
    plugin._validate_options(bad, manager(None), None, None, None)
    assert bad.sampling_params.custom_params == {"grkv": {"no_such_option": 1}, "other": 1}


def test_beam_search_and_sessions_are_refused_only_when_selected():
    beam = tokenized(None, beam_width=2, n=2)
    with pytest.raises(ValueError, match="beam search is not served"):
        plugin._validate_options(beam, manager("grkv"), None, None, None)
    plugin._validate_options(beam, manager(None), None, None, None)
    session = tokenized({"mode": "exact"})
    session.session_params = object()
    with pytest.raises(ValueError, match="session_params"):
        plugin._validate_options(session, manager("grkv"), None, None, None)


def test_requests_without_sampling_parameters_pass():
    plugin._validate_options(SimpleNamespace(), manager("grkv"), None, None, None)
    plain = tokenized(None)
    plugin._validate_options(plain, manager("grkv"), None, None, None)
    assert plain.sampling_params.custom_params is None


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        ({"attention_backend": "grkv_torch"}, None),
        ({"attention_backend": "grkv_flashinfer"}, "grkv_flashinfer reads the same slots for every head"),
        (
            {"attention_backend": "grkv_torch", "decode_attention_backend": "grkv_flashinfer"},
            "grkv_flashinfer reads the same slots for every head",
        ),
        ({"attention_backend": "grkv_torch", "tp_size": 2}, "set --tp-size 1"),
        ({"attention_backend": "grkv_triton"}, "outside CUDA graphs: set --disable-cuda-graph"),
        ({"attention_backend": "grkv_triton", "disable_cuda_graph": True}, None),
    ],
)
@pytest.mark.parametrize(
    "asked", [{"profile": "per_head"}, {"profile": "release_per_head"}, {"forced": "packed"}]
)
def test_budgets_per_head_are_refused_where_a_request_asks_for_them(monkeypatch, arguments, refusal, asked):
    """With SGLang's own arguments, as the tokenizer process has them."""
    monkeypatch.setattr("grkv_sglang.policy.resolve._config", lambda: GrkvConfig(allow_forced=True))
    server_args = ServerArgs(model_path="dummy", radix_cache_backend="grkv", **arguments)
    server_args.resolve_once()
    config = SimpleNamespace(head_dim=128)
    this = SimpleNamespace(server_args=server_args, tokenizer=None, model_config=config)
    request = tokenized({"prefix_end_tokens": 40, **asked})
    if refusal is None:
        plugin._validate_options(request, this)
    else:
        what = "forced='packed'" if "forced" in asked else f"profile '{asked['profile']}'"
        with pytest.raises(OptionsError, match=rf"custom_params.grkv: {what} .*{refusal}.*'default'"):
            plugin._validate_options(request, this)
    plugin._validate_options(tokenized({"prefix_end_tokens": 40, "profile": "best"}), this)


def test_only_our_key_is_request_level():
    def stock(streamer, key):
        return key == "theirs"

    assert plugin._is_request_level(stock, None, "grkv") is True
    assert plugin._is_request_level(stock, None, "theirs") is True
    assert plugin._is_request_level(stock, None, "else") is False


def test_state_belongs_to_our_cache_alone():
    h = Harness()
    answer = SimpleNamespace(internal_state={})
    plugin._add_state(answer, SimpleNamespace(tree_cache=h.cache))
    assert answer.internal_state["grkv"]["pool"]["total_slots"] == 120
    answer = SimpleNamespace(internal_state={})
    plugin._add_state(answer, SimpleNamespace(tree_cache=RadixCache.create_simulated()))
    assert answer.internal_state == {}


DOC = [1, 2, 3, 1, 1, 2, 2, 3, 3, 1, 2, 1]


def test_waiting_work_comes_before_idle_housekeeping():
    # One layer of three per step: 12 tokens of 4 allowed. A probe, three layers.
    h = Harness(census=True, step_tokens=4)
    turns: list[Any] = []
    scheduler = SimpleNamespace(tree_cache=h.cache, is_fully_idle=lambda: True)
    h.run([*DOC, 7, 8], {"prefix_end_tokens": 12})  # the probe is done here, between batches
    assert h.compressor.calls == 1
    for made, original_called in [(0, 0), (0, 0), (1, 1), (1, 2)]:
        plugin._work_at_idle(turns.append, scheduler)
        assert (h.cache.state()["num_spans"], len(turns)) == (made, original_called)
    assert turns == [scheduler, scheduler]
    assert h.cache.state()["census"] == {"enabled": True, "ok": True, "checks": 2, "last_error": None}


def test_no_census_while_requests_run():
    h = Harness(census=True)
    turns: list[Any] = []
    scheduler = SimpleNamespace(tree_cache=h.cache, is_fully_idle=lambda: False)
    plugin._work_at_idle(turns.append, scheduler)
    assert (turns, h.cache.state()["census"]["checks"]) == ([scheduler], 0)


def test_another_cache_is_idle_as_always():
    turns: list[Any] = []
    scheduler = SimpleNamespace(tree_cache=RadixCache.create_simulated())
    plugin._work_at_idle(turns.append, scheduler)
    assert turns == [scheduler]


def test_only_our_commands_are_taken_from_sglangs_requests():
    h = Harness()
    h.run([*DOC, 7, 8], {"prefix_end_tokens": 12})
    (span,) = h.cache.spans()
    scheduler = SimpleNamespace(tree_cache=h.cache)
    sha = h.cache.state()["spans"][0]["tokens_sha256"]

    def stock(scheduler_, request):
        return ("stock", scheduler_, request)

    theirs = SetInternalStateReq(server_args={"pp_max_micro_batch_size": 2})
    assert plugin._command(stock, scheduler, theirs) == ("stock", scheduler, theirs)
    ours = SetInternalStateReq(server_args=encode_command({"action": "pin", "tokens_sha256": sha}))
    assert plugin._command(stock, scheduler, ours).updated is True
    assert span.pinned
    unknown = SetInternalStateReq(server_args=encode_command({"action": "pin", "tokens_sha256": "0"}))
    assert plugin._command(stock, scheduler, unknown).updated is False
    elsewhere = SimpleNamespace(tree_cache=RadixCache.create_simulated())
    assert plugin._command(stock, elsewhere, theirs) == ("stock", elsewhere, theirs)
    assert plugin._command(stock, elsewhere, ours).updated is False


def test_new_weights_take_spans_out_of_reach():
    h = Harness()
    h.run([*DOC, 7, 8], {"prefix_end_tokens": 12})
    reader = h.submit([*DOC, 9, 9])
    assert reader.prefix_len == 12
    plugin._weights_changed(None, SimpleNamespace(scheduler=SimpleNamespace(tree_cache=h.cache)), "v2")
    assert h.cache.state()["counters"]["spans_outdated"] == 1
    later = h.submit([*DOC, 9, 9])
    assert later.prefix_len == 0
    h.check()
    for req in (reader, later):
        h.finish_prefill(req)
        h.finish(req)
    h.check()
    assert h.cache.state()["num_spans"] == 0
    stock = SimpleNamespace(tree_cache=RadixCache.create_simulated())
    plugin._weights_changed(None, SimpleNamespace(scheduler=stock), "v2")


@pytest.mark.parametrize(("backend", "added"), [("grkv", 1), (None, 0)])
def test_routes_are_added_only_when_selected(monkeypatch, backend, added):
    managers: list[Any] = []
    monkeypatch.setattr("grkv_sglang.admin.add_routes", managers.append)
    this = manager(backend)
    plugin._add_routes(None, this, this.server_args)
    assert managers == [this] * added


def test_each_hook_is_registered_once(monkeypatch):
    registered: list[tuple[str, Any, HookType]] = []
    monkeypatch.setattr(
        HookRegistry, "register", lambda target, hook, kind: registered.append((target, hook, kind))
    )
    plugin._register_hooks()
    assert sorted(target for target, _, _ in registered) == sorted(contract.HOOKS)
    around = {target for target, _, kind in registered if kind is HookType.AROUND}
    assert around == {
        contract.HOOK_REQUEST_LEVEL,
        contract.HOOK_ON_IDLE,
        contract.HOOK_COMMAND,
        contract.HOOK_DEFAULT_ATTENTION,
    }
    assert {kind for _, _, kind in registered} == {HookType.AROUND, HookType.AFTER}


MACHINES = {
    "hopper": {"is_hopper_with_cuda_12_3": True, "is_sm100": False},
    "blackwell": {"is_hopper_with_cuda_12_3": False, "is_sm100": True},
    "ampere": {"is_hopper_with_cuda_12_3": False, "is_sm100": False},
}


@pytest.mark.parametrize(
    ("machine", "flashinfer", "sinks", "theirs", "ours"),
    [
        ("ampere", True, False, "flashinfer", "grkv_flashinfer"),
        ("ampere", False, False, "triton", "grkv_triton"),
        ("ampere", True, True, "triton", "grkv_triton"),
        ("hopper", True, False, "fa3", "grkv_flashinfer"),
        ("hopper", False, False, "fa3", "grkv_triton"),
        ("hopper", True, True, "fa3", "grkv_triton"),
        ("blackwell", True, False, "trtllm_mha", "grkv_flashinfer"),
    ],
)
@pytest.mark.parametrize("radix", [None, "grkv"])
def test_the_attention_backend_where_none_was_named(
    monkeypatch, radix, machine, flashinfer, sinks, theirs, ours
):
    """Through SGLang's own resolution, on machines made of their facts."""
    monkeypatch.setattr(
        model_override_base, "current_platform", SimpleNamespace(is_out_of_tree=lambda: False)
    )
    hooked = _wrap_fn(
        model_override_base.get_default_attn_backend, plugin._default_attention, HookType.AROUND
    )
    monkeypatch.setattr(overrides, "get_default_attn_backend", hooked)
    arguments = ServerArgs(model_path="dummy", radix_cache_backend=radix)
    arguments.resolve_once()
    arguments._model_config = SimpleNamespace(
        attention_arch=AttentionArch.MHA,
        hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
        has_attention_sinks=sinks,
        has_asymmetric_kv=False,
    )
    with override_platform(has_flashinfer=flashinfer, is_hip=False, **MACHINES[machine]):
        overrides.run_post_process_pass(arguments, overrides._attention_backend_default)
    assert overrides.resolved_view(arguments).attention_backend == (ours if radix else theirs)


def test_a_named_attention_backend_is_left_alone():
    arguments = ServerArgs(model_path="dummy", radix_cache_backend="grkv", attention_backend="fa3")
    arguments.resolve_once()
    overrides.run_post_process_pass(arguments, overrides._attention_backend_default)
    assert overrides.resolved_view(arguments).attention_backend == "fa3"


@pytest.mark.parametrize("create", [plugin._create_triton, plugin._create_flashinfer])
def test_gpu_backends_are_not_built_on_a_cpu(create):
    with pytest.raises(ValueError, match="needs a GPU: set --attention-backend grkv_torch"):
        create(SimpleNamespace(device="cpu"))


class Scheduled:
    """A ScheduleBatch or a ModelRunner as far as it was filled in; the rest is None."""

    def __init__(self, **known: Any) -> None:
        vars(self).update(known)

    def __getattr__(self, name: str) -> None:
        return None


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND])
def test_a_batch_made_by_sglang_has_its_gaps_on_the_host(monkeypatch, mode):
    original = ForwardBatch.__dict__["init_new"].__func__
    hooked: Any = _wrap_fn(original, plugin._note_gaps, HookType.AFTER)
    monkeypatch.setattr(ForwardBatch, "init_new", classmethod(hooked))
    pool = ReqToTokenPool(4, 32, "cpu", False)
    lens = torch.tensor([9, 4])
    rows = torch.tensor([3, 2])
    batch = Scheduled(
        forward_mode=mode, seq_lens=lens, seq_lens_cpu=lens, seq_lens_sum=13, req_pool_indices=rows,
        req_pool_indices_cpu=rows, input_ids=torch.zeros(2), out_cache_loc=torch.tensor([1, 2]), reqs=[],
        extend_lens=[1, 1], prefix_lens=[8, 3], extend_num_tokens=2, extend_logprob_start_lens=[0, 0],
        return_hidden_states_mode=CaptureHiddenMode.NULL,
    )  # fmt: skip
    with get_context().override_server_args() as arguments, get_parallel().override(attn_dcp_size=1):
        translator = KVIndexTranslator(
            req_to_token=pool.req_to_token, token_to_kv_pool_allocator=None, token_to_kv_pool=None,
            page_size=1, device="cpu",
        )  # fmt: skip
        runner = Scheduled(
            device="cpu", req_to_token_pool=pool, kv_index_translator=translator, model_config=Scheduled(),
            server_args=arguments, ngram_embedding_manager=Scheduled(), is_draft_worker=False,
            prefill_attention_backend_str="torch_native", spec_algorithm=SpeculativeAlgorithm.NONE,
        )  # fmt: skip

        def made() -> Any:
            return ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False)

        assert host_lens(made().kv_loc_plan, lens) is None  # no backend of ours
        attach_row_gaps(pool, "cpu").set(3, 7)
        got = host_lens(made().kv_loc_plan, lens)
    assert got is not None
    assert got.tolist() == [2, 4]


def test_message_markers_are_used_where_the_template_has_any(tokenizer):
    assert plugin._template_markers(tokenizer) == learn_markers(tokenizer)
    bare = copy.copy(tokenizer)
    bare.chat_template = None
    assert plugin._template_markers(bare) is None
    assert plugin._template_markers(None) is None


def test_a_broken_contract_reaches_the_factory_not_the_loader(monkeypatch):
    monkeypatch.setattr(plugin.contract, "contract_problems", lambda: ["RadixCache.evict is missing"])
    with pytest.raises(plugin.contract.ContractError, match=r"RadixCache\.evict is missing"):
        plugin.create_cache(SimpleNamespace())
