from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grkv_sglang.core import Partial, attend, group_rows, join

from .reference import naive_attention, random


def heads_first(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1).contiguous()


def by_query(rows: Tensor, n_queries: int) -> Tensor:
    """[Hkv, m * G, ...] rows -> [m, Hq, ...]."""
    return rows.unflatten(1, (n_queries, -1)).transpose(0, 1).flatten(1, 2)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 3),
    st.sampled_from([1, 3, 4, 8]),
    st.integers(1, 5),
    st.integers(1, 13),
    st.integers(0, 7),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_joint_attention_is_attention_over_the_concatenation(
    n_kv_heads: int, group: int, m: int, n: int, p: int, causal: bool, seed: int
) -> None:
    d, dv, scale = 4, 3, 0.7
    queries = random(m, n_kv_heads * group, d, seed=seed, scale=3.0)
    keys, values = random(p + n, n_kv_heads, d, seed=seed + 1), random(p + n, n_kv_heads, dv, seed=seed + 2)
    # Token -1 of the span: such a query sees the ancestors only.
    last_seen = [(7 * i + seed) % (n + 1) - 1 for i in range(m)] if causal else [n - 1] * m
    expected, weights = naive_attention(
        queries, keys, values, scale=scale, last_seen=[p + last for last in last_seen]
    )

    rows = group_rows(queries, n_kv_heads)
    k, v = heads_first(keys), heads_first(values)
    beside = attend(rows, k[:, :p], v[:, :p], scale=scale) if p else None
    visible = torch.arange(n) <= torch.tensor(last_seen)[:, None] if causal else None
    joint = attend(rows, k[:, p:], v[:, p:], scale=scale, visible=visible, beside=beside)

    torch.testing.assert_close(by_query(joint.output, m), expected)
    torch.testing.assert_close(by_query(joint.weights, m), weights[..., p:])
    for i, last in enumerate(last_seen):
        assert (by_query(joint.weights, m)[i, :, last + 1 :] == 0).all()
    if p:
        apart = attend(rows, k[:, p:], v[:, p:], scale=scale, visible=visible)
        joined = join(Partial(apart.output, apart.lse), Partial(beside.output, beside.lse))  # type: ignore[union-attr]
        torch.testing.assert_close(joined.output, joint.output)
        torch.testing.assert_close(joined.lse, joint.lse)


def test_lse_is_the_natural_log_of_the_sum() -> None:
    queries, keys = torch.tensor([[[2.0, 0.0]]]), torch.tensor([[[1.0, 5.0], [3.0, 5.0], [0.0, 1.0]]])
    result = attend(queries, keys, torch.ones(1, 3, 1), scale=0.5)
    assert result.lse.item() == pytest.approx(torch.tensor([1.0, 3.0, 0.0]).exp().sum().log().item())


def test_masks_differ_between_heads() -> None:
    queries, keys, values = random(2, 3, 4, seed=0), random(2, 5, 4, seed=1), random(2, 5, 2, seed=2)
    visible = torch.rand(2, 3, 5, generator=torch.Generator().manual_seed(3)) < 0.5
    visible[:, :, 0] = True
    both = attend(queries, keys, values, scale=1.0, visible=visible)
    for head in range(2):
        for i in range(3):
            seen = visible[head, i]
            weights = (keys[head, seen] @ queries[head, i]).softmax(0)
            torch.testing.assert_close(both.weights[head, i, seen], weights)
            torch.testing.assert_close(both.output[head, i], weights @ values[head, seen])


@pytest.mark.parametrize("ancestor_logit", [-500.0, 0.0, 500.0])
def test_a_query_that_sees_no_key_of_the_span(ancestor_logit: float) -> None:
    queries, keys, values = torch.ones(1, 2, 1), torch.ones(1, 3, 1), torch.ones(1, 3, 2)
    visible = torch.tensor([[False, False, False], [True, True, True]])
    alone = attend(queries, keys, values, scale=1.0, visible=visible)
    assert alone.output[0, 0].tolist() == [0.0, 0.0]
    assert alone.output[0, 1].tolist() == pytest.approx([1.0, 1.0])
    assert alone.weights[0, 0].tolist() == [0.0, 0.0, 0.0]
    assert alone.lse[0, 0].item() == -torch.inf

    ancestor = Partial(output=torch.full((1, 2, 2), 7.0), lse=torch.full((1, 2), ancestor_logit))
    joint = attend(queries, keys, values, scale=1.0, visible=visible, beside=ancestor)
    assert joint.output[0, 0].tolist() == [7.0, 7.0]
    assert joint.weights[0, 0].tolist() == [0.0, 0.0, 0.0]
    assert joint.lse[0, 0].item() == ancestor_logit
    assert joint.output.isfinite().all()
    assert join(alone, ancestor).output[0, 0].tolist() == [7.0, 7.0]
    assert join(alone, alone).output[0, 0].tolist() == [0.0, 0.0]


def test_large_logits_do_not_overflow() -> None:
    queries, keys = torch.tensor([[[1000.0]]]), torch.tensor([[[1.0], [0.999], [-1.0]]])
    result = attend(queries, keys, torch.tensor([[[1.0], [2.0], [3.0]]]), scale=1.0)
    share = 1 / (1 + torch.tensor(-1.0).exp().item())
    assert result.weights[0, 0].tolist() == pytest.approx([share, 1 - share, 0.0], rel=1e-3)


def test_float32_is_close_to_float64() -> None:
    rows, keys, values = random(2, 6, 16, seed=5), random(2, 50, 16, seed=6), random(2, 50, 8, seed=7)
    exact = attend(rows, keys, values, scale=0.25)
    single = attend(rows.float(), keys.float(), values.float(), scale=0.25)
    torch.testing.assert_close(single.output.double(), exact.output, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(single.lse.double(), exact.lse, rtol=1e-6, atol=1e-6)


def test_rows_are_query_major() -> None:
    queries = torch.arange(2 * 6).view(2, 6, 1)
    # KV head 0 has query heads 0..2; query 0 first, all of its heads together.
    assert group_rows(queries, 2)[0, :, 0].tolist() == [0, 1, 2, 6, 7, 8]
    assert group_rows(queries, 2)[1, :, 0].tolist() == [3, 4, 5, 9, 10, 11]
    with pytest.raises(ValueError, match="multiple of 4 query heads, got 6"):
        group_rows(queries, 4)
