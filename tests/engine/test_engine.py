"""End to end on the real engine: what a request is served from, and what is left behind."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.multi_turn_drift import Chat as DriftChat
from benchmarks.multi_turn_drift import conversation, pieces_of_text, run_setting
from tests.engine.client import Client, distinct_tails, document, question
from tests.engine.fidelity import check_agreement

pytestmark = pytest.mark.engine

KNOWN_FAILURES = {"exception", "non_finite", "no_room", "budget_too_small"}


@pytest.fixture
def client(small_server: Client) -> Client:
    return small_server


def test_served_and_offline_fidelity_agree(client: Client, model_path: Path, tokenizer: Any):
    """Both passes, all kinds of queries."""
    check_agreement(client, model_path, tokenizer, ["default", "best"], context_tokens=700)


def test_document_is_compressed_once_and_serves_every_later_question(client: Client):
    client.flush()
    n = 700
    doc = document(client, n)
    before = client.settled_state()
    first, *later = distinct_tails(client, 4)
    cold = client.generate(doc + first, {"prefix_end_tokens": n})
    assert (cold.cached_tokens, cold.served["span_tokens"]) == (0, 0)
    state = client.settled_state()
    (span,) = state["spans"]
    assert (span["tokens"], span["slots"], span["twin_freed"]) == (n, 140, True)
    assert state["pool"] == {
        "total_slots": 6000,
        "free_slots": 6000 - 140 - len(first) - 7,
        "exact_slots": len(first) + 7,  # the question and the answer, whose last token has no KV yet
        "span_slots": 140,
        "in_work_slots": 0,
        "pinned_slots": 0,
    }
    assert 0 < span["error_after"] <= span["error_before"] < 1
    assert span["quality"] == pytest.approx(1 - span["error_after"])
    assert span["compress_s"] == pytest.approx(
        sum(span[k] for k in ("probe_s", "pass_s", "select_s", "regress_s", "copy_s"))
    )
    for tail in later:
        warm = client.generate(doc + tail)
        assert warm.cached_tokens == n
        assert warm.served == {
            "mode": "prefer_compressed", "exact_tokens": 0, "span_tokens": n, "span_slots": 140, "spans": 1,
            "budget": 0.2, "quality": pytest.approx(span["quality"], abs=1e-6), "profile": "default",
            "reprefilled_tokens": 0,
        }  # fmt: skip
    after = client.settled_state()
    done = {
        k: after["counters"][k] - before["counters"][k] for k in ("compressions_started", "compressions_done")
    }
    assert done == {"compressions_started": 1, "compressions_done": 1}
    assert after["spans"][0]["hits"] == 3
    assert after["counters"]["span_tokens_served"] - before["counters"]["span_tokens_served"] == 3 * n


@pytest.mark.parametrize("num_dummies", [0, 16])
def test_spans_that_keep_every_token_change_no_output(client: Client, num_dummies: int):
    """Forced spans of c = n against the same server serving exact KV, request by request.

    With dummies, sixteen tokens in front are a span of no slots: every later row starts with sixteen
    sentinels. RoPE is relative, so the outputs are those of the prompts without them.
    """
    dummies = list(range(2000, 2000 + num_dummies))
    prompts = []
    for seed, length in ((3, 300), (4, 411)):
        doc = document(client, length, seed)
        prompts += [(length, doc + tail) for tail in distinct_tails(client, 4)]
    client.flush()
    exact = [client.generate(p, {"mode": "exact"}, 12) for _, p in prompts]
    client.flush()
    if dummies:
        # Its own last token begins like the prompts: they must not reuse it, it saw the dummies.
        client.generate([*dummies, prompts[0][1][0]], {"prefix_end_tokens": num_dummies, "forced": "none"}, 1)
    forced = [
        client.generate(dummies + p, {"prefix_end_tokens": num_dummies + n, "forced": "all"}, 12)
        for n, p in prompts
    ]
    assert [a.output_ids for a in forced] == [a.output_ids for a in exact]
    in_full = [
        a for a, (n, _) in zip(forced, prompts, strict=True) if a.served["span_tokens"] == num_dummies + n
    ]
    assert len(in_full) == 6  # all but the first of each document
    assert all(a.served["span_tokens"] - a.served["span_slots"] == num_dummies for a in in_full)
    client.settled_state()


def test_compressed_kv_in_the_engine_equals_the_same_kv_in_transformers(client: Client, model_path):
    """The gap path against an independent implementation: the span's KV, put into a Hugging Face cache."""
    from transformers import AutoModelForCausalLM, DynamicCache

    client.flush()
    n, new = 500, 16
    doc = document(client, n, seed=5)
    first, second = distinct_tails(client, 2)
    client.flag("dump")
    client.generate(doc + first, {"prefix_end_tokens": n})
    client.settled_state()
    span = torch.load(client.folder / "span.pt")
    assert span["token_ids"] == doc
    warm = client.generate(doc + second, max_new_tokens=new)
    assert warm.served["span_slots"] == 100

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(zip(span["keys"], span["values"], strict=True)):
        cache.update(keys.movedim(0, 1)[None], values.movedim(0, 1)[None], layer)
    ids, positions, output = torch.tensor([second]), torch.arange(n, n + len(second))[None], []
    with torch.no_grad():
        for _ in range(new):
            logits = model(
                input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True
            ).logits
            output.append(int(logits[0, -1].argmax()))
            ids, positions = torch.tensor([[output[-1]]]), positions[:, -1:] + 1
    assert warm.output_ids == output


