"""What launchers refuse, and that CPU tensors go to the torch references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from grkv_kernels import (
    LayerBuffers,
    gather_tokens,
    key_jvp,
    key_vjp,
    merge_splits,
    merge_states,
    ragged_attention,
    ridged_gram,
    scatter_tokens,
    transposed_product,
    window_attention,
    window_scores,
)
from grkv_kernels.configs import TILES, tile
from grkv_kernels.dispatch import INTERPRETED, has_kernels, runs_reference
from grkv_kernels.key_step import key_jvp_reference
from grkv_kernels.ragged_attention import ragged_attention_reference


def test_cpu_tensors_go_to_the_reference():
    assert not INTERPRETED
    assert runs_reference(torch.device("cpu"))
    assert not runs_reference(torch.device("cuda"))
    queries, pool, cells = torch.randn(2, 4, 64), torch.randn(6, 64), torch.tensor([3, 1, 2])
    problem = queries, pool, pool, cells, torch.tensor([0, 1, 1, 3, 3])
    expected = ragged_attention_reference(*problem, n_kv_heads=2, scale=0.1)
    for actual, reference in zip(ragged_attention(*problem, n_kv_heads=2, scale=0.1), expected, strict=True):
        assert torch.equal(actual, reference)
    q, a, v = torch.randn(1, 3, 64), torch.rand(1, 3, 5), torch.randn(1, 5, 64)
    assert torch.equal(key_jvp(q, a, v, q, v, scale=0.1), key_jvp_reference(q, a, v, q, v, scale=0.1))


@pytest.mark.parametrize(
    ("device", "capability", "head_dims", "expected"),
    [
        ("cpu", (8, 0), (), False),
        ("cuda", (8, 0), (), True),
        ("cuda", (12, 0), (64, 128), True),
        ("cuda", (9, 0), (64, 129), False),
        ("cuda", (7, 5), (64,), False),
        ("xpu", (8, 0), (64,), False),
    ],
)
def test_where_there_are_kernels(monkeypatch, device, capability, head_dims, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert has_kernels(torch.device(device), *head_dims) == expected


def test_no_kernels_on_another_makers_card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not has_kernels(torch.device("cuda"))


def test_references_take_bfloat16():
    """Which the interpreter cannot be trusted with."""
    x = torch.randn(2, 3, 64).bfloat16()
    torch.testing.assert_close(ridged_gram(x, ridge=0.0), x.float() @ x.float().transpose(1, 2))
    scores, _ = window_scores(
        x[:, 2:].contiguous(), x, torch.tensor([2]), scale=0.1, n_window=0, pool_kernel=1
    )
    weights = torch.softmax(x[:, 2:].float() @ x.float().transpose(1, 2) * 0.1, dim=-1)
    torch.testing.assert_close(scores, weights.squeeze(1))
    buffers = [torch.zeros(4, 2, 64, dtype=torch.bfloat16)]
    rows = torch.randn(1, 2, 3, 64)
    scatter_tokens(LayerBuffers.of(buffers), torch.tensor([3, 0, 2]), rows)
    assert torch.equal(buffers[0][0], rows[0, :, 1].bfloat16())


def _ragged(**changes: Any) -> Any:
    given: dict[str, Any] = {
        "queries": torch.zeros(2, 4, 64),
        "key_cells": torch.zeros(6, 64),
        "value_cells": torch.zeros(6, 64),
        "cells": torch.zeros(0, dtype=torch.int64),
        "cells_indptr": torch.zeros(5, dtype=torch.int64),
        "n_kv_heads": 2,
        "scale": 1.0,
    }
    return ragged_attention(**(given | changes))


_X, _LSE, _SPLIT = torch.zeros(2, 3, 64), torch.zeros(2, 3), torch.zeros(1, 2, 3)
_LONG = torch.zeros(2, dtype=torch.int64)
_POOL = LayerBuffers.of([_X, _X.clone()])

REFUSED = [
    (
        lambda: _ragged(queries=torch.zeros(2, 4, 64).double()),
        r"expected queries \[T, Hq, d\] torch.float32 or torch.float16 or torch.bfloat16 on cpu, "
        r"got \[2, 4, 64\] torch.float64 on cpu",
    ),
    (lambda: _ragged(queries=torch.zeros(2, 4, 160)), "head size of 1 to 128, got 160"),
    (lambda: _ragged(n_kv_heads=3), "multiple of 3 query heads, got 4"),
    (lambda: _ragged(key_cells=torch.zeros(6, 32)), r"key_cells \[slots \* Hkv, 64\] .* got \[6, 32\]"),
    (lambda: _ragged(value_cells=torch.zeros(5, 64)), r"expected value_cells \[6, dv\] .* got \[5, 64\]"),
    (lambda: _ragged(value_cells=torch.zeros(64, 6).t()), r"contiguous, got strides \(1, 6\)"),
    (lambda: _ragged(cells_indptr=_LONG), r"expected cells_indptr \[5\] .* got \[2\]"),
    (lambda: _ragged(cells=torch.zeros(3)), r"expected cells .* got \[3\] torch.float32"),
    (lambda: _ragged(max_queries=2), "max_queries 1 without q_indptr, got 2"),
    (lambda: _ragged(num_splits=0), "at least one split, got 0"),
    (lambda: merge_states(_X, _LSE, _X.half(), _LSE), r"output_b .* torch.float32 .* got .* torch.float16"),
    (lambda: merge_states(_X, _LSE, _X, _LSE[:1]), r"expected lse_b \[2, 3\]"),
    (lambda: merge_splits(_X[None], _SPLIT, torch.float64), "expected a dtype out of .* got torch.float64"),
    (lambda: merge_splits(_X[None][:0], _SPLIT[:0], torch.float32), "one split or more, got none"),
    (
        lambda: window_scores(_X, _X, _LONG, scale=1.0, n_window=0, pool_kernel=1),
        "multiple of 2 positions, got 3",
    ),
    (
        lambda: window_scores(_X, _X, _LONG[:1], scale=1.0, n_window=0, pool_kernel=4),
        "odd pool_kernel of at least 1, got 4",
    ),
    (
        lambda: window_scores(_X, _X, _LONG[:1], scale=1.0, n_window=4, pool_kernel=1),
        "n_window between 0 and 3 tokens, got 4",
    ),
    (
        lambda: window_scores(_X, torch.zeros(2, 64, 3).mT, _LONG[:1], scale=1.0, n_window=0, pool_kernel=1),
        "expected keys contiguous in its last dimension",
    ),
    (
        lambda: window_attention(_X, _X, _X[:, :2], _LONG[:1], scale=1.0),
        r"expected values \[2, 3, dv\] .* got \[2, 2, 64\]",
    ),
    (
        lambda: window_attention(_X, _X, torch.zeros(2, 64, 3).mT, _LONG[:1], scale=1.0),
        "expected values contiguous in its last dimension",
    ),
    (lambda: LayerBuffers.of([]), "expected the buffers of one layer or more, got none"),
    (lambda: LayerBuffers.of([_X, _X[:1]]), r"expected buffers\[1\] \[2, 3, 64\] .* got \[1, 3, 64\]"),
    (lambda: gather_tokens(_POOL, _LONG, _LONG), r"expected kept \[2, 3, c\]"),
    (lambda: gather_tokens(_POOL, _LONG[:0], _LONG.repeat(2, 3, 1)), "slots for 2 kept tokens, got none"),
    (lambda: scatter_tokens(_POOL, _LONG, _X), r"expected rows \[2, 3, 2, 64\]"),
    (lambda: ridged_gram(_LSE, ridge=0.0), r"expected weights \[H, N, f\]"),
    (lambda: ridged_gram(torch.zeros(2, 64, 3).mT, ridge=0.0), "weights contiguous in its last dimension"),
    (lambda: transposed_product(_X, _X[:, :2]), r"expected u \[2, 3, dv\]"),
    (lambda: key_jvp(_X, _X, _X, _X, _X, scale=1.0), r"expected values \[2, 64, dv\]"),
    (lambda: key_jvp(_X, torch.zeros(2, 5, 3).mT, _X, _X, _X, scale=1.0), "weights contiguous in its last"),
    (lambda: key_vjp(_X, _X[..., :3].contiguous(), _X, _X, _LSE, scale=1.0), r"expected u \[2, 3, 64\]"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((8, 0), (8, 0)), ((8, 9), (8, 0)), ((9, 0), (9, 0)), ((10, 3), (10, 0)), ((12, 1), (12, 0))],
)
def test_devices_between_architectures_take_the_older_ones_tiles(monkeypatch, capability, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert tile("gram", torch.device("cuda")) is TILES[expected]["gram"]


def test_older_devices_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ValueError, match=r"capability 8.0 or newer, got 7.5"):
        tile("gram", torch.device("cuda"))
