"""Every kernel against its torch reference and against an independent computation in float64.

Errors are relative (`compare.worst_error`). What is allowed: the last digit of the output's dtype, plus what
the arithmetic may lose. Inputs of 16 bits are multiplied as TF32, exactly; only the softmax weights, which
the kernel computes in float32, lose digits there (10 bits are left, at worst cut off: 2e-3 covers it).
Products of float32 numbers take three TF32 passes and long sums in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
from grkv_kernels.compaction import gather_tokens_reference, scatter_tokens_reference
from grkv_kernels.gram import ridged_gram_reference, transposed_product_reference
from grkv_kernels.key_step import key_jvp_reference, key_vjp_reference
from grkv_kernels.merge import merge_splits_reference, merge_states_reference
from grkv_kernels.ragged_attention import ragged_attention_reference
from grkv_kernels.scoring import mean_weights_reference, window_attention_reference
from torch import Tensor

from benchmarks.gpu.compare import Case, rows_of
from benchmarks.gpu.ragged import exact_attention, make_problem
from benchmarks.gpu.rows import Row
from benchmarks.gpu.setup import Setup
from benchmarks.gpu.synthetic import make_layer, make_regression
from grkv_sglang.core import get_profile, group_rows

REFERENCE, FLOAT64 = "torch reference", "float64"

ATTENTION_ARITHMETIC = 2e-3
SCORES = 1e-3
LSE = 1e-4
GRAM = 3e-4
PRODUCT = 1e-4
JACOBIAN = 1e-3
MERGE_ARITHMETIC = 2e-5
EXACT = 0.0

PROFILE = get_profile("default")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def last_digit(dtype: torch.dtype) -> float:
    """The largest relative difference of two neighbouring numbers."""
    return torch.finfo(dtype).eps


def scoring(setup: Setup) -> Iterator[Row]:
    """`window_scores` with the queries of profile `default`: of 16 bits, and moved ones beside ancestors; and
    `window_attention` as a probe asks for it."""
    for dtype in setup.sizes.pool_dtypes:
        for n_tokens in setup.sizes.spans:
            layer = make_layer(setup, n_tokens, dtype)
            n_queries = min(PROFILE.window_queries or PROFILE.n_window, n_tokens // 2)
            positions = torch.arange(n_tokens - 2 * n_queries, n_tokens, 2, device=setup.device)
            rows = group_rows(layer.queries(positions), setup.sizes.kv_heads)
            beside = 5 + torch.randn(rows.shape[:2], generator=setup.generator(), device=setup.device)
            keys = layer.keys.transpose(0, 1)
            yield from _scoring_of(setup, rows.contiguous(), keys, positions, None)
            yield from _scoring_of(setup, rows.float().contiguous(), keys, positions, beside)
            yield from _window_of(setup, rows.contiguous(), keys, layer.values.transpose(0, 1), positions)


def _scoring_of(
    setup: Setup, queries: Tensor, keys: Tensor, positions: Tensor, beside: Tensor | None
) -> Iterator[Row]:
    scale, pool_kernel = setup.sizes.scale, PROFILE.pool_kernel
    n_before = keys.shape[1] - PROFILE.n_window

    def actual() -> Sequence[Tensor]:
        return window_scores(
            queries, keys, positions,
            scale=scale, n_window=PROFILE.n_window, pool_kernel=pool_kernel, beside_lse=beside,
        )  # fmt: skip

    def reference() -> Sequence[Tensor]:
        means, lse = mean_weights_reference(queries, keys, positions, scale=scale, beside_lse=beside)
        return _pooled(means, n_before, pool_kernel), lse

    def exact() -> Sequence[Tensor]:
        means, lse = _exact_means(queries, keys, positions, scale, beside)
        return _pooled(means, n_before, pool_kernel), lse

    case = (
        f"{dtype_name(keys.dtype)} keys, {dtype_name(queries.dtype)} queries"
        f"{'' if beside is None else ', ancestors'}, {keys.shape[1]} tokens"
    )
    allowed = {"scores": SCORES, "lse": LSE}
    yield from rows_of(
        setup,
        "correctness/scoring",
        Case("window_scores", case, allowed, actual, {REFERENCE: reference, FLOAT64: exact}),
    )


def _window_of(
    setup: Setup, queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor
) -> Iterator[Row]:
    scale = setup.sizes.scale

    def exact() -> Sequence[Tensor]:
        means, lse = _exact_means(queries, keys, positions, scale, None)
        group = queries.shape[1] // len(positions)
        behind = torch.arange(keys.shape[1], device=keys.device) > positions.repeat_interleave(group)[:, None]
        outputs = []
        for head in range(len(queries)):
            logits = queries[head].double() @ keys[head].double().T * scale - lse[head][:, None]
            outputs.append(logits.masked_fill_(behind, -torch.inf).exp_() @ values[head].double())
        return means, torch.stack(outputs)

    yield from rows_of(
        setup,
        "correctness/scoring",
        Case(
            "window_attention",
            f"{dtype_name(keys.dtype)}, {keys.shape[1]} tokens",
            {"means": SCORES, "output": ATTENTION_ARITHMETIC},
            lambda: window_attention(queries, keys, values, positions, scale=scale),
            {
                REFERENCE: lambda: window_attention_reference(queries, keys, values, positions, scale=scale),
                FLOAT64: exact,
            },
        ),
    )


def _pooled(means: Tensor, n_before: int, pool_kernel: int) -> Tensor:
    """The first `n_before` tokens [Hkv, n] averaged with their neighbours, zeros beyond both ends."""
    padded = torch.nn.functional.pad(means[:, :n_before], (pool_kernel // 2, pool_kernel // 2))
    return torch.cat((padded.unfold(1, pool_kernel, 1).mean(dim=-1), means[:, n_before:]), dim=1)


def _exact_means(
    queries: Tensor, keys: Tensor, positions: Tensor, scale: float, beside_lse: Tensor | None
) -> tuple[Tensor, Tensor]:
    """[Hkv, n] mean weights and [Hkv, m * G] log-sum-exps in float64, a head at a time."""
    group = queries.shape[1] // len(positions)
    behind = torch.arange(keys.shape[1], device=keys.device) > positions.repeat_interleave(group)[:, None]
    means, lses = [], []
    for head in range(len(queries)):
        logits = (queries[head].double() @ keys[head].double().T * scale).masked_fill_(behind, -torch.inf)
        top = logits.amax(dim=1)
        lse = (logits - top[:, None]).exp_().sum(dim=1).log() + top
        if beside_lse is not None:
            lse = torch.logaddexp(lse, beside_lse[head].double())
        means.append(logits.sub_(lse[:, None]).exp_().mean(dim=0))
        lses.append(lse)
    return torch.stack(means), torch.stack(lses)


def regression(setup: Setup) -> Iterator[Row]:
    """The products of both steps; those with the Jacobian against differentiated attention."""
    for dtype in setup.sizes.pool_dtypes:
        for n_tokens in setup.sizes.spans:
            yield from _regression_of(setup, dtype, n_tokens)


def _regression_of(setup: Setup, dtype: torch.dtype, n_tokens: int) -> Iterator[Row]:
    problem, scale, ridge = make_regression(setup, n_tokens, dtype), setup.sizes.scale, 0.07
    queries, weights, n_free = problem.queries, problem.weights, problem.n_free
    values = problem.values[:, :n_free].contiguous()
    residual = problem.target - problem.output
    delta = 0.1 * torch.randn(
        (*values.shape[:2], queries.shape[2]), generator=setup.generator(), device=setup.device
    )
    given = queries, weights, values, problem.output

    def attention(free_keys: Tensor) -> Tensor:
        keys = torch.cat((free_keys, problem.keys[:, n_free:].double()), dim=1)
        logits = queries.double() @ keys.transpose(1, 2) * scale
        return torch.softmax(logits, dim=-1) @ problem.values.double()

    def exact_gram() -> list[Tensor]:
        identity = torch.eye(weights.shape[1], dtype=torch.float64, device=setup.device)
        return [weights.double() @ weights.double().transpose(1, 2) + ridge * identity]

    def pushed() -> list[Tensor]:
        free = problem.keys[:, :n_free].double()
        return [torch.autograd.functional.jvp(attention, free, delta.double())[1]]

    def pulled() -> list[Tensor]:
        free = problem.keys[:, :n_free].double()
        return [torch.autograd.functional.vjp(attention, free, residual.double())[1]]

    size = f"{dtype_name(dtype)} pool, {weights.shape[1]} rows, {n_free} free tokens"
    cases = [
        Case(
            "ridged_gram",
            size,
            {"gram": GRAM},
            lambda: [ridged_gram(weights, ridge=ridge)],
            {REFERENCE: lambda: [ridged_gram_reference(weights, ridge=ridge)], FLOAT64: exact_gram},
        ),
        Case(
            "ridged_gram",
            size,
            {"symmetry": EXACT},
            lambda: [ridged_gram(weights, ridge=ridge)],
            {"its transpose": lambda: [ridged_gram(weights, ridge=ridge).transpose(1, 2)]},
        ),
        Case(
            "transposed_product",
            size,
            {"product": PRODUCT},
            lambda: [transposed_product(weights, residual)],
            {
                REFERENCE: lambda: [transposed_product_reference(weights, residual)],
                FLOAT64: lambda: [weights.double().transpose(1, 2) @ residual.double()],
            },
        ),
        Case(
            "key_jvp",
            size,
            {"J dK": JACOBIAN},
            lambda: [key_jvp(*given, delta, scale=scale)],
            {REFERENCE: lambda: [key_jvp_reference(*given, delta, scale=scale)], FLOAT64: pushed},
        ),
        Case(
            "key_vjp",
            size,
            {"J^T u": JACOBIAN},
            lambda: [key_vjp(*given, residual, scale=scale)],
            {REFERENCE: lambda: [key_vjp_reference(*given, residual, scale=scale)], FLOAT64: pulled},
        ),
    ]
    for case in cases:
        yield from rows_of(setup, "correctness/regression", case)


def moves(setup: Setup) -> Iterator[Row]:
    """`gather_tokens` and `scatter_tokens`, bit for bit: all layers of the shortest span, two of others."""
    sizes = setup.sizes
    for dtype in sizes.pool_dtypes:
        for n_tokens in sizes.spans:
            n_layers = sizes.layers if n_tokens == sizes.spans[0] else 2
            yield from _moves_of(setup, dtype, n_tokens, n_layers)


def _moves_of(setup: Setup, dtype: torch.dtype, n_tokens: int, n_layers: int) -> Iterator[Row]:
    sizes, device, generator = setup.sizes, setup.device, setup.generator()
    shape = (n_tokens + 7, sizes.kv_heads, sizes.head_dim)
    buffers = [torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(n_layers)]
    pool = LayerBuffers.of(buffers)
    slots = torch.randperm(shape[0], generator=generator, device=device)[:n_tokens]
    n_kept = n_tokens // 10
    kept = torch.randint(0, n_tokens, (n_layers, sizes.kv_heads, n_kept), generator=generator, device=device)
    # Heads that hold fewer tokens than others.
    kept[:, 0, n_kept // 2 :] = -1
    rows = torch.randn((*kept.shape, sizes.head_dim), generator=generator, device=device)
    size = f"{dtype_name(dtype)} pool, {n_layers} layers, {n_kept} of {n_tokens} tokens"

    def exact() -> list[Tensor]:
        head = torch.arange(sizes.kv_heads, device=device).unsqueeze(1)
        cells = slots[kept.clamp_min(0)] * sizes.kv_heads + head
        gathered = [b.flatten(0, 1)[cells[layer]].double() for layer, b in enumerate(buffers)]
        return [torch.stack(gathered).masked_fill_((kept < 0).unsqueeze(-1), 0.0)]

    yield from rows_of(
        setup,
        "correctness/moves",
        Case(
            "gather_tokens",
            size,
            {"rows": EXACT},
            lambda: [gather_tokens(pool, slots, kept)],
            {REFERENCE: lambda: [gather_tokens_reference(pool, slots, kept)], FLOAT64: exact},
        ),
    )
    target = slots[:n_kept]

    def scattered() -> list[Tensor]:
        copies = LayerBuffers.of([buffer.clone() for buffer in buffers])
        scatter_tokens(copies, target, rows)
        return [torch.stack(copies.buffers)]

    def scattered_reference() -> list[Tensor]:
        copies = LayerBuffers.of([buffer.clone() for buffer in buffers])
        scatter_tokens_reference(copies, target, rows)
        return [torch.stack(copies.buffers)]

    def scattered_exact() -> list[Tensor]:
        expected = torch.stack(buffers)
        expected.index_copy_(1, target, rows.double().transpose(1, 2).to(dtype))
        return [expected]

    yield from rows_of(
        setup,
        "correctness/moves",
        Case(
            "scatter_tokens",
            size,
            {"whole pool": EXACT},
            scattered,
            {REFERENCE: scattered_reference, FLOAT64: scattered_exact},
        ),
    )


def attention(setup: Setup) -> Iterator[Row]:
    """`ragged_attention`: full, a fifth, a tenth and no tokens at all, in one batch; one query and many."""
    for dtype in setup.sizes.pool_dtypes:
        for n_tokens in setup.sizes.spans:
            for counts in (None, (1, 40, 5)):
                yield from _attention_of(setup, dtype, n_tokens, counts)


def _attention_of(
    setup: Setup, dtype: torch.dtype, n_tokens: int, counts: tuple[int, ...] | None
) -> Iterator[Row]:
    sizes, problem = setup.sizes, make_problem(setup, n_tokens, dtype, counts)
    given = problem.queries, problem.keys, problem.values, problem.cells, problem.indptr
    n_kv_heads, scale, q_indptr = sizes.kv_heads, sizes.scale, problem.q_indptr

    def actual() -> Sequence[Tensor]:
        return ragged_attention(
            *given, n_kv_heads=n_kv_heads, scale=scale, q_indptr=q_indptr, max_queries=max(counts or (1,))
        )

    def reference() -> Sequence[Tensor]:
        return ragged_attention_reference(*given, n_kv_heads=n_kv_heads, scale=scale, q_indptr=q_indptr)

    what = "one query each" if counts is None else f"{', '.join(map(str, counts))} queries"
    case = f"{dtype_name(dtype)} pool, {n_tokens} tokens, {what}"
    allowed = {"output": last_digit(dtype) + ATTENTION_ARITHMETIC, "lse": LSE}
    expected = {REFERENCE: reference, FLOAT64: lambda: exact_attention(setup, problem)}
    yield from rows_of(
        setup, "correctness/attention", Case("ragged_attention", case, allowed, actual, expected)
    )


def merging(setup: Setup) -> Iterator[Row]:
    """`merge_states` and `merge_splits`, with parts that hold no key and nothing but NaN beside it."""
    sizes, device = setup.sizes, setup.device
    shape = (max(4, sizes.spans[0] // 256), sizes.heads, sizes.head_dim)
    generator = setup.generator()
    partial = torch.randn((8, *shape), generator=generator, device=device)
    lses = 20 + 3 * torch.randn(partial.shape[:3], generator=generator, device=device)
    lses[:, 0], lses[0, 1], lses[1, 2] = -torch.inf, -torch.inf, -torch.inf
    partial[lses == -torch.inf] = torch.nan

    for dtype in sizes.pool_dtypes:
        yield from _merging_of(setup, partial, lses, dtype)


def _merging_of(setup: Setup, partial: Tensor, lses: Tensor, dtype: torch.dtype) -> Iterator[Row]:
    allowed = {"output": last_digit(dtype) + MERGE_ARITHMETIC, "lse": MERGE_ARITHMETIC}
    pair = partial[:2].to(dtype)
    states = pair[0], lses[0], pair[1], lses[1]
    cases = [
        Case(
            "merge_splits",
            f"{dtype_name(dtype)}, {len(partial)} parts",
            allowed,
            lambda: merge_splits(partial, lses, dtype),
            {
                REFERENCE: lambda: merge_splits_reference(partial, lses, dtype),
                FLOAT64: lambda: _exact_merge(partial, lses),
            },
        ),
        Case(
            "merge_states",
            dtype_name(dtype),
            allowed,
            lambda: merge_states(*states),
            {
                REFERENCE: lambda: merge_states_reference(*states),
                FLOAT64: lambda: _exact_merge(pair, lses[:2]),
            },
        ),
    ]
    for case in cases:
        yield from rows_of(setup, "correctness/merging", case)


def _exact_merge(parts: Tensor, lses: Tensor) -> list[Tensor]:
    """Output and lse of parts [S, T, Hq, d] in float64."""
    # Finite where all parts are empty.
    top = lses.double().amax(dim=0).clamp_min(-1e300)
    exponentials = (lses.double() - top).exp()
    total = exponentials.sum(dim=0)
    weighted = (exponentials.unsqueeze(-1) * parts.double().nan_to_num(nan=0.0)).sum(dim=0)
    output = torch.where(total.unsqueeze(-1) > 0, weighted / total.unsqueeze(-1), 0.0)
    return [output, torch.where(total > 0, total.log() + top, -torch.inf)]