def test_probe_queries_equal_those_of_the_prefill(client: Client):
    client.flush()
    n = 600  # more than one prefill chunk
    doc = document(client, n, seed=6)
    flag = client.flag("queries")
    client.generate(doc + distinct_tails(client, 1)[0], {"prefix_end_tokens": n}, 1)
    client.settled_state()
    flag.unlink()
    layers = [json.loads(line) for line in (client.folder / "queries.jsonl").read_text().splitlines()]
    assert [entry["layer"] for entry in layers] == list(range(30))
    assert all(entry["queries"] == 72 for entry in layers)
    # fp32 over 30 layers; another order of sums in the attention.
    assert max(entry["max_abs_difference"] / entry["max_abs"] for entry in layers) < 1e-4


def test_span_after_span_shares_one_gap(client: Client):
    """The second span is selected and regressed with the first one's slots as ancestors."""
    client.flush()
    first_end, second_end = 400, 760
    doc = document(client, second_end, seed=18)
    tails = distinct_tails(client, 3)
    client.generate(doc[:first_end] + tails[0], {"prefix_end_tokens": first_end})
    client.settled_state()
    grown = client.generate(doc + tails[1], {"prefix_end_tokens": second_end})
    assert grown.served["span_tokens"] == first_end
    spans = sorted(client.settled_state()["spans"], key=lambda s: s["start_tokens"])
    assert [(s["start_tokens"], s["end_tokens"], s["slots"]) for s in spans] == [(0, 400, 80), (400, 760, 72)]
    assert 0.5 < spans[1]["quality"] < 1
    answer = client.generate(doc + tails[2])
    assert answer.served["spans"] == 2
    assert (answer.served["span_tokens"], answer.served["span_slots"]) == (second_end, 152)
    client.settled_state()


def test_a_prompt_that_leaves_a_span_in_its_middle_uses_no_part_of_it(client: Client):
    client.flush()
    n = 400
    doc = document(client, n, seed=7)
    client.generate(doc + distinct_tails(client, 1)[0], {"prefix_end_tokens": n})
    client.settled_state()
    half = doc[:200] + question(client, "What now?")
    answer = client.generate(half)
    assert (answer.cached_tokens, answer.served["span_tokens"]) == (0, 0)
    client.flush()
    assert client.generate(half).output_ids == answer.output_ids
    client.settled_state()


def test_an_exact_request_on_a_compressed_document_stays_exact(client: Client):
    client.flush()
    n = 700
    doc = document(client, n, seed=8)
    first, second = distinct_tails(client, 2)
    reference = client.generate(doc + second, {"mode": "exact"}, 12)
    client.flush()
    client.generate(doc + first, {"prefix_end_tokens": n})
    client.settled_state()
    exact = client.generate(doc + second, {"mode": "exact"}, 12)
    assert (exact.cached_tokens, exact.served["span_tokens"], exact.served["mode"]) == (0, 0, "exact")
    assert exact.output_ids == reference.output_ids
    # The exact copy is back beside the span; a request that prefers spans is still served from the span.
    again = client.generate(doc + distinct_tails(client, 3)[2])
    assert again.served["span_tokens"] == n
    client.settled_state()


