from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grkv_sglang.core import (
    PassChunk,
    PassResults,
    attention,
    question_chunks,
    repetition_chunks,
    span_chunks,
)
from grkv_sglang.core.passes import CUE_TOKENS, N_FIRST
from grkv_sglang.core.selection import PassStatistics, Statistic

from .reference import random

FIRST, CUE, ANSWER = [901, 902, 903], [911, 912], [921]


def repetition(
    n: int, chunk_tokens: int, n_sampled: int = 0, reach_tokens: int | None = None
) -> list[PassChunk]:
    """Of a span whose token ids are its positions."""
    return repetition_chunks(
        range(n),
        first=FIRST,
        cue=CUE,
        answer=ANSWER,
        chunk_tokens=chunk_tokens,
        n_sampled=n_sampled,
        reach_tokens=reach_tokens,
    )


def sampled_tokens(chunks: list[PassChunk]) -> list[int]:
    return [chunk.token_ids[i] for chunk in chunks for i in chunk.sampled]


def test_chunks_of_a_span() -> None:
    assert span_chunks(range(50, 57), chunk_tokens=3) == [
        PassChunk((50, 51, 52), 0, 0, (), own_keys=False),
        PassChunk((53, 54, 55), 3, 0, (), own_keys=False),
        PassChunk((56,), 6, 0, (), own_keys=False),
    ]


def test_chunks_of_a_repetition() -> None:
    # Strata of 25 / 3 tokens: their middles are 4, 12 and 20.
    assert repetition(25, 10, 3) == [
        PassChunk((*FIRST, *ANSWER, *range(10)), 25, 4, (4 + 4,), own_keys=True),
        PassChunk((*CUE, *range(2, 10), *ANSWER, *range(10, 20)), 25, 11, (11 + 2,), own_keys=True),
        PassChunk((*CUE, *range(12, 20), *ANSWER, *range(20, 25)), 25, 11, (11 + 0,), own_keys=True),
    ]


def test_a_cue_is_no_longer_than_what_lies_before() -> None:
    prompts = [chunk.token_ids[: chunk.n_prompt] for chunk in repetition(14, 3)]
    assert prompts == [
        (*FIRST, *ANSWER),
        (*CUE, 0, 1, 2, *ANSWER),
        (*CUE, 0, 1, 2, 3, 4, 5, *ANSWER),
        # CUE_TOKENS of them, although the chunk before is shorter.
        (*CUE, 1, 2, 3, 4, 5, 6, 7, 8, *ANSWER),
        (*CUE, 4, 5, 6, 7, 8, 9, 10, 11, *ANSWER),
    ]


def test_prompts_may_be_empty() -> None:
    (chunk,) = repetition_chunks([7, 8], first=[], cue=[], answer=[], chunk_tokens=2, n_sampled=1)
    assert chunk == PassChunk((7, 8), 2, 0, (1,), own_keys=True)


@pytest.mark.parametrize("chunk_tokens", [12, 13, 1000])
def test_a_chunk_longer_than_the_span_is_the_span(chunk_tokens: int) -> None:
    assert span_chunks(range(12), chunk_tokens=chunk_tokens) == span_chunks(range(12), chunk_tokens=12)
    assert len(span_chunks(range(12), chunk_tokens=chunk_tokens)) == 1
    (chunk,) = repetition(12, chunk_tokens, 4)
    assert chunk == PassChunk((*FIRST, *ANSWER, *range(12)), 12, 4, (5, 8, 11, 14), own_keys=True)


