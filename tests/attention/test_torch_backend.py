"""grkv_torch against float64 loops over rows, and against the stock backend where both apply."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

from grkv_sglang.attention.rows import prefix_row
from grkv_sglang.attention.torch_backend import QUERY_BLOCK_TOKENS, GrkvTorchAttnBackend, causal_attention

SHAPES = [(9, 3, 64), (4, 4, 32), (8, 1, 16), (4, 2, 48)]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


def reference(query, keys, values, scale):
    """[q, heads, d] over [n, kv_heads, d]: the last q of n tokens, one row and one head at a time."""
    q, k, v = query.double(), keys.double(), values.double()
    group = q.shape[1] // k.shape[1]
    out = torch.empty(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    for i in range(q.shape[0]):
        visible = k.shape[0] - q.shape[0] + i + 1
        for h in range(q.shape[1]):
            weights = torch.softmax(k[:visible, h // group] @ q[i, h] * scale, 0)
            out[i, h] = weights @ v[:visible, h // group]
    return out


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize(("num_new", "num_keys"), [(1, 1), (1, 37), (5, 5), (7, 29), (36, 37)])
def test_causal_attention(dtype, heads, kv_heads, dim, num_new, num_keys):
    torch.manual_seed(num_keys)
    query = torch.randn(num_new, heads, dim).to(dtype)
    keys, values = (
        torch.randn(num_keys, kv_heads, dim).to(dtype),
        torch.randn(num_keys, kv_heads, dim).to(dtype),
    )
    got = causal_attention(query, keys, values, dim**-0.5)
    torch.testing.assert_close(
        got.double(), reference(query, keys, values, dim**-0.5), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


def test_causal_attention_across_query_blocks():
    torch.manual_seed(0)
    num_new, num_keys = 2 * QUERY_BLOCK_TOKENS + 3, 2 * QUERY_BLOCK_TOKENS + 50
    query, keys, values = torch.randn(num_new, 2, 8), torch.randn(num_keys, 1, 8), torch.randn(num_keys, 1, 8)
    got = causal_attention(query, keys, values, 0.3)
    rows = [0, QUERY_BLOCK_TOKENS - 1, QUERY_BLOCK_TOKENS, 2 * QUERY_BLOCK_TOKENS, num_new - 1]
    for row in rows:
        visible = num_keys - num_new + row + 1
        want = reference(query[row : row + 1], keys[:visible], values[:visible], 0.3)
        torch.testing.assert_close(got[row : row + 1].double(), want, atol=2e-5, rtol=2e-5)


def test_more_queries_than_keys_is_an_error():
    with pytest.raises(ValueError, match="expected at most 2 query rows"):
        causal_attention(torch.zeros(3, 1, 4), torch.zeros(2, 1, 4), torch.zeros(2, 1, 4), 1.0)


def make_backend(cls, num_rows, row_tokens):
    pool = ReqToTokenPool(num_rows, row_tokens, "cpu", False)
    runner = SimpleNamespace(device="cpu", req_to_token_pool=pool, token_to_kv_pool=None)
    return cls(runner), pool


@pytest.mark.parametrize("seed", range(6))
def test_mixed_batch_of_gaps_reads_exactly_the_physical_slots(seed):
    """Random rows, gaps and lengths; the dummy slot and every slot outside the rows hold NaN."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    backend, pool = make_backend(GrkvTorchAttnBackend, 5, 64)
    heads, kv_heads, dim, num_slots = 6, 2, 16, 400
    k_cache = torch.full((num_slots, kv_heads, dim), torch.nan)
    v_cache = torch.full((num_slots, kv_heads, dim), torch.nan)
    free = (torch.randperm(num_slots - 1, generator=generator) + 1).tolist()
    rows, seq_lens, prefix_lens, slots_of = [], [], [], []
    for row in torch.randperm(5, generator=generator)[:3].tolist():
        prefix, new = draw(0, 30), draw(1, 12)
        physical = draw(0, prefix)
        slots = [free.pop() for _ in range(physical + new)]
        pool.req_to_token[row + 1, : prefix + new] = prefix_row(torch.tensor(slots), prefix + new)
        backend.row_gaps.set(row + 1, prefix - physical)
        k_cache[slots] = torch.randn(len(slots), kv_heads, dim, generator=generator)
        v_cache[slots] = torch.randn(len(slots), kv_heads, dim, generator=generator)
        rows.append(row + 1)
        seq_lens.append(prefix + new)
        prefix_lens.append(prefix)
        slots_of.append(slots)
    extend = [s - p for s, p in zip(seq_lens, prefix_lens, strict=True)]
    query = torch.randn(sum(extend), heads, dim, generator=generator)
    indices = torch.tensor(rows)
    backend.init_forward_metadata(SimpleNamespace(req_pool_indices=indices, out_cache_loc=None))
    got = backend._run_sdpa_forward_extend(
        query, torch.empty_like(query), k_cache, v_cache, pool.req_to_token, indices, torch.tensor(seq_lens),
        torch.tensor(prefix_lens), torch.tensor(extend), scaling=0.25, enable_gqa=True, causal=True,
    )  # fmt: skip
    start = 0
    for new, slots in zip(extend, slots_of, strict=True):
        want = reference(query[start : start + new], k_cache[slots], v_cache[slots], 0.25)
        torch.testing.assert_close(got[start : start + new].double(), want, atol=2e-5, rtol=2e-5)
        start += new

    one = torch.randn(len(rows), heads, dim, generator=generator)
    got = backend._run_sdpa_forward_decode(
        one, torch.empty_like(one), k_cache, v_cache, pool.req_to_token, indices, torch.tensor(seq_lens),
        scaling=0.25, enable_gqa=True,
    )  # fmt: skip
    for i, slots in enumerate(slots_of):
        want = reference(one[i : i + 1], k_cache[slots], v_cache[slots], 0.25)
        torch.testing.assert_close(got[i : i + 1].double(), want, atol=2e-5, rtol=2e-5)


