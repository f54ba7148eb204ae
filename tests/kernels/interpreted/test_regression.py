"""Whole layers compressed through the kernels, against the same layers compressed in torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from grkv_sglang.core import KEY_AND_VALUE, VALUE_ONLY, attend_probe, kernels
from tests.core.test_compress import SMALL, layer

KERNELS = ("key_jvp", "key_vjp", "ridged_gram", "transposed_product")  # of the regression


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that the core has called."""
    names: list[str] = []

    def noted(name, launcher):
        def call(*args, **kwargs):
            names.append(name)
            return launcher(*args, **kwargs)

        return call

    for name in (*KERNELS, "window_attention"):
        monkeypatch.setattr(kernels, name, noted(name, getattr(kernels, name)))
    return names


@pytest.mark.parametrize(
    ("name", "n_kv_heads", "group", "d", "dv", "p", "changes"),
    [
        ("default", 2, 3, 16, 16, 0, {}),
        ("paper", 1, 4, 24, 8, 7, {"cg_iterations": 3}),
        ("release", 3, 1, 8, 16, 0, {"steps": 2, "cg_iterations": 3}),
        ("per_head", 2, 3, 8, 6, 5, {"cg_iterations": 3}),
        ("release", 2, 2, 8, 8, 0, {"value_step": False}),
    ],
)
def test_a_layer(monkeypatch, launched, name, n_kv_heads, group, d, dv, p, changes):
    profile = replace(SMALL[name], **changes)
    made = layer(profile, 47, n_kv_heads=n_kv_heads, group=group, d=d, dv=dv, p=p, seed=5)
    result = made.compress(21)
    assert set(launched) == (set(KERNELS) if profile.value_step else {"key_jvp", "key_vjp"})
    assert (result.states == KEY_AND_VALUE).all()

    launched.clear()
    monkeypatch.setattr(kernels, "has_kernels", lambda *of: False)
    expected = made.compress(21)
    assert launched == []
    assert torch.equal(result.kept, expected.kept)
    assert torch.equal(result.states, expected.states)
    torch.testing.assert_close(result.keys, expected.keys, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(result.values, expected.values, rtol=1e-3, atol=1e-4)
    assert result.error_before == pytest.approx(expected.error_before, rel=1e-6)
    assert result.error_after == pytest.approx(expected.error_after, rel=1e-3)


def test_heads_that_are_too_large_for_the_kernels(launched):
    made = layer(replace(SMALL["release"], cg_iterations=2), 41, d=8, dv=144, seed=6)
    result = made.compress(19)
    assert (result.states >= VALUE_ONLY).all()
    assert set(launched) == {"ridged_gram"}


@pytest.mark.parametrize(("p", "dv"), [(0, 8), (9, 16)])
def test_attention_of_a_probe(monkeypatch, launched, p, dv):
    made = layer(SMALL["default"], 53, d=8, dv=dv, p=p, seed=7)
    inputs, chosen = made.inputs, made.plan.score_window
    keys, values = inputs.keys, inputs.values
    if inputs.ancestor_keys is not None and inputs.ancestor_values is not None:
        keys, values = torch.cat((inputs.ancestor_keys, keys)), torch.cat((inputs.ancestor_values, values))

    def attended():
        return attend_probe(
            inputs.queries[chosen], inputs.queries[made.plan.held_out], keys, values,
            positions=made.plan.positions[chosen], visible=torch.arange(53)[None] <= 11, n_tokens=53,
            scale=inputs.scale,
        )  # fmt: skip

    found, of_others = attended()
    assert launched == ["window_attention"]
    monkeypatch.setattr(kernels, "has_kernels", lambda *of: False)
    expected, expected_of_others = attended()
    assert len(launched) == 1
    torch.testing.assert_close(of_others, expected_of_others, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found.output, expected.output, rtol=1e-5, atol=1e-6)