def test_every_chunk_of_a_repetition_starts_behind_the_span() -> None:
    """None starts behind another chunk, however its prompt is cut."""
    assert [chunk.first_position for chunk in repetition(25, 7, 2)] == [25] * 4


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 90), st.integers(1, 100), st.data())
def test_chunks_cover_the_span_once(n: int, chunk_tokens: int, data: st.DataObject) -> None:
    n_sampled = data.draw(st.integers(0, n))
    own = span_chunks(range(n), chunk_tokens=chunk_tokens)
    assert [token for chunk in own for token in chunk.token_ids] == list(range(n))
    # Token ids are positions here.
    assert [chunk.first_position for chunk in own] == [chunk.token_ids[0] for chunk in own]
    assert not any(chunk.n_prompt or chunk.sampled or chunk.own_keys for chunk in own)

    repeated = repetition(n, chunk_tokens, n_sampled)
    assert [chunk.token_ids[chunk.n_prompt :] for chunk in repeated] == [chunk.token_ids for chunk in own]
    for i, chunk in enumerate(repeated):
        start = i * chunk_tokens
        prompt = (*CUE, *range(max(0, start - CUE_TOKENS), start), *ANSWER) if i else (*FIRST, *ANSWER)
        assert chunk.token_ids[: chunk.n_prompt] == prompt
        assert chunk.first_position == n
        assert chunk.own_keys
        # A prompt's queries are never kept.
        assert all(chunk.n_prompt <= at < len(chunk.token_ids) for at in chunk.sampled)
        assert list(chunk.sampled) == sorted(set(chunk.sampled))
    chosen = sampled_tokens(repeated)
    assert chosen == [(2 * stratum + 1) * n // (2 * n_sampled) for stratum in range(n_sampled)]
    # Evenly: as far apart as whole tokens can be.
    assert len({after - before for before, after in pairwise(chosen)}) <= 2
    # And wherever the chunks are cut.
    assert chosen == sampled_tokens(repetition(n, n, n_sampled))


@pytest.mark.parametrize(
    ("reach_tokens", "attended"),
    [
        (None, [None, None, None]),
        (0, [((0, 10),), ((0, 4), (10, 20)), ((0, 4), (20, 25))]),
        # The first tokens, and as far as there are tokens.
        (3, [((0, 13),), ((0, 4), (7, 23)), ((0, 4), (17, 25))]),
        (5, [((0, 15),), ((0, 4), (5, 25)), ((0, 4), (15, 25))]),
        # What touches the first tokens is one range with them.
        (6, [((0, 16),), ((0, 25),), ((0, 4), (14, 25))]),
        (1000, [((0, 25),)] * 3),
    ],
)
def test_what_a_repetition_looks_at(
    reach_tokens: int | None, attended: list[tuple[tuple[int, int], ...] | None]
) -> None:
    chunks = repetition(25, 10, 3, reach_tokens)
    assert [chunk.attended for chunk in chunks] == attended
    # Nothing else depends on it.
    assert [replace(chunk, attended=None) for chunk in chunks] == repetition(25, 10, 3)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 60), st.integers(1, 70), st.integers(0, 70))
def test_attended_ranges_are_the_first_tokens_and_the_neighbourhood(
    n: int, chunk_tokens: int, reach_tokens: int
) -> None:
    for i, chunk in enumerate(repetition(n, chunk_tokens, 0, reach_tokens)):
        assert chunk.attended is not None
        seen = [at for low, high in chunk.attended for at in range(low, high)]
        low, high = i * chunk_tokens - reach_tokens, (i + 1) * chunk_tokens + reach_tokens
        assert seen == [s for s in range(n) if s < N_FIRST or low <= s < high]
        assert all(low < high for low, high in chunk.attended)


def test_questions_follow_the_span_in_one_chunk() -> None:
    assert question_chunks([5, 6, 7], n_tokens=40) == [PassChunk((5, 6, 7), 40, 0, (0, 1, 2), own_keys=True)]


@pytest.mark.parametrize("chunk_tokens", [0, -1, -512])
def test_chunks_have_tokens(chunk_tokens: int) -> None:
    message = f"expected chunk_tokens >= 1, got {chunk_tokens}"
    with pytest.raises(ValueError, match=message):
        span_chunks(range(5), chunk_tokens=chunk_tokens)
    with pytest.raises(ValueError, match=message):
        repetition(5, chunk_tokens)


