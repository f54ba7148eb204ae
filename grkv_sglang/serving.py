"""Start a real SGLang HTTP server as a subprocess, wait for it, and end it with all its workers.

Used by the demo, the engine tests and the benchmarks; `grkv serve` uses `plugin_arguments` alone and
replaces its own process instead.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
from rich.console import Console

from grkv_sglang.config import (
    CONFIG_FILE_ENV,
    ENV_PREFIX,
    FLASHINFER_ATTENTION,
    RADIX_BACKEND,
    TORCH_ATTENTION,
    to_environment,
)

Engine = Literal["stock", "off", "grkv"]
"""`stock`: SGLang untouched. `off`: our attention backend, SGLang's cache. `grkv`: both ours."""


MEMORY_CHECKS = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}
"""SGLang's checks that are off by default; its idle check is on by default."""

LOG_TAIL_LINES = 40
LOG_LINE_CHARACTERS = 400  # SGLang prints all of its arguments on one line of 16,000
POLL_SECONDS = 0.2
STOP_SECONDS = 1.0
"""SIGTERM ends SGLang's workers at once; its launcher takes that for a crash and sleeps five seconds before
it ends as well, with nothing left to put in order."""


class ServerError(RuntimeError):
    """The server did not come up; the message ends with the last lines of its log."""


@dataclass(frozen=True)
class ServerSpec:
    """Everything that decides how one server runs. Sizes are in tokens."""

    model_path: Path
    engine: Engine
    log_path: Path
    port: int = 0  # 0: a free one is chosen at start
    max_total_tokens: int = 16384
    context_length: int | None = None
    chunked_prefill_size: int | None = None
    extra_args: tuple[str, ...] = ()
    grkv_config: Mapping[str, Any] = field(default_factory=dict)  # fields of GrkvConfig; engine "grkv" only
    memory_checks: bool = False
    random_seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    start_timeout_s: float = 600.0


@dataclass(frozen=True)
class RunningServer:
    """A server that answered its health check."""

    spec: ServerSpec
    base_url: str
    pid: int
    start_s: float


