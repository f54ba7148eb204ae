"""The serving benchmarks: workload, statistics, records, tables; and one tiny run with two servers."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.serving import (
    bench_serving,
    capacity,
    decode_latency,
    multi_turn,
    shared_documents,
    stats,
)
from benchmarks.serving.__main__ import app
from benchmarks.serving.all import BENCHMARKS
from benchmarks.serving.bench_serving import BenchServingSettings
from benchmarks.serving.capacity import CapacityResult, CapacitySettings
from benchmarks.serving.client import (
    Answer,
    ServingError,
    answer_of,
    closed_loop,
    generate_body,
    open_loop,
    token_gaps,
)
from benchmarks.serving.decode_latency import ByteModel
from benchmarks.serving.engines import (
    EngineChoice,
    EngineError,
    ServerSizes,
    evicted_in,
    in_turn,
    parse_engines,
    server_spec,
)
from benchmarks.serving.options import execute, reference_of
from benchmarks.serving.quality import Quality
from benchmarks.serving.record import RecordError, environment, open_result, save_result
from benchmarks.serving.shared_documents import (
    FullSharedSettings,
    SharedResult,
    SharedSettings,
)
from benchmarks.serving.tables import Table, markdown, rich_table
from benchmarks.serving.workload import (
    Questions,
    Request,
    WorkloadError,
    blocks_of,
    cut_documents,
    last_of_each,
    one_each,
    popularity,
    questions_of,
    request_stream,
)
from tests.benchmarks.serving_results import (
    CAPACITY,
    bench_serving_result,
    capacity_result,
    chat_result,
    decode_result,
    printed_by_sglang,
    request_row,
    shared_result,
    turn_row,
)
from tests.engine.tiny_model import ensure_tiny_model

QUESTIONS = Questions(before=(900, 901), after=(902,))
NO_QUALITY = Quality({}, "")


# Workload


class TestDocuments:
    def test_no_two_start_alike(self):
        text = [1, 2, 3, 4, 5, 6, 7, 8]
        assert cut_documents(text, 2, 4) == [(1, 2, 3, 4), (5, 6, 7, 8)]
        repeated = [5, 5, 5, 6, 5, 5, 7, 5]
        documents = cut_documents(repeated, 3, 4)
        assert documents == [(5, 5, 5, 6), (6, 5, 5, 7), (7, 5, 5, 5)]

    def test_go_on_at_the_beginning(self):
        assert cut_documents([1, 2, 3, 4], 2, 4) == [(1, 2, 3, 4), (3, 4, 1, 2)]

    def test_of_the_shipped_texts(self, tokenizer: Any):
        from benchmarks.texts import text_tokens

        documents = cut_documents(text_tokens(tokenizer, None), 64, 2048)
        assert len({document[0] for document in documents}) == 64
        assert {len(document) for document in documents} == {2048}

    @pytest.mark.parametrize(
        ("text", "count", "tokens", "message"),
        [([1, 2, 3], 1, 4, "longer text"), ([1, 2, 1, 2], 3, 2, "distinct first tokens")],
    )
    def test_refuses(self, text: list[int], count: int, tokens: int, message: str):
        with pytest.raises(WorkloadError, match=message):
            cut_documents(text, count, tokens)

    def test_texts_of_a_folder(self, tmp_path: Path, tokenizer: Any):
        from benchmarks.texts import text_tokens

        (tmp_path / "b.txt").write_text(" world")
        (tmp_path / "a.txt").write_text("hello")
        assert tokenizer.decode(text_tokens(tokenizer, tmp_path)) == "hello world"
        with pytest.raises(ValueError, match=r"\.txt"):
            text_tokens(tokenizer, tmp_path / "none")


class TestPopularity:
    def test_uniform(self):
        assert popularity("uniform", 4, seed=3).tolist() == [0.25] * 4

    def test_zipf_has_one_over_rank(self):
        found = sorted(popularity("zipf", 4, seed=0), reverse=True)
        harmonic = 1 + 1 / 2 + 1 / 3 + 1 / 4
        assert found == pytest.approx([1 / harmonic, 1 / 2 / harmonic, 1 / 3 / harmonic, 1 / 4 / harmonic])

    def test_zipf_ranks_are_dealt_out(self):
        orders = {tuple(np.argsort(popularity("zipf", 32, seed))) for seed in range(3)}
        assert len(orders) == 3

    @pytest.mark.parametrize("kind", ["uniform", "zipf"])
    def test_frequencies_are_those_expected(self, kind: Any):
        """20,000 draws: every frequency within four standard deviations."""
        documents = [tuple(range(20))] * 16
        probabilities = popularity(kind, 16, seed=5)
        count = 20_000
        drawn = Counter(
            r.document for r in request_stream(documents, probabilities, count, QUESTIONS, seed=1)
        )
        for document, p in enumerate(probabilities):
            assert abs(drawn[document] / count - p) < 4 * math.sqrt(p * (1 - p) / count)


class TestStream:
    documents = tuple(tuple(range(100 * n, 100 * n + 50)) for n in range(5))

    def stream(self, seed: int = 7, count: int = 40, rate: float | None = None) -> list[Request]:
        return request_stream(self.documents, popularity("uniform", 5, 0), count, QUESTIONS, seed, rate)

    def test_the_same_for_every_engine(self):
        assert self.stream() == self.stream()
        assert self.stream() != self.stream(seed=8)

    def test_prompts_are_document_and_question(self):
        for number, request in enumerate(self.stream()):
            document = self.documents[request.document]
            assert request.number == number
            assert request.document_tokens == 50
            assert request.prompt[:50] == document
            question = request.prompt[50:]
            assert len(question) == QUESTIONS.tokens == 11
            assert (question[:2], question[-1]) == ((900, 901), 902)
            place = document.index(question[2])
            assert question[2:10] == document[place : place + 8]

    def test_clients_that_wait_have_no_arrival_times(self):
        assert {request.arrival_s for request in self.stream()} == {0.0}

    def test_poisson_arrivals(self):
        arrivals = [request.arrival_s for request in self.stream(count=4000, rate=2.0)]
        gaps = np.diff(arrivals)
        assert min(gaps) >= 0
        assert np.mean(gaps) == pytest.approx(0.5, rel=0.05)
        # Exponential: the standard deviation is the mean.
        assert np.std(gaps) == pytest.approx(0.5, rel=0.08)

    def test_arrivals_do_not_change_what_is_asked(self):
        asked = [(r.document, r.prompt) for r in self.stream()]
        assert asked == [(r.document, r.prompt) for r in self.stream(rate=3.0)]

    def test_one_each(self):
        requests = one_each(self.documents, [3, 1], QUESTIONS, place=5)
        assert [(r.number, r.document) for r in requests] == [(0, 3), (1, 1)]
        assert requests[0].prompt == (*self.documents[3], 900, 901, *range(305, 313), 902)

    def test_blocks_and_the_last_of_each(self):
        requests = [Request(n, d, (), 0) for n, d in enumerate([2, 0, 2, 1, 0])]
        assert [[r.number for r in block] for block in blocks_of(requests, 2)] == [[0, 1], [2, 3], [4]]
        assert [r.number for r in last_of_each(requests)] == [4, 3, 2]

    def test_questions_of_a_tokenizer(self, tokenizer: Any):
        questions = questions_of(tokenizer)
        document = tokenizer("The king keeps the old clock in the tower of the town.")["input_ids"]
        asked = questions.about(document, 0)
        assert len(asked) == questions.tokens
        assert tokenizer.decode(asked).startswith("\n\nQuestion: What is meant where the text says: The king")
        assert tokenizer.decode(asked).endswith("?\nAnswer:")


# Statistics


class TestStats:
    def test_equal_values_have_no_width(self):
        assert stats.mean_interval([3.0, 3.0, 3.0]) == stats.Interval(3.0, 3.0, 3.0)

    def test_mean_is_as_wide_as_the_normal_interval(self):
        values = np.random.default_rng(0).normal(10, 2, 400)
        found = stats.mean_interval(list(values))
        half = 1.96 * values.std() / math.sqrt(400)
        assert found.value == pytest.approx(values.mean())
        assert found.high - found.value == pytest.approx(half, rel=0.1)
        assert found.value - found.low == pytest.approx(half, rel=0.1)

    def test_same_values_same_interval(self):
        values = [1.0, 2.0, 5.0, 9.0]
        assert stats.mean_interval(values) == stats.mean_interval(values)

    def test_pairs_that_differ_by_a_factor_have_no_width(self):
        below = [1.0, 5.0, 20.0]
        above = [2.0, 10.0, 40.0]
        paired = stats.paired_ratio(above, below)
        assert (paired.value, paired.low, paired.high) == pytest.approx((2.0, 2.0, 2.0))
        p95 = stats.paired_percentile_ratio(above, below, 95)
        assert (p95.value, p95.low, p95.high) == pytest.approx((2.0, 2.0, 2.0))
        unpaired = stats.ratio_of_means(above, below)
        assert unpaired.value == pytest.approx(2.0)
        assert unpaired.low < 1 < 4 < unpaired.high

    def test_ratio_of_two_samples_covers_the_truth(self):
        rng = np.random.default_rng(1)
        found = stats.ratio_of_means(list(rng.normal(6, 1, 200)), list(rng.normal(2, 0.5, 200)))
        assert found.low < 3 < found.high
        assert found.high - found.low < 0.5

    def test_percentile(self):
        assert stats.percentile([1.0, 2.0, 3.0, 4.0, 5.0], 50) == 3.0
        assert stats.percentile([0.0, 10.0], 95) == pytest.approx(9.5)

    @pytest.mark.parametrize(
        ("above", "below", "message"),
        [
            ([], [1.0], "at least one"),
            ([1.0], [1.0, 2.0], "one length"),
            ([1.0], [0.0], "not all 0"),
            ([1.0], [-1.0], "not negative"),
        ],
    )
    def test_refuses(self, above: list[float], below: list[float], message: str):
        with pytest.raises(ValueError, match=message):
            stats.paired_ratio(above, below)

    def test_shown(self):
        assert str(stats.Interval(0.2, 0.111, 0.3456)) == "0.20 (0.11–0.35)"
        assert str(stats.Interval(0.0421, 0.0399, 0.05)) == "0.042 (0.040–0.050)"


# Client


def test_gaps_of_an_event_are_shared_by_its_tokens():
    assert token_gaps([(0.5, 1), (0.8, 2), (1.4, 5)]) == pytest.approx((0.3, 0.2, 0.2, 0.2))
    assert token_gaps([(0.5, 1)]) == ()


def test_answer_of_events():
    served = [{"span_tokens": 8, "span_slots": 2}]
    last = {"meta_info": {"prompt_tokens": 12, "cached_tokens": 9, "grkv": served}, "output_ids": [4, 5]}
    answer = answer_of([(0.25, 1), (0.5, 2)], last, 2)
    assert answer == Answer(0.25, 0.5, (0.25,), (4, 5), 12, 9, 8, 2)
    with pytest.raises(ServingError, match="expected 3 tokens, got 2"):
        answer_of([(0.25, 1), (0.5, 2)], last, 3)
    with pytest.raises(ServingError, match="got 0"):
        answer_of([], {}, 3)


def test_body_carries_options_only_where_given():
    plain = generate_body((1, 2), 5)
    assert plain == {
        "input_ids": [1, 2],
        "sampling_params": {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True},
        "stream": True,
    }
    marked = generate_body((1, 2), 5, {"prefix_end_tokens": 1})
    assert marked["sampling_params"]["custom_params"] == {"grkv": {"prefix_end_tokens": 1}}


def requests_at(*arrivals: float) -> list[Request]:
    return [Request(n, n, (n,), 1, arrival) for n, arrival in enumerate(arrivals)]


def an_answer(request: Request) -> Answer:
    return Answer(0.1, 0.2, (0.1,), (request.number,), 2, 1, 0, 0)


def test_closed_loop_keeps_so_many_running():
    running = most = 0
    order = []

    async def send(request: Request) -> Answer:
        nonlocal running, most
        running += 1
        most = max(most, running)
        order.append(request.number)
        await asyncio.sleep(0.02 if request.number == 0 else 0.001)
        running -= 1
        return an_answer(request)

    answers = asyncio.run(closed_loop(requests_at(*[0.0] * 7), 3, send))
    assert most == 3
    assert order == list(range(7))
    assert [answer.output_ids for answer in answers] == [(n,) for n in range(7)]


def test_open_loop_sends_when_it_is_time():
    sent: dict[int, float] = {}

    async def send(request: Request) -> Answer:
        sent[request.number] = asyncio.get_running_loop().time()
        await asyncio.sleep(0.3)
        return an_answer(request)

    answers = asyncio.run(open_loop(requests_at(5.0, 5.1, 5.2), send))
    assert [answer.output_ids for answer in answers] == [(0,), (1,), (2,)]
    assert sent[1] - sent[0] == pytest.approx(0.1, abs=0.05)
    assert sent[2] - sent[0] == pytest.approx(0.2, abs=0.05)


def test_a_failed_request_ends_the_loop():
    async def send(request: Request) -> Answer:
        raise ServingError("refused")

    with pytest.raises(ServingError, match="refused"):
        asyncio.run(closed_loop(requests_at(0.0, 0.0), 2, send))


# Engines


def test_parse_engines():
    found = parse_engines(["stock", "off", "grkv:0.1", "grkv:0.25"])
    assert [(c.engine, c.budget, c.name) for c in found] == [
        ("stock", None, "stock"),
        ("off", None, "off"),
        ("grkv", 0.1, "grkv 0.1"),
        ("grkv", 0.25, "grkv 0.25"),
    ]


@pytest.mark.parametrize(
    "names", [["vllm"], ["grkv"], ["grkv:x"], ["grkv:0"], ["grkv:1.5"], ["off", "off"], []]
)
def test_parse_engines_refuses(names: list[str]):
    with pytest.raises(EngineError):
        parse_engines(names)


def test_reference_is_off_else_stock():
    assert reference_of(["stock", "grkv:0.1", "off"]) == "off"
    assert reference_of(["grkv:0.1", "stock"]) == "stock"
    assert reference_of(["grkv:0.1"]) is None


def test_order_turns_around():
    assert [in_turn("ab", block) for block in range(3)] == [["a", "b"], ["b", "a"], ["a", "b"]]


def test_servers_differ_in_nothing_but_the_engine(tmp_path: Path):
    sizes = ServerSizes(tmp_path / "model", tmp_path, pool_tokens=9000, chunk_tokens=256, seed=3)
    off, grkv = (
        server_spec(choice, sizes, {"triggers": "explicit"}) for choice in parse_engines(["off", "grkv:0.2"])
    )
    assert (off.engine, dict(off.grkv_config)) == ("off", {})
    assert (grkv.engine, dict(grkv.grkv_config)) == ("grkv", {"budget": 0.2, "triggers": "explicit"})
    for field in (
        "model_path",
        "max_total_tokens",
        "chunked_prefill_size",
        "extra_args",
        "random_seed",
        "dtype",
    ):
        assert getattr(off, field) == getattr(grkv, field)
    assert (off.max_total_tokens, off.chunked_prefill_size) == (9000, 256)
    assert off.log_path != grkv.log_path


def test_evicted_slots_out_of_metrics():
    page = (
        "# HELP sglang:evicted_tokens_total x\n# TYPE sglang:evicted_tokens_total counter\n"
        'sglang:evicted_tokens_total{rank="0"} 1500.0\nsglang:evicted_tokens_total{rank="1"} 36.0\n'
        "# TYPE sglang:other gauge\nsglang:other 7.0\n"
    )
    assert evicted_in(page) == 1536
    assert evicted_in("") == 0


# Shared documents


class TestSharedDocuments:
    @pytest.mark.parametrize(
        ("cached", "hit", "again"), [(0, 0, 100), (40, 40, 60), (100, 100, 0), (109, 100, 0)]
    )
    def test_only_cached_document_tokens_are_hits(self, cached: int, hit: int, again: int):
        row = request_row("off", 0, cached=cached, ttft_s=1.0)
        assert (row.hit_tokens, row.prefilled_again) == (hit, again)

    def test_pool_and_what_fits(self):
        settings = SharedSettings()
        assert settings.pool_tokens(24) == 8 * 1792 + 2 * 2 * (24 + 64)
        assert [settings.fits(n) for n in (4, 7, 8, 32)] == [True, True, False, False]
        assert settings.phases(4) == ("uniform",)
        assert settings.phases(32) == ("uniform", "zipf")

    def test_full_mode_reaches_eight_times_the_pool(self):
        full = FullSharedSettings()
        assert full.documents[0] / full.pool_documents == 0.5
        assert full.documents[-1] / full.pool_documents == 8
        assert full.output_tokens >= 64

    def test_missing_parts(self):
        result = shared_result(32, popularities=("uniform", "zipf"))
        assert shared_documents.missing_parts(result) == {32: ["zipf"]}
        result.done.append("32 documents, zipf")
        assert shared_documents.missing_parts(result) == {}

    def test_measured_requests_leave_out_warmup_and_cold(self):
        rows = shared_result().of("off", 16, "uniform")
        assert [row.number for row in rows] == [0, 1, 2, 3]

    def test_measured_table(self):
        measured = shared_documents.tables(shared_result(), NO_QUALITY)[0]
        off, grkv = (dict(zip(measured.columns, row, strict=True)) for row in measured.rows)
        assert (off["documents"], off["engine"], off["popularity"]) == ("16 (2 × pool)", "off", "uniform")
        assert off["TTFT mean, s"].startswith("3.00 (")
        assert off["hit rate"] == "70.0%"  # 2 * 100 + 2 * 40 of 400
        assert off["prefilled again"] == "120"
        assert off["tokens/s"] == "1.0"  # 4 requests, 3 tokens each, 12 s
        assert (off["resident"], off["evicted slots"]) == ("8", "4,321")
        assert grkv["TTFT mean, s"] == "0.50 (0.50–0.50)"
        assert (grkv["hit rate"], grkv["prefilled again"], grkv["tokens/s"]) == ("100.0%", "0", "4.0")
        assert grkv["resident"] == "16"

    def test_ratios_over_requests(self):
        found = shared_documents.ratios(shared_result(), 16, "uniform", "off", "grkv 0.1")
        assert found.ttft.value == pytest.approx(0.5 / 3.0)
        # Between all four requests missed and all four hit.
        assert (found.ttft.low, found.ttft.high) == pytest.approx((0.5 / 5.5, 1.0))
        assert found.itl.value == pytest.approx(0.5)
        assert found.tokens_per_s.value == pytest.approx(4.0)
        assert (found.prefilled_again, found.pairs) == (0.0, 4)

    def test_ratios_over_blocks_where_documents_fit(self):
        found = shared_documents.ratios(shared_result(4), 4, "uniform", "off", "grkv 0.1")
        # Each block of off has one hit and one miss: no width is left.
        assert (found.ttft.value, found.ttft.low, found.ttft.high) == pytest.approx((1 / 6,) * 3)
        assert found.pairs == 2

    def test_ratio_and_cold_tables(self):
        _, ratios, cold = shared_documents.tables(shared_result(), NO_QUALITY)
        assert ratios.title.startswith("Shared documents: beside off")
        (row,) = ratios.rows
        assert row[:3] == ("16", "uniform", "grkv 0.1")
        assert row[-2:] == ("0.000", "4")
        assert cold.rows[0] == ("16", "off", "4.00 (4.00–4.00)", "4.00", "25")

    def test_parts_that_are_not_done_are_not_shown(self):
        result = shared_result()
        result.done.clear()
        assert [table.rows for table in shared_documents.tables(result, NO_QUALITY)] == [(), (), ()]


# Multi-turn


class TestMultiTurn:
    def test_messages_bring_consecutive_pieces(self, tokenizer: Any):
        text = list(range(1000, 1100))
        messages = multi_turn.messages_of(tokenizer, text, users=2, turns=3, tokens=10)
        assert [len(own) for own in messages] == [3, 3]
        length = len(messages[0][0])
        assert {len(message) for own in messages for message in own} == {length}
        start = messages[0][0].index(1000)
        pieces = [message[start : start + 10] for message in messages[1]]
        assert pieces == [tuple(range(1050 + 10 * turn, 1060 + 10 * turn)) for turn in range(3)]
        assert tokenizer.decode(messages[0][0][:start]).startswith("<|im_start|>user")
        assert tokenizer.decode(messages[0][0]).endswith("<|im_start|>assistant\n")

    def test_repeats_begin_elsewhere(self):
        assert multi_turn.turned_text([1, 2, 3, 4], 1, 2) == [3, 4, 1, 2]

    def test_history_that_is_not_cached_is_prefilled_again(self):
        assert turn_row("off", 3, 0, cached=30, ttft_s=1.0).prefilled_again == 170
        assert turn_row("off", 1, 0, cached=8, ttft_s=1.0).prefilled_again == 0

    def test_tables(self):
        by_turn, beside = multi_turn.tables(chat_result(), NO_QUALITY)
        # Two users of 200 prompt and 10 new tokens in a pool of 256.
        assert by_turn.rows[1] == (
            "2", "1.64 × pool", "4.00 (4.00–4.00)", "1.00 (1.00–1.00)", "140", "2",
        )  # fmt: skip
        everything, beyond = beside.rows
        assert everything[:3] == ("grkv 0.1", "all", "0.25 (0.25–0.25)")
        assert everything[5:7] == ("0.25", "0.014")
        assert beyond[1] == "beyond the pool"


# Capacity


class TestCapacity:
    settings = CAPACITY

    def test_theory(self):
        pool = 8100
        assert capacity.theory(self.settings, EngineChoice("off"), pool) == 8
        # A document is prefilled at full size: 7,100 slots for spans of 100.
        assert capacity.theory(self.settings, EngineChoice("grkv", 0.1), pool) == 71
        assert capacity.slots_per_document(self.settings, EngineChoice("grkv", 0.25)) == 250

    def test_table(self):
        result = capacity_result()
        (table,) = capacity.tables(result, NO_QUALITY)
        assert table.rows[0][:8] == ("off", "1,000", "90", "8", "8", "1.00", "1.0", "–")
        assert table.rows[1][:8] == ("grkv 0.1", "100", "90", "71", "68", "0.96", "8.5", "69")
        assert table.rows[0][8:] == ("0", "0", "1")


# Decode latency


class TestDecodeLatency:
    def test_bytes_of_the_model(self, model_path: Path):
        model = decode_latency.byte_model(model_path, "float32", 10e9)
        assert model.kv_bytes_per_token == 2 * 30 * 3 * 64 * 4
        assert model.weight_bytes == 4 * 134_515_008
        half = decode_latency.byte_model(model_path, "bfloat16", 10e9)
        assert half.weight_bytes == model.weight_bytes // 2

    def test_refuses(self, tmp_path: Path):
        with pytest.raises(ValueError, match="safetensors"):
            decode_latency.byte_model(tmp_path, "float32", 1.0)
        with pytest.raises(ValueError, match="dtype"):
            decode_latency.byte_model(tmp_path, "int3", 1.0)

    def test_bound(self):
        model = ByteModel(weight_bytes=1_000_000, kv_bytes_per_token=1000, bandwidth_bytes_s=1e9)
        assert model.bound_ms(0) == pytest.approx(1.0)
        assert model.bound_ms(4000) == pytest.approx(5.0)

    def test_table(self):
        result = decode_result()
        (table,) = decode_latency.tables(result, NO_QUALITY)
        assert table.rows[0][:8] == ("4,000", "off", "4,000", "30.0 (30.0–30.0)", "5.0", "6.0", "–", "0.40")
        assert table.rows[1][2:7] == ("400", "15.0 (15.0–15.0)", "1.4", "10.7", "0.50 (0.50–0.50)")


# SGLang's own


class TestBenchServing:
    def test_command_is_sglangs_own(self, tmp_path: Path):
        """Every flag is one that the installed SGLang knows."""
        # Read, not imported: that takes half a minute.
        package = importlib.util.find_spec("sglang")
        assert package is not None
        assert package.origin is not None
        source = (Path(package.origin).parent / "benchmark" / "serving.py").read_text(encoding="utf-8")
        settings = BenchServingSettings()
        for variant in bench_serving.VARIANTS:
            line = bench_serving.command(settings, variant, "http://127.0.0.1:1", tmp_path / "o", 0)
            assert line[1:3] == ["-m", "sglang.benchmark.serving"]
            flags = [part for part in line if part.startswith("--")]
            assert [flag for flag in flags if f'"{flag}"' not in source] == []

    def test_variants(self, tmp_path: Path):
        lines = {
            variant: " ".join(
                bench_serving.command(BenchServingSettings(), variant, "http://h", tmp_path / "o", 0)
            )
            for variant in bench_serving.VARIANTS
        }
        assert "--gsp-num-turns 3" in lines["multi-turn"]
        assert "--backend sglang-oai-chat" in lines["multi-turn"]
        assert "--gsp-zipf-alpha 1.0" in lines["zipf"]
        assert "zipf" not in lines["shared-prefix"]

    def test_row(self):
        row = bench_serving.row_of(printed_by_sglang(mean_ttft_ms=900.0), "off", "zipf", 0)
        assert (row.completed, row.output_tokens_per_s, row.p95_ttft_ms, row.median_itl_ms) == (
            24,
            12.5,
            2000,
            25,
        )
        assert (row.prompt_tokens, row.cached_tokens) == (1000, 600)

    def test_table(self):
        (table,) = bench_serving.tables(bench_serving_result(), NO_QUALITY)
        off, grkv = (dict(zip(table.columns, row, strict=True)) for row in table.rows)
        assert (off["variant"], off["requests"], off["TTFT mean, s"], off["cached"]) == (
            "zipf",
            "24",
            "0.90",
            "60.0%",
        )
        assert (off["TTFT ratio"], grkv["TTFT ratio"], grkv["tokens/s ratio"]) == ("1.00", "0.33", "1.00")

    def test_unknown_variant_is_refused(self):
        with pytest.raises(ValidationError, match="unknown variants"):
            BenchServingSettings.model_validate({"variants": "shared-prefix,nothing"})


# Records


class TestRecords:
    def test_round_trip(self, tmp_path: Path):
        path = tmp_path / "result.json"
        result = shared_result()
        result.environments.append(environment("cpu"))
        save_result(path, result)
        empty = SharedResult(benchmark="shared-documents", settings=result.settings)
        assert open_result(path, empty) == result
        assert list(tmp_path.iterdir()) == [path]

    def test_rows_stand_one_to_a_line(self, tmp_path: Path):
        path = tmp_path / "result.json"
        save_result(path, shared_result())
        lines = path.read_text().splitlines()
        assert sum('"ttft_s"' in line for line in lines) == 16
        assert len(json.loads(path.read_text())["requests"]) == 16

    def test_nothing_there_is_a_new_result(self, tmp_path: Path):
        empty = SharedResult(benchmark="shared-documents", settings=SharedSettings())
        assert open_result(tmp_path / "none.json", empty) is empty
        assert open_result(None, empty) is empty

    def test_other_settings_are_refused_by_name(self, tmp_path: Path):
        path = tmp_path / "result.json"
        save_result(path, shared_result())
        other = SharedResult(benchmark="shared-documents", settings=SharedSettings(seed=5))
        with pytest.raises(RecordError, match=r"seed \(there 0, now 5\)"):
            open_result(path, other)

    def test_another_benchmark_is_refused(self, tmp_path: Path):
        path = tmp_path / "result.json"
        save_result(path, shared_result())
        other = CapacityResult(benchmark="capacity", settings=CapacitySettings())
        with pytest.raises(RecordError, match="no result of capacity"):
            open_result(path, other)

    def test_environment(self):
        found = environment("cpu")
        assert found.versions["sglang"] == "0.5.23"
        assert (found.device, found.cores > 0, found.memory_gib > 0) == ("cpu", True, True)

    def test_what_is_complete_is_not_run_again(self, tmp_path: Path):
        """No server is started: the tables and the plot are made of the file."""
        path = tmp_path / "result.json"
        result = shared_result()
        save_result(path, result)
        found = execute(BENCHMARKS["shared-documents"], result.settings, path, Console(quiet=True))
        assert found.requests == result.requests
        assert len(found.environments) == 0
        assert "| 16 (2 × pool) | uniform | off |" in path.with_suffix(".md").read_text()
        assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_markdown():
    table = Table("T", ("a", "b"), (("1", "x|y"),), "Note.")
    assert markdown([table]) == "### T\n\n| a | b |\n|---|---|\n| 1 | x/y |\n\nNote.\n"
    with pytest.raises(ValueError, match="expected 2 cells"):
        Table("T", ("a", "b"), (("1",),))


def test_wide_tables_are_turned_on_their_side():
    columns = tuple(f"c{n}" for n in range(9))
    rows = tuple(tuple(f"{row}{column}" for column in columns) for row in "ab")
    printed = io.StringIO()
    console = Console(width=60, file=printed)
    console.print(rich_table(Table("T", columns, rows)))
    lines = printed.getvalue().splitlines()
    assert [line.split("│")[1:4] for line in lines if "c8" in line] == [[" c8 ", " ac8 ", " bc8 "]]
    console.print(rich_table(Table("T", columns[:2], (("x", "y"),))))
    assert "│ x  │  y │" in printed.getvalue()


class TestQuality:
    def test_by_budget_at_the_nearest_length(self):
        quality = Quality.load()
        # Profiles that were measured at both lengths.
        former = "default[scorer=question_mass~snapkv~snapkv;window_tokens=128;window_queries=64]"
        short, long = quality.of(former, 0.1, 1536), quality.of(former, 0.1, 8000)
        assert short is not None
        assert long is not None
        assert (short.context_tokens, long.context_tokens) == (2048, 4096)
        # What the fidelity benchmark's own table says (benchmarks/results/quality-2048.md).
        assert short.kl_continuation == pytest.approx(0.1357, abs=5e-5)
        assert short.kl_answers == pytest.approx(0.7042, abs=5e-5)
        assert short.top1_answers == pytest.approx(0.721, abs=5e-4)

    def test_cells(self):
        quality = Quality.load()
        assert quality.cells("default", None, 1536) == ("0", "0", "1")
        assert quality.cells("default", 0.1, 1536) == ("0.147", "0.691", "0.72")
        assert quality.cells("default", 0.123, 1536) == ("not measured",) * 3

    def test_of_another_model_says_nothing(self, model_path: Path):
        quality = Quality.load()
        assert quality.for_model(None).of("default", 0.1, 2048) is not None
        assert quality.for_model(model_path).of("default", 0.1, 2048) is not None
        other = quality.for_model(Path("/models/other"))
        assert other.cells("default", 0.1, 2048) == ("not measured",) * 3
        assert other.note("default", 2048).startswith("Fidelity: no results")


# Commands


def test_every_benchmark_is_a_command():
    listed = CliRunner().invoke(app, ["--help"])
    assert set(BENCHMARKS) == {
        "shared-documents",
        "multi-turn",
        "capacity",
        "decode-latency",
        "bench-serving",
    }
    for name in BENCHMARKS:
        assert name in listed.output
        shown = CliRunner().invoke(app, [name, "--help"])
        assert shown.exit_code == 0, shown.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engines", "vllm"], "expected stock, off, or grkv"),
        (["--documents", "4,x"], "documents"),
        (["--popularities", "normal"], "popularities"),
    ],
)
def test_wrong_settings_end_with_status_2(arguments: list[str], message: str):
    result = CliRunner().invoke(app, ["shared-documents", *arguments])
    assert result.exit_code == 2
    assert message in result.output


def test_unknown_key_in_a_file_is_refused(tmp_path: Path):
    file = tmp_path / "sizes.toml"
    file.write_text("document_token = 5\n")
    result = CliRunner().invoke(app, ["shared-documents", "--config", str(file)])
    assert result.exit_code == 2
    assert "unknown field 'document_token'" in result.output


# Real servers


@pytest.mark.engine
def test_shared_documents_on_two_servers(tmp_path: Path, model_path: Path):
    """The whole way at a tiny size, with a small random model: twice the pool, off and grkv."""
    path = tmp_path / "shared.json"
    settings = SharedSettings(
        model=ensure_tiny_model(model_path.parent / "tiny-model-seed-0", model_path, seed=0),
        engines=("off", "grkv:0.25"),
        documents=(2, 10),
        document_tokens=200,
        pool_documents=5,
        clients=2,
        requests=10,
        pairs=2,
        block_requests=5,
        warmup_requests=3,
        output_tokens=6,
        chunk_tokens=256,
    )
    result = execute(BENCHMARKS["shared-documents"], settings, path, Console(quiet=True))
    assert result.done == ["2 documents, uniform", "10 documents, uniform", "10 documents, zipf"]
    assert open_result(path, SharedResult(benchmark="shared-documents", settings=settings)) == result
    parts: list[tuple[int, shared_documents.Phase, int]] = [
        (2, "cold", 2),
        (2, "uniform", 4),
        (10, "cold", 10),
        (10, "uniform", 10),
        (10, "zipf", 10),
    ]
    for documents, phase, count in parts:
        off, grkv = (result.of(engine, documents, phase) for engine in ("off", "grkv 0.25"))
        assert [r.number for r in off] == [r.number for r in grkv]
        assert [r.document for r in off] == [r.document for r in grkv]
        assert len(off) == count
        for row in (*off, *grkv):
            assert row.hit_tokens + row.prefilled_again == row.document_tokens == 200
            assert row.cached_tokens < row.prompt_tokens == 200 + result.question_tokens
            assert 0 < row.ttft_s <= row.total_s
            assert len(row.gaps_ms) == (0 if phase == "cold" else 5)
        if phase == "cold":
            assert sum(r.hit_tokens for r in (*off, *grkv)) == 0, "documents share a prefix"
            continue
        # Every document is compressed after its cold request and stays: nothing is prefilled again.
        assert shared_documents.hit_rate(grkv) == 1.0
        assert {r.span_slots for r in grkv} == {50}
        assert {r.span_tokens for r in off} == {0}
    assert shared_documents.hit_rate(result.of("off", 2, "uniform")) == 1.0
    assert 0 <= shared_documents.hit_rate(result.of("off", 10, "uniform")) < 0.8
    ends = {(p.engine, p.documents, p.phase): p for p in result.phases}
    assert ends["grkv 0.25", 10, "uniform"].resident_documents == 10
    assert ends["grkv 0.25", 10, "uniform"].spans == 10
    assert ends["grkv 0.25", 10, "uniform"].span_slots == 10 * 50
    assert 1 <= ends["off", 10, "uniform"].resident_documents <= 5
    assert ends["off", 10, "uniform"].evicted_slots >= 200
    assert ends["grkv 0.25", 2, "uniform"].evicted_slots == 0
    ratios = shared_documents.ratios(result, 10, "uniform", "off", "grkv 0.25")
    assert ratios.prefilled_again == 0.0
    assert "| 10 (2 × pool) | zipf | grkv 0.25 |" in path.with_suffix(".md").read_text()