@dataclass(frozen=True)
class Cached:
    """A span in one layer, and what lies before it: [n, Hkv, ...]."""

    keys: Tensor
    values: Tensor
    ancestors: tuple[Tensor, Tensor] | None
    group: int
    scale: float = 0.6


@dataclass(frozen=True)
class Own:
    """Queries [q, Hq, d], keys and values [q, Hkv, ...] of a chunk's tokens."""

    queries: Tensor
    keys: Tensor
    values: Tensor

    def __getitem__(self, some: slice) -> Own:
        return Own(self.queries[some], self.keys[some], self.values[some])


N_KV_HEADS, D, DV = 2, 8, 6


def coarse(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    """Float64 numbers that bfloat16 can hold."""
    return random(*shape, seed=seed, scale=scale).bfloat16().double()


def cached(n: int, *, group: int, p: int, seed: int = 0) -> Cached:
    def both(count: int, seed: int) -> tuple[Tensor, Tensor]:
        keys = coarse(count, N_KV_HEADS, D, seed=seed)
        return keys, coarse(count, N_KV_HEADS, DV, seed=seed + 1)

    return Cached(*both(n, seed + 1), both(p, seed + 3) if p else None, group)


def own_tokens(q: int, *, group: int, seed: int = 0) -> Own:
    return Own(
        coarse(q, N_KV_HEADS * group, D, seed=seed + 5, scale=2.0),
        coarse(q, N_KV_HEADS, D, seed=seed + 6),
        coarse(q, N_KV_HEADS, DV, seed=seed + 7),
    )


def tokens(q: int, *, own_keys: bool, first_position: int, n_prompt: int = 0) -> PassChunk:
    return PassChunk(tuple(range(q)), first_position, n_prompt, (), own_keys=own_keys)


def run(
    results: PassResults,
    chunk: PassChunk,
    span: Cached,
    own: Own,
    *,
    layer: int = 0,
    dtype: torch.dtype = torch.float64,
    held: Tensor | None = None,
) -> Tensor:
    keys, values = span.keys, span.values
    attended = chunk.attended_tokens()
    if attended is not None:
        keys, values = keys[attended], values[attended]
    if span.ancestors is not None:
        keys, values = torch.cat([span.ancestors[0], keys]), torch.cat([span.ancestors[1], values])
    return results.attend(
        layer,
        chunk,
        queries=own.queries.to(dtype),
        own_keys=own.keys.to(dtype),
        own_values=own.values.to(dtype),
        keys=keys.to(dtype),
        values=values.to(dtype),
        n_tokens=len(span.keys),
        scale=span.scale,
        held=held,
    )


def plain(chunk: PassChunk, span: Cached, own: Own) -> tuple[Tensor, Tensor]:
    """One softmax over everything that a token sees: output [q, Hq, dv], weights over the span [Hq, q, n]."""
    n, q = len(span.keys), len(own.queries)
    keys, values = [span.keys], [span.values]
    i, s = torch.arange(q)[:, None], torch.arange(n)
    visible = [torch.ones(q, n, dtype=torch.bool) if chunk.own_keys else s <= chunk.first_position + i]
    if chunk.attended is not None:
        visible[0] = visible[0] & torch.tensor([any(a <= x < b for a, b in chunk.attended) for x in range(n)])
    p = 0
    if span.ancestors is not None:
        p = len(span.ancestors[0])
        keys.insert(0, span.ancestors[0])
        values.insert(0, span.ancestors[1])
        visible.insert(0, torch.ones(q, p, dtype=torch.bool))
    if chunk.own_keys:
        keys.append(own.keys)
        values.append(own.values)
        visible.append(torch.arange(q) <= i)
    every_key, every_value = (torch.cat(part).repeat_interleave(span.group, dim=1) for part in (keys, values))
    logits = torch.einsum("qhd,shd->hqs", own.queries, every_key) * span.scale
    weights = logits.masked_fill(~torch.cat(visible, dim=1), -torch.inf).softmax(dim=-1)
    return torch.einsum("hqs,shv->qhv", weights, every_value), weights[:, :, p : p + n]


def counted(weights: Tensor, group: int) -> PassStatistics:
    """By the definition: weights [Hq, q, n] of the queries that count."""
    by_head = weights.unflatten(0, (-1, group))
    largest = weights.new_zeros(len(by_head), weights.shape[-1])
    for row in by_head.flatten(1, 2).unbind(1):
        largest = torch.maximum(largest, row)
    return PassStatistics(by_head.sum(2).mean(1), by_head.square().sum(2).mean(1), largest)


def assert_same(found: PassStatistics, expected: PassStatistics) -> None:
    for name, tensor in vars(expected).items():
        got = getattr(found, name)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), tensor, rtol=1e-5, atol=1e-6, msg=name)


