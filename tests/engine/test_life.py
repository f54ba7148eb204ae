"""The life of a compressed node on the real engine, with everything the scheduler does to it.

A cut-down random model, pages of 16 tokens, chunks of 256, LoRA, priorities with preemption, and a forced
retraction every few steps. Freed slots hold NaN.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.client import Client, distinct_tails, document
from tests.engine.conftest import engine

pytestmark = pytest.mark.engine

POOL = 4096
KNOWN_FAILURES = {"no_room", "given_up_for_room", "weights_changed", "deleted", "expired", "budget_too_small"}


@pytest.fixture(scope="module")
def client(tiny_model: Path, tokenizer: Any, server_dir: Path, adapters: dict[str, Path]) -> Iterator[Client]:
    loras = [f"{name}={path}" for name, path in adapters.items()]
    arguments = [
        *("--page-size", "16", "--max-running-requests", "8"),
        *("--enable-priority-scheduling", "--priority-scheduling-preemption-threshold", "5"),
        *("--enable-lora", "--lora-paths", *loras, "--max-lora-rank", "4", "--max-loras-per-batch", "3"),
        *("--lora-target-modules", "q_proj", "k_proj", "v_proj", "o_proj", "--lora-backend", "torch_native"),
        *("--enable-cache-report", "--enable-metrics"),
    ]
    config = {
        "allow_forced": True,
        "min_span_tokens": 256,
        "budget": 0.25,
        "step_tokens": 256,
        "triggers": "explicit,reuse",
        "cooldown_requests": 1,
        "pin_share": 0.25,
    }
    with engine(
        tiny_model,
        tokenizer,
        server_dir,
        grkv_config=config,
        extra_args=tuple(arguments),
        environment={"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"},
        max_total_tokens=POOL,
        context_length=4096,
        chunked_prefill_size=256,
    ) as client:
        yield client


def whole_pool(state: dict[str, Any]) -> bool:
    pool = state["pool"]
    return pool["free_slots"] + pool["exact_slots"] + pool["span_slots"] == POOL


def test_spans_that_keep_every_token_change_no_output_though_requests_are_retracted(client: Client):
    """Together, in chunks, behind spans, with retractions and overlap scheduling: as alone and exact."""
    assert client.http.get("/server_info").json()["disable_overlap_schedule"] is False
    n = 320
    docs = [document(client, n, seed) for seed in (1, 2)]
    long_tail = document(client, 400, seed=30)  # two chunks behind the span
    prompts = [doc + tail for doc in docs for tail in [*distinct_tails(client, 3), long_tail]]
    client.flush()
    exact = [client.generate(p, {"mode": "exact"}, 24) for p in prompts]
    client.flush()
    for doc in docs:
        client.generate([*doc, 7], {"prefix_end_tokens": n, "forced": "all"}, 1)
    assert client.settled_state()["num_spans"] == 2
    together = client.together([(p, {"mode": "prefer_compressed"}, 24) for p in prompts])
    assert [a.output_ids for a in together] == [a.output_ids for a in exact]
    assert [a.served["span_tokens"] for a in together] == [n] * 8
    assert whole_pool(client.settled_state())
    log = (client.folder / "server.log").read_text()
    assert re.search(r"Testing retraction\. #retracted_reqs: [1-9]", log)


def test_chunked_prefill_across_a_compressed_span_and_the_first_token_behind_it(client: Client):
    """A compressed span behind which four chunks follow gives what the span gives in one piece: the same
    request, once more, is served the span and what the first left behind it."""
    client.flush()
    n = 512
    doc, tail = document(client, n, seed=3), document(client, 900, seed=31)
    client.generate([*doc, 5], {"prefix_end_tokens": n}, 1)
    client.settled_state()
    first = client.generate(doc + tail, None, 12)
    again = client.generate(doc + tail, None, 12)
    assert (first.served["span_tokens"], first.served["span_slots"]) == (n, 128)
    assert (again.served["span_tokens"], again.cached_tokens) == (n, (n + 900 - 1) // 16 * 16)
    assert first.output_ids == again.output_ids
    client.settled_state()


def test_priorities_and_preemption_leave_every_answer_right(client: Client):
    client.flush()
    n = 320
    doc = document(client, n, seed=4)
    tails = distinct_tails(client, 12)
    exact = [client.generate(doc + tail, {"mode": "exact"}, 16) for tail in tails]
    client.flush()
    client.generate([*doc, 7], {"prefix_end_tokens": n, "forced": "all"}, 1)
    client.settled_state()
    answers: list[Any] = [None] * len(tails)

    def ask(i: int) -> None:
        answers[i] = client.generate(doc + tails[i], None, 16, priority=10 if i >= 8 else 0)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(tails))]
    for thread in threads:
        thread.start()
        time.sleep(0.02)
    for thread in threads:
        thread.join()
    assert [a.output_ids for a in answers] == [a.output_ids for a in exact]
    assert all(a.served["span_tokens"] == n for a in answers)
    assert whole_pool(client.settled_state())


NAMESPACES: list[dict[str, Any]] = [
    {},
    {"extra_key": "x"},
    {"cache_salt": "s"},
    {"lora_path": "a"},
    {"lora_path": "b"},
]


def test_a_span_is_hit_inside_its_namespace_and_missed_across(client: Client):
    client.flush()
    n = 320
    doc = document(client, n, seed=5)
    tails = distinct_tails(client, 3)
    for made, namespace in enumerate(NAMESPACES, 1):
        cold = client.generate(doc + tails[0], {"prefix_end_tokens": n}, **namespace)
        assert cold.cached_tokens == 0, namespace
        assert client.settled_state()["num_spans"] == made
        warm = client.generate(doc + tails[1], None, **namespace)
        assert warm.served["span_tokens"] == n, namespace
    # An adapter's spans are made with the adapter: each serves as well as the base model's.
    assert {round(s["quality"], 1) for s in client.state()["spans"]} != {0.0}


def test_budgets_per_head_in_pages(client: Client):
    """Packed spans change no output, and a compressed one keeps as many whole pages as an even one."""
    client.flush()
    n = 320
    doc = document(client, n, seed=9)
    tails = distinct_tails(client, 3)
    exact = [client.generate(doc + tail, {"mode": "exact"}, 12).output_ids for tail in tails]
    client.flush()
    client.generate([*doc, 7], {"prefix_end_tokens": n, "forced": "packed"}, 1)
    client.settled_state()
    packed = client.together([(doc + tail, None, 12) for tail in tails])
    assert [a.output_ids for a in packed] == exact
    assert [a.served["span_slots"] for a in packed] == [n] * 3
    slots = {}
    for profile in ("paper", "per_head"):
        client.flush()
        client.generate(doc + tails[0], {"prefix_end_tokens": n, "profile": profile})
        state = client.settled_state()
        slots[profile] = state["pool"]
        assert [(s["profile"], s["slots"]) for s in state["spans"]] == [(profile, n // 4)]
    assert slots["per_head"] == slots["paper"]
    served = client.together([(doc + tail, None, 12) for tail in tails])
    assert [a.served["profile"] for a in served] == ["per_head"] * 3
    client.settled_state()


def test_a_probe_uses_the_adapter_that_computed_the_prefix(client: Client):
    """Every query of a LoRA request's probe equals the one its prefill computed."""
    client.flush()
    n = 320
    client.flag("queries")
    doc = document(client, n, seed=6)
    client.generate(doc + distinct_tails(client, 1)[0], {"prefix_end_tokens": n}, lora_path="a")
    client.settled_state()
    (client.folder / "queries").unlink()
    rows = [json.loads(line) for line in (client.folder / "queries.jsonl").read_text().splitlines()]
    assert [row["layer"] for row in rows] == [0, 1, 2, 3]
    assert max(row["max_abs_difference"] / row["max_abs"] for row in rows) < 1e-4


