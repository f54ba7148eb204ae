"""The hooks: what they add when the backend is selected, and that they add nothing when it is not."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.sampling.sampling_params import SamplingParams

from grkv_sglang import plugin
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


def test_state_and_idle_work_belong_to_our_cache_alone():
    h = Harness(census=True)
    ours = SimpleNamespace(tree_cache=h.cache, is_fully_idle=lambda: True)
    answer = SimpleNamespace(internal_state={})
    plugin._add_state(answer, ours)
    plugin._work_at_idle(ours)
    assert answer.internal_state["grkv"]["pool"]["total_slots"] == 120
    assert h.cache.state()["census"] == {"enabled": True, "ok": True, "checks": 1, "last_error": None}
    stock = SimpleNamespace(tree_cache=RadixCache.create_simulated())
    answer = SimpleNamespace(internal_state={})
    plugin._add_state(answer, stock)
    plugin._work_at_idle(stock)
    assert answer.internal_state == {}


def test_a_broken_contract_reaches_the_factory_not_the_loader(monkeypatch):
    monkeypatch.setattr(plugin.contract, "contract_problems", lambda: ["RadixCache.evict is missing"])
    with pytest.raises(plugin.contract.ContractError, match=r"RadixCache\.evict is missing"):
        plugin.create_cache(SimpleNamespace())
