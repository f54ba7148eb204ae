"""``grkv_triton``: SGLang's Triton attention, reading each request's KV from its gap on.

Written against SGLang 0.5.23 ``srt/layers/attention/triton_backend.py: TritonAttnBackend``. All of its
kernels read a stream of slots (``kv_indptr``, ``kv_indices``), so two methods are enough for gaps:

- `_fill_kv_indptr_and_indices` packs the stream in eager decode, eager extend (the prefix; new tokens are
  read from the batch) and before each capture and replay of a decode graph, into the graph's own buffers;
- `get_num_kv_splits` spreads a decode row over programs by its length.

Where a span's heads hold tokens of their own (see `ragged`), its columns are left out of the stream. What
SGLang's kernels compute of the others comes with its log-sum-exp, and is merged with the attention over the
cells of each head. So are the slots that several decoding requests read first (see `shared`), which attend to
them together. Both outside CUDA graphs only, where such a batch waits for the device: for its rows.

Lengths and gaps stay on the device otherwise: this backend keeps no copy of them on the host. A gap need not
be a multiple of the page size, because the kernels address every slot by itself. Run in Triton's interpreter
on a CPU only; never on a GPU yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from grkv_kernels import merge_states
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from torch import Tensor

from grkv_sglang.attention.cells import add_shared, attend_cells, read_together
from grkv_sglang.attention.ragged import OrdinaryRanges, RaggedRegion, RegionCells, region_cells
from grkv_sglang.attention.refuse import refuse
from grkv_sglang.attention.rows import attach_row_gaps
from grkv_sglang.attention.shared import SharedCells
from grkv_sglang.config import TRITON_ATTENTION

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class GrkvTritonAttnBackend(TritonAttnBackend):  # type: ignore[misc]
    """TritonAttnBackend with gaps.

    Raises:
        ValueError: at construction, for what would read rows without asking for their gaps.
    """

    enable_lean_attention: bool | None

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
        self._regions: list[tuple[RaggedRegion, ...]] = []
        """Of each request of the batch; empty where none has any."""
        self._region_cells: list[RegionCells] = []
        self._shared: SharedCells | None = None

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """Of a captured batch or a replay: neither has regions or reads anything together."""
        self._regions, self._region_cells, self._shared = [], [], None
        super().init_forward_metadata_out_graph(forward_batch, in_capture)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Of an eager batch."""
        self._regions, self._region_cells = [], []
        self._shared = read_together(forward_batch, self.row_gaps, self.req_to_token, self.token_to_kv_pool)
        if self.row_gaps.has_regions:
            rows = forward_batch.req_pool_indices.tolist()
            regions = [self.row_gaps.regions_of(row) for row in rows]
            if any(regions):
                self._regions = regions
                self._region_cells = region_cells(self.req_to_token, rows, regions)
        super().init_forward_metadata(forward_batch)

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
        if self._shared is not None:
            first, lens = first + self._shared.num_slots, lens - self._shared.num_slots
        indptr = self.kv_indptr[: bs + 1] if kv_indptr is None else kv_indptr
        if self._regions:
            self._pack_ordinary(plan, rows, OrdinaryRanges.of(first, lens, self._regions), kv_indices, indptr)
            return indptr
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

    def _pack_ordinary(
        self, plan: KVLocPlan, rows: Tensor, ranges: OrdinaryRanges, kv_indices: Tensor, kv_indptr: Tensor
    ) -> None:
        """The stream of a batch without the columns of its regions: each range is packed like a row."""
        ends = torch.cumsum(ranges.lens, dim=0).to(kv_indptr.dtype)
        indptr = torch.nn.functional.pad(ends, (1, 0))
        self.kv_index_translator.pack_read_stream(
            plan, req_pool_indices=rows[ranges.request], seq_lens=ranges.lens, indptr=indptr, out=kv_indices,
            kv_start_idx=ranges.first,
        )  # fmt: skip
        kv_indptr[1:] = ends[ranges.last]

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
        """As SGLang's, then the regions and what is read together."""
        if not self._region_cells and self._shared is None:
            output: Tensor = super().forward_decode(q, k, v, layer, forward_batch, *args, **kwargs)
            return output
        by_split = self.forward_metadata.attn_lse
        by_split.fill_(-torch.inf)  # splits that a row does not use are not written
        # The other decode kernel, for AMD's GPUs, leaves no log-sum-exps.
        lean = self.enable_lean_attention
        self.enable_lean_attention = False
        try:
            output = super().forward_decode(q, k, v, layer, forward_batch, *args, **kwargs)
        finally:
            self.enable_lean_attention = lean
        queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        lse = torch.logsumexp(by_split[: queries.shape[0]], dim=-1)
        heads = output.view(-1, layer.tp_q_head_num, layer.v_head_dim)
        heads, lse = self._with_regions(queries, heads, lse, layer)
        if self._shared is not None:
            add_shared(self._shared, self.token_to_kv_pool, layer, TRITON_ATTENTION, queries, heads, lse)
        return heads.view_as(output)

    def _forward_extend_kernel(self, layer: RadixAttention, *args: Any, **kwargs: Any) -> Any:
        """As SGLang's, whose arguments begin with queries, new keys and values, and the output; then the
        regions."""
        if not self._region_cells:
            return super()._forward_extend_kernel(layer, *args, **kwargs)
        queries, _, _, output = args[:4]
        lse = torch.empty(queries.shape[:2], dtype=torch.float32, device=queries.device)
        super()._forward_extend_kernel(layer, *args, lse_extend=lse, **kwargs)
        metadata = self.forward_metadata
        merged, _ = self._with_regions(
            queries, output, lse, layer, q_indptr=metadata.qo_indptr, max_queries=metadata.max_extend_len
        )
        return output.copy_(merged)

    def _with_regions(
        self, queries: Tensor, output: Tensor, lse: Tensor, layer: RadixAttention, **given: Any
    ) -> tuple[Tensor, Tensor]:
        """Attention over the ordinary columns, [T, Hq, dv] and its log-sum-exp [T, Hq], merged with that over
        the regions, all of which every query sees. `given`: see `ragged_attention`."""
        for region in self._region_cells:
            indptr = region.indptr[layer.layer_id]
            more = attend_cells(
                self.token_to_kv_pool, layer, TRITON_ATTENTION, queries, region.cells, indptr, **given
            )
            output, lse = merge_states(output, lse, *more)
        return output, lse