def test_a_higher_minimum_quality_refuses_a_poor_span(client: Client):
    client.flush()
    n = 500
    doc = document(client, n, seed=9)
    first, second, third = distinct_tails(client, 3)
    client.generate(doc + first, {"prefix_end_tokens": n})
    (span,) = client.settled_state()["spans"]
    assert span["quality"] < 0.999
    assert client.generate(doc + second, {"min_quality": 0.999}).served["span_tokens"] == 0
    assert (
        client.generate(doc + third, {"min_quality": round(span["quality"], 4) - 0.001}).served["span_tokens"]
        == n
    )
    client.settled_state()


def test_identical_prompt_twice_and_thrice(client: Client):
    client.flush()
    n = 450
    prompt = document(client, n, seed=10) + question(client, "Who keeps the clock?")
    done = client.settled_state()["counters"]["compressions_done"]
    answers = [client.generate(prompt, {"prefix_end_tokens": n}) for _ in range(3)]
    assert [a.served["span_tokens"] for a in answers] == [0, n, n]
    assert answers[1].output_ids == answers[2].output_ids
    # The third finds its whole prompt but the last token: the span and what the second left under it.
    assert answers[2].cached_tokens == len(prompt) - 1
    state = client.settled_state()
    assert state["counters"]["compressions_done"] == done + 1
    assert state["num_spans"] == 1


def test_two_prompts_racing_for_one_document(client: Client):
    client.flush()
    n = 600
    doc = document(client, n, seed=11)
    before = client.settled_state()["counters"]
    first, second, third = distinct_tails(client, 3)
    options = {"prefix_end_tokens": n}
    client.together([(doc + first, options, 8), (doc + second, options, 24)])
    state = client.settled_state()
    assert state["counters"]["compressions_done"] - before["compressions_done"] == 1
    assert state["pool"]["exact_slots"] == len(first) + 7 + len(second) + 23
    assert state["pool"]["span_slots"] == 120
    assert client.generate(doc + third).served["span_tokens"] == n
    client.settled_state()


@pytest.mark.parametrize(("fault", "reason"), [("raise", "exception"), ("nan", "non_finite")])
def test_failed_compression_leaves_the_answer_right_and_the_pool_clean(
    client: Client, fault: str, reason: str
):
    client.flush()
    n = 400
    doc = document(client, n, seed=12)
    first, second = distinct_tails(client, 2)
    reference = [client.generate(doc + tail, {"mode": "exact"}) for tail in (first, second)]
    client.flush()
    before = client.settled_state()["counters"]["compressions_failed"].get(reason, 0)
    flag = client.flag(fault)
    answers = [client.generate(doc + first, {"prefix_end_tokens": n})]
    state = client.settled_state()
    assert not flag.exists(), "the fault was not injected"
    assert state["counters"]["compressions_failed"][reason] == before + 1
    assert state["num_spans"] == 0
    assert state["pool"]["span_slots"] == 0
    answers.append(client.generate(doc + second))
    assert answers[1].cached_tokens == n, "the exact prefix goes on serving"
    assert [a.output_ids for a in answers] == [a.output_ids for a in reference]
    client.settled_state()


def test_reuse_by_a_second_request_compresses_unasked(client: Client):
    client.flush()
    n = 640
    doc = document(client, n, seed=13)
    tails = distinct_tails(client, 3)
    served = [client.generate(doc + tail).served["span_tokens"] for tail in tails[:1]]
    assert client.settled_state()["num_spans"] == 0
    served.append(client.generate(doc + tails[1]).served["span_tokens"])
    assert client.settled_state()["num_spans"] == 1
    third = client.generate(doc + tails[2])
    assert [*served, third.served["span_tokens"]] == [0, 0, n - 16]
    client.settled_state()