# One head at a time, over 31 to 66 keys: 4 to 8 query tokens in a group of three, 12 to 25 in a group of one.
@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "WEIGHTS_AT_ONCE", {"cpu": 800})


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("own_keys", [True, False])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("p", [0, 5])
@pytest.mark.parametrize(
    ("q", "n_prompt"),
    [
        (1, 0),
        (3, 0),
        (4, 0),
        (5, 0),
        (5, 2),  # in the middle of a block
        (5, 4),  # at the seam of two
        (5, 5),  # nothing counts
        (13, 0),
        (14, 13),
        (30, 0),
        (30, 6),
        (30, 17),
        (30, 29),
    ],
)
def test_attention_of_a_chunk(own_keys: bool, group: int, p: int, q: int, n_prompt: int) -> None:
    span = cached(31, group=group, p=p, seed=q)
    own = own_tokens(q, group=group, seed=q)
    chunk = tokens(q, own_keys=own_keys, first_position=31 if own_keys else 1, n_prompt=n_prompt)
    results = PassResults()
    output = run(results, chunk, span, own)
    expected, weights = plain(chunk, span, own)
    assert output.dtype == torch.float32
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
    assert_same(results.statistics(0), counted(weights[:, n_prompt:], group))
    assert results.queries(0, 9).shape == (0, N_KV_HEADS * group, D)


@pytest.mark.parametrize("group", [1, 3, 200])
@pytest.mark.parametrize("own_keys", [True, False])
def test_attention_of_a_chunk_in_blocks_of_the_usual_size(group: int, own_keys: bool) -> None:
    q = 70 if group == 3 else 3 if group == 200 else 200
    span, own = cached(210, group=group, p=3), own_tokens(q, group=group)
    chunk = tokens(q, own_keys=own_keys, first_position=210 if own_keys else 9, n_prompt=q - 2)
    results = PassResults()
    output = run(results, chunk, span, own)
    expected, weights = plain(chunk, span, own)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
    assert_same(results.statistics(0), counted(weights[:, q - 2 :], group))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("p", [0, 5])
