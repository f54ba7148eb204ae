"""SGLang's own serving benchmark, unchanged: ``python -m benchmarks.serving bench-serving``.

``python -m sglang.benchmark.serving`` (``sglang.bench_serving`` until this release) with its dataset
``generated-shared-prefix``: groups of prompts that share a system prompt of random tokens; the same with Zipf
popularity; and with several turns over the chat API. It knows nothing of the plugin, which runs with its
default triggers. Every run begins with an empty cache, so that prefilling and compressing each group once is
in the figures; the servers take turns, turned around with every repeat. Random tokens say nothing about
quality.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from pydantic import Field, field_validator

from benchmarks.serving.client import ServingError
from benchmarks.serving.engines import in_turn, running_servers
from benchmarks.serving.options import Benchmark, Run, ServingSettings, reference_of, split
from benchmarks.serving.plots import bar_text, new_figure
from benchmarks.serving.progress import progress_bar
from benchmarks.serving.quality import Quality
from benchmarks.serving.record import Frozen, Result
from benchmarks.serving.tables import Table
from grkv_sglang.serving import log_tail

NAME = "bench-serving"
VARIANTS = ("shared-prefix", "zipf", "multi-turn")


class BenchServingSettings(ServingSettings):
    """Quick mode."""

    variants: tuple[str, ...] = Field(VARIANTS, description=f"Of {', '.join(VARIANTS)}.")
    groups: int = Field(8, ge=1, description="Shared system prompts (--gsp-num-groups).")
    prompts_per_group: int = Field(6, ge=1, description="Prompts of each (--gsp-prompts-per-group).")
    system_tokens: int = Field(768, ge=16, description="Tokens of a system prompt (--gsp-system-prompt-len).")
    question_tokens: int = Field(32, ge=1, description="Tokens of a question (--gsp-question-len).")
    output_tokens: int = Field(32, ge=1, description="Tokens of an answer (--gsp-output-len).")
    turns: int = Field(3, ge=2, description="Turns of the multi-turn variant (--gsp-num-turns).")
    pool_prompts: int = Field(3, ge=1, description="System prompts that the pool holds, beside the room.")
    clients: int = Field(4, ge=1, description="Requests at once (--max-concurrency).")
    repeats: int = Field(1, ge=1, description="Runs of each variant on each server.")

    @field_validator("variants", mode="before")
    @classmethod
    def _split_variants(cls, value: Any) -> Any:
        return split(value)

    @field_validator("variants")
    @classmethod
    def _known_variants(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        unknown = sorted(set(value) - set(VARIANTS))
        if unknown:
            raise ValueError(f"unknown variants {unknown}; valid are {', '.join(VARIANTS)}")
        return value

    @property
    def pool_tokens(self) -> int:
        running = self.clients * self.turns * (self.question_tokens + self.output_tokens + 16)
        # Text of random tokens is longer when it is tokenised again.
        return int(1.25 * self.pool_prompts * self.system_tokens) + 2 * running


class FullBenchServingSettings(BenchServingSettings):
    """Full mode: hours on a CPU."""

    engines: tuple[str, ...] = ("stock", "off", "grkv:0.1", "grkv:0.2")
    groups: int = 32
    prompts_per_group: int = 8
    system_tokens: int = 2048
    question_tokens: int = 128
    output_tokens: int = 64
    pool_prompts: int = 8
    repeats: int = 3


class BenchServingRow(Frozen):
    """One run, in SGLang's own terms; see its output."""

    engine: str
    variant: str
    repeat: int
    completed: int
    duration_s: float
    output_tokens_per_s: float
    mean_ttft_ms: float
    median_ttft_ms: float
    p95_ttft_ms: float
    mean_itl_ms: float
    median_itl_ms: float
    p95_itl_ms: float
    prompt_tokens: int
    cached_tokens: int


class BenchServingResult(Result):
    """A part is one variant in one repeat, on all servers."""

    settings: BenchServingSettings
    rows: list[BenchServingRow] = Field(default_factory=list)

    def of(self, engine: str, variant: str) -> list[BenchServingRow]:
        return [row for row in self.rows if (row.engine, row.variant) == (engine, variant)]


