"""The CPU platform: there on a machine without accelerator, out of the way with one."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from grkv_sglang.platform import TorchCpuPlatform, activate


def test_active_without_an_accelerator_and_absent_with_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    assert activate() == "grkv_sglang.platform.TorchCpuPlatform"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert activate() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    assert activate() is None


@pytest.mark.parametrize(
    ("given", "dtype", "backend"),
    [
        (("auto", None, "grkv"), "float32", "grkv_torch"),
        (("auto", "intel_amx", "grkv"), "float32", "grkv_torch"),
        (("bfloat16", "torch_native", "grkv"), "bfloat16", "torch_native"),
        (("auto", None, None), "float32", None),
    ],
)
def test_defaults(given, dtype, backend):
    names = ("dtype", "attention_backend", "radix_cache_backend")
    arguments = SimpleNamespace(**dict(zip(names, given, strict=True)), tp_size=1, pp_size=1, dp_size=1)
    platform = TorchCpuPlatform()
    platform.apply_server_args_defaults(arguments)
    assert (arguments.dtype, arguments.attention_backend) == (dtype, backend)
    assert (platform.get_device(), platform.get_dispatch_key_name()) == ("cpu", "native")
    assert platform.get_default_attention_backend() == "torch_native"


BIND = "SGLANG_CPU_OMP_THREADS_BIND"


@pytest.mark.parametrize(
    ("sizes", "present", "expected"),
    [
        ((1, 1, 1), None, None),
        ((2, 1, 1), None, "3|5"),
        ((3, 1, 1), None, "3|5|3"),  # more ranks than cores
        ((2, 2, 1), None, "3|5|3|5"),
        ((1, 1, 2), None, "3|5"),
        ((2, 1, 1), "0-1|2-3", "0-1|2-3"),
        ((1, 1, 1), "0-1", "0-1"),
    ],
)
def test_several_ranks_need_no_numa_node_each(monkeypatch, sizes, present, expected):
    environment = {} if present is None else {BIND: present}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 3})
    arguments = SimpleNamespace(
        dtype="auto", attention_backend=None, radix_cache_backend="grkv",
        **dict(zip(("tp_size", "pp_size", "dp_size"), sizes, strict=True)),
    )  # fmt: skip
    TorchCpuPlatform().apply_server_args_defaults(arguments)
    assert environment.get(BIND) == expected


def test_lora_pins_no_memory(monkeypatch):
    """Without an accelerator torch refuses to pin; `init_backend` lets LoRA's own code do without."""
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    for module in (layers, torch_backend):
        monkeypatch.setattr(module, "torch", torch)
    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    TorchCpuPlatform().init_backend()
    for module in (layers, torch_backend):
        replaced = module.torch
        assert replaced is not torch
        made = replaced.tensor([1, 2], dtype=torch.int32, pin_memory=True)
        assert (made.tolist(), made.dtype) == ([1, 2], torch.int32)
        assert replaced.zeros((2, 1), pin_memory=True).tolist() == [[0.0], [0.0]]
        assert replaced.empty((3,), dtype=torch.int64, pin_memory=True).shape == (3,)
        assert (replaced.Tensor, replaced.cat, replaced.nn) == (torch.Tensor, torch.cat, torch.nn)
    pinned = torch.arange(3)
    assert pinned.pin_memory() is pinned


def refuse(*args, **kwargs):
    raise RuntimeError("no accelerator to pin for")