def test_a_reloaded_adapter_does_not_see_the_old_ones_spans(client: Client, adapters: dict[str, Path]):
    client.flush()
    n = 320
    doc = document(client, n, seed=7)
    first, second, third = distinct_tails(client, 3)
    client.generate(doc + first, {"prefix_end_tokens": n}, lora_path="b")
    client.settled_state()
    assert client.generate(doc + second, None, lora_path="b").served["span_tokens"] == n
    client.settled_state()
    for route, body in (
        ("/unload_lora_adapter", {"lora_name": "b"}),
        ("/load_lora_adapter", {"lora_name": "b", "lora_path": str(adapters["b"])}),
    ):
        assert client.http.post(route, json=body).status_code == 200
    answer = client.generate(doc + third, None, lora_path="b")
    assert (answer.cached_tokens, answer.served["span_tokens"]) == (0, 0)
    client.settled_state()


def test_spans_of_older_weights_are_out_of_reach(client: Client, tiny_model: Path):
    client.flush()
    n = 320
    doc = document(client, n, seed=8)
    first, second = distinct_tails(client, 2)
    client.generate(doc + first, {"prefix_end_tokens": n})
    before = client.settled_state()
    assert before["num_spans"] == 1
    body = {"model_path": str(tiny_model), "flush_cache": False, "weight_version": "2"}
    response = client.http.post("/update_weights_from_disk", json=body)
    assert response.status_code == 200, response.text
    after = client.settled_state()
    assert after["num_spans"] == 0
    assert after["counters"]["spans_outdated"] == before["counters"]["spans_outdated"] + 1
    assert client.generate(doc + second).cached_tokens == 0
    assert whole_pool(client.settled_state())


