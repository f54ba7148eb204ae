"""Budgets per head on the real engine: heads of a layer keep different numbers of tokens in the same slots.

What the server answers from such spans is computed again from the cells it stored, in float64 and without any
of our code: the model's weights, one KV head after the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests.engine.client import Client, distinct_tails, document
from tests.engine.conftest import engine
from tests.engine.fidelity import check_agreement

pytestmark = pytest.mark.engine

POOL = 6000
WINDOW = 32
"""Tokens at a span's end that the profile keeps unchanged for every head."""


@pytest.fixture(scope="module")
def client(model_path: Path, tokenizer: Any, server_dir: Path) -> Iterator[Client]:
    config = {
        "profile": "per_head",
        "allow_forced": True,
        "min_span_tokens": 200,
        "budget": 0.2,
        "triggers": "explicit,reuse",
    }
    with engine(
        model_path,
        tokenizer,
        server_dir,
        grkv_config=config,
        max_total_tokens=POOL,
        context_length=4096,
        chunked_prefill_size=256,
    ) as client:
        yield client


@pytest.fixture(scope="module")
def model(model_path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64).eval()


class StoredSpan:
    """The cells of one span, as the server's memory held them when it was made."""

    def __init__(self, path: Path) -> None:
        dumped = torch.load(path)
        self.end = dumped["start_tokens"] + len(dumped["token_ids"])
        self.counts: Tensor = dumped["counts"]
        self.cells = [[rows.double().flatten(0, 1) for rows in dumped[kind]] for kind in ("keys", "values")]

    def of_head(self, layer: int, head: int) -> tuple[Tensor, Tensor]:
        """Keys and values [kept, d] of one KV head."""
        first = int(self.counts[layer, :head].sum())
        mine = slice(first, first + int(self.counts[layer, head]))
        keys, values = (rows[layer][mine] for rows in self.cells)
        return keys, values


