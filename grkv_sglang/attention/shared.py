"""Decoding of requests that read the same slots first: attention over those is computed once for all of them.

Many requests at once ask about one document. Each would read the document's KV from memory for a single query
token; together they read it once, as one matrix product. The attention of each over its other slots is joined
to that by log-sum-exp, which is exact but for rounding. Whether the slots are those of a span or of exact
tokens makes no difference: what is compared are the rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grkv_sglang.core.attention import Partial, attend, by_token, group_rows, join

LEAST_SAVED_SLOTS = {"cpu": 1024, "cuda": 32768}
"""Fewer slots than this, over all members but one, are read faster than attention is split and joined, by
kind of device. On a CPU measured by ``python -m benchmarks.shared_decode``; on a GPU an estimate that nobody
measured: four more launches per layer take some 40 us, in which 3 TB/s read as many slots of 4 KiB."""


@dataclass(frozen=True)
class SharedPrefix:
    """Some requests of a batch and how many of their first slots are the same, in the same order."""

    members: tuple[int, ...]
    num_slots: int

    @property
    def saved_slots(self) -> int:
        """Reads that it spares."""
        return (len(self.members) - 1) * self.num_slots


def pays(prefix: SharedPrefix, device: str) -> bool:
    """The cost model of a kind of device: what is spared against what splitting and joining cost."""
    return prefix.saved_slots >= LEAST_SAVED_SLOTS[device]


def shared_prefixes(rows: Sequence[Tensor], pays: Callable[[SharedPrefix], bool]) -> list[SharedPrefix]:
    """Disjoint groups of requests; those left out share too little.

    Requests about several documents behind one header share the header as well. Wherever requests part, it is
    decided what spares more reads: all of them together up to there, or the groups that go on together and,
    up to there, the rest.

    Args:
        rows: the slots of each request, [n] of any integer dtype on the host, in the order of its tokens. The
            last one, which is a decoding token's own, is never shared.
        pays: whether a group is worth it.
    """
    return _best(tuple(i for i, row in enumerate(rows) if len(row) > 1), rows, 0, pays)


def _best(
    members: tuple[int, ...], rows: Sequence[Tensor], start: int, pays: Callable[[SharedPrefix], bool]
) -> list[SharedPrefix]:
    """Of requests whose first `start` slots are the same."""
    if len(members) < 2:
        return []
    end = min(len(rows[i]) for i in members) - 1
    ahead = torch.stack([rows[i][start:end] for i in members])
    differs = (ahead != ahead[0]).any(dim=0)
    common = start + (int(differs.int().argmax()) if differs.any() else end - start)
    together = SharedPrefix(members, common)
    by_next: defaultdict[int, list[int]] = defaultdict(list)
    for i in members:
        if len(rows[i]) - 1 > common:
            by_next[int(rows[i][common])].append(i)
    apart = [group for some in by_next.values() for group in _best(tuple(some), rows, common, pays)]
    gone = {i for group in apart for i in group.members}
    rest = SharedPrefix(tuple(i for i in members if i not in gone), common)
    choices = [apart, [*apart, rest], [together]]
    possible = [groups for groups in choices if all(len(g.members) > 1 and pays(g) for g in groups)]
    return max(possible, key=lambda groups: sum(group.saved_slots for group in groups))


Read = Callable[[Tensor], Tensor]
"""Rows of a pool's keys or values, [slots] int64 -> [slots, Hkv, ...]."""