@pytest.mark.parametrize("sampled", [(), (2,), (0, 7, 8, 13), tuple(range(14))])
def test_outputs_of_sampled_queries_leave_out_the_chunk_itself(
    group: int, p: int, sampled: tuple[int, ...]
) -> None:
    span = cached(31, group=group, p=p)
    results, expected, queries = PassResults(), [], []
    for seed in (0, 50):
        own = own_tokens(14, group=group, seed=seed)
        chunk = replace(tokens(14, own_keys=True, first_position=31), sampled=sampled)
        run(results, chunk, span, own)
        alone = replace(chunk, own_keys=False)  # at position 31 and behind: all of the span is seen
        expected.append(plain(alone, span, own)[0][list(sampled)])
        queries.append(own.queries[list(sampled)])
    outputs = results.outputs(0, 28)
    assert outputs is not None
    assert outputs.dtype == torch.float32
    torch.testing.assert_close(outputs.double(), torch.cat(expected), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(results.queries(0, 28), torch.cat(queries), rtol=0, atol=0)
    if len(sampled) == 4:  # of eight, the middles of three equal parts
        few = results.outputs(0, 3)
        assert few is not None
        torch.testing.assert_close(few, outputs[[1, 4, 6]], rtol=0, atol=0)
        torch.testing.assert_close(results.queries(0, 3), torch.cat(queries)[[1, 4, 6]], rtol=0, atol=0)


def test_there_are_no_outputs_where_a_chunk_does_not_see_the_whole_span() -> None:
    span, own = cached(31, group=3, p=0), own_tokens(5, group=3)
    whole = replace(tokens(5, own_keys=True, first_position=31), sampled=(1, 3))
    for chunk in (replace(whole, attended=((0, 4), (9, 17))), replace(whole, own_keys=False)):
        results = PassResults()
        run(results, whole, span, own)
        run(results, chunk, span, own)
        assert results.outputs(0, 4) is None
        assert results.queries(0, 4).shape == (4, 3 * N_KV_HEADS, D)


def test_a_query_that_looks_at_nothing_but_its_chunk_has_finite_outputs() -> None:
    span, own = cached(31, group=1, p=0), own_tokens(3, group=1)
    own = replace(own, keys=own.queries.unflatten(1, (N_KV_HEADS, 1)).sum(2) * 1e4)
    results = PassResults()
    run(results, replace(tokens(3, own_keys=True, first_position=31), sampled=(0, 1, 2)), span, own)
    outputs = results.outputs(0, 3)
    assert outputs is not None
    assert outputs.isfinite().all()


@pytest.mark.parametrize(
    ("n_heads", "n_rows", "n_keys", "multiple", "expected"),
    [
        (3, 12, 50, 3, [(0, 1, 0, 12), (1, 2, 0, 12), (2, 3, 0, 12)]),
        (3, 12, 30, 3, [(0, 2, 0, 12), (2, 3, 0, 12)]),
        (2, 12, 5, 3, [(0, 2, 0, 12)]),
        (2, 12, 130, 3, [(0, 1, 0, 6), (0, 1, 6, 12), (1, 2, 0, 6), (1, 2, 6, 12)]),
        (1, 7, 130, 1, [(0, 1, 0, 6), (0, 1, 6, 7)]),
        (1, 6, 5000, 3, [(0, 1, 0, 3), (0, 1, 3, 6)]),  # not less than the rows of one query
        (2, 0, 50, 3, []),
        (1, 3, 0, 3, [(0, 1, 0, 3)]),
    ],
)
def test_blocks_cover_heads_and_rows_once(
    n_heads: int,
    n_rows: int,
    n_keys: int,
    multiple: int,
    expected: list[tuple[int, int, int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "WEIGHTS_AT_ONCE", {"cpu": 800})
    found = attention.blocks(n_heads, n_rows, n_keys, multiple=multiple, device=torch.device("cpu"))
    assert [(h.start, h.stop, r.start, r.stop) for h, r in found] == expected


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("own_keys", [True, False])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("p", [0, 5])
@pytest.mark.parametrize("attended", [((0, 31),), ((0, 4), (9, 17)), ((0, 4), (20, 31)), ((2, 3),)])
def test_attention_over_ranges_of_the_span(
    own_keys: bool, group: int, p: int, attended: tuple[tuple[int, int], ...]
) -> None:
    span, own = cached(31, group=group, p=p), own_tokens(14, group=group)
    first_position = 31 if own_keys else 5
    chunk = replace(
        tokens(14, own_keys=own_keys, first_position=first_position, n_prompt=3), attended=attended
    )
    results = PassResults()
    output = run(results, chunk, span, own)
    expected, weights = plain(chunk, span, own)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
    assert_same(results.statistics(0), counted(weights[:, 3:], group))
    left = torch.tensor([not any(a <= s < b for a, b in attended) for s in range(31)])
    assert all((tensor[:, left] == 0).all() for tensor in vars(results.statistics(0)).values())
    # What is not attended to does not matter, whatever it is.
    other = replace(span, keys=span.keys.clone(), values=span.values.clone())
    other.keys[left], other.values[left] = torch.nan, torch.nan
    assert torch.equal(run(PassResults(), chunk, other, own), output)


@pytest.mark.usefixtures("small_blocks")
def test_chunks_with_different_ranges_add_up() -> None:
    n, group = 29, 3
    span = cached(n, group=group, p=4)
    chunks = [*repetition(n, 8, 0, 2), *repetition(n, 20, 0)]
    owns = [own_tokens(len(chunk.token_ids), group=group, seed=10 * i) for i, chunk in enumerate(chunks)]
    results, weights = PassResults(), []
    for chunk, own in zip(chunks, owns, strict=True):
        output = run(results, chunk, span, own)
        expected, seen = plain(chunk, span, own)
        torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
        weights.append(seen[:, chunk.n_prompt :])
    assert_same(results.statistics(0), counted(torch.cat(weights, dim=1), group))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("own_keys", [True, False])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("attended", [None, ((0, 4), (9, 20))])
def test_heads_that_hold_different_tokens_before_the_span(
    own_keys: bool, group: int, attended: tuple[tuple[int, int], ...] | None
) -> None:
    """Each head attends as if it were alone with what it holds; one holds nothing."""
    if attended is not None and not own_keys:
        return  # a pass over the span sees all of it
    n, q, p = 31, 17, 5
    span, own = cached(n, group=group, p=p, seed=q), own_tokens(q, group=group, seed=q)
    assert span.ancestors is not None
    chunk = tokens(q, own_keys=own_keys, first_position=n if own_keys else 1, n_prompt=2)
    chunk = replace(chunk, attended=attended)
    held = torch.zeros(N_KV_HEADS, p, dtype=torch.bool)
    held[0] = torch.tensor([1, 0, 0, 1, 1]).bool()
    results = PassResults()
    output = run(results, chunk, span, own, held=held)
    for h in range(N_KV_HEADS):
        one, heads = slice(h, h + 1), slice(h * group, (h + 1) * group)
        past_keys, past_values = (past[held[h]][:, one] for past in span.ancestors)
        alone = replace(
            span, keys=span.keys[:, one], values=span.values[:, one], ancestors=(past_keys, past_values)
        )
        mine = replace(own, queries=own.queries[:, heads], keys=own.keys[:, one], values=own.values[:, one])
        expected, weights = plain(chunk, alone, mine)
        torch.testing.assert_close(output[:, heads].double(), expected, rtol=1e-5, atol=1e-5)
        found = PassStatistics(*(part[one] for part in vars(results.statistics(0)).values()))
        assert_same(found, counted(weights[:, 2:], group))


@pytest.mark.parametrize("own_keys", [True, False])
def test_attention_of_half_precision_is_computed_in_single(own_keys: bool) -> None:
    span, own = cached(17, group=3, p=4), own_tokens(9, group=3)
    chunk = tokens(9, own_keys=own_keys, first_position=17 if own_keys else 0)
    results, coarser = PassResults(), PassResults()
    torch.testing.assert_close(
        run(coarser, chunk, span, own, dtype=torch.bfloat16), run(results, chunk, span, own), rtol=0, atol=0
    )
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            vars(coarser.statistics(0)).values(), vars(results.statistics(0)).values(), strict=True
        )
    )


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 9, 40])
def test_chunks_of_a_span_add_up_to_its_causal_attention(group: int, chunk_tokens: int) -> None:
    n = 23
    span, own = cached(n, group=group, p=4), own_tokens(n, group=group)
    whole = tokens(n, own_keys=False, first_position=0)
    expected, weights = plain(whole, span, own)
    chunks = span_chunks(range(n), chunk_tokens=chunk_tokens)
    for order in (chunks, chunks[::-1]):
        results = PassResults()
        for chunk in order:
            some = slice(chunk.first_position, chunk.first_position + len(chunk.token_ids))
            output = run(results, chunk, span, own[some])
            torch.testing.assert_close(output.double(), expected[some], rtol=1e-5, atol=1e-5)
        assert_same(results.statistics(0), counted(weights, group))