@torch.no_grad()
def log_probabilities(
    model: Any, spans: Sequence[StoredSpan], suffix: Sequence[int], output: Sequence[int]
) -> Tensor:
    """Of each token of `output`, behind the spans and `suffix`."""
    ids = torch.tensor([*suffix, *output[:-1]])
    positions = torch.arange(spans[-1].end, spans[-1].end + len(ids))
    hidden = model.model.embed_tokens(ids)
    cos, sin = model.model.rotary_emb(hidden[None], positions[None])
    causal = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    for index, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        normed = layer.input_layernorm(hidden)
        q, k, v = (
            project(normed).view(len(ids), -1, attention.head_dim).transpose(0, 1)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = (rotated[0] for rotated in apply_rotary_pos_emb(q[None], k[None], cos, sin))
        heads = []
        for head in range(q.shape[0]):
            kv_head = head // (q.shape[0] // k.shape[0])
            stored = [span.of_head(index, kv_head) for span in spans]
            keys, values = (torch.cat(part) for part in zip(*stored, strict=True))
            before = causal.new_ones(len(ids), len(keys))
            logits = q[head] @ torch.cat([keys, k[kv_head]]).T * attention.head_dim**-0.5
            weights = logits.masked_fill(~torch.cat([before, causal], dim=1), -torch.inf).softmax(-1)
            heads.append(weights @ torch.cat([values, v[kv_head]]))
        hidden = hidden + attention.o_proj(torch.cat(heads, dim=-1))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    logits = model.lm_head(model.model.norm(hidden[len(suffix) - 1 :]))
    return logits.log_softmax(-1)[torch.arange(len(output)), torch.tensor(output)]


def compressed(client: Client, doc: list[int], tail: list[int], **options: Any) -> StoredSpan:
    """Have `doc` compressed behind a request; what was stored."""
    dump = client.flag("dump")
    client.generate(doc + tail, {"prefix_end_tokens": len(doc), **options})
    client.settled_state()
    assert not dump.exists()
    return StoredSpan(client.folder / "span.pt")


def served_as_stored(
    client: Client, model: Any, prefix: list[int], tail: list[int], spans: Sequence[StoredSpan], new: int
) -> dict[str, Any]:
    """Ask for `new` tokens behind `prefix`, and compute each one's log-probability again; what served it."""
    response = client.post(prefix + tail, None, new, return_logprob=True, logprob_start_len=-1).json()
    answer = client.answer(response)
    listed = response["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in listed] == answer.output_ids
    got = torch.tensor([logprob for logprob, _, _ in listed], dtype=torch.float64)
    want = log_probabilities(model, spans, tail, answer.output_ids)
    torch.testing.assert_close(got, want, atol=2e-3, rtol=0)
    return answer.served


@pytest.mark.parametrize("profile", ["per_head", "release_per_head"])
def test_the_server_answers_from_the_cells_of_each_head(client: Client, model: Any, profile: str):
    client.flush()
    n, new = 640, 24
    doc = document(client, n, seed=1)
    first, *tails = distinct_tails(client, 3)
    span = compressed(client, doc, first, profile=profile)
    n_layers, n_kv_heads = model.config.num_hidden_layers, model.config.num_key_value_heads
    assert span.counts.shape == (n_layers, n_kv_heads)
    assert span.counts.sum(dim=1).tolist() == [n // 5 * n_kv_heads] * n_layers
    assert int((span.counts.max(dim=1).values - span.counts.min(dim=1).values).max()) > 20
    assert int(span.counts.min()) > WINDOW

    # One question in one chunk, one in several.
    tails[1] = [tails[1][0], *document(client, 500, seed=9), *tails[1][1:]]
    for tail in tails:
        served = served_as_stored(client, model, doc, tail, [span], new)
        assert (served["span_tokens"], served["span_slots"]) == (n, n // 5)
        assert served["profile"] == profile
    client.settled_state()


def test_what_lies_behind_such_a_span_is_compressed_on_top_of_it(client: Client, model: Any):
    """A second span behind the first: its probe's queries are those of the prefill that was served from the
    first one's cells, and answers come from both."""
    client.flush()
    n, more = 400, 300
    doc, rest = document(client, n, seed=11), document(client, more, seed=12)
    tails = distinct_tails(client, 3)
    first = compressed(client, doc, tails[0])
    queries = client.flag("queries")
    second = compressed(client, doc + rest, tails[1])
    queries.unlink()
    rows = [json.loads(line) for line in (client.folder / "queries.jsonl").read_text().splitlines()]
    assert [row["layer"] for row in rows] == list(range(model.config.num_hidden_layers))
    assert max(row["max_abs_difference"] / row["max_abs"] for row in rows) < 1e-4
    spans = sorted(client.state()["spans"], key=lambda s: s["start_tokens"])
    assert [(s["start_tokens"], s["end_tokens"], s["slots"]) for s in spans] == [(0, 400, 80), (400, 700, 60)]
    assert spans[1]["quality"] > 0.5
    served = served_as_stored(client, model, doc + rest, tails[2], [first, second], 16)
    assert (served["spans"], served["span_tokens"], served["span_slots"]) == (2, n + more, 140)
    client.settled_state()


def test_every_head_keeps_the_exact_window(client: Client, model: Any):
    """What the cells hold, against the model's own keys and values: the window's, at each head's end."""
    client.flush()
    doc = document(client, 400, seed=2)
    span = compressed(client, doc, distinct_tails(client, 1)[0])
    with torch.no_grad():
        cache = model(torch.tensor([doc]), use_cache=True).past_key_values
    for layer in range(model.config.num_hidden_layers):
        for head in range(model.config.num_key_value_heads):
            exact = cache.layers[layer].keys[0, head], cache.layers[layer].values[0, head]
            for stored, own in zip(span.of_head(layer, head), exact, strict=True):
                torch.testing.assert_close(stored[-WINDOW:], own[-WINDOW:], atol=2e-3, rtol=1e-3)


def test_served_and_offline_fidelity_agree(client: Client, model_path: Path, tokenizer: Any):
    """The benchmark without an engine hides each head's tokens from it."""
    check_agreement(client, model_path, tokenizer, ["per_head", "release_per_head"], context_tokens=600)


@pytest.mark.parametrize("num_dummies", [0, 16])
def test_packed_spans_that_keep_every_token_change_no_output(client: Client, num_dummies: int):
    """As for even spans: every token kept, but stored head by head; with dummies behind sixteen sentinels."""
    dummies = list(range(2000, 2000 + num_dummies))
    prompts = []
    for seed, length in ((3, 300), (4, 410)):  # of 410 tokens a slot holds cells of two heads
        doc = document(client, length, seed)
        prompts += [(length, doc + tail) for tail in distinct_tails(client, 3)]
    client.flush()
    exact = [client.generate(p, {"mode": "exact"}, 12) for _, p in prompts]
    client.flush()
    if dummies:
        client.generate([*dummies, prompts[0][1][0]], {"prefix_end_tokens": num_dummies, "forced": "none"}, 1)
    packed = [
        client.generate(dummies + p, {"prefix_end_tokens": num_dummies + n, "forced": "packed"}, 12)
        for n, p in prompts
    ]
    assert [a.output_ids for a in packed] == [a.output_ids for a in exact]
    again = client.together([(dummies + p, None, 12) for _, p in prompts])
    assert [a.output_ids for a in again] == [a.output_ids for a in exact]
    assert [a.served["span_tokens"] for a in again] == [num_dummies + n for n, _ in prompts]
    assert [a.served["span_slots"] for a in again] == [n for n, _ in prompts]
    client.settled_state()


def test_it_saves_as_many_slots_as_an_even_span(client: Client):
    n = 600
    doc = document(client, n, seed=5)
    first, second = distinct_tails(client, 2)
    pools = {}
    for profile in ("default", "per_head"):
        client.flush()
        assert client.settled_state()["pool"]["free_slots"] == POOL
        client.generate(doc + first, {"prefix_end_tokens": n, "profile": profile})
        state = client.settled_state()
        (span,) = state["spans"]
        assert (span["profile"], span["slots"], span["twin_freed"]) == (profile, n // 5, True)
        assert span["quality"] == pytest.approx(1 - span["error_after"])
        assert 0.5 < span["quality"] < 1
        pools[profile] = state["pool"]
    assert pools["per_head"] == pools["default"]
    assert pools["per_head"]["free_slots"] == POOL - n // 5 - len(first) - 7
    assert client.generate(doc + second).served["span_slots"] == n // 5
    client.settled_state()


def test_even_and_per_head_spans_in_one_batch(client: Client):
    """Answers from spans of both kinds and from exact KV, decoded together, are those of each alone."""
    client.flush()
    n = 400
    tail = distinct_tails(client, 1)[0]
    kinds: list[dict[str, Any] | None] = [{"profile": "per_head"}, {"profile": "default"}, None]
    docs = [document(client, n, seed) for seed in (6, 7, 8)]
    for doc, kind in zip(docs, kinds, strict=True):
        if kind is not None:
            client.generate([*doc, 5], {"prefix_end_tokens": n, **kind}, 1)
    client.settled_state()
    calls = [
        (doc + tail, {} if kind else {"mode": "exact"}, 12) for doc, kind in zip(docs, kinds, strict=True)
    ]
    alone = [client.generate(*call) for call in calls]
    assert [a.served["profile"] for a in alone] == ["per_head", "default", None]
    together = client.together(calls)
    assert [a.output_ids for a in together] == [a.output_ids for a in alone]
    client.settled_state()
