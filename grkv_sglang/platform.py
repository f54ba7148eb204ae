"""SGLang platform for machines without a GPU: plain torch, nothing compiled.

SGLang 0.5.23's own CPU engine needs a CPU build of ``sgl-kernel``, which no package registry ships.
An out-of-tree platform (entry-point group ``sglang.srt.platforms``) whose dispatch key is ``native``
runs the same scheduler, radix cache and HTTP server on torch alone.

Written against SGLang 0.5.23: ``srt/platforms/interface.py: SRTPlatform``,
``srt/platforms/cpu.py: CpuDeviceMixin``.
"""

from __future__ import annotations

import os
import types
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from grkv_sglang.config import RADIX_BACKEND, TORCH_ATTENTION

if TYPE_CHECKING:
    from torch import device as TorchDevice


def activate() -> str | None:
    """Name the platform class to SGLang, or None where an accelerator should be left alone."""
    has_accelerator = torch.cuda.is_available() or (hasattr(torch, "xpu") and torch.xpu.is_available())
    if has_accelerator:
        return None
    return f"{__name__}.TorchCpuPlatform"


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
    """Torch-only CPU platform: no Triton, no graph capture, fp32 recommended.

    fp32 by default, because on a CPU without bf16 units a bf16 matrix product can be fifty times slower.
    """

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def apply_server_args_defaults(self, server_args: Any) -> None:
        if server_args.dtype == "auto":
            server_args.dtype = "float32"
        # SGLang presumes "intel_amx" for CPUs; its kernels are not on this platform.
        if server_args.radix_cache_backend == RADIX_BACKEND and server_args.attention_backend in (
            None,
            "intel_amx",
        ):
            server_args.attention_backend = TORCH_ATTENTION
        # SGLang's CPU start-up wants a NUMA node per rank unless cores are named; on this platform the names
        # bind nothing. Workers inherit the variable.
        ranks = server_args.tp_size * server_args.pp_size * server_args.dp_size
        if ranks > 1:
            cores = sorted(os.sched_getaffinity(0))
            names = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
            os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", names)

    def init_backend(self) -> None:
        _unpin_lora()

    def get_device(self, device_id: int | None = 0) -> Any:
        # A string: SGLang takes the default of --device from here and splits it at ":".
        return self.device_type

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def is_pin_memory_available(self, device: TorchDevice | None = None) -> bool:
        return False


def _unpin_lora() -> None:
    """SGLang's LoRA code asks for pinned memory without asking the platform (``lora/layers.py``,
    ``lora/backend/torch_backend.py``), which torch refuses where there is no accelerator."""
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    class TorchWithoutPinning(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    def unpinned(function: Any) -> Any:
        def call(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return call

    substitute = TorchWithoutPinning("torch")
    for name in ("tensor", "zeros", "empty"):
        setattr(substitute, name, unpinned(getattr(torch, name)))
    layers.torch = torch_backend.torch = substitute
    torch.Tensor.pin_memory = lambda self, device=None: self  # type: ignore[method-assign,assignment,return-value]
