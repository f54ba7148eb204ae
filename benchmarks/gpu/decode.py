"""The attention of a decode step over prefixes at full size and compressed, and moves in the pool.

Every request has a prefix of its own in slots all over the pool, so that each byte comes out of memory once.
The bound is those bytes at the bandwidth of a large copy on the same card.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from grkv_kernels import LayerBuffers, gather_tokens, merge_states, ragged_attention, scatter_tokens
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.correctness import dtype_name
from benchmarks.gpu.rows import Figure, Row, Skipped
from benchmarks.gpu.setup import Setup
from benchmarks.gpu.timing import Action, Step, copy_bandwidth, timed

_OWN_SLOTS = 256
_SHARED_SLOTS = (256, 1024, 4096, 16384)
_ROOM = 1.3
"""Memory for what comes beside the pool."""


def attention(setup: Setup) -> Iterator[Row]:
    """By length of the prefixes, number of requests and kept share; the smallest share also with heads that
    keep half to one and a half times of it."""
    part, sizes = "decode/attention", setup.sizes
    row, bytes_per_s = copy_bandwidth(setup, part)
    yield row
    yield Figure(part, "copy bandwidth, read and written", row.case, bytes_per_s / 1e9, "GB/s")
    for n_tokens in sizes.spans:
        for batch in sizes.batches:
            yield from _batch(setup, part, n_tokens, batch, bytes_per_s)


def _batch(setup: Setup, part: str, n_tokens: int, batch: int, bytes_per_s: float) -> Iterator[Row]:
    sizes, dtype = setup.sizes, setup.sizes.pool_dtypes[0]
    n_cells = batch * n_tokens * sizes.kv_heads
    pool_bytes = 2 * n_cells * sizes.head_dim * dtype.itemsize
    lacking = _lacking(setup, part, f"{batch} prefixes of {n_tokens} tokens", pool_bytes + 8 * n_cells)
    if lacking is not None:
        yield lacking
        return
    generator = setup.generator()

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=setup.device, dtype=dtype)

    keys, values = draw(n_cells, sizes.head_dim), draw(n_cells, sizes.head_dim)
    queries = draw(batch, sizes.heads, sizes.head_dim)
    medians_ms: dict[str, float] = {}
    for share in sizes.shares:
        kept = max(1, int(n_tokens * share))
        even = [kept] * sizes.kv_heads
        layouts = {"even": even}
        if share == min(sizes.shares):
            last = max(1, sizes.kv_heads - 1)
            layouts["ragged"] = [int(kept * (0.5 + head / last)) for head in range(sizes.kv_heads)]
        for heads, lengths in layouts.items():
            cells, indptr = _cells(setup, n_tokens, batch, lengths)

            def attend(cells: Tensor = cells, indptr: Tensor = indptr) -> tuple[Tensor, Tensor]:
                return ragged_attention(
                    queries, keys, values, cells, indptr, n_kv_heads=sizes.kv_heads, scale=sizes.scale
                )

            n_bytes = len(cells) * (2 * sizes.head_dim * dtype.itemsize + cells.element_size())
            bound_ms = n_bytes / bytes_per_s * 1e3
            case = f"batch {batch}, {n_tokens} tokens, {share:.0%} kept, {heads} heads, {dtype_name(dtype)}"
            name = f"ragged_attention {share:.0%} {heads}"
            steps = [Step(name, attend, True, bound_ms)]
            if heads == "even":
                contiguous = _contiguous(setup, keys, values, queries, batch, kept)
                steps.append(Step(f"torch SDPA {share:.0%}", contiguous, True, bound_ms))
            yield from timed(setup, part, case, steps, medians_ms)
    full = medians_ms.get("ragged_attention 100% even")
    for share in sizes.shares[1:]:
        compressed = medians_ms.get(f"ragged_attention {share:.0%} even")
        if full is not None and compressed:
            case = f"batch {batch}, {n_tokens} tokens"
            yield Figure(part, f"full / {share:.0%} kept", case, full / compressed, "times as fast")


def _cells(setup: Setup, n_tokens: int, batch: int, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Cells of every (request, head) in random slots of the pool, the same for all heads, each cell once."""
    kv_heads, longest = setup.sizes.kv_heads, max(lengths)
    order = torch.randperm(batch * n_tokens, generator=setup.generator(), device=setup.device)
    slots = order[: batch * longest].view(batch, longest)
    ranges = [
        slots[request, :length] * kv_heads + head
        for request in range(batch)
        for head, length in enumerate(lengths)
    ]
    indptr = torch.tensor([0, *lengths * batch], device=setup.device).cumsum(0)
    return torch.cat(ranges).to(torch.int32), indptr.to(torch.int32)


def _contiguous(setup: Setup, keys: Tensor, values: Tensor, queries: Tensor, batch: int, kept: int) -> Action:
    """Dense attention over as many tokens; the heads of a group go as rows, so that no key is repeated."""
    sizes = setup.sizes
    rows = queries.view(batch, sizes.kv_heads, sizes.group, sizes.head_dim)
    n_cells = batch * kept * sizes.kv_heads
    dense_keys, dense_values = (
        cells[:n_cells].view(batch, kept, sizes.kv_heads, sizes.head_dim).transpose(1, 2)
        for cells in (keys, values)
    )
    return lambda: scaled_dot_product_attention(rows, dense_keys, dense_values, scale=sizes.scale)


