"""``grkv_torch``: SGLang's torch_native attention, reading each request's KV from its gap on.

Written against SGLang 0.5.23 ``srt/layers/attention/torch_native_backend.py: TorchNativeAttnBackend``,
whose `forward_extend` / `forward_decode` (KV write, head layout) are inherited. Two things differ:

- keys and values are ``row[gap:seq_len]`` instead of ``row[:seq_len]`` (see `rows`);
- an extend computes only the rows of its new tokens. The stock backend pads the query to the whole
  sequence and throws the prefix's rows away, which costs a full prefill's attention on every cache hit.

Requests that decode behind the same slots, in general those of one span, attend to them together (see
`shared`). Where a span's heads hold tokens of their own (see `ragged`), each KV head attends by itself, over
its cells of the span and its part of all other slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from grkv_kernels import read_slots
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from grkv_sglang.attention.ragged import RaggedRegion, ordinary_ranges, unpack_heads
from grkv_sglang.attention.rows import attach_row_gaps
from grkv_sglang.attention.shared import SharedBatch, pays, shared_prefixes

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

QUERY_BLOCK_TOKENS = 512
"""Rows per attention call behind a prefix: bounds the mask, and skips keys that no row of it sees."""


class GrkvTorchAttnBackend(TorchNativeAttnBackend):  # type: ignore[misc]
    """torch_native with gaps. Refuses what the gap arithmetic does not cover at construction."""

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__(model_runner)
        if self.use_sliding_window_kv_pool:
            raise ValueError(
                "grkv_torch does not serve sliding-window models; use --attention-backend torch_native"
            )
        self.row_gaps = attach_row_gaps(self.req_to_token_pool, self.device)
        self._batch_gaps: list[int] = []
        self._shared: list[SharedBatch] | None = None
        """Of a decoding batch, known from its first layer on, as are the other requests:"""
        self._alone: list[int] = []
        self._layer_id = 0

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        self._batch_gaps = self.row_gaps.of(forward_batch.req_pool_indices).tolist()
        self._shared = None

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: RadixAttention, *args: Any, **kwargs: Any
    ) -> Tensor:
        self._layer_id = layer.layer_id
        output: Tensor = super().forward_extend(q, k, v, layer, *args, **kwargs)
        return output

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: RadixAttention, *args: Any, **kwargs: Any
    ) -> Tensor:
        self._layer_id = layer.layer_id
        output: Tensor = super().forward_decode(q, k, v, layer, *args, **kwargs)
        return output

    def _run_sdpa_forward_extend(
        self,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        extend_prefix_lens: Tensor,
        extend_seq_lens: Tensor,
        encoder_lens: Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> Tensor:
        """Attention of the new tokens.

        query and output [tokens, heads, dim], caches [slots, kv_heads, dim].
        """
        self._refuse(encoder_lens, is_cross_attn, sliding_window_size)
        if not causal:
            raise ValueError("grkv_torch serves causal attention only; use --attention-backend torch_native")
        start = 0
        batch = zip(
            req_pool_indices.tolist(),
            seq_lens.tolist(),
            extend_seq_lens.tolist(),
            self._batch_gaps,
            strict=True,
        )
        for row, seq_len, num_new, gap in batch:
            end = start + num_new
            output[start:end] = self._attend_row(
                query[start:end], k_cache, v_cache, req_to_token[row, :seq_len], row, gap, scaling
            )
            start = end
        return output

    def _run_sdpa_forward_decode(
        self,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        encoder_lens: Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> Tensor:
        """Attention of one token per request; shapes as for extend."""
        self._refuse(encoder_lens, is_cross_attn, sliding_window_size)
        rows, lens = req_pool_indices.tolist(), seq_lens.tolist()
        columns = [req_to_token[row, :seq_len] for row, seq_len in zip(rows, lens, strict=True)]
        if self._shared is None:
            self._shared = self._shared_of(rows, columns)
            together = {i for group in self._shared for i in group.members.tolist()}
            self._alone = [i for i in range(len(rows)) if i not in together]
        for group in self._shared:
            output[group.members] = group.attend(
                query[group.members],
                partial(read_slots, k_cache),
                partial(read_slots, v_cache),
                query.shape[-1] ** -0.5 if scaling is None else scaling,
            ).to(output.dtype)
        for i in self._alone:
            output[i : i + 1] = self._attend_row(
                query[i : i + 1], k_cache, v_cache, columns[i], rows[i], self._batch_gaps[i], scaling
            )
        return output

    def _shared_of(self, rows: Sequence[int], columns: Sequence[Tensor]) -> list[SharedBatch]:
        """What requests of the batch read together; only of slots that hold a token for every head."""
        if torch.device(self.device).type != "cpu":  # comparing rows would wait for the device
            return []
        slots = [
            column[:0] if self.row_gaps.regions_of(row) else column[gap:]
            for row, column, gap in zip(rows, columns, self._batch_gaps, strict=True)
        ]
        found = shared_prefixes(slots, partial(pays, device="cpu"))
        return [SharedBatch.of(prefix, slots) for prefix in found]

    def _attend_row(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        columns: Tensor,
        row: int,
        gap: int,
        scaling: float | None,
    ) -> Tensor:
        """The last tokens of one request, [q, heads, dim], over what its row's `columns` hold from the gap
        on."""
        regions = self.row_gaps.regions_of(row)
        if not regions:
            slots = columns[gap:]
            keys = _gathered(k_cache, slots, query.dtype)
            values = _gathered(v_cache, slots, query.dtype)
            return causal_attention(query, keys, values, scaling)
        keys_of, values_of = (
            _gathered_by_head(cache, columns, gap, regions, self._layer_id, query.dtype)
            for cache in (k_cache, v_cache)
        )
        by_kv_head = query.chunk(len(keys_of), dim=1)
        return torch.cat(
            [
                causal_attention(q, k.unsqueeze(1), v.unsqueeze(1), scaling)
                for q, k, v in zip(by_kv_head, keys_of, values_of, strict=True)
            ],
            dim=1,
        )

    @staticmethod
    def _refuse(encoder_lens: Tensor | None, is_cross_attn: bool, sliding_window_size: int | None) -> None:
        if encoder_lens is not None or is_cross_attn or sliding_window_size is not None:
            raise ValueError(
                "grkv_torch serves plain causal self-attention; use --attention-backend torch_native "
                "for encoder-decoder and sliding-window models"
            )


def causal_attention(query: Tensor, keys: Tensor, values: Tensor, scaling: float | None) -> Tensor:
    """Causal attention of the last `q` of `n` tokens.

    query [q, heads, d], keys [n, kv_heads, d], values [n, kv_heads, dv]; returns [q, heads, dv].
    Row i sees keys ``[0, n - q + i]``.
    """
    num_new, num_keys = query.shape[0], keys.shape[0]
    if num_new > num_keys:
        raise ValueError(f"expected at most {num_keys} query rows (one per key), got {num_new}")
    q = query.movedim(0, 1)[None]
    k = keys.movedim(0, 1)[None]
    v = values.movedim(0, 1)[None]
    gqa = query.shape[1] != keys.shape[1]
    if num_new == num_keys:
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=gqa)
        return out[0].movedim(0, 1)
    before = num_keys - num_new
    blocks = []
    for first in range(0, num_new, QUERY_BLOCK_TOKENS):
        last = min(first + QUERY_BLOCK_TOKENS, num_new)
        visible = before + last
        mask = None
        if last - first > 1:  # a single row sees every key
            mask = torch.ones(last - first, visible, dtype=torch.bool, device=query.device).tril_(
                before + first
            )
        blocks.append(
            scaled_dot_product_attention(
                q[:, :, first:last], k[:, :, :visible], v[:, :, :visible],
                attn_mask=mask, scale=scaling, enable_gqa=gqa,
            )
        )  # fmt: skip
    return torch.cat(blocks, dim=2)[0].movedim(0, 1)


def _gathered(cache: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    # A KV pool may hold another dtype than the model computes in.
    return read_slots(cache, slots).to(dtype)


def _gathered_by_head(
    cache: Tensor,
    columns: Tensor,
    gap: int,
    regions: tuple[RaggedRegion, ...],
    layer_id: int,
    dtype: torch.dtype,
) -> list[Tensor]:
    """What each KV head holds of a row, [n_h, dim]: its cells of the regions, then its part of the other
    slots, the newest last. All of a region lies before the tokens that causality concerns."""
    ranges = ordinary_ranges(gap, columns.numel(), regions)
    ordinary = _gathered(cache, torch.cat([columns[first:end] for first, end in ranges]), dtype)
    cells = [
        unpack_heads(
            _gathered(cache, columns[region.first_column : region.end_column], dtype),
            region.counts[layer_id],
        )
        for region in regions
    ]
    return [
        torch.cat([*(by_head[head] for by_head in cells), ordinary[:, head]])
        for head in range(cache.shape[1])
    ]