def test_samples_of_one_request_are_one_request(client: Client):
    client.flush()
    doc = document(client, 640, seed=9)
    first, second = distinct_tails(client, 2)
    params = {"temperature": 1.0, "max_new_tokens": 4, "ignore_eos": True, "n": 3}

    def sample(tail: list[int]) -> list[dict[str, Any]]:
        response = client.http.post("/generate", json={"input_ids": doc + tail, "sampling_params": params})
        assert response.status_code == 200, response.text
        answers: list[dict[str, Any]] = response.json()
        return answers

    assert len(sample(first)) == 3
    assert client.settled_state()["num_spans"] == 0  # three samples reuse nothing of another request
    sample(second)
    (span,) = client.settled_state()["spans"]  # the second request reused the document
    assert 600 < span["tokens"] < 640
    served = [a["meta_info"]["grkv"][0]["span_tokens"] for a in sample([9, *second])]
    assert served == [span["tokens"]] * 3
    client.settled_state()


def test_input_logprobs_decide_how_far_a_match_may_reach(client: Client):
    client.flush()
    n = 320
    doc, tail = document(client, n, seed=10), distinct_tails(client, 1)[0]
    client.generate([*doc, 5], {"prefix_end_tokens": n}, 1)
    client.settled_state()

    def ask(start: int) -> tuple[int, int, int]:
        answer = client.post(
            doc + tail, {"mode": "prefer_compressed"}, 4, return_logprob=True, logprob_start_len=start
        )
        assert answer.status_code == 200, answer.text
        meta = answer.json()["meta_info"]
        logprobs = [entry[0] for entry in meta["input_token_logprobs"][1:]]
        assert all(math.isfinite(value) for value in logprobs)
        return meta["cached_tokens"], meta["grkv"][0]["span_tokens"], len(logprobs)

    assert ask(n) == (n, n, len(tail) - 1)
    assert ask(0) == (0, 0, n + len(tail) - 1)  # every logit is wanted: nothing may be skipped
    client.settled_state()


def test_abort_in_mid_prefill_and_a_client_that_hangs_up(client: Client):
    client.flush()
    doc = document(client, 2500, seed=11)
    before = client.settled_state()["counters"]["compressions_started"]
    body = {
        "input_ids": doc,
        "sampling_params": {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True,
                            "custom_params": {"grkv": {"prefix_end_tokens": 2000}}},
        "rid": "to-be-aborted",
    }  # fmt: skip
    thread = threading.Thread(target=lambda: client.http.post("/generate", json=body))
    thread.start()
    time.sleep(0.15)
    assert client.http.post("/abort_request", json={"rid": "to-be-aborted"}).status_code == 200
    thread.join()
    with client.http.stream(
        "POST", "/generate", json={**body, "rid": "hangs-up", "stream": True}
    ) as response:
        next(response.iter_lines())
    state = client.settled_state()
    assert whole_pool(state)
    assert state["pool"]["span_slots"] == 0 or state["counters"]["compressions_started"] > before
    answer = client.generate(doc[:600], None)
    assert len(answer.output_ids) == 8
    client.settled_state()


def test_requests_that_arrive_together_share_one_prefix_and_one_compression(client: Client):
    client.flush()
    n = 640
    doc = document(client, n, seed=12)
    done = client.settled_state()["counters"]["compressions_done"]
    calls = [(doc + tail, {"prefix_end_tokens": n}, 12) for tail in distinct_tails(client, 6)]
    answers = client.together(calls)
    assert all(len(a.output_ids) == 12 for a in answers)
    state = client.settled_state()
    assert state["counters"]["compressions_done"] == done + 1
    (span,) = state["spans"]
    assert (span["tokens"], span["slots"]) == (n, 160)
    assert whole_pool(state)


def test_flush_in_the_middle_of_a_compression(client: Client):
    client.flush()
    n = 640
    doc = document(client, n, seed=13)
    first, second = distinct_tails(client, 2)
    with client.slow_layers():
        client.generate(doc + first, {"prefix_end_tokens": n})
        deadline = time.monotonic() + 20
        while client.state()["pool"]["in_work_slots"] == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        state = client.state()
        assert state["pool"]["in_work_slots"] == 160
        assert client.http.post("/flush_cache").status_code == 200
    state = client.settled_state()
    assert state["pool"]["free_slots"] == POOL
    assert client.generate(doc + second).cached_tokens == 0
    client.settled_state()


