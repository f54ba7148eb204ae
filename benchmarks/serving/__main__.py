"""``python -m benchmarks.serving BENCHMARK``."""

from __future__ import annotations

import typer

from benchmarks.serving.all import BENCHMARKS
from benchmarks.serving.options import command_of, end_servers_on_sigterm

app = typer.Typer(
    help="What a user gains and loses with the plugin, over HTTP, beside SGLang as it is.",
    add_completion=False,
    no_args_is_help=True,
)
for benchmark in BENCHMARKS.values():
    app.command(benchmark.name)(command_of(benchmark))

if __name__ == "__main__":
    end_servers_on_sigterm()
    app()