def command(
    settings: BenchServingSettings, variant: str, base_url: str, output: Path, repeat: int
) -> list[str]:
    """SGLang's command line."""
    chat = variant == "multi-turn"
    arguments: dict[str, Any] = {
        "--backend": "sglang-oai-chat" if chat else "sglang",
        "--base-url": base_url,
        "--dataset-name": "generated-shared-prefix",
        "--gsp-num-groups": settings.groups,
        "--gsp-prompts-per-group": max(1, settings.prompts_per_group // settings.turns)
        if chat
        else settings.prompts_per_group,
        "--gsp-system-prompt-len": settings.system_tokens,
        "--gsp-question-len": settings.question_tokens,
        "--gsp-output-len": settings.output_tokens,
        "--max-concurrency": settings.clients,
        "--seed": settings.seed + repeat + 1,
        "--output-file": output,
    }
    if chat:
        arguments["--gsp-num-turns"] = settings.turns
    if variant == "zipf":
        arguments |= {"--gsp-group-distribution": "zipf", "--gsp-zipf-alpha": 1.0}
    given = [str(part) for pair in arguments.items() for part in pair]
    flags = ["--flush-cache", "--cache-report", "--disable-tqdm"]
    return [sys.executable, "-m", "sglang.benchmark.serving", *given, *flags]


def row_of(printed: dict[str, Any], engine: str, variant: str, repeat: int) -> BenchServingRow:
    """From a line of SGLang's output file."""
    cache = printed["cache_report"]
    return BenchServingRow(
        engine=engine,
        variant=variant,
        repeat=repeat,
        completed=printed["completed"],
        duration_s=printed["duration"],
        output_tokens_per_s=printed["output_throughput"],
        **{
            f"{value}_{what}_ms": printed[f"{value}_{what}_ms"]
            for what in ("ttft", "itl")
            for value in ("mean", "median", "p95")
        },
        prompt_tokens=cache["total_prompt_tokens"],
        cached_tokens=cache["total_cached_tokens"],
    )


def run(run: Run[BenchServingResult]) -> None:
    """SGLang's own benchmark (generated-shared-prefix, Zipf, several turns), unchanged, against each
    server."""
    result = run.result
    settings = result.settings
    parts = [
        (variant, repeat)
        for repeat in range(settings.repeats)
        for variant in settings.variants
        if part_name(variant, repeat) not in result.done
    ]
    if not parts:
        return
    sizes = settings.sizes(run.log_folder, settings.pool_tokens)
    with (
        running_servers(settings.choices, sizes, {"profile": settings.profile}, run.console) as servers,
        progress_bar(run.console) as progress,
    ):
        task = progress.add_task("runs", total=len(parts) * len(servers))
        for number, (variant, repeat) in enumerate(parts):
            rows = []
            for engine in in_turn(list(servers), number):
                progress.update(task, description=f"{variant} {repeat + 1}, {engine}")
                output = run.log_folder / f"{variant}-{repeat}-{engine.replace(' ', '-')}.jsonl"
                line = command(settings, variant, servers[engine].base_url, output, repeat)
                rows.append(row_of(_run_one(line, output), engine, variant, repeat))
                progress.advance(task)
            result.rows += rows
            result.done.append(part_name(variant, repeat))
            run.save()


def part_name(variant: str, repeat: int) -> str:
    """Of a variant's run in `Result.done`."""
    return f"{variant} {repeat + 1}"


def _run_one(line: Sequence[str], output: Path) -> dict[str, Any]:
    """Run SGLang's benchmark; returns the line that it added to its file.

    Raises:
        ServingError: it failed; with the end of what it printed.
    """
    log = output.with_suffix(".log")
    with log.open("wb") as printed:
        # The model is on this machine; asking a hub about it would fail without a network.
        variables = os.environ | {"HF_HUB_OFFLINE": "1"}
        status = subprocess.run(
            line, stdout=printed, stderr=subprocess.STDOUT, env=variables, check=False
        ).returncode
    if status or not output.exists():
        raise ServingError(f"sglang.benchmark.serving ended with status {status}:\n{log_tail(log)}")
    found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8").splitlines()[-1])
    return found


def tables(result: BenchServingResult, quality: Quality) -> list[Table]:
    """SGLang's figures, means over repeats, and the ratio to the reference."""
    settings = result.settings
    reference = reference_of(settings.engines)
    rows = []
    for variant in settings.variants:
        for choice in settings.choices:
            own = result.of(choice.name, variant)
            if not own:
                continue
            theirs = result.of(reference, variant) if reference is not None else []
            ratio = _mean(own, "mean_ttft_ms") / _mean(theirs, "mean_ttft_ms") if theirs else None
            faster = (
                _mean(own, "output_tokens_per_s") / _mean(theirs, "output_tokens_per_s") if theirs else None
            )
            rows.append(
                (
                    variant,
                    choice.name,
                    str(sum(row.completed for row in own)),
                    f"{_mean(own, 'mean_ttft_ms') / 1000:.2f}",
                    f"{_mean(own, 'median_ttft_ms') / 1000:.2f}",
                    f"{_mean(own, 'p95_ttft_ms') / 1000:.2f}",
                    f"{_mean(own, 'mean_itl_ms'):.1f}",
                    f"{_mean(own, 'p95_itl_ms'):.1f}",
                    f"{_mean(own, 'output_tokens_per_s'):.1f}",
                    f"{sum(row.cached_tokens for row in own) / sum(row.prompt_tokens for row in own):.1%}",
                    "–" if ratio is None else f"{ratio:.2f}",
                    "–" if faster is None else f"{faster:.2f}",
                )
            )
    return [
        Table(
            "SGLang's own benchmark",
            (
                "variant", "engine", "requests", "TTFT mean, s", "median", "p95", "ITL mean, ms", "p95",
                "tokens/s", "cached", "TTFT ratio", "tokens/s ratio",
            ),
            tuple(rows),
            f"{settings.groups} groups, system prompts of {settings.system_tokens:,} tokens, pool "
            f"{settings.pool_tokens:,} slots ({settings.pool_prompts} of them), questions "
            f"{settings.question_tokens}, answers {settings.output_tokens} tokens, {settings.clients} at "
            f"once, {settings.repeats} run(s). Every run starts cold: first prefills and compressions are in "
            f"it. Ratios to {reference or 'none'}. Prompts are random tokens, so no fidelity is given.",
        )
    ]  # fmt: skip


def _mean(rows: Sequence[BenchServingRow], field: str) -> float:
    return sum(getattr(row, field) for row in rows) / len(rows)


def figure(result: BenchServingResult) -> Figure:
    """Mean TTFT and throughput by variant."""
    settings = result.settings
    variants = [v for v in settings.variants if all(result.of(c.name, v) for c in settings.choices)]
    figure = new_figure(10, 3.6)
    width = 0.8 / len(settings.choices)
    for axes, field, label, scale in zip(
        figure.subplots(1, 2),
        ("mean_ttft_ms", "output_tokens_per_s"),
        ("mean TTFT, s", "output tokens per second"),
        (0.001, 1.0),
        strict=True,
    ):
        for shift, choice in enumerate(settings.choices):
            heights = [scale * _mean(result.of(choice.name, v), field) for v in variants]
            bars = axes.bar(
                [i + shift * width for i in range(len(variants))], heights, width, label=choice.name
            )
            axes.bar_label(bars, fmt=bar_text, fontsize=8)
        axes.set_xticks([i + width * (len(settings.choices) - 1) / 2 for i in range(len(variants))], variants)
        axes.set_ylabel(label)
        axes.margins(y=0.25)
        axes.legend(fontsize=8)
    return figure


BENCHMARK = Benchmark(
    name=NAME,
    title="SGLang's own benchmark",
    settings=BenchServingSettings,
    full=FullBenchServingSettings,
    result=BenchServingResult,
    run=run,
    tables=tables,
    figure=figure,
)
