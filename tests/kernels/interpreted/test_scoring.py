"""Window scores against a loop over query rows in float64, and against their torch reference."""

from __future__ import annotations

import pytest
import torch
from grkv_kernels import scoring
from grkv_kernels.scoring import (
    mean_weights_reference,
    window_attention,
    window_attention_reference,
    window_scores,
)

CASES = [
    # dtype of queries and keys, KV heads, group, queries, tokens, d, window, pool, with ancestors,
    # tokens of a part
    (torch.float32, torch.float32, 3, 4, 5, 203, 128, 5, 5, True, 2048),
    (torch.float32, torch.float16, 1, 3, 9, 77, 80, 0, 7, False, 64),
    (torch.float16, torch.float16, 2, 8, 3, 131, 64, 131, 3, True, 64),
    (torch.float16, torch.float16, 1, 1, 1, 1, 64, 0, 1, False, 2048),
]


def _scores_in_float64(queries, keys, positions, scale, n_window, pool_kernel, beside_lse):
    n_kv_heads, n_rows, _ = queries.shape
    n_tokens, group = keys.shape[1], n_rows // len(positions)
    means = torch.zeros(n_kv_heads, n_tokens, dtype=torch.float64)
    lse = torch.full((n_kv_heads, n_rows), -torch.inf, dtype=torch.float64)
    for head in range(n_kv_heads):
        for row in range(n_rows):
            seen = int(positions[row // group]) + 1
            exponentials = (keys[head, :seen].double() @ queries[head, row].double() * scale).exp()
            total = exponentials.sum()
            if beside_lse is not None:
                total += beside_lse[head, row].double().exp()
            if total > 0:
                lse[head, row] = total.log()
                means[head, :seen] += exponentials / total / n_rows
    scores = means.clone()
    reach, n_before = pool_kernel // 2, n_tokens - n_window
    for token in range(n_before):
        covered = means[:, max(0, token - reach) : min(n_before, token + reach + 1)]
        scores[:, token] = covered.sum(dim=1) / pool_kernel
    return scores, lse


@pytest.mark.parametrize("case", CASES)
def test_scores(case, monkeypatch):
    query_dtype, key_dtype, n_kv_heads, group, m, n, d, n_window, pool_kernel, ancestors, part = case
    monkeypatch.setattr(scoring, "_PART_TOKENS", part)
    generator = torch.Generator().manual_seed(n)
    queries = torch.randn(n_kv_heads, m * group, d, generator=generator).to(query_dtype)
    # A view of the pool's layout.
    keys = torch.randn(n, n_kv_heads, d, generator=generator).to(key_dtype).transpose(0, 1)
    positions = torch.arange(n - m, n)
    beside = None
    if m > 2:
        # One query that sees no token, and one that sees a few; the former's ancestors are none at all.
        positions[0], positions[1] = -1, 3
    if ancestors:
        beside = 3 + torch.randn(n_kv_heads, m * group, generator=generator)
        beside[:, :group] = -torch.inf
    scores, lse = window_scores(
        queries, keys, positions, scale=d**-0.5, n_window=n_window, pool_kernel=pool_kernel, beside_lse=beside
    )
    assert scores.isfinite().all()
    expected, expected_lse = _scores_in_float64(
        queries, keys, positions, d**-0.5, n_window, pool_kernel, beside
    )
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=2e-6)
    means, reference_lse = mean_weights_reference(queries, keys, positions, scale=d**-0.5, beside_lse=beside)
    reference = scoring._pooled_before(means, n - n_window, pool_kernel)
    torch.testing.assert_close(scores, reference, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(lse, reference_lse, rtol=1e-5, atol=2e-6)


OUTPUT_CASES = [
    # dtype of queries, of keys and values, KV heads, group, queries, tokens, d, dv, tokens of a part, parts
    (torch.float32, torch.float32, 2, 3, 5, 203, 128, 80, 64, 32),
    (torch.float32, torch.float16, 1, 4, 20, 333, 24, 64, 64, 2),
    (torch.float16, torch.float16, 3, 1, 1, 1, 64, 64, 2048, 32),
]


@pytest.mark.parametrize("case", OUTPUT_CASES)
def test_attention(case, monkeypatch):
    query_dtype, dtype, n_kv_heads, group, m, n, d, dv, part, most = case
    monkeypatch.setattr(scoring, "_PART_TOKENS", part)
    monkeypatch.setattr(scoring, "_MOST_OUTPUTS", most)
    generator = torch.Generator().manual_seed(n)
    queries = torch.randn(n_kv_heads, m * group, d, generator=generator).to(query_dtype)
    keys, values = (
        torch.randn(n, n_kv_heads, width, generator=generator).to(dtype).transpose(0, 1) for width in (d, dv)
    )
    positions = torch.arange(n - m, n)
    if m > 2:
        positions[0], positions[1] = -1, 3
    means, output = window_attention(queries, keys, values, positions, scale=d**-0.5)
    expected = torch.zeros(n_kv_heads, m * group, dv, dtype=torch.float64)
    for head in range(n_kv_heads):
        for row in range(m * group):
            seen = int(positions[row // group]) + 1
            weights = torch.softmax(keys[head, :seen].double() @ queries[head, row].double() * d**-0.5, 0)
            expected[head, row] = weights @ values[head, :seen].double()
    assert output.dtype == torch.float32
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-6)
    expected_means, _ = _scores_in_float64(queries, keys, positions, d**-0.5, n, 1, None)
    torch.testing.assert_close(means.double(), expected_means, rtol=1e-5, atol=1e-8)
    reference = window_attention_reference(queries, keys, values, positions, scale=d**-0.5)
    for actual, expected_one in zip((means, output), reference, strict=True):
        torch.testing.assert_close(actual, expected_one, rtol=1e-5, atol=1e-6)


def test_attention_to_no_tokens():
    means, output = window_attention(
        torch.randn(2, 3, 64), torch.randn(2, 0, 64), torch.randn(2, 0, 80), torch.tensor([-1]), scale=1.0
    )
    assert means.shape == (2, 0)
    assert torch.equal(output, torch.zeros(2, 3, 80))


def test_no_tokens():
    beside = torch.randn(2, 3)
    scores, lse = window_scores(
        torch.randn(2, 3, 64), torch.randn(2, 0, 64), torch.tensor([-1]),
        scale=1.0, n_window=0, pool_kernel=5, beside_lse=beside,
    )  # fmt: skip
    assert scores.shape == (2, 0)
    assert torch.equal(lse, beside)
