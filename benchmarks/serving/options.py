"""Settings of the benchmarks, and the command that each of them is."""

from __future__ import annotations

import inspect
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import typer
from matplotlib.figure import Figure
from pydantic import BaseModel, ConfigDict, Field, field_validator
from rich.console import Console

from benchmarks.serving.client import ServingError
from benchmarks.serving.engines import EngineChoice, ServerSizes, parse_engines
from benchmarks.serving.quality import Quality
from benchmarks.serving.record import RecordError, Result, environment, open_result, save_result
from benchmarks.serving.tables import Table, markdown, rich_table
from benchmarks.serving.workload import WorkloadError
from grkv_sglang.commands.options import with_settings
from grkv_sglang.model import ensure_model
from grkv_sglang.serving import ServerError, detect_device
from grkv_sglang.settings import ConfigError, load_settings

PREFIX = "BENCHMARK_"
"""Of environment variables, none of which is read."""


class Settings(BaseModel):
    """What all benchmarks have in common. A class's defaults are its quick mode; the full mode is a
    subclass with other defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    chunk_tokens: int = Field(512, ge=1, description="Tokens of a prefill chunk.")
    seed: int = Field(0, description="Of requests, popularity and servers.")
    model: Path | None = Field(None, description="Hugging Face folder; SmolLM2-135M-Instruct unless given.")
    dtype: str = Field("float32", description="Of weights and KV: float32, bfloat16 or float16.")
    texts: Path | None = Field(
        None, description="Folder of .txt files to cut texts from; the demo's unless given."
    )

    def model_path(self) -> Path:
        """The model's folder; the default one is made on first use."""
        return self.model or ensure_model()


class ServingSettings(Settings):
    """Of the benchmarks that compare servers."""

    engines: tuple[str, ...] = Field(
        ("off", "grkv:0.1"),
        description="Servers to compare: stock (SGLang as it is), off (our attention backend with SGLang's "
        "cache; the reference where it takes part), grkv with a budget (grkv:0.1). Separated by commas.",
    )
    profile: str = Field("default", description="How prefixes are compressed.")
    output_tokens: int = Field(64, ge=1, description="Tokens of every answer.")

    @field_validator("engines", mode="before")
    @classmethod
    def _split_names(cls, value: Any) -> Any:
        return split(value)

    @field_validator("engines")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        parse_engines(value)
        return value

    @property
    def choices(self) -> list[EngineChoice]:
        return parse_engines(self.engines)

    def sizes(self, log_folder: Path, pool_tokens: int) -> ServerSizes:
        """Of servers with such a pool."""
        return ServerSizes(
            model_path=self.model_path(),
            log_folder=log_folder,
            pool_tokens=pool_tokens,
            chunk_tokens=self.chunk_tokens,
            seed=self.seed,
            dtype=self.dtype,
        )


def split(value: Any) -> Any:
    """Text with commas as a list, for fields that are tuples."""
    return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value


def reference_of(engines: Sequence[str]) -> str | None:
    """Name of the engine that others are compared with: off, else stock, else none."""
    names = {choice.name for choice in parse_engines(engines)}
    return next((name for name in ("off", "stock") if name in names), None)


R = TypeVar("R", bound=Result)


@dataclass(frozen=True)
class Run(Generic[R]):
    """What a benchmark works with: its result so far, and where progress and parts that are done go."""

    result: R
    console: Console
    log_folder: Path
    save: Callable[[], None]


@dataclass(frozen=True)
class Benchmark(Generic[R]):
    """One benchmark: how it is set, run and shown.

    Attributes:
        name: of its command and in its files.
        settings, full: quick and full mode.
        result: what it writes.
        run: fills `Run.result`, part by part.
        tables, figure: of a result; the tables carry the budgets' fidelity.
        title: a heading.
    """

    name: str
    title: str
    settings: type[Settings]
    full: type[Settings]
    result: type[R]
    run: Callable[[Run[R]], None]
    tables: Callable[[R, Quality], list[Table]]
    figure: Callable[[R], Figure]


def execute(benchmark: Benchmark[R], settings: Settings, path: Path | None, console: Console) -> R:
    """Run a benchmark or go on with one; write JSON, Markdown and plot beside each other; show the tables.

    Raises:
        RecordError: `path` holds something else.
    """
    result = open_result(path, benchmark.result(benchmark=benchmark.name, settings=settings))
    # It is part of the result once something was measured in it.
    here = environment(detect_device())

    def save() -> None:
        if here not in result.environments:
            result.environments.append(here)
        save_result(path, result)
        console.print(f"complete: {result.done[-1]}")

    log_folder = Path(tempfile.mkdtemp(prefix=f"grkv-{benchmark.name}-"))
    console.print(f"[dim]server logs: {log_folder}[/dim]")
    benchmark.run(Run(result, console, log_folder, save))
    tables = benchmark.tables(result, Quality.load().for_model(settings.model))
    for table in tables:
        console.print(rich_table(table))
    if path is not None:
        path.with_suffix(".md").write_text(markdown(tables), encoding="utf-8")
        benchmark.figure(result).savefig(path.with_suffix(".png"), dpi=120)
        console.print(f"{path}, .md, .png")
    return result


def end_servers_on_sigterm() -> None:
    """Make a program that is told to end do so as after Ctrl-C: its servers end with it."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def command_of(benchmark: Benchmark[Any]) -> Callable[..., None]:
    """The command of a benchmark, with one option per field of its settings."""

    def command(
        *,
        quick: Annotated[
            bool,
            typer.Option("--quick/--full", help="Minutes on two cores, or hours; defaults shown are quick."),
        ] = True,
        json_path: Annotated[
            Path | None,
            typer.Option("--json", help="Where the result goes; a result that is there is gone on with."),
        ] = None,
        config: Path | None,
        **fields: Any,
    ) -> None:
        kind = benchmark.settings if quick else benchmark.full
        try:
            settings = load_settings(
                kind,
                PREFIX,
                environ={},
                config_file=config,
                overrides=fields,
                label=f"{benchmark.name} settings",
            )  # fmt: skip
            execute(benchmark, settings, json_path, Console())
        except (ConfigError, RecordError, WorkloadError) as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(2) from error
        except (ServingError, ServerError) as error:
            typer.echo(f"{error}\nWhat is complete is kept; the same command goes on with it.", err=True)
            raise typer.Exit(1) from error

    command.__doc__ = inspect.getdoc(benchmark.run)
    return with_settings(command, benchmark.settings)
