"""``grkv_flashinfer``: SGLang's FlashInfer attention, reading each request's KV from its gap on.

Written against SGLang 0.5.23 ``srt/layers/attention/flashinfer_backend.py: FlashInferAttnBackend``. All that
its wrappers know of a batch comes from one plan call per wrapper, made by two updaters in eager mode and
before each capture and replay of a graph. Their `call_begin_forward` already takes a first column per
request (for sliding windows); the subclasses here fill it in and shorten the lengths to match:

- decode: the sequence, and its copy on the host, from which a graph replay is planned without waiting for the
  device;
- extend: the prefix (ragged + paged: new tokens are read from the batch) or the whole sequence (paged only).
  Query lengths come from logical lengths and do not change.

Slots that several decoding requests read first (see `shared`) are left out of an eager decode plan and
attended to together, by our kernel. A captured graph reads rows as they are.

SGLang's sums of lengths only size temporary index buffers; they stay logical, an upper bound. Its FlashInfer
path reads slot by slot whatever the page size, so a gap need not be a multiple of it. FlashInfer's own plan
and kernels need a GPU: they have never been run with these inputs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from sglang.srt.layers.attention.flashinfer_backend import (
    FlashInferAttnBackend,
    FlashInferIndicesUpdaterDecode,
    FlashInferIndicesUpdaterPrefill,
)
from torch import Tensor

from grkv_sglang.attention.cells import add_shared, read_together
from grkv_sglang.attention.refuse import refuse
from grkv_sglang.attention.rows import attach_row_gaps, host_lens
from grkv_sglang.attention.shared import SharedCells
from grkv_sglang.config import FLASHINFER_ATTENTION

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class GrkvFlashInferAttnBackend(FlashInferAttnBackend):  # type: ignore[misc]
    """FlashInferAttnBackend with gaps.

    Raises:
        ValueError: at construction, for what would read rows without asking for their gaps.
    """

    def __init__(self, model_runner: ModelRunner, init_new_workspace: bool = False) -> None:
        super().__init__(model_runner, init_new_workspace=init_new_workspace)
        uncovered = {
            "sliding-window models, encoder-decoder models": self.dispatch_reason is not None
            or self.use_sliding_window_kv_pool,
            "deterministic inference": self.enable_deterministic,
            "speculative decoding": not model_runner.spec_algorithm.is_none(),
            "diffusion LLMs": self.is_dllm_model,
            "multi-item scoring": self.enable_mis,
            "KV caches that are dequantised into a workspace": self.prefill_uses_dequant_workspace
            or self.decode_uses_dequant_workspace,
        }
        refuse("grkv_flashinfer", uncovered, "flashinfer")
        # SGLang asks this of its own class only.
        self._check_kv_attention_access("prefill", self.prefill_kv_access)
        self._check_kv_attention_access("decode", self.decode_kv_access)
        self.row_gaps = attach_row_gaps(model_runner.req_to_token_pool, model_runner.device)
        self.indices_updater_decode = GapDecodeUpdater(model_runner, self)
        self.indices_updater_prefill = GapPrefillUpdater(model_runner, self)
        self.shared: SharedCells | None = None

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Of an eager batch."""
        table = self.req_to_token_pool.req_to_token
        self.shared = read_together(forward_batch, self.row_gaps, table, self.token_to_kv_pool)
        super().init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """Of a captured batch or a replay, which reads nothing together."""
        self.shared = None
        super().init_forward_metadata_out_graph(forward_batch, in_capture)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """As SGLang's, then what is read together."""
        if self.shared is None:
            output: Tensor = super().forward_decode(q, k, v, layer, forward_batch, *args, **kwargs)
            return output
        wrappers = self.forward_metadata.decode_wrappers
        asked = _WithLse(wrappers[0])
        self.forward_metadata.decode_wrappers = [asked]
        try:
            output = super().forward_decode(q, k, v, layer, forward_batch, *args, **kwargs)
        finally:
            self.forward_metadata.decode_wrappers = wrappers
        queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        heads = output.view(-1, layer.tp_q_head_num, layer.v_head_dim)
        pool = self.token_to_kv_pool
        add_shared(self.shared, pool, layer, FLASHINFER_ATTENTION, queries, heads, asked.lse)
        return output