@pytest.mark.usefixtures("small_blocks")
def test_chunks_of_a_repetition_know_nothing_of_each_other() -> None:
    n, group = 19, 3
    span = cached(n, group=group, p=4)
    chunks = repetition(n, 8, 5)
    owns = [own_tokens(len(chunk.token_ids), group=group, seed=10 * i) for i, chunk in enumerate(chunks)]
    results, weights = PassResults(), []
    for chunk, own in zip(chunks, owns, strict=True):
        output = run(results, chunk, span, own)
        expected, seen = plain(chunk, span, own)
        torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
        weights.append(seen[:, chunk.n_prompt :])
    assert_same(results.statistics(0), counted(torch.cat(weights, dim=1), group))
    # The sampled queries of all chunks, in the order of the chunks.
    sampled = [own.queries[list(chunk.sampled)] for chunk, own in zip(chunks, owns, strict=True)]
    assert torch.equal(results.queries(0, 5), torch.cat(sampled))
    # All where there are fewer, else evenly spaced ones.
    assert torch.equal(results.queries(0, 9), torch.cat(sampled))
    assert torch.equal(results.queries(0, 2), torch.cat(sampled)[[1, 3]])
    assert torch.equal(results.queries(0, 1), torch.cat(sampled)[[2]])


def test_sampled_queries_are_copies_in_their_own_dtype() -> None:
    span, own = cached(9, group=1, p=0), own_tokens(6, group=1)
    queries = own.queries.bfloat16()
    before = queries.clone()
    results = PassResults()
    results.attend(
        0,
        PassChunk(tuple(range(6)), 9, 2, (2, 5), own_keys=True),
        queries=queries,
        own_keys=own.keys.bfloat16(),
        own_values=own.values.bfloat16(),
        keys=span.keys.bfloat16(),
        values=span.values.bfloat16(),
        n_tokens=len(span.keys),
        scale=span.scale,
    )
    # The engine's next layer uses the same memory.
    queries.zero_()
    assert torch.equal(results.queries(0, 2), before[[2, 5]])


