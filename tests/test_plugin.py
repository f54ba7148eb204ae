"""The hooks: what they add when the backend is selected, and that they add nothing when it is not."""

from __future__ import annotations

import copy
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import SetInternalStateReq
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.sampling.sampling_params import SamplingParams

from grkv_sglang import contract, plugin
from grkv_sglang.admin import encode_command
from grkv_sglang.policy.boundaries import learn_markers
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
    assert around == {contract.HOOK_REQUEST_LEVEL, contract.HOOK_ON_IDLE, contract.HOOK_COMMAND}
    assert {kind for _, _, kind in registered} == {HookType.AROUND, HookType.AFTER}


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