def test_a_path_that_is_split_while_it_is_compressed(client: Client):
    client.flush()
    n = 640
    doc = document(client, n, seed=14)
    first, second = distinct_tails(client, 2)
    with client.slow_layers():
        client.generate(doc + first, {"prefix_end_tokens": n})
        answer = client.generate(doc[:400] + second)  # arrives between two steps, diverges inside
        assert answer.cached_tokens == 400
    state = client.settled_state()
    assert (n, 160) in [(span["tokens"], span["slots"]) for span in state["spans"]]
    assert client.generate(doc + second).served["span_tokens"] == n
    client.settled_state()


@pytest.mark.parametrize(
    ("flag", "layer", "reason"),
    [
        ("no_room", 0, "no_room"),
        ("probe", 0, "exception"),
        ("raise", 1, "exception"),
        ("raise", 4, "exception"),
        ("nan", 2, "non_finite"),
    ],
)
def test_faults_leave_the_full_prefix_serving(client: Client, flag: str, layer: int, reason: str):
    client.flush()
    n = 512
    doc = document(client, n, seed=15)
    first, second = distinct_tails(client, 2)
    reference = [client.generate(doc + tail, {"mode": "exact"}) for tail in (first, second)]
    client.flush()
    before = client.settled_state()["counters"]["compressions_failed"].get(reason, 0)
    path = client.flag(flag, layer)
    answers = [client.generate(doc + first, {"prefix_end_tokens": n})]
    state = client.settled_state()
    assert not path.exists(), "the fault was not injected"
    assert state["counters"]["compressions_failed"][reason] == before + 1
    assert state["pool"]["span_slots"] == 0
    answers.append(client.generate(doc + second))
    assert answers[1].cached_tokens == n
    assert [a.output_ids for a in answers] == [a.output_ids for a in reference]
    assert whole_pool(client.settled_state())


def test_the_price_of_asking_for_exact_is_told(client: Client):
    client.flush()
    n = 512
    doc = document(client, n, seed=16)
    tails = distinct_tails(client, 4)
    client.generate(doc + tails[0], {"prefix_end_tokens": n})
    client.settled_state()
    assert client.generate(doc + tails[1]).served["reprefilled_tokens"] == 0
    assert client.generate(doc + tails[2], {"mode": "exact"}).served["reprefilled_tokens"] == n
    # The exact copy is back: asking again costs nothing.
    assert client.generate(doc + tails[3], {"mode": "exact"}).served["reprefilled_tokens"] == 0
    client.settled_state()


def test_pin_list_delete_and_expire(client: Client):
    client.flush()
    n = 512
    docs = {seed: document(client, n, seed) for seed in (17, 18, 19)}
    first, second = distinct_tails(client, 2)
    client.generate(docs[17] + first, {"prefix_end_tokens": n, "pin": True})
    client.generate(docs[18] + first, {"prefix_end_tokens": n, "ttl_s": 1.0})
    client.generate(docs[19] + first, {"prefix_end_tokens": n}, cache_salt="tenant")
    state = client.settled_state()
    assert state["pool"]["pinned_slots"] == 128
    assert {(s["pinned"], s["ttl_s"], s["namespace"] is None) for s in state["spans"]} == {
        (True, None, True),
        (False, 1.0, True),
        (False, None, False),
    }
    assert client.http.get("/grkv/state").json()[0]["num_spans"] == 3
    time.sleep(1.5)
    assert client.settled_state()["num_spans"] == 2
    assert client.generate(docs[18] + second).served["span_tokens"] == 0

    assert client.command(action="delete", cache_salt="tenant").status_code == 200
    assert client.generate(docs[19] + second, None, cache_salt="tenant").cached_tokens == 0

    (pinned,) = [s for s in client.settled_state()["spans"] if s["pinned"]]
    sha = pinned["tokens_sha256"]
    assert client.command(action="unpin", tokens_sha256=sha).status_code == 200
    assert client.settled_state()["pool"]["pinned_slots"] == 0
    assert client.command(action="delete", tokens_sha256=sha).status_code == 200
    assert client.generate(docs[17] + second).cached_tokens == 0
    assert client.command(action="delete", tokens_sha256=sha).status_code == 404
    bad = client.command(action="drop")
    assert bad.status_code == 400
    assert "Input should be 'delete', 'pin' or 'unpin'" in bad.text
    assert whole_pool(client.settled_state())


