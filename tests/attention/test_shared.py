"""Decoding over shared slots: which requests go together, and that their attention is the plain one."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from torch import Tensor

from grkv_sglang.attention import shared
from grkv_sglang.attention.ragged import RaggedRegion
from grkv_sglang.attention.rows import prefix_row
from grkv_sglang.attention.shared import SharedCells, SharedPrefix, pays, shared_prefixes
from grkv_sglang.attention.torch_backend import GrkvTorchAttnBackend
from tests.attention.reference import reference


def rows(*slots: list[int]) -> list[Tensor]:
    return [torch.tensor(row, dtype=torch.int32) for row in slots]


def anything(prefix: SharedPrefix) -> bool:
    return prefix.saved_slots > 0


HEADER, A, B = [1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23, 24]


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ([], []),
        ([[5, 6, 7]], []),
        ([[5, 6, 7], [8, 9]], []),
        # The last slot of a request is its new token's own.
        ([[5, 6, 7], [5, 6, 7]], [((0, 1), 2)]),
        ([[5], [5]], []),
        ([[5, 6, 7, 50], [5, 6, 8, 51], [5, 6, 9]], [((0, 1, 2), 2)]),
        # One document each behind a header: with the document.
        (
            [[*HEADER, *A, 50], [*HEADER, *B, 51], [*HEADER, *A, 52, 53], [*HEADER, *B, 54]],
            [((0, 2), 7), ((1, 3), 8)],
        ),
        # Those without a companion share the header.
        (
            [[*HEADER, *A, 50], [*HEADER, *A, 51], [*HEADER, 60, 52], [*HEADER, 70, 53]],
            [((0, 1), 7), ((2, 3), 3)],
        ),
        # A long header and short documents: all together.
        ([[*range(1, 21), 30, 50], [*range(1, 21), 30, 51], [*range(1, 21), 40, 52]], [((0, 1, 2), 20)]),
        # Order counts: attention would not mind, but no two spans have the same slots in another order.
        ([[5, 6, 7, 50], [6, 5, 7, 51]], []),
    ],
)
def test_which_requests_go_together(requests: list[list[int]], expected: list[tuple[tuple[int, ...], int]]):
    found = shared_prefixes(rows(*requests), anything)
    assert sorted((group.members, group.num_slots) for group in found) == sorted(expected)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=7), max_size=6), st.integers(1, 6))
def test_groups_are_disjoint_true_and_worth_it(prefixes: list[list[int]], least: int):
    requests = [[*prefix, 100 + i] for i, prefix in enumerate(prefixes)]
    found = shared_prefixes(rows(*requests), lambda prefix: prefix.saved_slots >= least)
    members = [i for group in found for i in group.members]
    assert len(members) == len(set(members))
    for group in found:
        assert len(group.members) >= 2
        assert group.saved_slots >= least
        assert len({tuple(requests[i][: group.num_slots]) for i in group.members}) == 1
        assert all(len(requests[i]) > group.num_slots for i in group.members)
        # As many as they have in common.
        longer = {tuple(requests[i][: group.num_slots + 1]) for i in group.members}
        assert len(longer) > 1
    # Never worse than the best single group.
    single = [
        (sum(request[:n] == first[:n] for request in requests) - 1) * n
        for first in requests
        for n in range(1, len(first))
    ]
    best = max((saved for saved in single if saved >= least), default=0)
    assert sum(group.saved_slots for group in found) >= best


@pytest.mark.parametrize(("device", "least"), [("cpu", 1024), ("cuda", 32768)])
def test_few_shared_slots_are_not_worth_it(device: str, least: int):
    here = partial(pays, device=device)
    slots = list(range(1, least + 1))
    assert shared_prefixes(rows([*slots, 9], [*slots, 10]), here) == [SharedPrefix((0, 1), len(slots))]
    assert shared_prefixes(rows([*slots[1:], 9], [*slots[1:], 10]), here) == []


@pytest.mark.parametrize("n_kv_heads", [1, 3])
def test_groups_as_cells(n_kv_heads: int):
    """By group and head, the cells of the slots that all of its members read."""
    requests = rows([7, 5, 9, 1], [4, 6, 2], [7, 5, 9, 3], [8, 1], [4, 6, 11, 12], [7, 5, 9, 13])
    prefixes = shared_prefixes(requests, anything)
    made = SharedCells.of(prefixes, requests, n_kv_heads, torch.device("cpu"))
    assert made.num_slots.tolist() == [3, 2, 3, 0, 2, 3]
    assert made.most_members == 3
    groups = [
        (made.members[start:end].tolist(), number)
        for number, (start, end) in enumerate(pairwise(made.q_indptr.tolist()))
    ]
    assert sorted(members for members, _ in groups) == [[0, 2, 5], [1, 4]]
    for members, number in groups:
        for head in range(n_kv_heads):
            index = number * n_kv_heads + head
            cells = made.cells[made.cells_indptr[index] : made.cells_indptr[index + 1]].tolist()
            slots = [7, 5, 9] if 0 in members else [4, 6]
            assert cells == [slot * n_kv_heads + head for slot in slots]
    assert made.cells_indptr[-1] == len(made.cells)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (9, 3), (4, 1)])
@pytest.mark.parametrize(
    ("dtype", "pool_dtype", "tolerance"),
    [
        (torch.float32, torch.float32, 2e-5),
        (torch.bfloat16, torch.bfloat16, 2e-2),
        (torch.float32, torch.float8_e4m3fn, 2e-5),
    ],
)
def test_decoding_together_is_decoding(
    heads: int,
    kv_heads: int,
    dtype: torch.dtype,
    pool_dtype: torch.dtype,
    tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
):
    """Two documents behind a header, one of them a span behind a gap; one request alone, and one whose span
    has budgets per head. What nobody reads is NaN, the dummy slot too."""
    monkeypatch.setitem(shared.LEAST_SAVED_SLOTS, "cpu", 4)
    attended: list[int] = []
    attend = shared.SharedBatch.attend

    def counted(self, *args):
        attended.append(len(self.members))
        return attend(self, *args)

    monkeypatch.setattr(shared.SharedBatch, "attend", counted)
    torch.manual_seed(heads)
    dim, num_slots = 16, 150
    pool = ReqToTokenPool(8, 64, "cpu", False)
    kv = MHATokenToKVPool(num_slots, 1, pool_dtype, kv_heads, dim, 1, "cpu", False)
    backend = GrkvTorchAttnBackend(SimpleNamespace(device="cpu", req_to_token_pool=pool, token_to_kv_pool=kv))
    free = (torch.randperm(num_slots) + 1).tolist()

    def take(count: int) -> list[int]:
        return [free.pop() for _ in range(count)]

    header, span, document = take(3), take(9), take(17)
    packed = take(6)
    counts = torch.tensor([[6 * kv_heads] + [0] * (kv_heads - 1)])
    requests = [
        (11, [*header, *span], 1),
        (0, [*header, *document], 4),
        (11, [*header, *span], 7),
        (0, take(5), 2),
        (0, [*header, *document], 1),
        (11, [*header, *span], 3),
        (5, packed, 2),
    ]
    rows_, lens, slots_of = [], [], []
    for row, (gap, prefix, others) in enumerate(requests, 1):
        slots = [*prefix, *take(others)]
        pool.req_to_token[row, : gap + len(slots)] = prefix_row(torch.tensor(slots), gap + len(slots))
        regions = (RaggedRegion(gap, 6, counts),) if prefix is packed else ()
        backend.row_gaps.set(row, gap, regions)
        rows_.append(row)
        lens.append(gap + len(slots))
        slots_of.append(slots)
    used = sorted({slot for slots in slots_of for slot in slots})
    for cache in kv.get_kv_buffer(0):
        cache.fill_(torch.nan)
        bits = cache.view(torch.uint8) if pool_dtype.itemsize == 1 else cache
        numbers = torch.randn(len(used), kv_heads, dim).to(pool_dtype)
        bits[used] = numbers.view(torch.uint8) if pool_dtype.itemsize == 1 else numbers
    batch = SimpleNamespace(
        req_pool_indices=torch.tensor(rows_),
        seq_lens=torch.tensor(lens),
        out_cache_loc=torch.tensor([slots[-1] for slots in slots_of]),
        encoder_lens=None,
    )
    backend.init_forward_metadata(batch)
    layer = RadixAttention(heads, dim, 0.3, kv_heads, 0)
    query = torch.randn(len(rows_), heads, dim).to(dtype)
    k, v = (torch.randn(len(rows_), kv_heads, dim).to(dtype) for _ in range(2))
    got = backend.forward_decode(query.flatten(1), k, v, layer, batch).view(len(rows_), heads, dim)
    keys, values = (cache.float() for cache in kv.get_kv_buffer(0))
    assert sorted(attended) == [2, 3]
    for i, slots in enumerate(slots_of[:-1]):
        want = reference(query[i : i + 1], keys[slots], values[slots], 0.3)
        torch.testing.assert_close(got[i : i + 1].double(), want, atol=tolerance, rtol=tolerance)
    # A batch that shares nothing, behind it.
    alone = SimpleNamespace(
        req_pool_indices=batch.req_pool_indices[3:4],
        seq_lens=batch.seq_lens[3:4],
        out_cache_loc=batch.out_cache_loc[3:4],
        encoder_lens=None,
    )
    backend.init_forward_metadata(alone)
    again = backend.forward_decode(query[3:4].flatten(1), k[3:4], v[3:4], layer, alone)
    torch.testing.assert_close(again.view(heads, dim), got[3], atol=tolerance, rtol=tolerance)
    assert len(attended) == 2
