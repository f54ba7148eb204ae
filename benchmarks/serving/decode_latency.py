"""Time per token behind a long prefix: ``python -m benchmarks.serving decode-latency``.

One stream. For every length each server gets a prefix of its own, which is prefilled (and compressed) once;
then all of them decode behind it in turn, as often as asked for, the order turned around every time. The
first turn is not counted.

The byte bound: to make a token, a server reads all weights once and the KV of the row; it takes at least that
many bytes over the memory's bandwidth, which is measured here by multiplying a matrix larger than the caches
with a vector. With a budget the row has the span's slots and what came since.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from pydantic import Field, field_validator
from safetensors import safe_open
from transformers import AutoTokenizer

from benchmarks.serving import stats
from benchmarks.serving.client import ServingError
from benchmarks.serving.engines import EngineChoice, Live, in_turn, measure
from benchmarks.serving.options import Benchmark, Run, ServingSettings, reference_of, split
from benchmarks.serving.plots import new_figure
from benchmarks.serving.progress import progress_bar
from benchmarks.serving.quality import COLUMNS, Quality
from benchmarks.serving.record import Frozen, Result
from benchmarks.serving.tables import Table
from benchmarks.serving.workload import Questions, cut_documents, questions_of
from benchmarks.texts import text_tokens
from grkv_sglang.core.budget import slots_for_budget
from grkv_sglang.serving import detect_device

NAME = "decode-latency"
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
BANDWIDTH_BYTES = 2**29
BANDWIDTH_REPEATS = 10


class DecodeSettings(ServingSettings):
    """Quick mode."""

    lengths: tuple[int, ...] = Field((1024, 2048, 4096, 8000), description="Tokens of the prefixes.")
    output_tokens: int = Field(48, ge=2, description="Tokens of every answer.")
    repeats: int = Field(8, ge=2, description="Measured answers per server and length.")

    @field_validator("lengths", mode="before")
    @classmethod
    def _split_lengths(cls, value: Any) -> Any:
        return split(value)


class FullDecodeSettings(DecodeSettings):
    """Full mode."""

    engines: tuple[str, ...] = ("stock", "off", "grkv:0.1", "grkv:0.2", "grkv:0.5")
    lengths: tuple[int, ...] = (1024, 2048, 3072, 4096, 6144, 8000)
    output_tokens: int = 64
    repeats: int = 24


class DecodeRow(Frozen):
    """One answer."""

    engine: str
    tokens: int
    repeat: int
    cached_tokens: int
    span_tokens: int
    span_slots: int
    ttft_s: float
    gaps_ms: list[float]

    @property
    def token_ms(self) -> float:
        """From the first token to the last, by tokens: it does not matter whether two came in one event."""
        return statistics.fmean(self.gaps_ms)


class ByteModel(Frozen):
    """What a step must read, and how fast memory gives it."""

    weight_bytes: int
    kv_bytes_per_token: int
    bandwidth_bytes_s: float

    def bound_ms(self, slots: float) -> float:
        """Least milliseconds of a step whose row holds so many KV slots."""
        return 1000 * (self.weight_bytes + self.kv_bytes_per_token * slots) / self.bandwidth_bytes_s


class DecodeResult(Result):
    """A part is a length."""

    settings: DecodeSettings
    byte_model: ByteModel | None = None
    rows: list[DecodeRow] = Field(default_factory=list)

    def of(self, engine: str, tokens: int) -> list[DecodeRow]:
        return [row for row in self.rows if (row.engine, row.tokens) == (engine, tokens)]


def byte_model(model_path: Path, dtype: str, bandwidth_bytes_s: float) -> ByteModel:
    """Of a Hugging Face folder with safetensors.

    Raises:
        ValueError: it has none, or the dtype is unknown.
    """
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype {dtype!r}: expected one of {', '.join(DTYPE_BYTES)}")
    files = sorted(model_path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{model_path}: expected *.safetensors, found none")
    parameters = 0
    for path in files:
        with safe_open(path, framework="numpy") as tensors:
            parameters += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    config = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    size = DTYPE_BYTES[dtype]
    return ByteModel(
        weight_bytes=parameters * size,
        kv_bytes_per_token=2 * config["num_hidden_layers"] * heads * head_dim * size,
        bandwidth_bytes_s=bandwidth_bytes_s,
    )


def measured_bandwidth(device: str) -> float:
    """Bytes per second at which a matrix of half a gibibyte is read for a product with a vector; the best of
    a few."""
    import torch

    columns = 4096
    matrix = torch.ones(BANDWIDTH_BYTES // (4 * columns), columns, device=device)
    vector = torch.ones(columns, device=device)
    best = math.inf
    for _ in range(BANDWIDTH_REPEATS):
        started = time.perf_counter()
        product = matrix @ vector
        product[0].item()  # waits for a GPU
        best = min(best, time.perf_counter() - started)
    return matrix.numel() * 4 / best


def run(run: Run[DecodeResult]) -> None:
    """Per-token latency against prefix length, full and compressed, with the byte-count bound beside it."""
    result = run.result
    settings = result.settings
    missing = [length for length in settings.lengths if part_name(length) not in result.done]
    if not missing:
        return
    model_path = settings.model_path()
    if result.byte_model is None:
        # Before the servers start: they would share the bandwidth.
        result.byte_model = byte_model(model_path, settings.dtype, measured_bandwidth(detect_device()))
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    questions = questions_of(tokenizer)
    text = text_tokens(tokenizer, settings.texts)
    asked = questions.tokens + settings.output_tokens
    # The prefix, its span, and the tails of all answers.
    pool_tokens = 2 * max(settings.lengths) + (settings.repeats + 3) * asked

    async def work(engines: list[Live]) -> None:
        with progress_bar(run.console) as progress:
            for length in missing:
                task = progress.add_task(f"{length} tokens", total=(settings.repeats + 2) * len(engines))
                (prefix,) = cut_documents(text, 1, length)
                for engine in engines:
                    await engine.flush()
                rows = []
                for repeat in range(-2, settings.repeats):  # -2: prefill, -1: the first from the cache
                    for engine in in_turn(engines, repeat):
                        rows.append(await _answer(engine, prefix, questions, repeat, settings.output_tokens))
                        progress.advance(task)
                result.rows += [row for row in rows if row.repeat >= 0]
                result.done.append(part_name(length))
                run.save()

    sizes = settings.sizes(run.log_folder, pool_tokens)
    measure(settings.choices, sizes, {"triggers": "explicit", "profile": settings.profile}, run.console, work)


def part_name(length: int) -> str:
    """Of a length in `Result.done`."""
    return f"{length} tokens"


async def _answer(
    engine: Live, prefix: Sequence[int], questions: Questions, repeat: int, new_tokens: int
) -> DecodeRow:
    prompt = [*prefix, *questions.about(prefix, 10 * (repeat + 2))]
    answer = await engine.ask(prompt, new_tokens, {"prefix_end_tokens": len(prefix)})
    await engine.settle()
    if repeat >= 0 and answer.cached_tokens < len(prefix):
        raise ServingError(
            f"{engine.name}: expected {len(prefix)} cached tokens, got {answer.cached_tokens}; "
            "the prefix was evicted"
        )
    return DecodeRow(
        engine=engine.name,
        tokens=len(prefix),
        repeat=repeat,
        cached_tokens=answer.cached_tokens,
        span_tokens=answer.span_tokens,
        span_slots=answer.span_slots,
        ttft_s=round(answer.ttft_s, 4),
        gaps_ms=[round(1000 * gap, 3) for gap in answer.gaps_s],
    )


def slots_of(choice: EngineChoice, tokens: int) -> int:
    """KV slots of a prefix, as read in every step."""
    if choice.budget is None:
        return tokens
    return slots_for_budget(tokens, share=choice.budget, tokens=None)


def tables(result: DecodeResult, quality: Quality) -> list[Table]:
    """Milliseconds per token, the bound, and the ratio to the reference."""
    settings, model = result.settings, result.byte_model
    reference = reference_of(settings.engines)
    rows = []
    for length in settings.lengths:
        if part_name(length) not in result.done:
            continue
        for choice in settings.choices:
            own = result.of(choice.name, length)
            ratio = "–"
            if reference is not None and choice.name != reference:
                theirs = [row.token_ms for row in result.of(reference, length)]
                ratio = str(stats.paired_ratio([row.token_ms for row in own], theirs))
            slots = slots_of(choice, length)
            bound = model.bound_ms(slots) if model else math.nan
            found = stats.mean_interval([row.token_ms for row in own])
            rows.append(
                (
                    f"{length:,}",
                    choice.name,
                    f"{slots:,}",
                    f"{found.value:.1f} ({found.low:.1f}–{found.high:.1f})",
                    f"{bound:.1f}",
                    f"{found.value / bound:.1f}",
                    ratio,
                    f"{stats.mean_interval([row.ttft_s for row in own]).value:.2f}",
                    *quality.cells(settings.profile, choice.budget, length),
                )
            )
    note = (
        f"One stream, {settings.output_tokens} output tokens, {settings.repeats} answers each; "
        "from the first token to the last, by tokens."
    )
    if model:
        note += (
            f" Bound: {model.weight_bytes / 1e6:.0f} MB of weights and {model.kv_bytes_per_token:,} bytes "
            f"per slot at {model.bandwidth_bytes_s / 1e9:.1f} GB/s."
        )
    middle = sorted(settings.lengths)[len(settings.lengths) // 2]
    return [
        Table(
            "Decode latency",
            (
                "prefix tokens", "engine", "slots", "ms per token", "bound, ms", "times the bound",
                f"ratio to {reference or 'none'}", "TTFT from the cache, s", *COLUMNS,
            ),
            tuple(rows),
            f"{note} {quality.note(settings.profile, middle)}",
        )
    ]  # fmt: skip


def figure(result: DecodeResult) -> Figure:
    """Milliseconds per token over prefix length, the bounds dashed in the same colours."""
    settings, model = result.settings, result.byte_model
    figure = new_figure(7.5, 4.2)
    axes = figure.subplots()
    lengths = sorted(length for length in settings.lengths if part_name(length) in result.done)
    for number, choice in enumerate(settings.choices):
        found = [stats.mean_interval([r.token_ms for r in result.of(choice.name, n)]) for n in lengths]
        errors = [[i.value - i.low for i in found], [i.high - i.value for i in found]]
        color = f"C{number}"
        axes.errorbar(
            lengths,
            [i.value for i in found],
            yerr=errors,
            marker="o",
            capsize=3,
            color=color,
            label=choice.name,
        )
        if model:
            bounds = [model.bound_ms(slots_of(choice, n)) for n in lengths]
            axes.plot(lengths, bounds, ".--", color=color, label=f"{choice.name}, byte bound")
    axes.set_xlabel("tokens of the prefix")
    axes.set_ylabel("ms per token")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    return figure


BENCHMARK = Benchmark(
    name=NAME,
    title="Decode latency",
    settings=DecodeSettings,
    full=FullDecodeSettings,
    result=DecodeResult,
    run=run,
    tables=tables,
    figure=figure,
)
