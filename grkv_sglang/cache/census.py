"""A check of our own at idle: every KV slot is free or owned by exactly one tree node.

SGLang's idle checker compares counts; this one compares the slots themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grkv_sglang.attention.rows import physical_slots
from grkv_sglang.cache.span import SpanNode, slots_of
from grkv_sglang.cache.tree import SpanTree


class CensusError(RuntimeError):
    """A slot has no owner, or two; or a size in the books is not the size in the tree."""


def take_census(tree: SpanTree) -> None:
    """Raise CensusError unless free slots, exact slots and span slots are disjoint and cover the pool.

    Only at idle: running requests own slots of their own.
    """
    allocator = tree.token_to_kv_pool_allocator
    page_size = tree.page_size
    pages = allocator.get_all_free_pages()
    free = (pages[:, None] * page_size + torch.arange(page_size, device=pages.device)[None, :]).flatten()
    owners: dict[str, list[Tensor]] = {"free": [free], "exact": [], "span": []}
    evictable = 0
    for node in tree.nodes():
        slots = physical_slots(node.value)
        if slots.numel() != slots_of(node):
            raise CensusError(f"node {node.id} owns {slots.numel()} slots but counts {slots_of(node)}")
        if node.lock_ref != 0:
            raise CensusError(f"node {node.id} is locked {node.lock_ref} times though nothing runs")
        owners["span" if isinstance(node, SpanNode) else "exact"].append(slots)
        evictable += slots.numel()
    counts = {name: sum(s.numel() for s in slots) for name, slots in owners.items()}
    if tree.evictable_size() != evictable or tree.protected_size() != 0:
        raise CensusError(
            f"the books say {tree.evictable_size()} evictable and {tree.protected_size()} protected slots, "
            f"the tree holds {evictable}"
        )
    everything = torch.cat([s.to(torch.int64) for slots in owners.values() for s in slots])
    unique, times = torch.unique(everything, return_counts=True)
    if bool((times > 1).any()):
        raise CensusError(f"slots with two owners: {unique[times > 1][:8].tolist()} ({counts})")
    # Slots [0, page_size) are SGLang's dummy page.
    expected = torch.arange(page_size, allocator.size + page_size, device=unique.device)
    if unique.numel() != expected.numel() or not torch.equal(unique, expected):
        missing = expected[~torch.isin(expected, unique)]
        raise CensusError(f"{missing.numel()} slots without an owner: {missing[:8].tolist()} ({counts})")