def test_layers_are_counted_apart() -> None:
    span, other = cached(9, group=3, p=2), cached(9, group=3, p=2, seed=50)
    own = own_tokens(4, group=3)
    chunk = tokens(4, own_keys=True, first_position=9)
    together, first, second = PassResults(), PassResults(), PassResults()
    for _ in range(2):
        run(together, chunk, span, own, layer=3)
        run(together, chunk, other, own, layer=7)
        run(first, chunk, span, own)
        run(second, chunk, other, own)
    for layer, alone in ((3, first), (7, second)):
        found, expected = together.statistics(layer), alone.statistics(0)
        assert torch.equal(found.total, expected.total)
        assert torch.equal(found.maximum, expected.maximum)
    assert not torch.equal(first.statistics(0).total, second.statistics(0).total)
    with pytest.raises(KeyError):
        together.statistics(0)


def test_attending_leaves_its_inputs_alone() -> None:
    span, own = cached(9, group=3, p=2), own_tokens(4, group=3)
    single = Own(own.queries.float(), own.keys.float(), own.values.float())
    tensors = [*vars(single).values(), span.keys, span.values, *(span.ancestors or ())]
    copies = [tensor.clone() for tensor in tensors]
    results = PassResults()
    chunk = tokens(4, own_keys=True, first_position=9)
    run(results, chunk, span, single, dtype=torch.float32)
    assert all(torch.equal(new, old) for new, old in zip(tensors, copies, strict=True))
    # The statistics are counted on in place.
    so_far = results.statistics(0)
    total, maximum = so_far.total.clone(), so_far.maximum.clone()
    run(results, chunk, span, single, dtype=torch.float32)
    assert results.statistics(0) is so_far
    torch.testing.assert_close(so_far.total, 2 * total)
    assert torch.equal(so_far.maximum, maximum)