@dataclass(frozen=True)
class SharedBatch:
    """A group as attention reads it. All on the pool's device.

    Attributes:
        members: [g] int64, which requests of the batch.
        shared: [n] int64, the slots that all read.
        own: [g * w] int64, the other slots of each; the shorter ones repeat their last.
        held: [g, w] bool, which of them are no repetition.
    """

    members: Tensor
    shared: Tensor
    own: Tensor
    held: Tensor

    @classmethod
    def of(cls, prefix: SharedPrefix, rows: Sequence[Tensor]) -> SharedBatch:
        mine = [rows[i] for i in prefix.members]
        shared = mine[0][: prefix.num_slots].long()
        rest = [row[prefix.num_slots :].long() for row in mine]
        column = torch.arange(max(map(len, rest)), device=shared.device)
        own = torch.cat([row[column.clamp(max=len(row) - 1)] for row in rest])
        held = column < torch.tensor([len(row) for row in rest], device=shared.device)[:, None]
        return cls(torch.tensor(prefix.members, device=shared.device), shared, own, held)

    def attend(self, queries: Tensor, keys: Read, values: Read, scale: float) -> Tensor:
        """One decoding token of each member, in float32 (or float64 if the queries are).

        Args:
            queries: [g, Hq, d] of the members.
            keys, values: read the pool's.
            scale: factor on the logits.

        Returns:
            [g, Hq, dv].
        """
        dtype = torch.promote_types(queries.dtype, torch.float32)
        n_members, n_heads, _ = queries.shape
        together = [read(self.shared).transpose(0, 1).to(dtype) for read in (keys, values)]
        n_kv_heads = len(together[0])
        group = n_heads // n_kv_heads
        rows = group_rows(queries.to(dtype), n_kv_heads)
        first = attend(rows, *together, scale=scale)
        # Each member's KV heads are heads of their own here, with one query.
        apart = [
            read(self.own).unflatten(0, (n_members, -1)).transpose(1, 2).flatten(0, 1).to(dtype)
            for read in (keys, values)
        ]
        visible = self.held.repeat_interleave(n_kv_heads, dim=0).unsqueeze(1)
        second = attend(
            queries.to(dtype).reshape(n_members * n_kv_heads, group, -1), *apart, scale=scale, visible=visible
        )
        joined = join(first, _by_kv_head(second, n_members))
        return by_token(joined.output, group)


@dataclass(frozen=True)
class SharedCells:
    """All groups of a batch as ``grkv_kernels.ragged_attention`` reads them: each like a request whose query
    tokens are its members'. All on the pool's device.

    Attributes:
        members: [M] int64, which requests of the batch, group by group.
        q_indptr: [groups + 1] int32, where each group's begin in `members`.
        most_members: of one group.
        cells: int64, by group and KV head the shared slots' cells (`ragged`).
        cells_indptr: [groups * Hkv + 1] int32, where each head's begin.
        num_slots: [B] int64, how many of each request's first slots these are; 0 for requests in no group.
        num_slots_cpu: the same on the host.
    """

    members: Tensor
    q_indptr: Tensor
    most_members: int
    cells: Tensor
    cells_indptr: Tensor
    num_slots: Tensor
    num_slots_cpu: Tensor

    @classmethod
    def of(
        cls, prefixes: Sequence[SharedPrefix], rows: Sequence[Tensor], n_kv_heads: int, device: torch.device
    ) -> SharedCells:
        """Of groups (one at least) of a batch with these slots, [n] each on the host."""
        head = torch.arange(n_kv_heads).unsqueeze(1)
        num_slots = torch.zeros(len(rows), dtype=torch.int64)
        cells, sizes = [], []
        for prefix in prefixes:
            num_slots[list(prefix.members)] = prefix.num_slots
            slots = rows[prefix.members[0]][: prefix.num_slots].long()
            cells.append((slots * n_kv_heads + head).flatten())
            sizes += [prefix.num_slots] * n_kv_heads
        counts = [len(prefix.members) for prefix in prefixes]
        return cls(
            members=torch.tensor([i for prefix in prefixes for i in prefix.members], device=device),
            q_indptr=_starts(counts).to(device),
            most_members=max(counts),
            cells=torch.cat(cells).to(device),
            cells_indptr=_starts(sizes).to(device),
            num_slots=num_slots.to(device),
            num_slots_cpu=num_slots,
        )


def _starts(sizes: Sequence[int]) -> Tensor:
    """[len + 1] int32 of parts that follow each other."""
    return torch.nn.functional.pad(torch.tensor(sizes).cumsum(0), (1, 0)).to(torch.int32)


def _by_kv_head(of_members: Partial, n_members: int) -> Partial:
    """[g * Hkv, G, ...] -> [Hkv, g * G, ...], the order of `group_rows`."""

    def turned(tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (n_members, -1)).transpose(0, 1).flatten(1, 2)

    return Partial(output=turned(of_members.output), lse=turned(of_members.lse))