def test_without_gaps_it_is_the_stock_backend():
    ours, pool = make_backend(GrkvTorchAttnBackend, 2, 32)
    stock, _ = make_backend(TorchNativeAttnBackend, 2, 32)
    pool.req_to_token[1, :20] = torch.arange(1, 21)
    pool.req_to_token[2, :9] = torch.arange(21, 30)
    caches = torch.randn(2, 40, 2, 16)
    query = torch.randn(15 + 9, 4, 16)
    indices = torch.tensor([1, 2])
    ours.init_forward_metadata(SimpleNamespace(req_pool_indices=indices, out_cache_loc=None))
    arguments = {
        "k_cache": caches[0], "v_cache": caches[1], "req_to_token": pool.req_to_token,
        "req_pool_indices": indices, "seq_lens": torch.tensor([20, 9]), "scaling": 0.25, "enable_gqa": True,
    }  # fmt: skip
    lens = {
        "extend_prefix_lens": torch.tensor([5, 0]),
        "extend_seq_lens": torch.tensor([15, 9]),
        "causal": True,
    }
    results = [
        b._run_sdpa_forward_extend(query=query, output=torch.empty_like(query), **arguments, **lens)
        for b in (ours, stock)
    ]
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-5)
    # A prefill without prefix is the very same call.
    assert torch.equal(results[0][15:], results[1][15:])
    one = query[:2]
    results = [
        b._run_sdpa_forward_decode(query=one, output=torch.empty_like(one), **arguments)
        for b in (ours, stock)
    ]
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "bad", [{"is_cross_attn": True}, {"sliding_window_size": 8}, {"encoder_lens": torch.tensor([3])}]
)
def test_what_the_gap_does_not_cover_is_refused(bad):
    backend, pool = make_backend(GrkvTorchAttnBackend, 1, 8)
    empty = torch.zeros(1, 1, 4)
    with pytest.raises(ValueError, match="--attention-backend torch_native"):
        backend._run_sdpa_forward_decode(
            empty, empty, empty, empty, pool.req_to_token, torch.tensor([1]), torch.tensor([1]), **bad
        )