def test_statistics_by_hand() -> None:
    # Two queries under two heads: rows are query 0 head 0, query 0 head 1, query 1 head 0, query 1 head 1.
    weights = torch.tensor([[[0.5, 0.0], [0.25, 0.25], [0.0, 0.75], [1.0, 0.0]]])
    nothing = PassStatistics.nothing(1, 2, torch.device("cpu"))
    assert [tensor.tolist() for tensor in vars(nothing).values()] == [[[0.0, 0.0]]] * 3
    left = nothing
    left.count(weights.clone(), 2)
    assert left.total.tolist() == [[1.75 / 2, 1.0 / 2]]
    assert left.square.tolist() == [[pytest.approx(1.3125 / 2), pytest.approx(0.625 / 2)]]
    assert left.maximum.tolist() == [[1.0, 0.75]]
    left.count(torch.tensor([[[0.0, 1.0], [0.0, 0.5]]]), 2)
    assert left.total.tolist() == [[1.75 / 2, 2.5 / 2]]
    assert left.square.tolist() == [[pytest.approx(1.3125 / 2), pytest.approx(1.875 / 2)]]
    assert left.maximum.tolist() == [[1.0, 1.0]]
    # Only the last token: its range.
    left.count(torch.tensor([[[0.5], [1.5]]]), 2, ((1, 2),))
    assert left.total.tolist() == [[1.75 / 2, 4.5 / 2]]
    assert left.maximum.tolist() == [[1.0, 1.5]]


@pytest.mark.parametrize("attended", [((0, 9),), ((0, 2), (5, 9)), ((1, 2), (3, 4), (7, 8)), ((8, 9),)])
def test_counting_ranges_is_counting_zeros_elsewhere(attended: tuple[tuple[int, int], ...]) -> None:
    seen = torch.tensor([any(low <= s < high for low, high in attended) for s in range(9)])
    ranges, zeros = (PassStatistics.nothing(2, 9, torch.device("cpu")) for _ in range(2))
    for seed in (0, 1):
        weights = random(2, 12, 9, seed=seed).softmax(-1).float() * seen
        some = weights[:, :, seen].clone()
        zeros.count(weights, 3)
        ranges.count(some, 3, attended)
    for name, tensor in vars(zeros).items():
        torch.testing.assert_close(getattr(ranges, name), tensor, msg=name)


@pytest.mark.parametrize("counted", [set(), {"total"}, {"square"}, {"maximum"}, {"total", "maximum"}])
def test_only_what_is_asked_for_is_counted(counted: set[Statistic]) -> None:
    """The same numbers; what was not counted cannot be read by mistake."""
    some = PassStatistics.nothing(2, 9, torch.device("cpu"), frozenset(counted))
    whole = PassStatistics.nothing(2, 9, torch.device("cpu"))
    for seed, attended in ((0, None), (1, ((2, 4), (5, 9)))):
        weights = random(2, 12, 9 if attended is None else 6, seed=seed).softmax(-1).float()
        for statistics in (some, whole):
            statistics.count(weights.clone(), 3, attended)
    for name, tensor in vars(whole).items():
        assert torch.equal(getattr(some, name), tensor if name in counted else torch.empty(2, 0)), name


def test_counting_overwrites_the_weights() -> None:
    """As documented: squares in place are what makes it cheap."""
    weights = random(2, 6, 5, seed=0).softmax(-1).float()
    given = weights.clone()
    PassStatistics.nothing(2, 5, torch.device("cpu")).count(given, 3)
    assert not torch.equal(given, weights)