def shared(setup: Setup) -> Iterator[Row]:
    """Requests behind the same slots and some of their own: together and one by one. Without graphs, as
    a server does it: launches count."""
    part, sizes, dtype = "decode/shared", setup.sizes, setup.sizes.pool_dtypes[0]
    generator = setup.generator()
    own = min(_OWN_SLOTS, sizes.spans[0])
    for batch in (count for count in sizes.batches if count > 1):
        queries = torch.randn(
            (batch, sizes.heads, sizes.head_dim), generator=generator, device=setup.device, dtype=dtype
        )
        for n_shared in dict.fromkeys(min(count, sizes.spans[0]) for count in _SHARED_SLOTS):
            n_slots = n_shared + batch * own
            keys, values = torch.randn(
                (2, n_slots * sizes.kv_heads, sizes.head_dim),
                generator=generator, device=setup.device, dtype=dtype,
            )  # fmt: skip
            order = torch.randperm(n_slots, generator=generator, device=setup.device)
            of_all, rest = order[:n_shared].expand(1, -1), order[n_shared:].view(batch, own)
            of_each = torch.cat([of_all.expand(batch, -1), rest], dim=1)
            every, first, second = (_cells_of(slots, sizes.kv_heads) for slots in (of_each, of_all, rest))
            group = torch.tensor([0, batch], dtype=torch.int32, device=setup.device)

            def attend(
                cells: tuple[Tensor, Tensor], keys: Tensor = keys, values: Tensor = values,
                queries: Tensor = queries, **given: Any,
            ) -> tuple[Tensor, Tensor]:  # fmt: skip
                return ragged_attention(
                    queries, keys, values, *cells, n_kv_heads=sizes.kv_heads, scale=sizes.scale, **given
                )

            case = f"batch {batch}, {n_shared} shared and {own} own tokens, {dtype_name(dtype)}"
            medians_ms: dict[str, float] = {}
            together = partial(_joined, attend, first, second, group)
            steps = [Step("one by one", partial(attend, every)), Step("together", together)]
            yield from timed(setup, part, case, steps, medians_ms)
            if len(medians_ms) == len(steps):
                ratio = medians_ms["together"] / medians_ms["one by one"]
                yield Figure(part, "together / one by one", case, ratio, "of the time")


def _joined(
    attend: Callable[..., tuple[Tensor, Tensor]],
    shared_cells: tuple[Tensor, Tensor],
    own_cells: tuple[Tensor, Tensor],
    group: Tensor,
) -> tuple[Tensor, Tensor]:
    batch = (len(own_cells[1]) - 1) // (len(shared_cells[1]) - 1)
    return merge_states(*attend(own_cells), *attend(shared_cells, q_indptr=group, max_queries=batch))


def _cells_of(slots: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Cells and their indptr of requests that read `slots` [B, n] with every head."""
    head = torch.arange(kv_heads, device=slots.device).unsqueeze(1)
    cells = slots.unsqueeze(1) * kv_heads + head
    indptr = torch.arange(cells.shape[0] * kv_heads + 1, device=slots.device) * slots.shape[1]
    return cells.flatten().to(torch.int32), indptr.to(torch.int32)


def moves(setup: Setup) -> Iterator[Row]:
    """The keys of a tenth of a span out of the pool and back, all layers in one launch."""
    part, sizes = "decode/moves", setup.sizes
    dtype, n_tokens = sizes.pool_dtypes[0], sizes.compression_span
    shape = (n_tokens, sizes.kv_heads, sizes.head_dim)
    pool_bytes = sizes.layers * n_tokens * sizes.kv_heads * sizes.head_dim * dtype.itemsize
    lacking = _lacking(setup, part, f"{sizes.layers} layers of {n_tokens} tokens", pool_bytes)
    if lacking is not None:
        yield lacking
        return
    row, bytes_per_s = copy_bandwidth(setup, part)
    yield row
    generator = setup.generator()
    pool = LayerBuffers.of(
        [
            torch.randn(shape, generator=generator, device=setup.device, dtype=dtype)
            for _ in range(sizes.layers)
        ]
    )
    slots = torch.randperm(n_tokens, generator=generator, device=setup.device)
    n_kept = n_tokens // 10
    kept = torch.rand(
        (sizes.layers, sizes.kv_heads, n_tokens), generator=generator, device=setup.device
    ).topk(n_kept, dim=-1).indices.sort(dim=-1).values  # fmt: skip
    rows = torch.randn((*kept.shape, sizes.head_dim), generator=generator, device=setup.device)
    target = slots[:n_kept].contiguous()
    n_bytes = rows.numel() * (dtype.itemsize + rows.element_size())
    bound_ms = n_bytes / bytes_per_s * 1e3
    steps = [
        Step("gather_tokens", lambda: gather_tokens(pool, slots, kept), True, bound_ms),
        Step("scatter_tokens", lambda: scatter_tokens(pool, target, rows), True, bound_ms),
    ]
    medians_ms: dict[str, float] = {}
    case = f"{n_kept} of {n_tokens} tokens, {sizes.layers} layers, {dtype_name(dtype)} to and from float32"
    yield from timed(setup, part, case, steps, medians_ms)
    for name, median_ms in medians_ms.items():
        yield Figure(part, f"{name}, read and written", case, n_bytes / median_ms / 1e6, "GB/s")


def _lacking(setup: Setup, part: str, name: str, n_bytes: int) -> Skipped | None:
    """A row if the device has no room for it."""
    free_bytes, needed = setup.free_bytes(), int(n_bytes * _ROOM)
    if free_bytes is None or free_bytes > needed:
        return None
    gib = 2**30
    return Skipped(part, name, f"{needed / gib:.1f} GiB of free memory, has {free_bytes / gib:.1f}")
