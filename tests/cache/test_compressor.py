"""Which forward passes a compression plans beyond its probe."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grkv_sglang.cache.compressor import CHUNK_TOKENS, CompressionError, Compressor, SpanSource
from grkv_sglang.core import PassChunk, Profile, get_profile, span_chunks
from grkv_sglang.policy.prompts import PassPrompts, longest_prompt, pass_chunks

PROMPTS = PassPrompts(repeat_first=(1, 2, 3), repeat_cue=(4,), answer=(5, 6), questions=(7, 8, 9, 10))
BEHIND = longest_prompt(PROMPTS)
START, N = 40, 600


def source(n_merged: int = 0) -> SpanSource:
    """A span of `N` tokens, the first of them held by `n_merged` slots of an older span if there are any."""
    n_exact = N - 10 * n_merged
    return SpanSource(
        start_tokens=START,
        token_ids=range(N - n_exact, N),
        exact_start_tokens=START + N - n_exact,
        slots=torch.arange(n_exact),
        merged_token_ids=range(N - n_exact),
        merged_slots=torch.arange(n_merged),
        protected=(),
        ancestor_slots=torch.arange(START),
    )


def with_scorer(scorer: str, fit_repetition: int = 0) -> Profile:
    return replace(get_profile("paper"), scorer=scorer, fit_repetition=fit_repetition)


def chunks(
    profile: Profile,
    *,
    prompts: PassPrompts | None = PROMPTS,
    context_len: int = 100_000,
    span: SpanSource | None = None,
) -> dict[str, list[PassChunk]]:
    runner: Any = SimpleNamespace(
        token_to_kv_pool=None,
        model=torch.nn.Identity(),
        model_config=SimpleNamespace(context_len=context_len),
    )
    found: dict[str, list[PassChunk]] = {}
    for kind, chunk in Compressor(runner, prompts)._chunks(span or source(), profile):
        found.setdefault(kind, []).append(chunk)
    return found


def test_a_profile_without_passes_has_no_chunks():
    assert chunks(get_profile("paper")) == {}
    # Not even room behind the prefix.
    assert chunks(get_profile("paper"), context_len=START + N, prompts=None) == {}


@pytest.mark.parametrize("prompts", [PROMPTS, None])
@pytest.mark.parametrize("context_len", [100_000, START + N])
def test_a_pass_over_the_span_needs_neither_tokenizer_nor_room(prompts: PassPrompts | None, context_len: int):
    found = chunks(with_scorer("h2o"), prompts=prompts, context_len=context_len)
    assert found == {"span": span_chunks(range(N), chunk_tokens=CHUNK_TOKENS)}


def test_every_pass_that_a_profile_needs():
    profile = replace(with_scorer("h2o~question_mass", fit_repetition=8), repetition_reach_tokens=9)
    assert chunks(profile) == {
        kind: pass_chunks(kind, range(N), PROMPTS, chunk_tokens=CHUNK_TOKENS, reach_tokens=9)
        for kind in ("questions", "repetition", "span")
    }


def test_a_repetition_fits_behind_the_prefix():
    profile = with_scorer("kvzip")
    for room in (8, 20, CHUNK_TOKENS + 50):
        context_len = START + N + BEHIND + room
        (repeated,) = chunks(profile, context_len=context_len).values()
        assert {len(chunk.token_ids) - chunk.n_prompt for chunk in repeated[:-1]} == {min(room, CHUNK_TOKENS)}
        ends = [START + chunk.first_position + len(chunk.token_ids) for chunk in repeated]
        assert max(ends) <= context_len
    with pytest.raises(CompressionError, match="1 positions of the model's are missing") as failure:
        chunks(profile, context_len=START + N + BEHIND + 7)
    assert failure.value.reason == "no_positions"


def test_requests_fit_behind_the_prefix():
    profile = with_scorer("question_mass")
    chunks(profile, context_len=START + N + BEHIND)
    with pytest.raises(CompressionError, match="3 positions"):
        chunks(profile, context_len=START + N + BEHIND - 3)


def test_merged_spans():
    span = source(n_merged=5)
    (repeated,) = chunks(with_scorer("kvzip"), span=span).values()
    assert [token for chunk in repeated for token in chunk.token_ids[chunk.n_prompt :]] == list(range(N))
    assert {chunk.attended for chunk in repeated} == {None}
    with pytest.raises(CompressionError, match="merged spans") as failure:
        chunks(with_scorer("h2o"), span=span)
    assert failure.value.reason == "unsupported"
