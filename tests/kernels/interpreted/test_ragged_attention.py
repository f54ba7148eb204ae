"""Ragged attention against a loop over query heads in float64, and against its torch reference."""

from __future__ import annotations

import pytest
import torch
from grkv_kernels.dispatch import INTERPRETED
from grkv_kernels.merge import merge_splits, merge_splits_reference, merge_states, merge_states_reference
from grkv_kernels.ragged_attention import ragged_attention, ragged_attention_reference
from torch import Tensor

# One KV head and several; every group; head sizes of Llama, one that is no power of two, and two that differ;
# one part and several; one query per request, none, and more than a block of rows.
DECODE = [
    # dtype, KV heads, group, d, dv, lengths of the ranges, splits
    (torch.float32, 1, 1, 64, 64, [0, 5, 130], 1),
    (torch.float32, 2, 4, 128, 128, [150, 0, 64, 65, 0, 0], 3),
    (torch.float16, 1, 8, 64, 128, [63, 129], 2),
    (torch.float16, 3, 3, 80, 80, [7, 70, 1], 4),
]
EXTEND = [
    # dtype, KV heads, group, d, dv, lengths of the ranges, splits, query tokens of each request
    (torch.float32, 1, 3, 80, 64, [33, 0, 70], 2, [4, 1, 0]),
    (torch.float16, 2, 8, 128, 128, [66, 31, 0, 9], 1, [1, 11]),
]


def _assert_close(actual: Tensor, expected: Tensor) -> None:
    """Up to the rounding of the actual dtype; everything before it is float32."""
    rtol, atol = (1e-3, 5e-4) if actual.dtype == torch.float16 else (1e-5, 2e-6)
    torch.testing.assert_close(actual.double(), expected.double(), rtol=rtol, atol=atol)


def _problem(dtype, n_kv_heads, group, d, dv, lengths, n_tokens, index_dtype):
    generator = torch.Generator().manual_seed(sum(lengths) + d)
    total = sum(lengths)
    n_cells = (total + 11) // n_kv_heads * n_kv_heads
    queries = torch.randn(n_tokens, n_kv_heads * group, d, generator=generator).to(dtype)
    keys = torch.randn(n_cells, d, generator=generator).to(dtype)
    values = torch.randn(n_cells, dv, generator=generator).to(dtype)
    # Cell 0 and all others that no range names would show.
    cells = torch.randperm(n_cells - 1, generator=generator)[:total] + 1
    unused = torch.ones(n_cells, dtype=torch.bool).index_fill_(0, cells, False)
    keys[unused], values[unused] = torch.nan, torch.nan
    # Nor is anything read behind the ranges.
    cells = torch.cat((cells, torch.full((3,), 2**30))).to(index_dtype)
    indptr = torch.tensor([0, *lengths]).cumsum(0).to(index_dtype)
    return queries, keys, values, cells, indptr


def _attention_in_float64(problem, n_kv_heads, scale, request_of):
    queries, keys, values, cells, indptr = problem
    output = torch.zeros(*queries.shape[:2], values.shape[1], dtype=torch.float64)
    lse = torch.full(queries.shape[:2], -torch.inf, dtype=torch.float64)
    group = queries.shape[1] // n_kv_heads
    for token, request in enumerate(request_of):
        for head in range(queries.shape[1]):
            index = request * n_kv_heads + head // group
            here = cells[int(indptr[index]) : int(indptr[index + 1])].long()
            if here.numel():
                logits = keys[here].double() @ queries[token, head].double() * scale
                exponentials = logits.exp()
                lse[token, head] = exponentials.sum().log()
                output[token, head] = exponentials @ values[here].double() / exponentials.sum()
    return output, lse


