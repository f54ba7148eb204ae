"""Results of the serving benchmarks as if measured, small enough to check by hand."""

from __future__ import annotations

from typing import Any

from benchmarks.serving import bench_serving
from benchmarks.serving.bench_serving import BenchServingResult, BenchServingSettings
from benchmarks.serving.capacity import CapacityResult, CapacityRow, CapacitySettings
from benchmarks.serving.decode_latency import ByteModel, DecodeResult, DecodeRow, DecodeSettings
from benchmarks.serving.multi_turn import ChatResult, ChatSettings, TurnBlock, TurnRow
from benchmarks.serving.shared_documents import (
    BlockRow,
    PhaseRow,
    RequestRow,
    SharedResult,
    SharedSettings,
)

CAPACITY = CapacitySettings(document_tokens=1000, pool_documents=8, room_tokens=100)


def request_row(
    engine: str,
    number: int,
    *,
    cached: int,
    ttft_s: float,
    block: int = 0,
    documents: int = 4,
    **changes: Any,
) -> RequestRow:
    values = {
        "engine": engine,
        "documents": documents,
        "phase": "uniform",
        "block": block,
        "number": number,
        "document": number % documents,
        "document_tokens": 100,
        "prompt_tokens": 110,
        "cached_tokens": cached,
        "span_tokens": 0,
        "span_slots": 0,
        "ttft_s": ttft_s,
        "total_s": ttft_s + 1,
        "gaps_ms": [20.0, 40.0],
    }
    return RequestRow.model_validate(values | changes)


def shared_result(documents: int = 16, **settings: Any) -> SharedResult:
    """Two engines, two blocks of two requests; off hits every other document, grkv all."""
    result = SharedResult(
        benchmark="shared-documents",
        settings=SharedSettings.model_validate(
            {"documents": (documents,), "popularities": ("uniform",), "output_tokens": 3, **settings}
        ),
        pool_tokens=900,
        question_tokens=10,
        done=[f"{documents} documents, uniform"],
    )
    for engine in ("off", "grkv 0.1"):
        ours = engine != "off"
        for number in range(-2, 4):
            hit = ours or number % 2 == 0
            result.requests.append(
                request_row(
                    engine,
                    number,
                    cached=105 if hit else 40,
                    ttft_s=(0.5 if hit else 5.5) if not ours else 0.5,
                    block=-1 if number < 0 else number // 2,
                    documents=documents,
                    gaps_ms=[10.0, 20.0] if ours else [20.0, 40.0],
                )
            )
            if number in (0, 1):
                cold = request_row(
                    engine, number, cached=0, ttft_s=4.0, documents=documents, phase="cold", gaps_ms=[]
                )
                result.requests.append(cold)
        for block in (-1, 0, 1):
            values = {
                "engine": engine,
                "documents": documents,
                "block": block,
                "requests": 2,
                "settle_s": 0.0,
            }
            wall_s = 1.5 if ours else 6.0
            result.blocks.append(BlockRow.model_validate({**values, "phase": "uniform", "wall_s": wall_s}))
            if block == 0:
                result.blocks.append(BlockRow.model_validate({**values, "phase": "cold", "wall_s": 8.0}))
        result.phases.append(
            PhaseRow(
                engine=engine,
                documents=documents,
                phase="uniform",
                evicted_slots=0 if ours else 4321,
                resident_documents=16 if ours else 8,
                probed_documents=16 if ours else 11,
                spans=16 if ours else None,
                span_slots=160 if ours else None,
            )
        )
    return result


def turn_row(engine: str, turn: int, user: int, *, cached: int, ttft_s: float) -> TurnRow:
    return TurnRow(
        engine=engine, repeat=0, turn=turn, user=user, history_tokens=100 * (turn - 1),
        prompt_tokens=100 * turn, cached_tokens=cached, span_tokens=0, span_slots=0, ttft_s=ttft_s,
        total_s=ttft_s, gaps_ms=[10.0],
    )  # fmt: skip


def chat_result() -> ChatResult:
    settings = ChatSettings(users=2, turns=2, output_tokens=10, pool_tokens=256)
    result = ChatResult(benchmark="multi-turn", settings=settings, done=["repeat 1"])
    for engine, ttft_s, cached in (("off", 2.0, 30), ("grkv 0.1", 0.5, 99)):
        for turn in (1, 2):
            for user in (1, 0):
                result.turns.append(
                    turn_row(engine, turn, user, cached=cached if turn == 2 else 0, ttft_s=ttft_s * turn)
                )
            result.blocks.append(
                TurnBlock(engine=engine, repeat=0, turn=turn, wall_s=ttft_s, settle_s=0, evicted_slots=0)
            )
    return result


def capacity_result() -> CapacityResult:
    """Off as in theory, grkv a little below."""
    rows = [
        CapacityRow(
            engine=engine, documents=90, theory=theory, slots_per_document=slots,
            resident_documents=resident, probed_documents=12, spans=spans, span_slots=None,
            evicted_slots=0,
        )
        for engine, theory, slots, resident, spans in (
            ("off", 8, 1000, 8, None),
            ("grkv 0.1", 71, 100, 68, 69),
        )
    ]  # fmt: skip
    return CapacityResult(benchmark="capacity", settings=CAPACITY, pool_tokens=8100, rows=rows)


def decode_result() -> DecodeResult:
    """30 ms per token and half of that."""
    settings = DecodeSettings(lengths=(4000,), repeats=2)
    model = ByteModel(weight_bytes=1_000_000, kv_bytes_per_token=1000, bandwidth_bytes_s=1e9)
    result = DecodeResult(
        benchmark="decode-latency", settings=settings, byte_model=model, done=["4000 tokens"]
    )
    for engine, ms in (("off", 30.0), ("grkv 0.1", 15.0)):
        for repeat in range(2):
            row = DecodeRow(
                engine=engine, tokens=4000, repeat=repeat, cached_tokens=4000, span_tokens=0,
                span_slots=0, ttft_s=0.4, gaps_ms=[ms - 5, ms, ms + 5],
            )  # fmt: skip
            result.rows.append(row)
    return result


def printed_by_sglang(mean_ttft_ms: float) -> dict[str, Any]:
    """The part of a line of SGLang's output file that is read."""
    return {
        "completed": 24, "duration": 30.0, "output_throughput": 12.5, "mean_ttft_ms": mean_ttft_ms,
        "median_ttft_ms": 700.0, "p95_ttft_ms": 2000.0, "mean_itl_ms": 30.0, "median_itl_ms": 25.0,
        "p95_itl_ms": 90.0, "cache_report": {"total_prompt_tokens": 1000, "total_cached_tokens": 600},
    }  # fmt: skip


def bench_serving_result() -> BenchServingResult:
    """One variant; grkv waits a third as long."""
    return BenchServingResult(
        benchmark="bench-serving",
        settings=BenchServingSettings(variants=("zipf",)),
        done=["zipf 1"],
        rows=[
            bench_serving.row_of(printed_by_sglang(mean_ttft_ms), engine, "zipf", 0)
            for engine, mean_ttft_ms in (("off", 900.0), ("grkv 0.1", 300.0))
        ],
    )
