"""The demo's parts that need no server: documents, prompts, client, statistics, result, report."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from rich.console import Console

from grkv_sglang.client.state import GrkvState, spans_of, tokens_sha256
from grkv_sglang.demo import identity, overhead
from grkv_sglang.demo.client import ClientError, Generation, SglangClient
from grkv_sglang.demo.cost import relative_cost
from grkv_sglang.demo.documents import (
    Document,
    chat_prompt,
    common_prefix_length,
    document_prompts,
    load_documents,
)
from grkv_sglang.demo.job import summarise_run
from grkv_sglang.demo.report import print_report, save_plot, shorten
from grkv_sglang.demo.result import (
    Agreement,
    DemoResult,
    DocumentResult,
    EngineRun,
    IdentityResult,
    MemoryChecks,
    NoLongPrefixResult,
    RequestRecord,
    SentinelResult,
    Versions,
    read_json,
    write_json,
)
from grkv_sglang.demo.run import DemoSettings, run_demo, summarise
from grkv_sglang.model import ensure_model
from grkv_sglang.serving import RunningServer, ServerSpec


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ensure_model())


# Documents and prompts


def test_documents_are_long_and_different(tokenizer: Any) -> None:
    documents = load_documents()
    assert len(documents) == 3
    for document in documents:
        tokens = len(tokenizer(document.text)["input_ids"])
        assert 4100 <= tokens <= 4300, document.name
        assert document.text[-1] in ".!?'\"", document.name
        assert len(document.questions) == 4
        first_words = [question.split()[0] for question in document.questions]
        assert len(set(first_words)) == 4, "prompts would share more than the document"
    assert len({document.text for document in documents}) == 3


def test_prompts_share_the_document_and_no_question(tokenizer: Any) -> None:
    for document in load_documents():
        prompts = document_prompts(document, tokenizer)
        shared = tokenizer.decode(prompts.prompts[0][: prompts.prefix_tokens])
        assert shared.endswith(document.text + "\n\nQuestion:"), document.name
        assert prompts.prefix_tokens >= 4000
        for prompt, question in zip(prompts.prompts, document.questions, strict=True):
            rest = tokenizer.decode(prompt[prompts.prefix_tokens :])
            assert rest == f" {question}<|im_end|>\n<|im_start|>assistant\n"


def test_chat_prompt_is_the_templates_own_tokens(tokenizer: Any) -> None:
    prompt = chat_prompt("A text.", "Why?", tokenizer)
    messages = [
        {"role": "system", "content": "You answer questions about a document in one or two sentences."},
        {"role": "user", "content": "A text.\n\nQuestion: Why?"},
    ]
    assert prompt == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


@pytest.mark.parametrize(
    ("sequences", "expected"),
    [
        ([[1, 2, 3], [1, 2, 4]], 2),
        ([[1, 2, 3], [1, 2, 4], [1, 5]], 1),
        ([[1, 2], [1, 2, 3]], 2),
        ([[1, 2], [1, 2]], 2),
        ([[1], [2]], 0),
        ([[], [1]], 0),
    ],
)
def test_common_prefix_length(sequences: list[list[int]], expected: int) -> None:
    assert common_prefix_length(sequences) == expected


def test_common_prefix_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least two"):
        common_prefix_length([[1, 2]])


def test_identity_prompts_share_exactly_their_prefix(tokenizer: Any) -> None:
    groups = identity.build_groups(load_documents(), tokenizer)
    assert [len(group.prefix) for group in groups] == [300, 360, 430, 500]
    assert [len(group.prompts) for group in groups] == [5, 5, 5, 5]
    for group in groups:
        assert common_prefix_length(group.prompts) == len(group.prefix)
        assert all(prompt[: len(group.prefix)] == group.prefix for prompt in group.prompts)
    firsts = [group.prefix[0] for group in groups]
    assert len(set(firsts)) == 4, "prefixes would share tokens"
    assert identity.DUMMY_TOKENS[0] not in firsts


def test_identity_refuses_short_documents(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="only"):
        identity.build_groups([Document("short", "Too short.", ("Why?",))], tokenizer)


def test_bursts_are_distinct(tokenizer: Any) -> None:
    bursts = overhead.build_bursts(load_documents(), tokenizer, 26)
    prompts = [prompt for burst in bursts for prompt in burst]
    assert len(prompts) == len(set(prompts)) == 26 * 4
    assert {len(prompt) for prompt in prompts} == {60}


def test_bursts_need_enough_text(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="need 4000 prompts"):
        overhead.build_bursts(load_documents(), tokenizer, 1000)


# Statistics


def test_relative_cost_by_hand() -> None:
    """Ratios 1.1, 1.0, 1.2: logs 0.0953, 0, 0.1823; t(0.95, 2) = 2.919986."""
    cost = relative_cost([1.1, 3.0, 2.4], [1.0, 3.0, 2.0])
    mean = (math.log(1.1) + math.log(1.2)) / 3
    assert cost.mean == pytest.approx(math.exp(mean) - 1)
    assert cost.median == pytest.approx(0.1)
    assert cost.upper_95 == pytest.approx(0.27926, abs=1e-5)


def test_relative_cost_of_equal_times_is_zero() -> None:
    cost = relative_cost([2.0, 3.0], [2.0, 3.0])
    assert (cost.mean, cost.median, cost.upper_95) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("times", "reference", "message"),
    [([1.0], [1.0], "two or more"), ([1.0, 2.0], [1.0], "two or more"), ([1.0, 0.0], [1.0, 1.0], "positive")],
)
def test_relative_cost_refuses(times: list[float], reference: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        relative_cost(times, reference)


# The plugin's state


def span_state(**changes: Any) -> dict[str, Any]:
    ids = list(range(10))
    state = {
        "start_tokens": 0,
        "end_tokens": 10,
        "tokens": 10,
        "slots": 4,
        "budget": 0.4,
        "profile": "default",
        "quality": 0.9,
        "error_before": 0.2,
        "error_after": 0.1,
        "hits": 3,
        "probe_s": 0.1,
        "pass_s": 0.2,
        "select_s": 0.2,
        "regress_s": 0.3,
        "copy_s": 0.4,
        "compress_s": 1.0,
        "twin_freed": True,
        "age_s": 5.0,
        "pinned": False,
        "ttl_s": None,
        "reason": "explicit",
        "generation": 0,
        "namespace": None,
        "tokens_sha256": hashlib.sha256(struct.pack("<10q", *ids)).hexdigest(),
    }
    return state | changes


def grkv_state(*spans: dict[str, Any]) -> dict[str, Any]:
    return {
        "config": {"budget": 0.1},
        "pool": {
            "total_slots": 100,
            "free_slots": 90,
            "exact_slots": 6,
            "span_slots": 4,
            "in_work_slots": 0,
            "pinned_slots": 0,
        },
        "counters": {
            "compressions_started": 1,
            "compressions_done": 1,
            "compressions_failed": {},
            "compressions_skipped": {"too_short": 2},
            "span_hits": {"prefer_compressed": 3},
            "span_tokens_served": 30,
            "spans_made": {"explicit": 1},
            "reprefilled_tokens": 0,
            "twins_freed": 1,
            "spans_superseded": 0,
            "spans_expired": 0,
            "spans_outdated": 0,
            "pins_refused": 0,
            "deleted_slots": 0,
            "spans_evicted": 0,
            "jobs_waiting": 0,
        },
        "num_spans": len(spans),
        "spans": list(spans),
        "census": {"ok": True, "checks": 5, "last_error": None},
    }


def test_tokens_sha256_is_of_little_endian_int64() -> None:
    assert tokens_sha256([1, -2, 300000]) == hashlib.sha256(struct.pack("<3q", 1, -2, 300000)).hexdigest()


def test_spans_of_a_path_in_order() -> None:
    later = span_state(start_tokens=10, end_tokens=12, tokens_sha256=tokens_sha256(range(12)))
    elsewhere = span_state(tokens_sha256=tokens_sha256(range(1, 11)))
    state = GrkvState.model_validate(grkv_state(later, elsewhere, span_state()))
    assert [span.end_tokens for span in spans_of(state, range(20))] == [10, 12]
    assert [span.end_tokens for span in spans_of(state, range(11))] == [10]
    assert spans_of(state, range(9)) == []


def test_state_without_a_promised_field_is_an_error() -> None:
    state = grkv_state()
    del state["census"]
    with pytest.raises(ValidationError, match="census"):
        GrkvState.model_validate(state)


# The client


def answer(text: str, ids: list[int], **meta: Any) -> dict[str, Any]:
    meta_info = {"prompt_tokens": 9, "cached_tokens": 4, "completion_tokens": len(ids)} | meta
    return {"text": text, "output_ids": ids, "meta_info": meta_info}


def client_of(handler: Any) -> SglangClient:
    return SglangClient("http://server", httpx.MockTransport(handler))


def test_stream_shows_pieces_and_reads_the_last_event() -> None:
    sent: dict[str, Any] = {}
    report = {"span_tokens": 8, "span_slots": 2}
    events = [answer("Pa", [1]), answer("Paris", [1, 2]), answer("Paris.", [1, 2, 3], grkv=[report])]

    def handler(request: httpx.Request) -> httpx.Response:
        sent.update(json.loads(request.content))
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        return httpx.Response(200, text="".join([*lines, "data: [DONE]\n\n"]))

    pieces: list[str] = []
    with client_of(handler) as client:
        options = {"prefix_end_tokens": 3}
        generation = client.stream([7, 8, 9], 5, options=options, on_text=pieces.append)
    assert pieces == ["Pa", "ris", "."]
    assert generation.text == "Paris."
    assert generation.output_ids == (1, 2, 3)
    assert (generation.prompt_tokens, generation.cached_tokens) == (9, 4)
    assert generation.grkv == report
    assert 0 < generation.ttft_s <= generation.total_s
    assert sent == {
        "input_ids": [7, 8, 9],
        "stream": True,
        "sampling_params": {
            "temperature": 0.0,
            "max_new_tokens": 5,
            "ignore_eos": False,
            "custom_params": {"grkv": {"prefix_end_tokens": 3}},
        },
    }


def test_batch_is_one_request() -> None:
    bodies: list[dict[str, Any]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return httpx.Response(200, json=[answer("a", [1]), answer("b", [2])])

    with client_of(handler) as client:
        generations = client.generate([[1, 2], [3, 4]], 1)
    assert [g.output_ids for g in generations] == [(1,), (2,)]
    assert [g.grkv for g in generations] == [None, None]
    (body,) = bodies
    assert body["input_ids"] == [[1, 2], [3, 4]]
    assert "custom_params" not in body["sampling_params"]


@pytest.mark.parametrize("method", ["stream", "generate"])
def test_refused_request_carries_the_servers_words(method: str) -> None:
    with client_of(lambda _: httpx.Response(400, text="budget must be at most 1")) as client:
        prompt: Any = [1] if method == "stream" else [[1]]
        with pytest.raises(ClientError, match="budget must be at most 1"):
            getattr(client, method)(prompt, 1)


def test_error_inside_a_stream_is_raised() -> None:
    text = 'data: {"error": {"message": "too long"}}\n\ndata: [DONE]\n\n'
    with (
        client_of(lambda _: httpx.Response(200, text=text)) as client,
        pytest.raises(ClientError, match="too long"),
    ):
        client.stream([1], 1)


def test_wait_for_span_returns_the_one_that_ends_there() -> None:
    info = {"internal_states": [{"grkv": grkv_state(span_state())}]}
    with client_of(lambda _: httpx.Response(200, json=info)) as client:
        assert client.wait_for_span(range(10)).slots == 4


def test_wait_for_span_tells_why_none_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grkv_sglang.demo.client.COMPRESSION_TIMEOUT_S", 0.0)
    info = {"internal_states": [{"grkv": grkv_state(span_state())}]}
    with (
        client_of(lambda _: httpx.Response(200, json=info)) as client,
        pytest.raises(ClientError, match="too_short"),
    ):
        client.wait_for_span(range(11))


def test_server_without_the_plugin_has_no_state() -> None:
    with (
        client_of(lambda _: httpx.Response(200, json={"internal_states": [{}]})) as client,
        pytest.raises(ClientError, match="no 'grkv'"),
    ):
        client.grkv_state()


# Identity


def generation(ids: list[int], span_tokens: int = 0, span_slots: int = 0) -> Generation:
    report = {"span_tokens": span_tokens, "span_slots": span_slots} if span_tokens else None
    return Generation("", tuple(ids), 9, 0, 0.1, 0.2, report)


def test_agreement_names_prompt_and_place() -> None:
    result = identity.agreement([[1, 2, 3], [1, 2], [5]], [[1, 2, 3], [1, 9], [5, 6]])
    assert result == Agreement(prompts=3, equal=1, differing_prompts=[1, 2], first_difference_at=[1, 1])


def test_agreement_of_different_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        identity.agreement([[1]], [[1], [2]])


def test_identity_result_counts_spans_and_sentinels() -> None:
    exact = [generation([1]), generation([2])]
    result = identity.identity_result(
        groups=[identity.PrefixGroup((1,), ((1, 2), (1, 3)))],
        stock=exact,
        stock_batched=[generation([1]), generation([3])],
        off=exact,
        grkv=[generation([1]), generation([2], span_tokens=300, span_slots=300)],
        sentinels=[generation([1], 16, 0), generation([9], 316, 300)],
    )
    assert result.versus_off.equal == 2
    assert result.served_from_span == 1
    assert result.stock_batched_versus_sequential.differing_prompts == [1]
    assert result.sentinels.served_from_span == 1
    assert result.sentinels.sentinel_rows == 2
    assert result.sentinels.versus_off.equal == 1


# Results and report


def request(ttft_s: float, cached: int) -> RequestRecord:
    return RequestRecord(
        question="Who?",
        answer="Nobody [yet].",
        prompt_tokens=1010,
        cached_tokens=cached,
        output_tokens=3,
        ttft_s=ttft_s,
        total_s=ttft_s + 1,
        document_slots=1000,
    )


def engine_run(cold: float, *warm: float) -> EngineRun:
    return summarise_run([request(cold, 0), *(request(ttft, 1000) for ttft in warm)], 1000)


def document_result(name: str, compress_s: float, slots: int) -> DocumentResult:
    grkv = engine_run(10.0, 0.5, 0.5)
    return DocumentResult(
        compressions=1,
        compressed_slots=slots,
        twin_freed=True,
        budget=0.1,
        profile="default",
        quality=0.9,
        error_before=0.2,
        error_after=0.1,
        compress_s=compress_s,
        probe_s=0.1,
        pass_s=0.2,
        select_s=0.2,
        regress_s=0.3,
        copy_s=0.0,
        span_hits=2,
        free_slots_before=9000,
        free_slots_after_compression=8940,
        free_slots_after=8900,
        name=name,
        tokens=1000,
        full_slots=1000,
        reprefilled_document_tokens_warm=grkv.reprefilled_document_tokens_warm,
        stock=engine_run(10.0, 5.0, 5.0),
        off=engine_run(8.0, 1.0, 2.0),
        grkv=grkv,
    )


@pytest.fixture
def result() -> DemoResult:
    documents = [document_result("one", 1.0, 100), document_result("two", 2.0, 120)]
    all_equal = Agreement(prompts=20, equal=20, differing_prompts=[], first_difference_at=[])
    return DemoResult(
        model="small",
        seed=0,
        quick=False,
        budget=0.1,
        profile="default",
        pool_tokens=16384,
        new_tokens=48,
        server_start_s={"stock": 40.0},
        versions=Versions(
            grkv_sglang="0.1.0",
            sglang="0.5.23",
            torch="2",
            transformers="5",
            python="3.11",
            platform="Linux",
            device="cpu",
            cpu_count=2,
        ),
        summary=summarise(documents),
        documents=documents,
        identity=IdentityResult(
            prompts=20,
            prefixes=4,
            new_tokens=24,
            versus_off=all_equal,
            served_from_span=16,
            versus_stock=all_equal,
            off_versus_stock=all_equal,
            stock_batched_versus_sequential=all_equal,
            sentinels=SentinelResult(
                dummy_tokens=16, versus_off=all_equal, served_from_span=16, sentinel_rows=20
            ),
        ),
        no_long_prefix=NoLongPrefixResult(
            pairs=2,
            prompts_per_burst=4,
            prompt_tokens=60,
            new_tokens=16,
            mean_cost=0.001,
            median_cost=0.0,
            upper_95=0.01,
            off_s=[1.0, 1.0],
            grkv_s=[1.0, 1.002],
        ),
        memory_checks=MemoryChecks(
            switches={"GRKV_CENSUS": "true"}, census_ok=True, census_checks=7, census_last_error=None
        ),
    )


def test_warm_requests_that_recompute_the_document_are_counted() -> None:
    run = summarise_run([request(9.0, 0), request(1.0, 990), request(2.0, 1005), request(3.0, 0)], 1000)
    assert run.cold_ttft_s == 9.0
    assert run.warm_ttft_s == [1.0, 2.0, 3.0]
    assert run.answers == ["Nobody [yet]."] * 4
    assert run.reprefilled_document_tokens_warm == 10 + 0 + 1000


def test_summary_by_hand(result: DemoResult) -> None:
    summary = result.summary
    assert summary.warm_ttft_ratio_grkv_off == pytest.approx(0.375)  # ratios 0.5, 0.25, 0.5, 0.25
    assert summary.compress_s == 1.5
    assert summary.compress_share_of_grkv_cold_ttft == pytest.approx(0.15)
    assert summary.compress_share_of_off_cold_ttft == pytest.approx(1.5 / 8)
    assert summary.compressed_share == pytest.approx(0.11)
    assert summary.reprefilled_document_tokens_warm == 0


def test_json_round_trip(result: DemoResult, tmp_path: Path) -> None:
    file = tmp_path / "figures" / "demo.json"
    write_json(result, file)
    assert read_json(file) == result
    plain = json.loads(file.read_text())
    assert plain["documents"][0]["grkv"]["warm_ttft_s"] == [0.5, 0.5]
    assert plain["documents"][1]["compressed_slots"] == 120


def test_json_with_an_unknown_field_is_refused(result: DemoResult, tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    file.write_text(json.dumps(json.loads(result.model_dump_json()) | {"speed": 1}))
    with pytest.raises(ValidationError, match="speed"):
        read_json(file)


def test_report_says_the_figures(result: DemoResult) -> None:
    console = Console(width=160, record=True)
    print_report(result, console)
    text = console.export_text()
    assert "Nobody [yet]." in text
    assert "11.0% of their full-size slots" in text
    assert "20 of 20 equal to off" in text
    assert "95% bound +1.00%" in text
    assert "census clean (7 checks)" in text


def test_plot_is_a_png(result: DemoResult, tmp_path: Path) -> None:
    file = tmp_path / "plots" / "demo.png"
    save_plot(result, file)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_shorten() -> None:
    assert shorten("one\n two ", 20) == "one two"
    assert shorten("abcdef", 4) == "abc…"


# The whole run, on a stand-in for SGLang


class StandInServer:
    """Answers the demo's requests as a server would: the output depends on the prompt's end alone."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.seen: list[tuple[int, ...]] = []
        self.spans: dict[tuple[int, ...], int] = {}
        self.done = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/flush_cache":
            self.seen.clear()
            self.spans.clear()
            return httpx.Response(200)
        if request.url.path == "/server_info":
            return httpx.Response(200, json={"internal_states": [{"grkv": self._state()}]})
        body = json.loads(request.content)
        options = body["sampling_params"].get("custom_params", {}).get("grkv")
        assert options is None or self.engine == "grkv"
        if body.get("stream"):
            event = self._answer(body["input_ids"], options)
            return httpx.Response(200, text=f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n")
        return httpx.Response(200, json=[self._answer(ids, options) for ids in body["input_ids"]])

    def _answer(self, ids: list[int], options: dict[str, Any] | None) -> dict[str, Any]:
        prompt = tuple(ids)
        used = [span for span in self.spans if prompt[: len(span)] == span]
        tokens = max((len(span) for span in used), default=0)
        slots = sum(self.spans[span] for span in used)
        cached = max((common_prefix_length([prompt, old]) for old in self.seen), default=0)
        self.seen.append(prompt)
        if options is not None:
            end = options["prefix_end_tokens"]
            keep = {"all": 1.0, "none": 0.0, None: 0.1}[options.get("forced")]
            self.spans[prompt[:end]] = round((end - tokens) * keep)
            self.done += 1
        report = {"grkv": [{"span_tokens": tokens, "span_slots": slots}]} if self.engine == "grkv" else {}
        return answer("text", [*prompt[-3:]], cached_tokens=cached, **report)

    def _state(self) -> dict[str, Any]:
        spans = [
            span_state(end_tokens=len(ids), tokens=len(ids), slots=slots, tokens_sha256=tokens_sha256(ids))
            for ids, slots in self.spans.items()
        ]
        state = grkv_state(*spans)
        state["counters"]["compressions_done"] = self.done
        return state


def test_run_demo_asks_all_engines_and_assembles(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[ServerSpec] = []

    @contextmanager
    def connected(spec: ServerSpec, console: Console) -> Iterator[tuple[RunningServer, SglangClient]]:
        started.append(spec)
        with client_of(StandInServer(spec.engine)) as client:
            yield RunningServer(spec, "http://server", 1, 40.0), client

    monkeypatch.setattr("grkv_sglang.demo.run._connected", connected)
    console = Console(width=160, record=True)
    result = run_demo(DemoSettings(ensure_model(), quick=True), console)

    assert [(spec.engine, spec.memory_checks) for spec in started] == [
        *(("stock", True), ("off", True), ("grkv", True)),
        *(("off", False), ("grkv", False)),
    ]
    assert [spec.grkv_config.get("budget") for spec in started] == [None, None, 0.1, None, 0.1]
    assert len({spec.max_total_tokens for spec in started}) == 1
    assert len({spec.log_path for spec in started}) == 5
    (document,) = result.documents
    assert document.compressions == 1
    assert document.compressed_slots == round(document.tokens * 0.1)
    assert document.reprefilled_document_tokens_warm == 0
    assert [r.document_slots for r in document.grkv.requests] == [document.tokens, document.compressed_slots]
    assert [r.document_slots for r in document.off.requests] == [document.tokens] * 2
    assert result.identity.versus_off.equal == result.identity.prompts == 5
    assert result.identity.served_from_span == 4
    assert result.identity.sentinels.served_from_span == 4
    assert result.identity.sentinels.sentinel_rows == 5
    assert result.no_long_prefix.pairs == 5
    assert result.memory_checks.census_ok
    assert "Who is the visitor" in console.export_text()
