"""The contract with SGLang: it holds for the pinned release, and a break is named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from grkv_sglang import contract, plugin
from grkv_sglang.config import ATTENTION_BACKENDS, FLASHINFER_ATTENTION, TORCH_ATTENTION, TRITON_ATTENTION
from grkv_sglang.contract import ContractError, HostSymbol
from grkv_sglang.refusals import REFUSALS, attention_problems, per_head_refusal, refusals_for


def test_holds_for_the_installed_release():
    assert contract.contract_problems() == []


def test_a_missing_symbol_and_a_changed_signature_are_named(monkeypatch):
    symbols = (
        HostSymbol("sglang.srt.mem_cache.radix_cache.RadixCache.no_such_method", ("self",), "test"),
        HostSymbol("sglang.srt.mem_cache.radix_cache.RadixCache.evict", ("self", "params", "mercy"), "test"),
        HostSymbol("sglang.srt.no_such_module.thing", (), "test"),
    )
    monkeypatch.setattr(contract, "HOST_SYMBOLS", symbols)
    with pytest.raises(ContractError) as error:
        contract.check_contract()
    text = str(error.value)
    assert "no_such_method is missing" in text
    assert "RadixCache.evict takes ['self', 'params'], expected ['mercy'] too" in text
    assert "no_such_module" in text


def test_another_version_is_refused_with_the_way_out(monkeypatch):
    monkeypatch.setattr(contract, "installed_sglang", lambda: "0.6.0")
    with pytest.raises(ContractError, match=r"SGLang 0\.6\.0 is installed.*pip install 'sglang==0\.5\.23'"):
        contract.check_contract()


def test_hooks_that_were_not_applied_are_seen(monkeypatch):
    monkeypatch.setattr(contract, "HOOKS", ("sglang.srt.mem_cache.radix_cache.RadixCache.evict",))
    with pytest.raises(ContractError, match=r"did not apply these hooks.*RadixCache\.evict"):
        contract.check_hooks_applied()


def test_every_hook_is_in_the_contract():
    assert len(set(contract.HOOKS)) == len(contract.HOOKS) == 9
    assert set(contract.HOOKS) <= {symbol.path for symbol in contract.HOST_SYMBOLS}


@pytest.mark.parametrize("backend", ATTENTION_BACKENDS.values())
def test_an_attention_backend_finds_what_it_expects(backend):
    contract.check_attention_contract(backend)


def test_every_override_of_an_attention_backend_is_in_its_contract():
    from grkv_sglang.attention import flashinfer_backend, torch_backend, triton_backend

    classes: dict[str, tuple[type, ...]] = {
        TORCH_ATTENTION: (torch_backend.GrkvTorchAttnBackend,),
        TRITON_ATTENTION: (triton_backend.GrkvTritonAttnBackend,),
        FLASHINFER_ATTENTION: (
            flashinfer_backend.GrkvFlashInferAttnBackend,
            flashinfer_backend.GapDecodeUpdater,
            flashinfer_backend.GapPrefillUpdater,
        ),
    }
    assert set(classes) == set(contract.ATTENTION_SYMBOLS)
    for backend, ours in classes.items():
        named = {symbol.path for symbol in contract.ATTENTION_SYMBOLS[backend]}
        overrides = {
            f"{cls.__base__.__module__}.{cls.__base__.__qualname__}.{name}"
            for cls in ours
            for name, value in vars(cls).items()
            if callable(value) and cls.__base__ is not None and name in vars(cls.__base__)
        }
        assert overrides
        assert overrides <= named


def test_an_attention_backend_that_does_not_fit_is_not_built(monkeypatch):
    symbol = HostSymbol(
        "sglang.srt.layers.attention.triton_backend.TritonAttnBackend.gone", ("self",), "test"
    )
    monkeypatch.setitem(contract.ATTENTION_SYMBOLS, TRITON_ATTENTION, (symbol,))
    with pytest.raises(ContractError, match=r"TritonAttnBackend\.gone is missing"):
        plugin._create_triton(SimpleNamespace(device="cuda"))


def served_arguments(**changes):
    plain = dict(  # noqa: C408
        disable_radix_cache=False,
        speculative_algorithm=None,
        enable_hierarchical_cache=False,
        enable_lmcache=False,
        enable_flexkv=False,
        enable_unified_cache_external_linker=False,
        enable_unified_memory=False,
        enable_streaming_session=False,
        enable_session_radix_cache=False,
        disaggregation_mode="null",
        enable_hisparse=False,
        enable_mixed_chunk=False,
        enable_deterministic_inference=False,
        enable_two_batch_overlap=False,
        enable_pdmux=False,
        dllm_algorithm=None,
        pp_size=1,
        tp_size=1,
        dp_size=1,
        enable_dp_attention=False,
        ep_size=1,
        attn_cp_size=1,
        dcp_size=1,
        kv_events_config=None,
        enable_lora_overlap_loading=False,
        kv_cache_dtype="auto",
    )
    return SimpleNamespace(**{**plain, **changes})


def served_model(text=None, architectures=("LlamaForCausalLM",), **changes):
    plain = dict(  # noqa: C408
        attention_arch=SimpleNamespace(name="MHA"),
        is_hybrid_swa=False,
        sliding_window_size=None,
        is_encoder_decoder=False,
        is_local_attention_model=False,
        attention_chunk_size=None,
        is_multimodal=False,
        is_generation=True,
        hf_text_config=SimpleNamespace(**(text or {})),
        hf_config=SimpleNamespace(architectures=list(architectures)),
    )
    return SimpleNamespace(**{**plain, **changes})


def test_a_plain_model_and_server_are_served():
    assert refusals_for(served_arguments(), served_model()) == []


@pytest.mark.parametrize(
    "arguments", [{"tp_size": 2}, {"enable_lora": True, "lora_paths": ["a=/adapters/a"]}, {"tp_size": 8}]
)
def test_tensor_parallelism_and_lora_are_served(arguments):
    assert refusals_for(served_arguments(**arguments), served_model()) == []


CASES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"attention_arch": SimpleNamespace(name="MLA")}, "MLA"),
    ({}, {"is_hybrid_swa": True}, "sliding-window"),
    ({}, {"sliding_window_size": 4096}, "sliding-window"),
    ({}, {"is_encoder_decoder": True}, "encoder-decoder"),
    ({}, {"attention_chunk_size": 8192}, "chunked local"),
    ({}, {"is_local_attention_model": True}, "chunked local"),
    ({}, {"text": {"attn_logit_softcapping": 50.0}}, "soft-capping"),
    ({}, {"text": {"no_rope_layers": [1, 0]}}, "without RoPE"),
    ({}, {"architectures": ["GptOssForCausalLM"]}, "sinks as parameters"),
    ({}, {"text": {"num_kv_shared_layers": 4}}, "shared across layers"),
    ({}, {"is_multimodal": True}, "multimodal models"),
    ({}, {"text": {"rope_scaling": {"mrope_section": [16, 24, 24]}}}, "multimodal RoPE"),
    ({"enable_mixed_chunk": True}, {}, "mixed chunks"),
    ({}, {"is_generation": False}, "embedding"),
    ({"disable_radix_cache": True}, {}, "--disable-radix-cache"),
    ({"speculative_algorithm": "EAGLE"}, {}, "speculative"),
    ({"enable_hierarchical_cache": True}, {}, "HiCache"),
    ({"enable_lmcache": True}, {}, "LMCache"),
    ({"enable_flexkv": True}, {}, "FlexKV"),
    ({"enable_unified_cache_external_linker": True}, {}, "linker"),
    ({"enable_unified_memory": True}, {}, "unified KV memory"),
    ({"enable_streaming_session": True}, {}, "streaming sessions"),
    ({"enable_session_radix_cache": True}, {}, "session radix"),
    ({"disaggregation_mode": "prefill"}, {}, "disaggregation"),
    ({"enable_hisparse": True}, {}, "HiSparse"),
    ({"enable_deterministic_inference": True}, {}, "deterministic"),
    ({"enable_two_batch_overlap": True}, {}, "two-batch overlap"),
    ({"enable_pdmux": True}, {}, "multiplexing"),
    ({"dllm_algorithm": "x"}, {}, "diffusion"),
    ({"pp_size": 2}, {}, "pipeline"),
    ({"dp_size": 2}, {}, "data-parallel"),
    ({"enable_dp_attention": True}, {}, "data-parallel"),
    ({"ep_size": 2}, {}, "expert"),
    ({"attn_cp_size": 2}, {}, "context parallelism"),
    ({"dcp_size": 2}, {}, "decode context"),
    ({"kv_events_config": "{}"}, {}, "KV cache events"),
    ({"enable_lora_overlap_loading": True}, {}, "LoRA overlap loading"),
    ({"kv_cache_dtype": "nvfp4"}, {}, "4 bits"),
]


@pytest.mark.parametrize(
    ("arguments", "model", "name"), CASES, ids=[c[2] + str(i) for i, c in enumerate(CASES)]
)
def test_each_unserved_combination_is_refused_by_name_with_a_way_out(arguments, model, name):
    refused = refusals_for(served_arguments(**arguments), served_model(**model))
    assert any(name in r.what for r in refused)
    assert all(r.way_out for r in refused)


def test_every_refusal_has_a_case():
    seen = {
        r.what
        for arguments, model, _ in CASES
        for r in refusals_for(served_arguments(**arguments), served_model(**model))
    }
    assert seen == {r.what for r in REFUSALS}


@pytest.mark.parametrize(
    ("name", "device", "ours"),
    [
        ("torch_native", "cpu", "grkv_torch"),
        ("triton", "cpu", "grkv_torch"),
        ("torch_native", "cuda", "grkv_torch"),
        ("triton", "cuda", "grkv_triton"),
        ("flashinfer", "cuda", "grkv_flashinfer"),
        ("fa3", "cuda", "grkv_flashinfer or grkv_triton"),
        ("trtllm_mha", "cuda", "grkv_flashinfer or grkv_triton"),
    ],
)
def test_a_foreign_attention_backend_is_refused_with_the_flag_to_set(name, device, ours):
    problems = attention_problems(name, name, device, cuda_graphs=True)
    assert problems == [
        f"the {phase} attention backend {name!r} would read sentinel slots as KV: "
        f"set --attention-backend {ours}"
        for phase in ("prefill", "decode")
    ]
    (problem,) = attention_problems("grkv_triton", name, device, cuda_graphs=True)
    assert problem.startswith("the decode attention backend")


ELSEWHERE = "set --attention-backend grkv_triton or grkv_torch"
NO_GRAPHS = "grkv_triton reads them outside CUDA graphs: set --disable-cuda-graph"
ONE_RANK = "each tensor-parallel rank would share out its own heads' budget: set --tp-size 1"
SMALL_HEADS = (
    "grkv_triton reads them up to a head size of 128, the model's is 192: set --attention-backend grkv_torch"
)


@pytest.mark.parametrize(
    ("prefill", "decode", "tp_size", "head_dim", "cuda_graphs", "problems"),
    [
        ("grkv_torch", "grkv_torch", 1, 256, True, []),
        ("grkv_torch", "grkv_torch", 2, 64, False, [ONE_RANK]),
        ("grkv_triton", "grkv_triton", 1, 128, False, []),
        ("grkv_triton", "grkv_triton", 1, 64, True, [NO_GRAPHS]),
        ("grkv_triton", "grkv_torch", 1, 192, False, [SMALL_HEADS]),
        ("grkv_torch", "grkv_triton", 4, 192, True, [NO_GRAPHS, SMALL_HEADS, ONE_RANK]),
        (
            "grkv_torch", "grkv_flashinfer", 1, 64, False,
            [f"grkv_flashinfer reads the same slots for every head: {ELSEWHERE}"],
        ),
        (
            "grkv_flashinfer", "grkv_flashinfer", 2, 192, True,
            [f"grkv_flashinfer reads the same slots for every head: {ELSEWHERE}", ONE_RANK],
        ),
    ],
)  # fmt: skip
def test_budgets_per_head_are_refused_by_name_with_a_way_out(
    prefill, decode, tp_size, head_dim, cuda_graphs, problems
):
    refusal = per_head_refusal(
        prefill, decode, tp_size=tp_size, head_dim=head_dim, cuda_graphs=cuda_graphs, narrow_kv=False
    )
    if not problems:
        assert refusal is None
    else:
        assert refusal == (
            "lets KV heads keep different numbers of tokens, which this server does not hold "
            f"({'; '.join(problems)}), or use another profile: 'default' or 'best'"
        )


@pytest.mark.parametrize(
    ("prefill", "decode", "refused"),
    [
        ("grkv_triton", "grkv_triton", True),
        ("grkv_torch", "grkv_triton", True),
        ("grkv_torch", "grkv_torch", False),
    ],
)
def test_budgets_per_head_in_a_narrow_pool_are_refused_where_kernels_read_no_fp8(prefill, decode, refused):
    refusal = per_head_refusal(prefill, decode, tp_size=1, head_dim=64, cuda_graphs=False, narrow_kv=True)
    if refused:
        assert refusal is not None
        assert "grkv_triton reads them at 16 bits or more: set --kv-cache-dtype bfloat16" in refusal
    else:
        assert refusal is None


@pytest.mark.parametrize(
    ("prefill", "decode", "device", "cuda_graphs", "refused"),
    [
        ("grkv_torch", "grkv_torch", "cpu", True, False),
        ("grkv_torch", "grkv_torch", "cuda", False, False),
        ("grkv_torch", "grkv_torch", "cuda", True, True),
        ("grkv_torch", "grkv_flashinfer", "cuda", True, True),
        ("grkv_flashinfer", "grkv_flashinfer", "cuda", True, False),
        ("grkv_flashinfer", "grkv_triton", "cuda", True, False),
    ],
)
def test_only_the_torch_backend_does_without_cuda_graphs(prefill, decode, device, cuda_graphs, refused):
    problems = attention_problems(prefill, decode, device, cuda_graphs)
    assert ["--disable-cuda-graph" in problem for problem in problems] == [True] * refused
