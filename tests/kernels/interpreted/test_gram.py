"""The products of a value step against float64, and against their torch reference."""

from __future__ import annotations

import pytest
import torch
from grkv_kernels.gram import (
    ridged_gram,
    ridged_gram_reference,
    transposed_product,
    transposed_product_reference,
)

CASES = [
    # dtype, KV heads, rows, columns, dv, columns behind them
    (torch.float32, 3, 75, 33, 128, 0),
    (torch.float32, 1, 130, 70, 80, 0),
    (torch.float16, 2, 5, 67, 64, 0),
    (torch.float32, 2, 41, 50, 64, 9),
    (torch.float16, 3, 70, 16, 64, 16),
]


@pytest.mark.parametrize("case", CASES)
def test_products(case):
    dtype, n_heads, n_rows, n_columns, dv, n_other = case
    generator = torch.Generator().manual_seed(n_rows)
    logits = 2 * torch.randn(n_heads, n_rows, n_columns + n_other, generator=generator)
    weights = torch.softmax(logits, dim=-1).to(dtype)[:, :, :n_columns]
    u = torch.randn(n_heads, n_rows, dv, generator=generator)
    exact = weights.double()

    gram = ridged_gram(weights, ridge=0.3)
    assert torch.equal(gram, gram.transpose(1, 2))
    expected = exact @ exact.transpose(1, 2) + 0.3 * torch.eye(n_rows, dtype=torch.float64)
    torch.testing.assert_close(gram.double(), expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(gram, ridged_gram_reference(weights, ridge=0.3), rtol=1e-5, atol=1e-7)

    product = transposed_product(weights, u)
    torch.testing.assert_close(product.double(), exact.transpose(1, 2) @ u.double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(product, transposed_product_reference(weights, u), rtol=1e-5, atol=1e-6)


def test_empty():
    assert torch.equal(ridged_gram(torch.zeros(2, 3, 0), ridge=0.5), 0.5 * torch.eye(3).expand(2, -1, -1))
    assert ridged_gram(torch.zeros(2, 0, 5), ridge=0.5).shape == (2, 0, 0)
    assert torch.equal(transposed_product(torch.zeros(2, 0, 5), torch.zeros(2, 0, 64)), torch.zeros(2, 5, 64))
    assert transposed_product(torch.zeros(2, 3, 0), torch.zeros(2, 3, 64)).shape == (2, 0, 64)
