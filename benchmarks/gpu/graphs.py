"""`ragged_attention` captured in a CUDA graph, replayed with other cells, lengths and queries."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from grkv_kernels import ragged_attention
from torch import Tensor

from benchmarks.gpu.compare import Case, rows_of
from benchmarks.gpu.correctness import (
    ATTENTION_ARITHMETIC,
    EXACT,
    FLOAT64,
    LSE,
    dtype_name,
    last_digit,
)
from benchmarks.gpu.ragged import Problem, exact_attention, make_problem
from benchmarks.gpu.rows import Row, Skipped
from benchmarks.gpu.setup import Setup

PART = "graphs/attention"
_REPLAYS = 4


def attention(setup: Setup) -> Iterator[Row]:
    """One graph for each dtype of the pool; each replay reads what the metadata say by then."""
    if not setup.on_gpu:
        yield Skipped(PART, "capture and replay", "a CUDA device")
        return
    for dtype in setup.sizes.pool_dtypes:
        for counts in (None, (1, 40, 5)):
            yield from _replays(setup, dtype, counts)


def _replays(setup: Setup, dtype: torch.dtype, counts: tuple[int, ...] | None) -> Iterator[Row]:
    """Shorter and shorter prefixes, then the longest again: what is left of a longer one would show."""
    longest = setup.sizes.spans[0]
    static = make_problem(setup, longest, dtype, counts)
    graph, outputs = _capture(setup, static, counts)
    what = "one query each" if counts is None else f"{', '.join(map(str, counts))} queries"
    for replay in range(_REPLAYS):
        n_tokens = longest if replay == _REPLAYS - 1 else longest // 2**replay - 7 * replay
        now = make_problem(setup, n_tokens, dtype, counts, salt=replay + 1)
        _copy_into(static, now)

        def replayed() -> list[Tensor]:
            # Whatever the graph does not write would show.
            for output in outputs:
                output.fill_(torch.nan)
            graph.replay()
            return [output.clone() for output in outputs]

        case = f"{dtype_name(dtype)} pool, {what}, replay {replay + 1} with {n_tokens} tokens"
        # Cut into the same parts as when it was captured, so every digit has to be the same.
        eager = {"eager": lambda: _attend(setup, static, counts)}
        exact = {FLOAT64: lambda: exact_attention(setup, static)}
        close = {"output": last_digit(dtype) + ATTENTION_ARITHMETIC, "lse": LSE}
        name = "ragged_attention replayed"
        yield from rows_of(setup, PART, Case(name, case, {"output": EXACT, "lse": EXACT}, replayed, eager))
        yield from rows_of(setup, PART, Case(name, case, close, replayed, exact))


def _attend(setup: Setup, problem: Problem, counts: tuple[int, ...] | None) -> tuple[Tensor, Tensor]:
    return ragged_attention(
        problem.queries, problem.keys, problem.values, problem.cells, problem.indptr,
        n_kv_heads=setup.sizes.kv_heads, scale=setup.sizes.scale,
        q_indptr=problem.q_indptr, max_queries=max(counts or (1,)),
    )  # fmt: skip


def _capture(
    setup: Setup, static: Problem, counts: tuple[int, ...] | None
) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor]]:
    # Compiles, which a capture cannot.
    _attend(setup, static, counts)
    setup.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = _attend(setup, static, counts)
    return graph, outputs


def _copy_into(static: Problem, now: Problem) -> None:
    """Other numbers at the same addresses; the buffers are as long as the longest problem."""
    static.queries.copy_(now.queries)
    static.indptr.copy_(now.indptr)
    for buffer, new in ((static.keys, now.keys), (static.values, now.values), (static.cells, now.cells)):
        buffer[: len(new)].copy_(new)
