"""Every kernel compiled ahead of time for every architecture, at the shapes of Llama-3.1-8B: no spills.

The launchers themselves are called, with tensors that have shapes but no memory, and each launch compiles in
place of running: so the arguments, their alignment and the tiles are those of a real launch. A launcher that
waited for the device would fail here: there is none.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from grkv_kernels import (
    LayerBuffers,
    gather_tokens,
    key_jvp,
    key_vjp,
    merge_states,
    ragged_attention,
    ridged_gram,
    scatter_tokens,
    transposed_product,
    window_attention,
    window_scores,
)
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

_BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

# What a program may have (CUDA programming guide), on the smallest card that takes the tiles: see `configs`.
SHARED_LIMIT_BYTES = {(8, 0): 99 * 1024, (9, 0): 227 * 1024, (10, 0): 227 * 1024}

_LAYERS, _HEADS, _KV_HEADS, _D = 32, 32, 8, 128


class _Device:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._number = 10 * capability[0] + capability[1]

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._number, 32)

    def get_current_device(self) -> int:
        # Triton keeps compiled kernels by device.
        return self._number

    def get_current_stream(self, device: int) -> int:
        return 0


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _indices(*shape: int) -> Tensor:
    return _empty(*shape, dtype=torch.int64)


def _launch_attention() -> None:
    pool = _empty(4096 * _KV_HEADS, _D)
    cases: list[tuple[int, dict[str, Any]]] = [(16, {}), (2, {"q_indptr": _indices(3), "max_queries": 9})]
    for n_requests, extends in cases:
        ragged_attention(
            _empty(16, _HEADS, _D), pool, pool, _indices(5000), _indices(n_requests * _KV_HEADS + 1),
            n_kv_heads=_KV_HEADS, scale=_D**-0.5, **extends,
        )  # fmt: skip
    output, lse = _empty(16, _HEADS, _D), _empty(16, _HEADS, dtype=torch.float32)
    merge_states(output, lse, output, lse)


def _launch_scoring() -> None:
    keys = _empty(32000, _KV_HEADS, _D).transpose(0, 1)
    # Queries as the probe leaves them, and moved to another position.
    for dtype in (torch.bfloat16, torch.float32):
        queries = _empty(_KV_HEADS, 32 * _HEADS // _KV_HEADS, _D, dtype=dtype)
        window_scores(queries, keys, _indices(32), scale=_D**-0.5, n_window=32, pool_kernel=5)
        window_attention(queries, keys, keys, _indices(32), scale=_D**-0.5)


def _launch_compaction() -> None:
    pool = LayerBuffers.of([_empty(4096, _KV_HEADS, _D) for _ in range(_LAYERS)])
    gather_tokens(pool, _indices(3000), _indices(_LAYERS, _KV_HEADS, 300))
    scatter_tokens(pool, _indices(300), _empty(_LAYERS, _KV_HEADS, 300, _D, dtype=torch.float32))


def _launch_regression() -> None:
    """In float32, like the regression; 44 queries."""

    def empty(n: int, width: int) -> Tensor:
        return _empty(_KV_HEADS, n, width, dtype=torch.float32)

    n_rows, n_free = 44 * _HEADS // _KV_HEADS, 3000
    rows, tokens = empty(n_rows, _D), empty(n_free, _D)
    # Behind the tokens that may change come those that may not: rows at any address, and at aligned ones.
    for n_kept in (3332, 3328):
        weights = empty(n_rows, n_kept)[:, :, :n_free]
        key_jvp(rows, weights, tokens, rows, tokens, scale=_D**-0.5)
        key_vjp(rows, weights, tokens, rows, rows, scale=_D**-0.5)
        ridged_gram(weights, ridge=0.1)
        transposed_product(weights, rows)


KERNELS = {
    _launch_attention: {"_partial_kernel", "_merge_splits_kernel", "_merge_states_kernel"},
    _launch_scoring: {"_row_lse_kernel", "_column_mean_kernel", "_merge_splits_kernel"},
    _launch_compaction: {"_gather_kernel", "_scatter_kernel"},
    _launch_regression: {"_jvp_kernel", "_vjp_kernel", "_gram_kernel", "_transposed_product_kernel"},
}


@pytest.mark.parametrize("launch", KERNELS, ids=lambda launch: launch.__name__.removeprefix("_launch_"))
@pytest.mark.parametrize("capability", SHARED_LIMIT_BYTES, ids="sm_{0[0]}{0[1]}".format)
def test_compiles_without_spills(
    launch: Callable[[], None], capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiled: list[tuple[str, Any]] = []

    def launcher(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def compile_only(*args: Any, **kwargs: Any) -> None:
            compiled.append((kernel.__name__, kernel.run(*args, grid=grid, warmup=True, **kwargs)))

        return compile_only

    monkeypatch.setattr(JITFunction, "__getitem__", launcher)
    monkeypatch.setattr(triton.runtime.driver, "_active", _Device(capability))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    launch()

    assert {name for name, _ in compiled} == KERNELS[launch]
    for name, kernel in compiled:
        usage = _assemble(kernel.asm["ptx"], capability, tmp_path / "kernel.ptx")
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in usage, f"{name}: {usage}"
        registers = re.search(r"Used (\d+) registers", usage)
        assert registers is not None, f"{name}: {usage}"
        assert int(registers[1]) <= 255, f"{name}: {usage}"
        # The assembler does not know what is reserved at launch.
        assert kernel.metadata.shared <= SHARED_LIMIT_BYTES[capability], name


def _assemble(ptx: str, capability: tuple[int, int], path: Path) -> str:
    """What Triton's own assembler says about a kernel's registers."""
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert target is not None
    path.write_text(ptx)
    assembler = _BIN / ("ptxas-blackwell" if capability >= (10, 0) else "ptxas")
    output = path.with_suffix(".cubin")
    command = [str(assembler), "-v", f"-arch={target[1]}", str(path), "-o", str(output)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr
