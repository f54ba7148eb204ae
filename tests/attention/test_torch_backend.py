"""grkv_torch against float64 loops over rows, and against the stock backend where both apply."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

from grkv_sglang.attention.ragged import RaggedRegion
from grkv_sglang.attention.rows import prefix_row
from grkv_sglang.attention.torch_backend import QUERY_BLOCK_TOKENS, GrkvTorchAttnBackend, causal_attention
from tests.attention.reference import reference

SHAPES = [(9, 3, 64), (4, 4, 32), (8, 1, 16), (4, 2, 48)]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


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


@pytest.mark.parametrize(
    ("seed", "dtype"),
    [
        *((seed, torch.float32) for seed in range(6)),
        (6, torch.bfloat16),
        (7, torch.float16),
        (8, torch.float8_e4m3fn),
        (9, torch.float8_e5m2),
    ],
)
def test_mixed_batch_of_gaps_reads_exactly_the_physical_slots(seed, dtype):
    """Random rows, gaps and lengths; the dummy slot and every slot outside the rows hold NaN. Of a pool in
    another dtype than the model's, attention is that over what is stored."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    backend, pool = make_backend(GrkvTorchAttnBackend, 5, 64)
    heads, kv_heads, dim, num_slots = 6, 2, 16, 400
    k_cache = torch.full((num_slots, kv_heads, dim), torch.nan, dtype=dtype)
    v_cache = torch.full((num_slots, kv_heads, dim), torch.nan, dtype=dtype)
    free = (torch.randperm(num_slots - 1, generator=generator) + 1).tolist()
    rows, seq_lens, prefix_lens, slots_of = [], [], [], []
    for row in torch.randperm(5, generator=generator)[:3].tolist():
        prefix, new = draw(0, 30), draw(1, 12)
        physical = draw(0, prefix)
        slots = [free.pop() for _ in range(physical + new)]
        pool.req_to_token[row + 1, : prefix + new] = prefix_row(torch.tensor(slots), prefix + new)
        backend.row_gaps.set(row + 1, prefix - physical)
        k_cache[slots] = torch.randn(len(slots), kv_heads, dim, generator=generator).to(dtype)
        v_cache[slots] = torch.randn(len(slots), kv_heads, dim, generator=generator).to(dtype)
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


def heads_of(rng, num_slots, kv_heads):
    """How many cells each head has of `num_slots` slots; one head may have none."""
    counts = [0] * kv_heads
    for _ in range(num_slots * kv_heads):
        counts[rng.choice(range(kv_heads) if kv_heads == 1 or rng.random() < 0.5 else [0])] += 1
    return counts


class RaggedRow:
    """A request whose prefix is exact tokens, even spans and spans with budgets per head, in any order."""

    def __init__(self, rng, free, parts, gap, new, n_layers, kv_heads):
        """`parts`: ("even", slots) or ("ragged", slots); the tokens of a request that follow are even."""
        self.columns, self.regions, self.gap, self.new = [0] * gap, [], gap, new
        self.held: list[list[list[tuple[int, int]]]] = [
            [[] for _ in range(kv_heads)] for _ in range(n_layers)
        ]
        """By layer and head, the cells (slot, head's row in it) that it attends to, the newest last."""
        for kind, size in [*parts, ("even", new)]:
            slots = [free.pop() for _ in range(size)]
            first = len(self.columns)
            self.columns += slots
            cells = [(slot, row) for slot in slots for row in range(kv_heads)]
            if kind == "even":
                for layer in self.held:
                    for head in range(kv_heads):
                        layer[head] += [(slot, head) for slot in slots]
                continue
            counts = [heads_of(rng, size, kv_heads) for _ in range(n_layers)]
            self.regions.append(RaggedRegion(first, size, torch.tensor(counts)))
            for layer, of_layer in zip(self.held, counts, strict=True):
                at = 0
                for head, count in enumerate(of_layer):
                    layer[head] += cells[at : at + count]
                    at += count

    def expected(self, query, keys, values, layer, scale):
        """Float64, one head after the other: [q, heads, d] over the cells of its KV head."""
        held = self.held[layer]
        group = query.shape[1] // len(held)
        output = []
        for head in range(query.shape[1]):
            slots, rows = zip(*held[head // group], strict=True)
            k, v = (cache[list(slots), list(rows)].unsqueeze(1) for cache in (keys, values))
            output.append(reference(query[:, head : head + 1], k, v, scale))
        return torch.cat(output, dim=1)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (3, 1), (9, 3)])
