"""The CPU platform: there on a machine without accelerator, out of the way with one."""

from __future__ import annotations

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
    arguments = SimpleNamespace(**dict(zip(names, given, strict=True)))
    platform = TorchCpuPlatform()
    platform.apply_server_args_defaults(arguments)
    assert (arguments.dtype, arguments.attention_backend) == (dtype, backend)
    assert (platform.get_device(), platform.get_dispatch_key_name()) == ("cpu", "native")
    assert platform.get_default_attention_backend() == "torch_native"