class _WithLse:
    """A decode wrapper whose `forward` leaves the natural log-sum-exps of its logits in `lse` [B, Hq]."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self.lse: Tensor

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """What SGLang calls; FlashInfer's log-sum-exps are to the base 2."""
        output: Tensor
        output, lse = self._wrapper.forward_return_lse(*args, **kwargs)
        self.lse = lse * math.log(2)
        return output


class GapDecodeUpdater(FlashInferIndicesUpdaterDecode):  # type: ignore[misc]
    """Plans decode wrappers over the physical part of each row."""

    def call_begin_forward(
        self,
        wrapper: Any,
        paged_kernel_lens: Tensor,
        paged_kernel_lens_sum: int,
        kv_indptr: Tensor,
        kv_start_idx: Tensor | None,
        spec_info: Any,
        seq_lens_cpu: Tensor | None,
        *args: Any,
        plan: KVLocPlan,
        req_pool_indices: Tensor,
        **kwargs: Any,
    ) -> None:
        """paged_kernel_lens [lanes] and seq_lens_cpu [lanes] (on the host) are logical; a graph's padded
        lanes come last, with row 0 and length 1. Without lengths on the host FlashInfer takes them from the
        device."""
        _refuse_other_starts(kv_start_idx, spec_info)
        first, lens = self.attn_backend.row_gaps.read_range(
            req_pool_indices[: paged_kernel_lens.numel()], paged_kernel_lens
        )
        lens_cpu = host_lens(plan, seq_lens_cpu)
        shared = self.attn_backend.shared
        if shared is not None:
            first, lens = first + shared.num_slots, lens - shared.num_slots
            lens_cpu = None if lens_cpu is None else lens_cpu - shared.num_slots_cpu
        super().call_begin_forward(
            wrapper, lens, paged_kernel_lens_sum, kv_indptr, first, None, lens_cpu,
            *args, plan=plan, req_pool_indices=req_pool_indices, **kwargs,
        )  # fmt: skip


class GapPrefillUpdater(FlashInferIndicesUpdaterPrefill):  # type: ignore[misc]
    """Plans prefill wrappers over the physical part of each row."""

    def call_begin_forward(
        self,
        wrapper_ragged: Any,
        wrapper_paged: Any,
        req_pool_indices: Tensor,
        paged_kernel_lens: Tensor,
        paged_kernel_lens_sum: int,
        seq_lens: Tensor,
        prefix_lens: Tensor | None,
        kv_start_idx: Tensor | None,
        kv_indptr: Tensor,
        qo_indptr: Tensor,
        use_ragged: bool,
        spec_info: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """paged_kernel_lens [batch] is what the paged wrapper reads, logically: the prefixes if `use_ragged`,
        else the sequences."""
        _refuse_other_starts(kv_start_idx, spec_info)
        first, lens = self.attn_backend.row_gaps.read_range(req_pool_indices, paged_kernel_lens)
        super().call_begin_forward(
            wrapper_ragged, wrapper_paged, req_pool_indices, lens, paged_kernel_lens_sum, seq_lens,
            prefix_lens, first, kv_indptr, qo_indptr, use_ragged, None, *args, **kwargs,
        )  # fmt: skip


def _refuse_other_starts(kv_start_idx: Tensor | None, spec_info: Any) -> None:
    # Not reached by what the constructor accepts; a plan for it would be silently wrong.
    if kv_start_idx is not None:
        raise ValueError(
            "grkv_flashinfer: the row already starts elsewhere (sliding window, cross attention)"
        )
    if spec_info is not None:
        raise ValueError("grkv_flashinfer: speculative batches bring their own slots")