def _compare(case, counts: list[int] | None, num_splits: int) -> None:
    dtype, n_kv_heads, group, d, dv, lengths = case
    n_requests = len(lengths) // n_kv_heads
    request_of = [r for r in range(n_requests) for _ in range(1 if counts is None else counts[r])]
    index_dtype = torch.int64 if dtype == torch.float16 else torch.int32
    problem = _problem(dtype, n_kv_heads, group, d, dv, lengths, len(request_of), index_dtype)
    q_indptr = None if counts is None else torch.tensor([0, *counts]).cumsum(0).to(index_dtype)
    settings = {"n_kv_heads": n_kv_heads, "scale": d**-0.5, "q_indptr": q_indptr}
    output, lse = ragged_attention(
        *problem, max_queries=1 if counts is None else max(counts), num_splits=num_splits, **settings
    )
    assert output.dtype == dtype
    assert lse.dtype == torch.float32
    expected = _attention_in_float64(problem, n_kv_heads, d**-0.5, request_of)
    reference = ragged_attention_reference(*problem, **settings)
    for other_output, other_lse in (expected, reference):
        _assert_close(output, other_output)
        _assert_close(lse, other_lse)


def test_this_process_interprets():
    assert INTERPRETED


@pytest.mark.parametrize("case", DECODE)
def test_decode(case):
    *case, num_splits = case
    _compare(case, None, num_splits)


@pytest.mark.parametrize("case", EXTEND)
def test_extend(case):
    *case, num_splits, counts = case
    _compare(case, counts, num_splits)


@pytest.mark.parametrize("num_splits", [1, 2, None])
def test_nothing_to_do(num_splits):
    """No requests; requests whose ranges are all empty."""
    pool = torch.full((4, 64), torch.nan)
    cells = torch.zeros(0, dtype=torch.int64)
    for n_requests in (0, 2):
        output, lse = ragged_attention(
            torch.randn(n_requests, 4, 64), pool, pool, cells, torch.zeros(2 * n_requests + 1).long(),
            n_kv_heads=2, scale=1.0, num_splits=num_splits,
        )  # fmt: skip
        assert torch.equal(output, torch.zeros(n_requests, 4, 64))
        assert torch.equal(lse, torch.full((n_requests, 4), -torch.inf))


@pytest.mark.parametrize(("dtype", "dv"), [(torch.float32, 80), (torch.float16, 128)])
def test_merge_states(dtype, dv):
    """Both sets, one of them, and neither; what stands beside an lse of -inf is not looked at."""
    generator = torch.Generator().manual_seed(dv)
    shape = (4, 3)
    states: list[Tensor] = []
    for empty in ([1, 3], [2, 3]):
        output = torch.randn(*shape, dv, generator=generator).to(dtype)
        # Its exponentials overflow.
        lse = 200 + torch.randn(shape, generator=generator)
        output[empty], lse[empty] = torch.nan, -torch.inf
        states += [output, lse]
    output, lse = merge_states(*states)
    assert output.dtype == dtype
    output_a, lse_a, output_b, lse_b = (state.double().nan_to_num(nan=0.0) for state in states)
    lse_a, lse_b = states[1].double(), states[3].double()
    share = torch.where(lse_a == -torch.inf, 0.0, torch.sigmoid(lse_a - lse_b)).unsqueeze(-1)
    expected = share * output_a + (1 - share) * output_b
    _assert_close(output, expected)
    _assert_close(lse, torch.logaddexp(lse_a, lse_b))
    for actual, reference in zip((output, lse), merge_states_reference(*states), strict=True):
        _assert_close(actual, reference)


@pytest.mark.parametrize("n_splits", [1, 5])
def test_merge_splits(n_splits):
    generator = torch.Generator().manual_seed(n_splits)
    partial = torch.randn(n_splits, 3, 2, 80, generator=generator)
    lse = 200 + torch.randn(n_splits, 3, 2, generator=generator)
    lse[:, 0], partial[:, 0] = -torch.inf, torch.nan
    lse[0, 1, 0], partial[0, 1, 0] = -torch.inf, torch.nan
    output, joint = merge_splits(partial, lse, torch.float32)
    assert torch.equal(output[0], torch.zeros(2, 80))
    assert torch.equal(joint[0], torch.full((2,), -torch.inf))
    share = torch.softmax(lse.double(), dim=0).nan_to_num(nan=0.0).unsqueeze(-1)
    expected = (share * partial.double().nan_to_num(nan=0.0)).sum(dim=0)
    _assert_close(output, expected)
    for actual, reference in zip(
        (output, joint), merge_splits_reference(partial, lse, torch.float32), strict=True
    ):
        _assert_close(actual, reference)
