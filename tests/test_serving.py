"""Commands, environments and processes of the servers that demo, tests and benchmarks start."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from grkv_sglang.cli import app, serve_arguments
from grkv_sglang.config import GrkvConfig
from grkv_sglang.serving import (
    Engine,
    ServerError,
    ServerSpec,
    build_command,
    build_environment,
    free_port,
    running_process,
    wait_until_healthy,
)
from grkv_sglang.settings import ConfigError

SPEC = ServerSpec(Path("/models/small"), "stock", Path("server.log"), max_total_tokens=4096, random_seed=7)
COMMON = [
    *(sys.executable, "-m", "sglang.launch_server", "--model-path", "/models/small"),
    *("--dtype", "float32", "--device", "cpu", "--host", "127.0.0.1", "--port", "31000"),
    *("--random-seed", "7", "--max-total-tokens", "4096"),
]
QUIET = ["--sleep-on-idle", "--skip-server-warmup"]


def spec(engine: Engine, **changes: Any) -> ServerSpec:
    return replace(SPEC, engine=engine, **changes)


@pytest.mark.parametrize(
    ("engine", "arguments"),
    [
        ("stock", []),
        ("off", ["--attention-backend", "grkv_torch"]),
        ("grkv", ["--attention-backend", "grkv_torch", "--radix-cache-backend", "grkv"]),
    ],
)
def test_command_per_engine(engine: Engine, arguments: list[str]) -> None:
    assert build_command(spec(engine), 31000) == COMMON + QUIET + arguments


def test_command_with_sizes_and_extra_arguments() -> None:
    wanted = spec("grkv", context_length=2048, chunked_prefill_size=512, extra_args=("--log-level", "error"))
    assert build_command(wanted, 31000) == [
        *COMMON,
        *("--context-length", "2048", "--chunked-prefill-size", "512"),
        *QUIET,
        *("--attention-backend", "grkv_torch", "--radix-cache-backend", "grkv"),
        *("--log-level", "error"),
    ]


def test_environment_carries_only_the_specs_settings() -> None:
    base = {"PATH": "/usr/bin", "GRKV_BUDGET": "0.9", "HOME": "/home/x"}
    environment = build_environment(
        spec("grkv", grkv_config={"budget": 0.1, "triggers": ["explicit", "insert"]}), base
    )
    assert environment == {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin",
        "HOME": "/home/x",
        "GRKV_BUDGET": "0.1",
        "GRKV_TRIGGERS": "explicit,insert",
    }


@pytest.mark.parametrize(
    ("engine", "census"), [("stock", {}), ("off", {}), ("grkv", {"GRKV_CENSUS": "true"})]
)
def test_memory_checks(engine: Engine, census: dict[str, str]) -> None:
    environment = build_environment(spec(engine, memory_checks=True), {})
    del environment["PATH"]
    assert environment == {
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
        "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
        **census,
    }


def test_unknown_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="bugdet"):
        build_environment(spec("grkv", grkv_config={"bugdet": 0.1}), {})


def test_settings_for_another_engine_are_refused() -> None:
    with pytest.raises(ValueError, match="does not read grkv_config"):
        build_environment(spec("off", grkv_config={"budget": 0.1}), {})


def test_dead_server_reports_the_end_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    script = "import sys; print('early\\n' * 100); print('no such model', file=sys.stderr); sys.exit(3)"
    with (
        running_process([sys.executable, "-c", script], os.environ, log) as process,
        pytest.raises(ServerError) as error,
    ):
        wait_until_healthy(process, f"http://127.0.0.1:{free_port()}", log, timeout_s=60)
    message = str(error.value)
    assert "exit status 3" in message
    assert "no such model" in message
    assert message.count("early") < 100


def test_silent_server_times_out(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    command = [sys.executable, "-c", "import time; print('loading', flush=True); time.sleep(600)"]
    with (
        running_process(command, os.environ, log) as process,
        pytest.raises(ServerError, match="within 1 s"),
    ):
        wait_until_healthy(process, f"http://127.0.0.1:{free_port()}", log, timeout_s=1)
    assert process.returncode is not None


def test_healthy_server_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "health").write_text("")
    port = free_port()
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "-d", str(tmp_path)]
    shown: list[float] = []
    with running_process(command, os.environ, tmp_path / "server.log") as process:
        wait_until_healthy(process, f"http://127.0.0.1:{port}", tmp_path / "server.log", 60, shown.append)
        assert process.poll() is None
    assert shown
    assert process.returncode is not None


def test_workers_end_with_the_server(tmp_path: Path) -> None:
    """A worker that ignores SIGTERM outlives its parent; the whole group has to go."""
    worker = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print(os.getpid(), flush=True); time.sleep(600)"
    )
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {worker!r}])"
    log = tmp_path / "server.log"
    with running_process([sys.executable, "-c", script], os.environ, log):
        pid = int(_wait_for(lambda: log.read_text().strip()))
        assert _is_running(pid)
    _wait_for(lambda: not _is_running(pid))


def test_on_a_gpu_the_plugin_chooses_the_attention_backend() -> None:
    """Only a server without our radix cache has to name ours."""
    assert build_command(spec("off", device="cuda"), 31000)[-2:] == ["--attention-backend", "grkv_flashinfer"]
    assert build_command(spec("grkv", device="cuda"), 31000)[-2:] == ["--radix-cache-backend", "grkv"]
    for arguments in (build_command(spec("grkv", device="cuda"), 31000), serve_arguments([], "cuda")):
        assert not {"--attention-backend", "--disable-cuda-graph"} & set(arguments)


def test_serve_arguments_let_the_user_win() -> None:
    assert serve_arguments(["--model-path", "m", "--dtype", "bfloat16"], "cpu") == [
        *("--attention-backend", "grkv_torch", "--radix-cache-backend", "grkv"),
        *("--device", "cpu", "--dtype", "float32", "--sleep-on-idle"),
        *("--model-path", "m", "--dtype", "bfloat16"),
    ]


def test_serve_has_an_option_for_every_setting() -> None:
    text = CliRunner().invoke(app, ["serve", "--help"], terminal_width=200).output
    missing = [name for name in GrkvConfig.model_fields if f"--{name.replace('_', '-')} " not in text]
    assert not missing


def test_serve_replaces_itself_with_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(
        os, "execve", lambda _path, command, environment: calls.append((command, environment))
    )
    monkeypatch.setattr("grkv_sglang.cli.detect_device", lambda: "cuda")
    settings = ["--budget", "0.2", "--triggers", "explicit,reuse"]
    arguments = ["serve", *settings, "--", "--model-path", "m", "--port", "1"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    ((command, environment),) = calls
    assert command[1:3] == ["-m", "sglang.launch_server"]
    assert command[-4:] == ["--model-path", "m", "--port", "1"]
    assert environment["GRKV_BUDGET"] == "0.2"
    assert environment["GRKV_TRIGGERS"] == "explicit,reuse"
    assert "GRKV_MODE" not in environment


def test_serve_refuses_a_wrong_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("started"))
    result = CliRunner().invoke(app, ["serve", "--budget", "7", "--", "--model-path", "m"])
    assert result.exit_code == 1
    assert "budget" in result.stderr


def _wait_for(condition: Any, timeout_s: float = 30.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError("waited in vain")


def _is_running(pid: int) -> bool:
    """False for a process that is gone or only waits for its parent to notice."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
