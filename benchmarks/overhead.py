"""What the plugin costs: ``python -m benchmarks.overhead``.

*Compression* beside the prefill of the same tokens: for every length, as often as asked for, a text that the
server has not seen is prefilled and kept exact, then a request for the same prefix has it compressed. Lengths
and profiles take turns, so that drift of the machine falls on all alike; every share is that of one text's
own prefill.

*No long prefix*: bursts of short prompts with nothing to compress, on a server with the plugin and one
without it (``off``), one right after the other. How long running requests wait while a document is compressed
is measured by ``python -m benchmarks.inter_token_gap``.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import typer
from matplotlib.figure import Figure
from pydantic import Field, field_validator
from rich.progress import Progress
from transformers import AutoTokenizer

from benchmarks.serving.options import Benchmark, Run, Settings, command_of, end_servers_on_sigterm, split
from benchmarks.serving.plots import new_figure
from benchmarks.serving.progress import progress_bar
from benchmarks.serving.quality import Quality
from benchmarks.serving.record import Frozen, Result
from benchmarks.serving.tables import Table
from benchmarks.texts import text_tokens
from grkv_sglang.demo import overhead as short_prompts
from grkv_sglang.demo.client import SglangClient
from grkv_sglang.demo.documents import load_documents
from grkv_sglang.demo.result import NoLongPrefixResult
from grkv_sglang.serving import Engine, ServerSpec, detect_device, running_server

NAME = "overhead"
PARTS = ("probe", "pass", "select", "regress", "copy")
SHORT_POOL_TOKENS = 16384


class OverheadSettings(Settings):
    """Quick mode."""

    chunk_tokens: int = Field(8192, ge=1, description="Tokens of a prefill chunk; a text in one is fastest.")
    lengths: tuple[int, ...] = Field((1536, 4096, 8000), description="Tokens of the prefixes.")
    profiles: tuple[str, ...] = Field(("default",), description="Profiles.")
    budget: float = Field(0.1, gt=0, le=1, description="Share of the tokens kept.")
    repeats: int = Field(4, ge=1, description="Texts per length and profile, besides one to warm up.")
    pairs: int = Field(
        24, ge=2, description="Bursts of short prompts on both servers, besides two to warm up."
    )

    @field_validator("lengths", "profiles", mode="before")
    @classmethod
    def _split_lists(cls, value: Any) -> Any:
        return split(value)


class FullOverheadSettings(OverheadSettings):
    """Full mode."""

    profiles: tuple[str, ...] = ("default", "best")
    repeats: int = 5
    pairs: int = 48


class Row(Frozen):
    """One text. `prefill_s`: until its first token; `compress_s` in all, `parts_s` of it by `PARTS`."""

    profile: str
    tokens: int
    prefill_s: float
    compress_s: float
    parts_s: dict[str, float]

    @property
    def share(self) -> float:
        return self.compress_s / self.prefill_s


class OverheadResult(Result):
    """Two parts: compression, and no long prefix."""

    settings: OverheadSettings
    rows: list[Row] = Field(default_factory=list)
    no_long_prefix: NoLongPrefixResult | None = None

    def of(self, profile: str, tokens: int) -> list[Row]:
        return [row for row in self.rows if (row.profile, row.tokens) == (profile, tokens)]


def measure(
    client: SglangClient, text: Sequence[int], settings: OverheadSettings, progress: Progress
) -> list[Row]:
    """All rows, the first round of each length and profile left out: caches and allocators warm up in it."""
    rows: list[Row] = []
    kinds = [(n, p) for n in settings.lengths for p in settings.profiles]
    plan = kinds * (settings.repeats + 1)
    for number, (tokens, profile) in enumerate(progress.track(plan, description="texts")):
        client.flush_cache()
        start = 997 * number % len(text)
        prefix = [*text[start:], *text][:tokens]
        cold = client.stream([*prefix, 7], 1, options={"mode": "exact"})
        client.stream([*prefix, 9, 9], 1, options={"prefix_end_tokens": tokens, "profile": profile})
        span = client.wait_for_span(prefix)
        parts = {part: float(getattr(span, f"{part}_s")) for part in PARTS}
        row = Row(
            profile=profile,
            tokens=tokens,
            prefill_s=cold.ttft_s,
            compress_s=span.compress_s,
            parts_s=parts,
        )
        rows.append(row)
    return rows[len(kinds) :]


def run(run: Run[OverheadResult]) -> None:
    """What compression costs beside a prefill, and the plugin where no prefix is long."""
    result = run.result
    settings = result.settings

    def spec(engine: Engine, name: str, pool_tokens: int) -> ServerSpec:
        plugin = {"triggers": "explicit", "budget": settings.budget}
        return ServerSpec(
            model_path=settings.model_path(),
            engine=engine,
            log_path=run.log_folder / f"{name}.log",
            max_total_tokens=pool_tokens,
            chunked_prefill_size=settings.chunk_tokens,
            grkv_config=plugin if engine == "grkv" else {},
            random_seed=settings.seed,
            device=detect_device(),
            dtype=settings.dtype,
        )

    tokenizer = AutoTokenizer.from_pretrained(settings.model_path())
    if "compression" not in result.done:
        text = text_tokens(tokenizer, settings.texts)
        with (
            running_server(spec("grkv", "compression", 3 * max(settings.lengths)), run.console) as server,
            SglangClient(server.base_url) as client,
            progress_bar(run.console) as progress,
        ):
            result.rows = measure(client, text, settings, progress)
        result.done.append("compression")
        run.save()
    if "no long prefix" not in result.done:
        count = settings.pairs + short_prompts.WARMUP_PAIRS
        bursts = short_prompts.build_bursts(load_documents(), tokenizer, count)
        with ExitStack() as stack:
            off, grkv = (
                stack.enter_context(
                    SglangClient(
                        stack.enter_context(
                            running_server(spec(engine, f"{engine}-short", SHORT_POOL_TOKENS), run.console)
                        ).base_url
                    )
                )
                for engine in ("off", "grkv")
            )
            progress = stack.enter_context(progress_bar(run.console))
            task = progress.add_task("bursts of short prompts", total=count)
            result.no_long_prefix = short_prompts.measure_overhead(
                off, grkv, bursts, partial(progress.advance, task)
            )
        result.done.append("no long prefix")
        run.save()


def tables(result: OverheadResult, quality: Quality) -> list[Table]:
    """Shares of the prefill by profile and length, and the cost without long prefixes."""
    settings = result.settings
    kinds = dict.fromkeys((row.profile, row.tokens) for row in result.rows)
    found = [
        Table(
            "Compression beside the prefill of the same tokens",
            ("profile", "tokens", "prefill, s", "compression, s", "of the prefill", *PARTS),
            tuple(_compression_row(result.of(*kind)) for kind in kinds),
            f"Medians of {settings.repeats} texts, range in brackets, budget {settings.budget:g}. Parts as "
            "shares of the prefill.",
        )
    ]
    cost = result.no_long_prefix
    if cost is not None:
        found.append(
            Table(
                "No long prefix: the plugin beside off",
                ("pairs", "burst", "mean", "median", "upper 95% bound"),
                (
                    (
                        str(cost.pairs),
                        f"{cost.prompts_per_burst} prompts of {cost.prompt_tokens} tokens, "
                        f"{cost.new_tokens} new",
                        f"{cost.mean_cost:+.1%}",
                        f"{cost.median_cost:+.1%}",
                        f"{cost.upper_95:+.1%}",
                    ),
                ),
                "Extra time of a burst; one-sided bound of the mean, Student's t on the logarithms of paired "
                "ratios.",
            )
        )
    return found


def _compression_row(rows: Sequence[Row]) -> tuple[str, ...]:
    shares = [row.share for row in rows]
    return (
        rows[0].profile,
        f"{rows[0].tokens:,}",
        f"{statistics.median(row.prefill_s for row in rows):.2f}",
        f"{statistics.median(row.compress_s for row in rows):.2f}",
        f"{statistics.median(shares):.1%} ({min(shares):.1%}–{max(shares):.1%})",
        *(f"{_part(rows, part):.1%}" for part in PARTS),
    )


def _part(rows: Sequence[Row], part: str) -> float:
    """Median share of the prefill."""
    return statistics.median(row.parts_s[part] / row.prefill_s for row in rows)


def figure(result: OverheadResult) -> Figure:
    """Stacked shares of the prefill; extra time of every burst."""
    figure = new_figure(10, 3.6)
    shares, bursts = figure.subplots(1, 2)
    kinds = list(dict.fromkeys((row.profile, row.tokens) for row in result.rows))
    labels = [f"{profile}\n{tokens:,} tokens" for profile, tokens in kinds]
    bottom = [0.0] * len(kinds)
    for part in PARTS:
        heights = [100 * _part(result.of(*kind), part) for kind in kinds]
        shares.bar(labels, heights, 0.5, bottom=bottom, label=part)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    shares.set_ylabel("compression, % of the prefill")
    shares.legend(fontsize=8)
    cost = result.no_long_prefix
    if cost is not None:
        extra = [100 * (ours / theirs - 1) for ours, theirs in zip(cost.grkv_s, cost.off_s, strict=True)]
        bursts.plot(range(1, len(extra) + 1), extra, "o", markersize=4)
        bursts.axhline(0, color="black", linewidth=0.8)
        bursts.axhline(100 * cost.mean_cost, color="C1", label="mean")
        bursts.axhline(100 * cost.upper_95, color="C1", linestyle=":", label="upper 95% bound")
        bursts.legend(fontsize=8)
    bursts.set_xlabel("pair")
    bursts.set_ylabel("extra time without long prefixes, %")
    return figure


BENCHMARK = Benchmark(
    name=NAME,
    title="Overhead",
    settings=OverheadSettings,
    full=FullOverheadSettings,
    result=OverheadResult,
    run=run,
    tables=tables,
    figure=figure,
)

if __name__ == "__main__":
    end_servers_on_sigterm()
    typer.run(command_of(BENCHMARK))
