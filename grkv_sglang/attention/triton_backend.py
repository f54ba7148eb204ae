"""``grkv_triton``: SGLang's Triton attention, reading each request's KV from its gap on.

Written against SGLang 0.5.23 ``srt/layers/attention/triton_backend.py: TritonAttnBackend``. All of its
kernels read a stream of slots (``kv_indptr``, ``kv_indices``), so two methods are enough:

- `_fill_kv_indptr_and_indices` packs the stream in eager decode, eager extend (the prefix; new tokens are
  read from the batch) and before each capture and replay of a decode graph, into the graph's own buffers;
- `get_num_kv_splits` spreads a decode row over programs by its length.

Lengths and gaps stay on the device: this backend keeps no copy of them on the host. A gap need not be a
multiple of the page size, because the kernels address every slot by itself. Run in Triton's interpreter on a
CPU only; never on a GPU yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from torch import Tensor

from grkv_sglang.attention.refuse import refuse
from grkv_sglang.attention.rows import attach_row_gaps

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
    from sglang.srt.model_executor.model_runner import ModelRunner


class GrkvTritonAttnBackend(TritonAttnBackend):  # type: ignore[misc]
    """TritonAttnBackend with gaps.

    Raises:
        ValueError: at construction, for what would read rows without asking for their gaps.
    """

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__(model_runner)
        uncovered = {
            "sliding-window models": (self.sliding_window_size or -1) > 0 or self.use_sliding_window_kv_pool,
            "encoder-decoder models": model_runner.model_config.is_encoder_decoder,
            "MLA models": self.use_mla,
            "deterministic inference": self.enable_deterministic,
            "speculative decoding": not model_runner.spec_algorithm.is_none(),
            "diffusion LLMs": self.dllm_block_size is not None,
            "decode context parallelism": self.dcp_size > 1,
        }
        refuse("grkv_triton", uncovered, "triton")
        self.row_gaps = attach_row_gaps(model_runner.req_to_token_pool, self.device)

    def _fill_kv_indptr_and_indices(
        self,
        plan: KVLocPlan,
        bs: int,
        seq_lens: Tensor,
        req_pool_indices: Tensor,
        kv_indices: Tensor,
        kv_indptr: Tensor | None = None,
    ) -> Tensor:
        """Pack the slots of `bs` rows behind each other; returns ``kv_indptr[: bs + 1]``.

        seq_lens [>= bs] logical lengths (decode: of the sequence, extend: of the prefix), req_pool_indices
        [>= bs], kv_indices [>= physical lengths together] int64, written up to them. In a graph all four
        tensors are the graph's: what is written here is what the next replay reads.
        """
        rows = req_pool_indices[:bs]
        first, lens = self.row_gaps.read_range(rows, seq_lens[:bs])
        indptr = self.kv_indptr[: bs + 1] if kv_indptr is None else kv_indptr
        indptr[1:] = torch.cumsum(lens, dim=0)
        self.kv_index_translator.pack_read_stream(
            plan, req_pool_indices=rows, seq_lens=lens, indptr=indptr, out=kv_indices, kv_start_idx=first
        )
        return indptr

    def get_num_kv_splits(
        self, num_kv_splits: Tensor, seq_lens: Tensor, uneven_batch: Tensor | None = None
    ) -> None:
        """Splits of each decode row, into `num_kv_splits` [batch] int32.

        SGLang passes logical `seq_lens` [batch]; the work is in the physical ones, which it has just had
        packed (both its callers do so for the same rows).
        """
        rows = seq_lens.shape[0]
        physical = self.kv_indptr[1 : rows + 1] - self.kv_indptr[:rows]
        super().get_num_kv_splits(num_kv_splits, physical, uneven_batch)
