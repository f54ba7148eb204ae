"""A server whose KV pool holds fp8 numbers: compressed, read and checked like any other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.client import Client, distinct_tails, document
from tests.engine.conftest import engine

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def client(model_path: Path, tokenizer: Any, server_dir: Path) -> Iterator[Client]:
    with engine(
        model_path,
        tokenizer,
        server_dir,
        grkv_config={"allow_forced": True, "min_span_tokens": 200, "budget": 0.2, "triggers": "explicit"},
        extra_args=("--kv-cache-dtype", "fp8_e4m3"),
        max_total_tokens=6000,
        context_length=4096,
        chunked_prefill_size=512,
    ) as client:
        yield client


def test_a_span_that_keeps_every_token_changes_no_output(client: Client) -> None:
    prompts = []
    for seed, length in ((3, 300), (4, 411)):
        doc = document(client, length, seed)
        prompts += [(length, doc + tail) for tail in distinct_tails(client, 3)]
    client.flush()
    exact = [client.generate(p, {"mode": "exact"}, 12) for _, p in prompts]
    client.flush()
    forced = [client.generate(p, {"prefix_end_tokens": n, "forced": "all"}, 12) for n, p in prompts]
    assert [a.output_ids for a in forced] == [a.output_ids for a in exact]
    in_full = [a for a, (n, _) in zip(forced, prompts, strict=True) if a.served["span_tokens"] == n]
    assert len(in_full) == 4  # all but the first of each document
    client.settled_state()


def test_a_document_is_compressed_and_served(client: Client) -> None:
    """Freed slots hold NaN, and SGLang's memory checks and the census are on."""
    client.flush()
    n = 700
    doc = document(client, n, seed=5)
    first, *later = distinct_tails(client, 3)
    dump = client.flag("dump")
    queries = client.flag("queries")
    client.generate(doc + first, {"prefix_end_tokens": n})
    state = client.settled_state()
    queries.unlink()
    assert not dump.exists()
    (span,) = state["spans"]
    assert (span["tokens"], span["slots"], span["twin_freed"]) == (n, 140, True)
    assert 0 < span["error_after"] < span["error_before"] < 1
    for tail in later:
        warm = client.generate(doc + tail)
        assert (warm.cached_tokens, warm.served["span_slots"]) == (n, 140)
    client.settled_state()

    stored = torch.load(client.folder / "span.pt")
    assert {tensor.dtype for side in ("keys", "values") for tensor in stored[side]} == {torch.float8_e4m3fn}
    assert all(t.float().isfinite().all() for side in ("keys", "values") for t in stored[side])
    # The probe attends to the cached KV that the prefill attended to.
    layers = [json.loads(line) for line in (client.folder / "queries.jsonl").read_text().splitlines()]
    assert [entry["layer"] for entry in layers] == list(range(30))
    assert max(entry["max_abs_difference"] / entry["max_abs"] for entry in layers) < 1e-4
