"""Forward passes over as many tokens as the span has, for what a few probed queries cannot tell.

A pass is cut into chunks that are independent of each other: the tokens of a chunk attend to the cached span
(and what lies before it), a repeating chunk to its own earlier tokens too, and nothing is written. Its
attention weights are reduced to a few numbers per KV head and token as it goes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grkv_sglang.core.attention import blocks, by_token, group_rows
from grkv_sglang.core.queries import stratum_midpoints
from grkv_sglang.core.selection import ALL_STATISTICS, PassKind, PassStatistics, Statistic

N_FIRST = 4
"""First tokens of a span, which are attention sinks where it starts the sequence."""

CUE_TOKENS = 8
"""A repeating chunk that is not the first is cued by so many tokens before it."""


@dataclass(frozen=True)
class PassChunk:
    """Tokens of one forward pass.

    Attributes:
        token_ids: q tokens.
        first_position: of the first token, relative to the span's start; the others follow.
        n_prompt: the first so many tokens only set the task, their attention does not count.
        sampled: which tokens' queries are kept for the regression.
        own_keys: the tokens attend to each other, causally, behind the cached ones; otherwise they are tokens
            of the span, and attend to what is cached up to their own positions.
        attended: ranges of the span's tokens that are attended to, ascending and disjoint; None for all.
    """

    token_ids: tuple[int, ...]
    first_position: int
    n_prompt: int
    sampled: tuple[int, ...]
    own_keys: bool
    attended: tuple[tuple[int, int], ...] | None = None

    def attended_tokens(self, device: torch.device | None = None) -> Tensor | None:
        """[k] int64, the span's tokens that are attended to; None for all."""
        if self.attended is None:
            return None
        return torch.cat([torch.arange(low, high, device=device) for low, high in self.attended])


def span_chunks(token_ids: Sequence[int], *, chunk_tokens: int) -> list[PassChunk]:
    """The span's own tokens [n], once more, at most `chunk_tokens` at a time.

    Raises:
        ValueError: `chunk_tokens` is less than 1.
    """
    _check_chunk(chunk_tokens)
    return [
        PassChunk(tuple(token_ids[start : start + chunk_tokens]), start, 0, (), own_keys=False)
        for start in range(0, len(token_ids), chunk_tokens)
    ]


def question_chunks(questions: Sequence[int], *, n_tokens: int) -> list[PassChunk]:
    """Requests as they may follow a span of `n_tokens` tokens; every token counts and keeps its query."""
    return [PassChunk(tuple(questions), n_tokens, 0, tuple(range(len(questions))), own_keys=True)]


def repetition_chunks(
    token_ids: Sequence[int],
    *,
    first: Sequence[int],
    cue: Sequence[int],
    answer: Sequence[int],
    chunk_tokens: int,
    n_sampled: int,
    reach_tokens: int | None = None,
) -> list[PassChunk]:
    """The model repeats the span [n] chunk by chunk, behind it.

    Source: KVzip, arXiv 2505.23416, whose prompts name the start of every chunk but the first.

    Args:
        token_ids: the span.
        first: what asks for the first chunk, "Repeat the previous context exactly.".
        cue: what asks for another one, followed by the `CUE_TOKENS` tokens before it.
        answer: what the reply starts with: the chat template's change of turns.
        chunk_tokens: most repeated tokens per chunk.
        n_sampled: number of queries to keep of the whole repetition, evenly spaced.
        reach_tokens: a chunk attends to the span's first `N_FIRST` tokens, to the part that it repeats and to
            so many tokens on either side; None: to the whole span. In a long span most of the cost of a full
            repetition is attention to what is not being repeated.

    Raises:
        ValueError: `chunk_tokens` is less than 1.
    """
    _check_chunk(chunk_tokens)
    wanted = stratum_midpoints(len(token_ids), n_sampled)
    chunks = []
    for start in range(0, len(token_ids), chunk_tokens):
        repeated = token_ids[start : start + chunk_tokens]
        asked = (*cue, *token_ids[max(0, start - CUE_TOKENS) : start]) if start else tuple(first)
        prompt = (*asked, *answer)
        sampled = tuple(len(prompt) + i - start for i in wanted if start <= i < start + len(repeated))
        attended = None
        if reach_tokens is not None:
            low, high = start - reach_tokens, start + len(repeated) + reach_tokens
            attended = _ranges(low, high, len(token_ids))
        chunks.append(PassChunk((*prompt, *repeated), len(token_ids), len(prompt), sampled, True, attended))
    return chunks


