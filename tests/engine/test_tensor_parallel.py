"""Two tensor-parallel ranks on the CPU: each compresses its own heads, both decide alike.

SGLang's memory checks and our census run on every rank: a rank whose slots went out of step would stop the
server.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.client import Client, distinct_tails, document
from tests.engine.conftest import engine

pytestmark = pytest.mark.engine

POOL = 3000


@pytest.fixture(scope="module")
def client(tiny_model: Path, tokenizer: Any, server_dir: Path) -> Iterator[Client]:
    with engine(
        tiny_model,
        tokenizer,
        server_dir,
        grkv_config={
            "allow_forced": True,
            "min_span_tokens": 256,
            "budget": 0.25,
            "step_tokens": 256,
            "cooldown_requests": 1,
            "pressure_watermark": 0.5,  # one document is a quarter of this pool
        },
        extra_args=("--tp-size", "2"),
        environment={"OMP_NUM_THREADS": "1"},
        max_total_tokens=POOL,
        context_length=2048,
        chunked_prefill_size=256,
    ) as client:
        yield client


def test_spans_that_keep_every_token_change_no_output(client: Client):
    n = 300
    doc = document(client, n, seed=1)
    tails = distinct_tails(client, 4)
    exact = [client.generate(doc + tail, {"mode": "exact"}, 12) for tail in tails]
    client.flush()
    client.generate([*doc, 7], {"prefix_end_tokens": n, "forced": "all"}, 1)
    client.settled_state()
    together = client.together([(doc + tail, None, 12) for tail in tails])
    assert [a.output_ids for a in together] == [a.output_ids for a in exact]
    assert all(a.served["span_tokens"] == n for a in together)
    client.settled_state()


def test_budgets_per_head_are_refused(client: Client):
    answer = client.post(document(client, 300), {"prefix_end_tokens": 280, "profile": "per_head"})
    assert answer.status_code == 400
    assert (
        "profile 'per_head' lets KV heads keep different numbers of tokens, which this server does not hold "
        "(each tensor-parallel rank would share out its own heads' budget: set --tp-size 1), or use another "
        "profile: 'default' or 'best'"
    ) in answer.text


def test_a_document_is_compressed_by_both_ranks_and_served(client: Client):
    client.flush()
    n = 640
    doc = document(client, n, seed=2)
    first, second = distinct_tails(client, 2)
    client.generate(doc + first, {"prefix_end_tokens": n, "ttl_s": 60.0})
    state = client.settled_state()
    (span,) = state["spans"]
    assert (span["tokens"], span["slots"], span["twin_freed"]) == (n, 160, True)
    assert state["pool"]["free_slots"] == POOL - 160 - len(first) - 7
    assert 0 < span["error_after"] <= span["error_before"] < 1  # over the heads of both ranks
    assert client.generate(doc + second).served["span_slots"] == 160
    client.settled_state()


@pytest.mark.parametrize(("flag", "layer"), [("raise", 2), ("nan", 3)])
def test_a_failure_on_one_rank_is_a_failure_on_both(client: Client, flag: str, layer: int):
    """The flag is taken down by the rank that comes first; the other one compresses its heads in vain."""
    client.flush()
    n = 512
    doc = document(client, n, seed=3)
    first, second = distinct_tails(client, 2)
    exact = client.generate(doc + second, {"mode": "exact"})
    client.flush()
    before = sum(client.settled_state()["counters"]["compressions_failed"].values())
    path = client.flag(flag, layer)
    client.generate(doc + first, {"prefix_end_tokens": n})
    state = client.settled_state()
    assert not path.exists()
    failed = state["counters"]["compressions_failed"]
    assert sum(failed.values()) == before + 1
    assert failed.keys() <= {"exception", "non_finite", "other_rank"}
    assert state["pool"]["span_slots"] == 0
    answer = client.generate(doc + second)
    assert (answer.cached_tokens, answer.output_ids) == (n, exact.output_ids)
    client.settled_state()


def test_documents_beyond_the_pool_leave_both_ranks_in_step(client: Client):
    client.flush()
    docs = [document(client, 700, seed) for seed in range(10, 18)]
    first, second = distinct_tails(client, 2)
    calls = [(doc + first, {"prefix_end_tokens": 700} if i % 2 else None, 6) for i, doc in enumerate(docs)]
    for start in range(0, len(calls), 2):
        assert all(len(a.output_ids) == 6 for a in client.together(calls[start : start + 2]))
    state = client.settled_state()
    pool = state["pool"]
    assert pool["free_slots"] + pool["exact_slots"] + pool["span_slots"] == POOL
    assert state["counters"]["spans_made"]["pressure"] >= 1
    hits = [client.generate(doc + second).served["span_tokens"] for doc in docs]
    # Four were marked; a cold one may go before pressure comes to compress it.
    assert sum(tokens >= 600 for tokens in hits) >= 4
    client.settled_state()
