"""The products with the Jacobian against automatic differentiation of attention itself in float64, and
against their torch reference."""

from __future__ import annotations

import pytest
import torch
from grkv_kernels import key_step
from grkv_kernels.key_step import key_jvp, key_jvp_reference, key_vjp, key_vjp_reference
from torch import Tensor

CASES = [
    # dtype of queries, values and so on, KV heads, rows, free tokens, other tokens, d, dv, tokens of a part
    (torch.float32, 2, 37, 75, 3, 128, 128, 32),
    (torch.float32, 1, 3, 33, 0, 64, 80, 512),
    (torch.float16, 1, 40, 35, 9, 80, 64, 512),
]


def _assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("case", CASES)
def test_products(case, monkeypatch):
    dtype, n_heads, n_rows, n_free, n_other, d, dv, part = case
    monkeypatch.setattr(key_step, "_PART_TOKENS", part)
    generator = torch.Generator().manual_seed(n_rows)

    def random(*shape: int) -> Tensor:
        # Numbers that float16 holds, so that only the arithmetic differs.
        return torch.randn(shape, generator=generator).half().to(dtype)

    scale = d**-0.5
    queries, keys = random(n_heads, n_rows, d), random(n_heads, n_free + n_other, d).double()
    values = random(n_heads, n_free + n_other, dv)
    delta, u = random(n_heads, n_free, d), random(n_heads, n_rows, dv)

    def attention(free_keys: Tensor) -> Tensor:
        logits = queries.double() @ torch.cat((free_keys, keys[:, n_free:]), 1).transpose(1, 2) * scale
        return torch.softmax(logits, dim=-1) @ values.double()

    free_keys = keys[:, :n_free]
    output, pushed = torch.autograd.functional.jvp(attention, free_keys, delta.double())
    _, pulled = torch.autograd.functional.vjp(attention, free_keys, u.double())
    logits = queries.double() @ keys.transpose(1, 2) * scale
    # In float32: what both products take for given must not be rounded to 16 bits first.
    weights = torch.softmax(logits, dim=-1).float()[:, :, :n_free]  # a view where there are other tokens
    assert weights.is_contiguous() == (n_other == 0)
    given = queries, weights, values[:, :n_free].contiguous(), output.float()

    forward = key_jvp(*given, delta, scale=scale)
    _assert_close(forward, pushed)
    _assert_close(forward, key_jvp_reference(*given, delta, scale=scale))
    backward = key_vjp(*given, u, scale=scale)
    _assert_close(backward, pulled)
    _assert_close(backward, key_vjp_reference(*given, u, scale=scale))


def test_empty():
    for n_rows, n_free in ((3, 0), (0, 5)):
        queries, output = torch.zeros(2, n_rows, 64), torch.zeros(2, n_rows, 80)
        given = queries, torch.zeros(2, n_rows, n_free), torch.zeros(2, n_free, 80), output
        assert torch.equal(key_jvp(*given, torch.zeros(2, n_free, 64), scale=1.0), output)
        assert torch.equal(key_vjp(*given, output, scale=1.0), torch.zeros(2, n_free, 64))