def test_budget_and_profile_of_a_request(client: Client):
    client.flush()
    n = 500
    doc = document(client, n, seed=14)
    tails = distinct_tails(client, 5)
    client.generate(doc + tails[0], {"prefix_end_tokens": n, "budget_tokens": 77, "profile": "paper"})
    (span,) = client.settled_state()["spans"]
    assert (span["slots"], span["profile"]) == (77, "paper")
    # The server keeps 20%: this span is not for everyone.
    assert client.generate(doc + tails[1]).served["span_tokens"] == 0
    assert client.generate(doc + tails[2], {"budget_tokens": 77}).served["span_slots"] == 77
    client.generate(doc + tails[3], {"prefix_end_tokens": n, "budget": 0.3, "profile": "release"})
    spans = client.settled_state()["spans"]
    assert (150, "release") in [(s["slots"], s["profile"]) for s in spans]
    assert client.generate(doc + tails[4]).served["span_slots"] == 150
    client.settled_state()


def test_protected_tokens_come_on_top_of_the_budget(client: Client):
    client.flush()
    n = 500
    doc = document(client, n, seed=23)
    tails = distinct_tails(client, 4)
    options = {"prefix_end_tokens": n, "protected": "100-130"}
    client.generate(doc + tails[0], options)
    (span,) = client.settled_state()["spans"]
    assert (span["slots"], span["protected"]) == (30 + 94, [[100, 130]])  # a fifth of the other 470
    assert client.generate(doc + tails[1], options).served["span_slots"] == 124
    assert client.generate(doc + tails[2]).served["span_slots"] == 124
    # Others are not protected in this span: it does not serve, and another one is made.
    other = {"prefix_end_tokens": n, "protected": "200-210"}
    assert client.generate(doc + tails[3], other).served["span_tokens"] == 0
    spans = client.settled_state()["spans"]
    assert {tuple(map(tuple, s["protected"])) for s in spans} >= {((200, 210),)}


def test_a_prefix_too_short_to_compress_stays_exact_and_is_counted(client: Client):
    client.flush()
    n = 60
    doc = document(client, n, seed=19)
    first, second = distinct_tails(client, 2)
    before = client.state()["counters"]["compressions_failed"].get("budget_too_small", 0)
    client.generate(doc + first, {"prefix_end_tokens": n})  # 12 slots, of which 36 would always be kept
    state = client.settled_state()
    assert state["num_spans"] == 0
    assert state["counters"]["compressions_failed"]["budget_too_small"] == before + 1
    answer = client.generate(doc + second)
    assert (answer.cached_tokens, answer.served["span_tokens"]) == (n, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"modes": "exact"},
            "unknown field 'modes'; valid fields are mode, prefix_end_tokens, prefix_end, budget",
        ),
        ({"mode": "fast"}, "Input should be 'exact', 'prefer_exact' or 'prefer_compressed'"),
        ({"prefix_end_tokens": 2, "protected": "1-9"}, "must lie in the prefix of 2 tokens, got an end of 9"),
        ({"prefix_end_tokens": 2, "protected": "1"}, "expected ranges such as '0-120,800-830'"),
        ({"budget": 0.001}, "this server allows budgets between 0.01 and 1"),
        ({"prefix_end_tokens": 999}, "at least one token of the prompt behind it, got 999 of 3"),
        ({"prefix_end": "document"}, "no user message of the chat template"),
        ("yes", "must be an object with the fields"),
    ],
)
def test_bad_options_give_a_400_that_names_the_valid_fields(client: Client, options, message: str):
    response = client.post([1, 2, 3], options)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_beam_search_is_refused_by_name(client: Client):
    params = {"max_new_tokens": 4, "beam_width": 2, "n": 2}
    response = client.http.post("/generate", json={"input_ids": [1, 2, 3], "sampling_params": params})
    assert response.status_code == 400
    assert "beam search is not served with --radix-cache-backend grkv" in response.text


def test_openai_chat_finds_the_document_by_the_template_and_tells_what_served_it(client: Client):
    client.flush()
    text = client.tokenizer.decode(document(client, 500, seed=15))

    def ask(question: str):
        response = client.http.post(
            "/v1/chat/completions",
            json={
                "model": "default",
                "messages": [
                    {"role": "system", "content": "Answer briefly."},
                    {"role": "user", "content": text},
                    {"role": "user", "content": question},
                ],
                "temperature": 0,
                "max_tokens": 8,
                "return_meta_info": True,
                "custom_params": {"grkv": {"prefix_end": "document"}},
            },
        )
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["meta_info"]["grkv"][0]

    assert ask("Who keeps the clock?")["span_tokens"] == 0
    (span,) = client.settled_state()["spans"]
    served = ask("What did the ferry carry?")
    assert served["span_tokens"] == span["tokens"] > 500
    bad = client.http.post(
        "/v1/chat/completions",
        json={
            "model": "default",
            "messages": [{"role": "user", "content": "x"}],
            "custom_params": {"grkv": {"a": 1}},
        },
    )
    assert bad.status_code == 400
    assert "unknown field 'a'; valid fields are mode" in bad.text


