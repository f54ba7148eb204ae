"""Which finished request leaves which work."""

from __future__ import annotations

from array import array

import pytest

from grkv_sglang.config import GrkvConfig
from grkv_sglang.policy.acceptance import Budget
from grkv_sglang.policy.jobs import REUSE_MARGIN_TOKENS, RequestState, make_job, reuse_end
from grkv_sglang.policy.options import NO_OPTIONS, RequestOptions

PROMPT = array("q", range(1000))
CONFIG = GrkvConfig(budget=0.2, min_span_tokens=100)


def job(options=NO_OPTIONS, reuse=None, config=CONFIG, page_size=1):
    state = RequestState.of(options, config)
    state.reuse_end_tokens = reuse
    return make_job(state, PROMPT, extra_key="lora", cache_salt="tenant", config=config, page_size=page_size)


def test_explicit_job_carries_the_requests_wishes_and_namespace():
    made = job(RequestOptions(prefix_end_tokens=700, budget=0.5, profile="paper"))
    assert made.token_ids == PROMPT[:700]
    assert (made.extra_key, made.cache_salt, made.reason) == ("lora", "tenant", "explicit")
    assert (made.budget, made.profile, made.forced) == (Budget(0.5, None), "paper", None)


def test_reuse_job_is_made_by_the_servers_settings():
    made = job(RequestOptions(budget=0.9, mode="prefer_exact"), reuse=500)
    assert (made.end_tokens, made.reason, made.budget) == (500, "reuse", Budget(0.2, None))


def test_ends_are_page_aligned():
    assert job(RequestOptions(prefix_end_tokens=703), page_size=16).end_tokens == 688
    assert job(RequestOptions(prefix_end_tokens=15), page_size=16) is None


def test_no_job():
    assert job() is None
    assert job(RequestOptions(prefix_end_tokens=1000)) is None
    assert job(RequestOptions(prefix_end_tokens=700), config=GrkvConfig(compression=False)) is None


def test_same_work_has_one_identity():
    assert job(reuse=500).identity == job(reuse=500).identity
    assert job(reuse=500).identity != job(reuse=501).identity
    explicit = RequestOptions(prefix_end_tokens=500, budget=0.3)
    assert job(explicit).identity != job(reuse=500).identity


@pytest.mark.parametrize(
    ("matched", "span_end", "settings", "mode", "expected"),
    [
        (400, 0, {}, "prefer_compressed", 400 - REUSE_MARGIN_TOKENS),
        (400, 0, {}, "exact", None),
        (100 + REUSE_MARGIN_TOKENS, 0, {}, "prefer_exact", 100),
        (99 + REUSE_MARGIN_TOKENS, 0, {}, "prefer_exact", None),
        (400, 300, {}, "prefer_compressed", None),
        (400, 200, {}, "prefer_compressed", 400 - REUSE_MARGIN_TOKENS),
        (400, 0, {"auto_reuse": False}, "prefer_compressed", None),
        (400, 0, {"compression": False}, "prefer_compressed", None),
        (0, 0, {}, "prefer_compressed", None),
    ],
)
def test_reuse_end(matched, span_end, settings, mode, expected):
    config = GrkvConfig(min_span_tokens=100, **settings)
    got = reuse_end(matched_tokens=matched, last_span_end=span_end, config=config, page_size=1, mode=mode)
    assert got == expected


def test_reuse_end_is_page_aligned():
    config = GrkvConfig(min_span_tokens=100)
    assert (
        reuse_end(matched_tokens=405, last_span_end=0, config=config, page_size=64, mode="prefer_exact")
        == 384
    )
