"""FlashInfer's wrappers without FlashInfer's kernels: they keep what they were planned with.

Planning is the one step between SGLang's index updaters and the kernels, and it needs a GPU. What decode
kernels would compute from the last plan is computed here in float64.
"""

from __future__ import annotations

import math
import types
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention import flashinfer_backend
from torch import Tensor


class Wrapper:
    """What SGLang uses of a wrapper: its graph buffers, and `begin_forward`, which plans."""

    def __init__(self, workspace: Tensor, layout: str, use_cuda_graph: bool = False, **buffers: Any) -> None:
        self.is_cuda_graph_enabled = use_cuda_graph
        self.buffers = buffers
        self._paged_kv_indices_buf = buffers.get(
            "paged_kv_indices_buffer", buffers.get("paged_kv_indices_buf")
        )
        self._custom_mask_buf = None
        self.plans: list[dict[str, Any]] = []


class DecodeWrapper(Wrapper):
    def begin_forward(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, *_: Any, **__: Any
    ) -> None:
        self.plans.append({"indptr": indptr, "indices": indices, "pages": last_page_len.tolist()})

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.forward_return_lse(*args, **kwargs)[0]

    def forward_return_lse(
        self, q: Tensor, kv: tuple[Tensor, Tensor], *, sm_scale: float, k_scale: float | None,
        v_scale: float | None, logits_soft_cap: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Output [B, Hq, dv] and, as FlashInfer's, log-sum-exps [B, Hq] to the base 2."""
        assert logits_soft_cap == 0
        starts, slots = stream(self.plans[-1])
        outputs, lses = [], []
        for query, start, end in zip(q.double(), starts, starts[1:], strict=False):
            keys, values = (
                buffer[slots[start:end]].double().repeat_interleave(q.shape[1] // buffer.shape[1], dim=1)
                for buffer in kv
            )
            logits = torch.einsum("hd,nhd->hn", query, keys) * sm_scale * (k_scale or 1)
            outputs.append(torch.einsum("hn,nhd->hd", logits.softmax(-1), values) * (v_scale or 1))
            lses.append(logits.logsumexp(-1) / math.log(2))
        return torch.stack(outputs).to(q.dtype), torch.stack(lses).float()


def fast_decode_plan(
    wrapper: DecodeWrapper, indptr: Tensor, indices: Tensor, last_page_len: Tensor, *_: Any,
    global_override_indptr_cpu: Tensor | None, **__: Any,
) -> None:  # fmt: skip
    """The planner that SGLang swaps in after a decode graph's first plan."""
    host = None if global_override_indptr_cpu is None else global_override_indptr_cpu.tolist()
    plan = {"indptr": indptr, "indices": indices, "pages": last_page_len.tolist(), "host_indptr": host}
    wrapper.plans.append(plan)


class PagedPrefillWrapper(Wrapper):
    def begin_forward(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, last_page_len: Tensor,
        *_: Any, **__: Any,
    ) -> None:  # fmt: skip
        plan = {"queries": qo_indptr.tolist(), "indptr": paged_kv_indptr, "indices": paged_kv_indices}
        self.plans.append(plan)


class RaggedPrefillWrapper(Wrapper):
    def begin_forward(self, qo_indptr: Tensor, kv_indptr: Tensor, *_: Any, **__: Any) -> None:
        self.plans.append({"queries": qo_indptr.tolist(), "keys": kv_indptr.tolist()})


class TorchOnCpu(types.ModuleType):
    """torch for a module that names ``device="cuda"`` whatever device it was given."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if name not in ("empty", "zeros"):
            return found

        def make(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
            made: Tensor = found(*args, device="cpu" if device == "cuda" else device, **kwargs)
            return made

        return make


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put all of it where SGLang looks for it."""
    for name, stand_in in {
        "BatchDecodeWithPagedKVCacheWrapper": DecodeWrapper,
        "BatchPrefillWithPagedKVCacheWrapper": PagedPrefillWrapper,
        "BatchPrefillWithRaggedKVCacheWrapper": RaggedPrefillWrapper,
        "fast_decode_plan": fast_decode_plan,
        "torch": TorchOnCpu("torch"),
    }.items():
        # SGLang does not import FlashInfer where there is no GPU.
        monkeypatch.setattr(flashinfer_backend, name, stand_in, raising=False)


def stream(plan: dict[str, Any]) -> tuple[list[int], list[int]]:
    """indptr and the slots it covers."""
    indptr = plan["indptr"].tolist()
    return indptr, plan["indices"][: indptr[-1]].tolist()