def test_a_flood_leaves_pinned_spans_and_never_wedges_the_pool(client: Client):
    client.flush()
    n = 512
    pinned = document(client, n, seed=40)
    first, second = distinct_tails(client, 2)
    client.generate(pinned + first, {"prefix_end_tokens": n, "pin": True})
    client.settled_state()
    refused = client.state()["counters"]["pins_refused"]
    # Fifteen documents of 1000 tokens through a pool of 4096 slots, each asking for a pin.
    calls = [
        (document(client, 1000, seed) + first, {"prefix_end_tokens": 992, "pin": True}, 4)
        for seed in range(41, 56)
    ]
    for start in range(0, len(calls), 2):
        answers = client.together(calls[start : start + 2])
        assert all(len(a.output_ids) == 4 for a in answers)
    state = client.settled_state()
    assert client.generate(pinned + second).served["span_tokens"] == n
    assert state["pool"]["pinned_slots"] <= POOL / 4
    assert state["counters"]["pins_refused"] > refused
    # One request that needs nearly the whole pool: pins give way before it is refused.
    huge = document(client, 3900, seed=60)
    assert len(client.generate(huge, {"mode": "exact"}, 4).output_ids) == 4
    assert whole_pool(client.settled_state())


def test_the_cache_report_counts_what_a_span_serves(client: Client):
    client.flush()
    n = 512
    doc = document(client, n, seed=61)
    client.generate([*doc, 5], {"prefix_end_tokens": n}, 1)
    client.settled_state()
    body = {"model": "default", "prompt": [*doc, 6, 7], "max_tokens": 2, "temperature": 0}
    usage = client.http.post("/v1/completions", json=body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == n


def metric(client: Client, name: str) -> float:
    """Sum of a metric's samples on SGLang's own endpoint."""
    lines = client.http.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def test_the_caches_metrics_are_on_sglangs_endpoint(client: Client):
    """Every counter of the state, and the sizes, once they were published (at most a second later)."""
    client.flush()
    n = 512
    client.generate([*document(client, n, seed=70), 5], {"prefix_end_tokens": n}, 1)
    client.settled_state()
    time.sleep(2.5)
    counters = client.settled_state()["counters"]
    for name in ("span_hits", "spans_made", "compressions_failed"):
        assert metric(client, f"sglang:grkv_{name}_total") == sum(counters[name].values()), name
    for name in ("span_tokens_served", "reprefilled_tokens", "compressions_started", "deleted_slots"):
        assert metric(client, f"sglang:grkv_{name}_total") == counters[name], name
    assert metric(client, "sglang:grkv_compression_seconds_count") == counters["compressions_done"]
    assert metric(client, "sglang:grkv_span_quality_count") == counters["compressions_done"]
    assert metric(client, "sglang:grkv_spans{") == 1
    assert metric(client, "sglang:grkv_span_slots{") == 128
    assert metric(client, "sglang:grkv_saved_slots{") == 384


def test_sglangs_own_metrics_count_tokens_from_spans_and_slots_in_use(client: Client):
    client.flush()
    n = 512
    doc = document(client, n, seed=62)
    client.generate([*doc, 5], {"prefix_end_tokens": n}, 1)
    client.settled_state()
    cached = metric(client, "sglang:cached_tokens_total")
    client.generate([*doc, 6, 7], None, 2)
    client.settled_state()
    assert metric(client, "sglang:cached_tokens_total") == cached + n
    evicted = metric(client, "sglang:evicted_tokens_total")
    for seed in range(63, 70):
        client.generate(document(client, 900, seed), {"mode": "exact"}, 1)
    assert metric(client, "sglang:evicted_tokens_total") > evicted
    client.settled_state()


def test_an_unknown_option_is_a_400_on_every_route(client: Client):
    for route, body in (
        ("/generate", {"input_ids": [1, 2, 3], "sampling_params": {"custom_params": {"grkv": {"x": 1}}}}),
        ("/v1/completions", {"model": "m", "prompt": "a b", "custom_params": {"grkv": {"pin": True}}}),
    ):
        response: httpx.Response = client.http.post(route, json=body)
        assert response.status_code == 400, response.text
        assert "custom_params.grkv" in response.text


def test_nothing_failed_but_what_was_meant_to(client: Client):
    counters = client.settled_state()["counters"]
    assert counters["compressions_failed"].keys() <= KNOWN_FAILURES | {"exception", "non_finite"}
    assert counters["compressions_failed"]["exception"] == 3
    assert counters["compressions_failed"]["non_finite"] == 1