def test_streaming_tells_it_from_the_first_chunk_on(client: Client):
    client.flush()
    n = 400
    doc = document(client, n, seed=16)
    first, second = distinct_tails(client, 2)
    client.generate(doc + first, {"prefix_end_tokens": n})
    client.settled_state()
    body = {
        "input_ids": doc + second,
        "sampling_params": {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True},
        "stream": True,
    }
    chunks = []
    with client.http.stream("POST", "/generate", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunks.append(json.loads(line.removeprefix("data: "))["meta_info"])
    assert len(chunks) >= 2
    assert [chunk["grkv"][0]["span_tokens"] for chunk in chunks] == [n] * len(chunks)


def test_namespaces_do_not_share_spans(client: Client):
    client.flush()
    n = 400
    doc = document(client, n, seed=17)
    first, second, third = distinct_tails(client, 3)
    client.generate(doc + first, {"prefix_end_tokens": n}, extra_key="tenant-a")
    client.settled_state()
    assert client.generate(doc + second, extra_key="tenant-b").cached_tokens == 0
    assert client.generate(doc + third, extra_key="tenant-a").served["span_tokens"] == n
    client.settled_state()


def test_long_mixed_batch_under_pressure_leaves_a_clean_pool(client: Client):
    """More documents than the pool holds, in parallel, in all modes, chunked and evicted."""
    client.flush()
    calls = []
    for round_ in range(2):
        for seed in range(20, 25):
            doc = document(client, 900, seed)
            tail = distinct_tails(client, 6)[round_ + seed % 4]
            options = [{"prefix_end_tokens": 900}, None, {"mode": "exact"}, {"mode": "prefer_exact"}][
                seed % 4
            ]
            calls.append((doc + tail, options, 6))
    answers = client.together(calls)
    assert all(len(a.output_ids) == 6 for a in answers)
    state = client.settled_state()
    assert state["pool"]["free_slots"] + state["pool"]["exact_slots"] + state["pool"]["span_slots"] == 6000
    assert state["counters"]["compressions_failed"].keys() <= KNOWN_FAILURES


def test_eleven_turns_of_a_chat_stay_coherent_and_are_prefilled_once(client: Client):
    """The history is compressed as it grows; each reply is as likely as behind the full cache, or nearly."""
    client.flush()
    closing = list(client.tokenizer.encode("<|im_end|>\n"))
    messages = conversation(client.tokenizer, pieces_of_text(client.tokenizer, 11, 90))
    turns, _ = run_setting("chat", DriftChat(str(client.http.base_url)), messages, [], closing, 12)
    state = client.settled_state()
    # Nothing but the newest message is prefilled: the history comes from spans and the exact tail behind.
    assert all(t.cached_tokens >= t.history_tokens - len(closing) - 1 for t in turns[1:])
    last = turns[-1]
    assert last.spans >= 3
    assert last.span_tokens > 0.7 * last.history_tokens
    assert last.span_slots < 0.25 * last.span_tokens
    compressed = [t for t in turns if t.span_tokens]
    assert len(compressed) >= 7
    assert statistics.fmean(t.nll - t.full_nll for t in compressed) < 0.25
    assert statistics.fmean(t.top1_agreement for t in compressed) > 0.75
    # Of this chat the tree holds the spans and one exact tail (the exact copy is the other chat, of "full").
    own = [s for s in state["spans"] if s["namespace"] is not None]
    assert state["pool"]["span_slots"] == sum(s["slots"] for s in own)
    exact_copy = last.history_tokens + len(messages[-1]) + 12
    assert state["pool"]["exact_slots"] <= 2 * exact_copy - last.span_tokens + len(closing)


def test_the_log_tells_of_compressions(client: Client):
    log = (client.folder / "server.log").read_text()
    assert "grkv: compressed tokens [0, 700) into 140 slots" in log
    assert "profile default, quality 0." in log