def detect_device() -> str:
    """`cuda` where torch sees a GPU, else `cpu` (the plugin's own platform)."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def attention_arguments(device: str) -> list[str]:
    """SGLang's arguments for our attention backend alone: the one that the plugin chooses by itself on the
    CPU, and on a GPU where FlashInfer is installed (SGLang's CUDA build requires it)."""
    return ["--attention-backend", TORCH_ATTENTION if device == "cpu" else FLASHINFER_ATTENTION]


def plugin_arguments(device: str) -> list[str]:
    """SGLang's arguments that select the plugin: attention and cache, which only work together. On a GPU the
    plugin chooses the attention backend when it knows the model."""
    attention = attention_arguments(device) if device == "cpu" else []
    return [*attention, "--radix-cache-backend", RADIX_BACKEND]


def build_command(spec: ServerSpec, port: int) -> list[str]:
    """Command line of the server, with the interpreter that runs us."""
    command = [sys.executable, "-m", "sglang.launch_server"]
    command += ["--model-path", str(spec.model_path), "--dtype", spec.dtype, "--device", spec.device]
    command += ["--host", "127.0.0.1", "--port", str(port), "--random-seed", str(spec.random_seed)]
    command += ["--max-total-tokens", str(spec.max_total_tokens)]
    if spec.context_length is not None:
        command += ["--context-length", str(spec.context_length)]
    if spec.chunked_prefill_size is not None:
        command += ["--chunked-prefill-size", str(spec.chunked_prefill_size)]
    # Idle schedulers otherwise spin on a core that the server under measurement needs.
    command += ["--sleep-on-idle", "--skip-server-warmup"]
    if spec.engine == "off":
        command += attention_arguments(spec.device)
    elif spec.engine == "grkv":
        command += plugin_arguments(spec.device)
    return command + list(spec.extra_args)


def build_environment(spec: ServerSpec, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of the server: `base` (ours unless given), its plugin settings replaced by the spec's.

    Raises:
        ConfigError: `grkv_config` names a field that does not exist.
        ValueError: `grkv_config` was given for an engine that would not read it.
    """
    if spec.grkv_config and spec.engine != "grkv":
        raise ValueError(f"engine {spec.engine!r} does not read grkv_config")
    inherited = os.environ if base is None else base
    environment = {name: value for name, value in inherited.items() if not name.startswith(ENV_PREFIX)}
    # A command started as `path/to/python -m ...` finds its tools (ninja, for one) beside that python.
    environment["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), environment.get("PATH", "")))
    if spec.memory_checks:
        environment |= MEMORY_CHECKS
    if spec.engine == "grkv":
        census = {"census": True} if spec.memory_checks else {}
        environment |= to_environment({**census, **spec.grkv_config})
    return environment


def serve_environment(values: Mapping[str, Any], config_file: Path | None) -> dict[str, str]:
    """Our environment plus plugin settings, for `grkv serve`; settings that are None stay as they are."""
    environment = dict(os.environ) | to_environment(values)
    if config_file is not None:
        environment[CONFIG_FILE_ENV] = str(config_file)
    return environment


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def log_tail(path: Path, lines: int = LOG_TAIL_LINES) -> str:
    """Last lines of a log file, or a note that there is none."""
    if not path.is_file():
        return f"({path} was not written)"
    tail = path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
    return "\n".join(line[:LOG_LINE_CHARACTERS] for line in tail)


@contextmanager
def running_server(spec: ServerSpec, console: Console | None = None) -> Iterator[RunningServer]:
    """Run the server for the length of a `with` block.

    Args:
        spec: how to run it.
        console: where the waiting is shown; standard error unless given.

    Raises:
        ServerError: it ended or did not answer within `start_timeout_s`.
    """
    port = spec.port or free_port()
    with running_process(build_command(spec, port), build_environment(spec), spec.log_path) as process:
        started = time.perf_counter()
        base_url = f"http://127.0.0.1:{port}"
        with (console or Console(stderr=True)).status("") as status:

            def show(elapsed_s: float) -> None:
                status.update(f"starting the {spec.engine} server: {elapsed_s:.0f} s (log: {spec.log_path})")

            wait_until_healthy(process, base_url, spec.log_path, spec.start_timeout_s, show)
        yield RunningServer(spec, base_url, process.pid, time.perf_counter() - started)


@contextmanager
def running_process(
    command: Sequence[str], environment: Mapping[str, str], log_path: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a process group of its own, its output in `log_path`; end the whole group at exit."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            _end_group(process)


def wait_until_healthy(
    process: subprocess.Popen[bytes],
    base_url: str,
    log_path: Path,
    timeout_s: float,
    show: Callable[[float], None] = lambda elapsed_s: None,
) -> None:
    """Poll ``GET /health`` until it answers 200; `show` is called with the elapsed seconds between polls.

    Raises:
        ServerError: the process ended, or the time is up; with the log's tail.
    """
    started = time.perf_counter()
    while True:
        elapsed_s = time.perf_counter() - started
        show(elapsed_s)
        if process.poll() is not None:
            raise ServerError(
                f"the server ended with exit status {process.returncode} after {elapsed_s:.0f} s. "
                f"End of {log_path}:\n{log_tail(log_path)}"
            )
        if _is_healthy(base_url):
            return
        if elapsed_s > timeout_s:
            raise ServerError(
                f"no answer from {base_url}/health within {timeout_s:.0f} s. "
                f"End of {log_path}:\n{log_tail(log_path)}"
            )
        time.sleep(POLL_SECONDS)


def _is_healthy(base_url: str) -> bool:
    # The check generates a token, which takes seconds while a server warms up.
    try:
        return httpx.get(f"{base_url}/health", timeout=30.0).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the process group, SIGKILL to what is left of it after a while."""
    _signal_group(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):  # what ignores SIGTERM gets SIGKILL below
        process.wait(STOP_SECONDS)
    # The launcher may be gone before its workers: the group is what has to end.
    _signal_group(process.pid, signal.SIGKILL)
    process.wait()


def _signal_group(group: int, signal_number: signal.Signals) -> None:
    try:
        os.killpg(group, signal_number)
    except ProcessLookupError:
        return  # all of it is gone already