@pytest.mark.parametrize("new", [1, 5])
def test_heads_that_hold_tokens_of_their_own(heads, kv_heads, new):
    """Batches of rows with no, one and several regions, with other counts in each layer."""
    rng = random.Random(heads + new)
    torch.manual_seed(heads)
    n_layers, dim, num_slots, num_rows = 3, 16, 300, 6
    pool = ReqToTokenPool(num_rows, 64, "cpu", False)
    kv = MHATokenToKVPool(num_slots, 1, torch.float32, kv_heads, dim, n_layers, "cpu", False)
    runner = SimpleNamespace(device="cpu", req_to_token_pool=pool, token_to_kv_pool=kv)
    backend = GrkvTorchAttnBackend(runner)
    free = rng.sample(range(1, num_slots + 1), num_slots)
    parts = [
        [("ragged", 4)],
        [("even", 7)],
        [("even", 3), ("ragged", 1), ("ragged", 5), ("even", 2), ("ragged", 3)],
        [],
        [("ragged", 2), ("even", 6)],
    ]
    requests = []
    for row, of_row in zip(rng.sample(range(1, num_rows + 1), len(parts)), parts, strict=True):
        gap = rng.randint(1, 9) if of_row else 0
        request = RaggedRow(rng, free, of_row, gap, new, n_layers, kv_heads)
        pool.req_to_token[row, : len(request.columns)] = torch.tensor(request.columns)
        backend.row_gaps.set(row, gap, tuple(request.regions))
        requests.append((row, request))
    for layer_id in range(n_layers):
        for cache in kv.get_kv_buffer(layer_id):
            cache.fill_(torch.nan)
            used = [slot for _, r in requests for slot in r.columns[r.gap : len(r.columns) - new]]
            cache[used] = torch.randn(len(used), kv_heads, dim)
    seq_lens = torch.tensor([len(r.columns) for _, r in requests])
    batch = SimpleNamespace(
        req_pool_indices=torch.tensor([row for row, _ in requests]),
        seq_lens=seq_lens,
        extend_prefix_lens=seq_lens - new,
        extend_seq_lens=torch.full_like(seq_lens, new),
        out_cache_loc=torch.tensor([slot for _, r in requests for slot in r.columns[-new:]]),
        encoder_lens=None,
    )
    backend.init_forward_metadata(batch)
    for layer_id in (2, 0, 1):
        layer = RadixAttention(heads, dim, 0.3, kv_heads, layer_id)
        query = torch.randn(len(requests) * new, heads, dim)
        k, v = (torch.randn(len(requests) * new, kv_heads, dim) for _ in range(2))
        forward = backend.forward_decode if new == 1 else backend.forward_extend
        got = forward(query.flatten(1), k, v, layer, batch).view_as(query)
        keys, values = kv.get_kv_buffer(layer_id)
        for i, (_, request) in enumerate(requests):
            mine = slice(i * new, (i + 1) * new)
            want = request.expected(query[mine], keys, values, layer_id, 0.3)
            torch.testing.assert_close(got[mine].double(), want, atol=2e-5, rtol=2e-5)
        if new == 1:  # the same through an extend of one token
            again = backend.forward_extend(query.flatten(1), k, v, layer, batch).view_as(query)
            torch.testing.assert_close(again, got, atol=2e-6, rtol=2e-6)


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
