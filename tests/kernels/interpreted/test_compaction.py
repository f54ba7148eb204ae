"""Gather and scatter over all layers against loops, number for number."""

from __future__ import annotations

import pytest
import torch
from grkv_kernels.compaction import (
    LayerBuffers,
    gather_tokens,
    gather_tokens_reference,
    scatter_tokens,
    scatter_tokens_reference,
)

CASES = [
    # dtype of the pool and of the rows, layers, KV heads, d, tokens of the span, kept tokens
    (torch.float32, torch.float32, 2, 1, 64, 41, 37),
    (torch.float16, torch.float32, 3, 3, 80, 7, 5),
    (torch.float32, torch.float16, 1, 2, 128, 40, 33),
    (torch.float16, torch.float16, 2, 1, 64, 3, 0),
]


@pytest.mark.parametrize("case", CASES)
def test_gather_and_scatter(case):
    pool_dtype, row_dtype, n_layers, n_kv_heads, d, n_tokens, n_kept = case
    generator = torch.Generator().manual_seed(n_tokens)
    n_slots = n_tokens + n_kept + 3
    buffers = [
        torch.randn(n_slots, n_kv_heads, d, generator=generator).to(pool_dtype) for _ in range(n_layers)
    ]
    order = torch.randperm(n_slots, generator=generator)
    slots, targets = order[:n_tokens], order[n_tokens : n_tokens + n_kept]
    for buffer in buffers:
        # Padding, which nothing may read.
        buffer[order[n_tokens:]] = torch.nan
    kept = torch.randint(-1, n_tokens, (n_layers, n_kv_heads, n_kept), generator=generator)
    pool = LayerBuffers.of(buffers)
    rows = gather_tokens(pool, slots, kept, dtype=row_dtype)
    assert rows.dtype == row_dtype
    for layer, head, j in torch.cartesian_prod(*map(torch.arange, kept.shape)).tolist():
        token = int(kept[layer, head, j])
        expected = buffers[layer][slots[token], head] if token >= 0 else torch.zeros(d)
        assert torch.equal(rows[layer, head, j], expected.to(row_dtype))
    assert torch.equal(rows, gather_tokens_reference(pool, slots, kept, dtype=row_dtype))

    before = [buffer.clone() for buffer in buffers]
    by_reference = LayerBuffers.of([buffer.clone() for buffer in buffers])
    new = torch.randn(rows.shape, generator=generator).to(row_dtype)
    scatter_tokens(pool, targets, new)
    scatter_tokens_reference(by_reference, targets, new)
    for layer, buffer in enumerate(buffers):
        for j, slot in enumerate(targets.tolist()):
            assert torch.equal(buffer[slot], new[layer, :, j].to(pool_dtype))
        untouched = torch.ones(n_slots, dtype=torch.bool).index_fill_(0, targets, False)
        torch.testing.assert_close(
            buffer[untouched], before[layer][untouched], rtol=0, atol=0, equal_nan=True
        )
        torch.testing.assert_close(buffer, by_reference.buffers[layer], rtol=0, atol=0, equal_nan=True)


def test_interpreted_bfloat16_pool_of_bfloat16_rows():
    """Bits are moved as they are. Conversions are not tested: the interpreter truncates them."""
    buffers = [torch.randn(9, 2, 64).bfloat16() for _ in range(2)]
    pool = LayerBuffers.of(buffers)
    kept = torch.tensor([[[0, 2], [1, 3]], [[3, 1], [0, 0]]])
    rows = gather_tokens(pool, torch.tensor([4, 3, 2, 1]), kept, dtype=torch.bfloat16)
    assert torch.equal(rows[1, 0, 0], buffers[1][1, 0])
    scatter_tokens(pool, torch.tensor([7, 8]), rows)
    assert torch.equal(buffers[0][8, 1], buffers[0][1, 1])