def _ranges(low: int, high: int, n_tokens: int) -> tuple[tuple[int, int], ...]:
    """The span's first tokens, and ``[low, high)`` as far as it lies in the span."""
    low, high = max(low, 0), min(high, n_tokens)
    first = min(N_FIRST, n_tokens)
    return ((0, max(first, high)),) if low <= first else ((0, first), (low, high))


def _check_chunk(chunk_tokens: int) -> None:
    if chunk_tokens < 1:
        raise ValueError(f"expected chunk_tokens >= 1, got {chunk_tokens}")


class PassResults:
    """What the chunks of one pass have left so far, layer by layer."""

    def __init__(self, counted: frozenset[Statistic] = ALL_STATISTICS) -> None:
        """`counted`: what of the weights."""
        self._counted = counted
        self._statistics: dict[int, PassStatistics] = {}
        self._queries: dict[int, list[Tensor]] = {}
        self._outputs: dict[int, list[Tensor | None]] = {}

    def statistics(self, layer: int) -> PassStatistics:
        """Of all chunks so far."""
        return self._statistics[layer]

    def queries(self, layer: int, count: int) -> Tensor:
        """[count, Hq, d], evenly spaced among the sampled queries of all chunks so far; all if there are
        fewer."""
        return _spread(torch.cat(self._queries[layer]), count)

    def outputs(self, layer: int, count: int) -> Tensor | None:
        """[count, Hq, dv] float32, the attention of `queries` over the span and what lies before it, without
        the pass's own tokens; None if not all of the span was attended to."""
        found = self._outputs[layer]
        known = [output for output in found if output is not None]
        return _spread(torch.cat(known), count) if len(known) == len(found) else None

    def attend(
        self,
        layer: int,
        chunk: PassChunk,
        *,
        queries: Tensor,
        own_keys: Tensor,
        own_values: Tensor,
        keys: Tensor,
        values: Tensor,
        n_tokens: int,
        scale: float,
        held: Tensor | None = None,
    ) -> Tensor:
        """Attention of a chunk in one layer; counts its weights over the span.

        Args:
            layer: which.
            chunk: its tokens.
            queries: [q, Hq, d] post-RoPE; `own_keys` [q, Hkv, d] and `own_values` [q, Hkv, dv] of the same
                tokens. Any float dtype, as all tensors.
            keys, values: [p + k, Hkv, ...] of what lies before the span, all visible, and then of the span's
                tokens that the chunk attends to (`PassChunk.attended_tokens`).
            n_tokens: n, of the whole span.
            scale: factor on the logits.
            held: [Hkv, p] bool, which head holds a token in a row before the span; None: every head in each.

        Returns:
            [q, Hq, dv] float32.
        """
        n_queries, n_heads, _ = queries.shape
        n_cached, n_kv_heads, dv = values.shape
        group = n_heads // n_kv_heads
        rows = group_rows(queries.float(), n_kv_heads) * scale
        attended = chunk.attended or ((0, n_tokens),)
        span = slice(n_cached - sum(high - low for low, high in attended), n_cached)
        own = torch.arange(n_queries, device=rows.device)
        # Not joined to one tensor: the cached ones are large.
        seen = [(keys, values), (own_keys, own_values)] if chunk.own_keys else [(keys, values)]
        by_head = [(k.transpose(0, 1).float(), v.transpose(0, 1).float()) for k, v in seen]
        if chunk.own_keys:
            masked, visible = slice(n_cached, None), own <= own[:, None]
        else:
            token = chunk.attended_tokens(rows.device)
            token = torch.arange(n_tokens, device=rows.device) if token is None else token
            masked, visible = span, token <= chunk.first_position + own[:, None]
        output = rows.new_empty(n_kv_heads, n_queries * group, dv)
        looked_at_all = chunk.own_keys and chunk.attended is None
        sampled = torch.tensor(chunk.sampled, dtype=torch.int64, device=rows.device)
        sampled_rows = (sampled[:, None] * group + torch.arange(group, device=rows.device)).flatten()
        of_sampled = rows.new_empty(n_kv_heads, len(sampled_rows), dv)
        if layer not in self._statistics:
            self._statistics[layer] = PassStatistics.nothing(n_kv_heads, n_tokens, rows.device, self._counted)
        n_keys = n_cached + (n_queries if chunk.own_keys else 0)
        for heads, some in blocks(n_kv_heads, rows.shape[1], n_keys, multiple=group, device=rows.device):
            # One softmax over everything that is seen: before the span, the span, the chunk itself.
            parts = [torch.bmm(rows[heads, some], k[heads].transpose(1, 2)) for k, _ in by_head]
            logits = torch.cat(parts, dim=-1)
            first, last = some.start // group, some.stop // group
            by_query = logits[..., masked].unflatten(1, (-1, group))
            by_query.masked_fill_(~visible[first:last].unsqueeze(1), -torch.inf)
            if held is not None:
                logits[..., : span.start].masked_fill_(~held[heads].unsqueeze(1), -torch.inf)
            weights = logits.softmax(dim=-1)
            output[heads, some] = torch.bmm(weights[..., :n_cached], by_head[0][1][heads])
            if looked_at_all:
                here = (sampled_rows >= some.start) & (sampled_rows < some.stop)
                index = sampled_rows[here] - some.start
                every = len(index) == weights.shape[1]
                share = (weights if every else weights[:, index])[..., :n_cached].sum(dim=-1, keepdim=True)
                # Nearly all of a query's attention may be on its own chunk, but not quite all.
                share.clamp_(min=torch.finfo(share.dtype).tiny)
                of_sampled[heads, here] = output[heads, some][:, index] / share
            if chunk.own_keys:
                output[heads, some].baddbmm_(weights[..., n_cached:], by_head[1][1][heads])
            counting = weights[:, max(0, chunk.n_prompt - first) * group :, span]
            if counting.shape[1]:
                self._statistics[layer].count(counting, group, chunk.attended, heads)
        self._queries.setdefault(layer, []).append(queries[sampled].clone())
        alone = by_token(of_sampled, group) if looked_at_all else None
        self._outputs.setdefault(layer, []).append(alone)
        return by_token(output, group)


def fitted_queries(
    results: Mapping[PassKind, PassResults], counts: Mapping[PassKind, int], layer: int
) -> tuple[dict[PassKind, Tensor], dict[PassKind, Tensor]]:
    """What the regression fits of passes: their queries in one layer, and these queries' outputs where they
    are known. Kinds in `counts` without results are left out."""
    taken = {kind: (results[kind], count) for kind, count in counts.items() if kind in results}
    queries = {kind: of.queries(layer, count) for kind, (of, count) in taken.items()}
    outputs = {kind: of.outputs(layer, count) for kind, (of, count) in taken.items()}
    return queries, {kind: output for kind, output in outputs.items() if output is not None}


def _spread(found: Tensor, count: int) -> Tensor:
    """`count` of the first dimension, evenly spaced; all if there are fewer."""
    return found[stratum_midpoints(len(found), count)] if len(found) > count else found
