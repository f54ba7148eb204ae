"""Attention over single cells of the pool (`ragged`), by our own kernel, beside a backend's own kernels.

What a backend leaves out of its rows, because heads hold tokens of their own there or because several
requests read it together (`shared`), is attended to here and merged with the rest by log-sum-exp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grkv_kernels import merge_states, ragged_attention
from grkv_kernels.dispatch import FLOATS, MAX_HEAD_DIM
from torch import Tensor

from grkv_sglang.attention.kv_scales import kv_scales
from grkv_sglang.attention.rows import RowGaps
from grkv_sglang.attention.shared import SharedCells, pays, shared_prefixes

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def read_together(
    forward_batch: ForwardBatch, row_gaps: RowGaps, req_to_token: Tensor, pool: MHATokenToKVPool
) -> SharedCells | None:
    """What the requests of an eager batch read together; nothing unless they decode and our kernel reads the
    pool (16 bits or more, heads that fit).

    Waits for the device: rows are compared on the host. That moves 4 bytes a slot, of which attention reads
    some kilobytes in every layer. Only slots that hold a token for every head are shared.
    """
    readable = pool.dtype in FLOATS and max(pool.head_dim, pool.v_head_dim) <= MAX_HEAD_DIM
    if not readable or not forward_batch.forward_mode.is_decode():
        return None
    rows = forward_batch.req_pool_indices
    first, lens = (part.tolist() for part in row_gaps.read_range(rows, forward_batch.seq_lens))
    ends = [start + count for start, count in zip(first, lens, strict=True)]
    columns = req_to_token[rows, : max(ends, default=0)].cpu()
    slots = [
        columns[i, end if row_gaps.regions_of(row) else start : end]
        for i, (row, start, end) in enumerate(zip(rows.tolist(), first, ends, strict=True))
    ]
    device = rows.device.type
    prefixes = shared_prefixes(slots, lambda prefix: pays(prefix, device))
    return SharedCells.of(prefixes, slots, pool.head_num, rows.device) if prefixes else None


def attend_cells(
    pool: MHATokenToKVPool,
    layer: RadixAttention,
    backend: str,
    queries: Tensor,
    cells: Tensor,
    indptr: Tensor,
    **given: Any,
) -> tuple[Tensor, Tensor]:
    """Attention over cells, [T, Hq, dv], and its natural log-sum-exp [T, Hq].

    `backend`: whose scales the pool is read with; the rest as in ``grkv_kernels.ragged_attention``.
    """
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    scales = kv_scales(layer, backend)
    output, lse = ragged_attention(
        queries.contiguous(),
        keys.view(-1, keys.shape[-1]),
        values.view(-1, values.shape[-1]),
        cells,
        indptr,
        n_kv_heads=keys.shape[1],
        scale=layer.scaling * scales.key,
        **given,
    )
    return output if scales.value == 1 else output * scales.value, lse


def add_shared(
    shared: SharedCells,
    pool: MHATokenToKVPool,
    layer: RadixAttention,
    backend: str,
    queries: Tensor,
    output: Tensor,
    lse: Tensor,
) -> None:
    """Merge attention over what is read together into `output` [B, Hq, dv], which is that over the other
    slots, with the log-sum-exps `lse` [B, Hq]."""
    together = attend_cells(
        pool, layer, backend, queries[shared.members], shared.cells, shared.cells_indptr,
        q_indptr=shared.q_indptr, max_queries=shared.most_members,
    )  # fmt: skip
    merged, _ = merge_states(output[shared.members], lse[shared.members], *together)
    output[shared.members] = merged
