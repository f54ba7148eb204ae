"""The commands' arguments, help and exit statuses; what they do is tested in their own modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from grkv_sglang.cli import app
from grkv_sglang.commands import doctor, inspect, verify, warm
from grkv_sglang.serving import free_port


def grkv(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), terminal_width=200)


@pytest.mark.parametrize("command", ["warm", "inspect", "verify", "doctor"])
def test_help_teaches_by_examples(command: str):
    text = grkv(command, "--help").output
    assert "Examples:" in text
    assert f"\n    grkv {command}" in text


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_no_server(command: str):
    result = grkv(command, "--url", f"http://127.0.0.1:{free_port()}")
    assert result.exit_code == 1
    assert "error: " in result.output
    assert "ConnectError" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "7"], "budget: Input should be less than or equal to 1"),
        (["--ttl", "0"], "ttl_s: Input should be greater than 0"),
        (["--template", "{question}"], "the template must hold {document} once"),
        ([], "no documents found"),
    ],
)
def test_warm_refuses_before_anything_is_sent(tmp_path: Path, arguments: list[str], message: str):
    if arguments:
        (tmp_path / "a.txt").write_text("x")
    result = grkv("warm", str(tmp_path), *arguments)
    assert result.exit_code == 1
    assert message in result.output


def test_inspect_is_watched_or_json():
    assert "not both" in grkv("inspect", "--watch", "--json").output


@pytest.mark.parametrize(("ok", "status"), [(True, 0), (False, 1)])
def test_exit_statuses(monkeypatch, tmp_path: Path, ok: bool, status: int):
    (tmp_path / "a.txt").write_text("text")
    seen: dict[str, Any] = {}

    def run(name: str) -> Any:
        def call(*arguments: Any, **fields: Any) -> bool:
            seen[name] = (arguments, fields)
            return ok

        return call

    for module, name in ((warm, "run_warm"), (verify, "run_verify"), (doctor, "run_doctor")):
        monkeypatch.setattr(module, name, run(name))
    file = str(tmp_path / "a.txt")
    assert grkv("warm", file, "--pin", "--system", "S", "--concurrency", "2").exit_code == status
    _, documents, settings, _ = seen["run_warm"][0]
    assert [document.text for document in documents] == ["text"]
    assert (settings.pin, settings.layout.system, settings.concurrency) == (True, "S", 2)
    assert grkv("verify", "--text", file, "--max-gap", "0.3").exit_code == status
    assert (seen["run_verify"][0][1].text, seen["run_verify"][0][1].max_gap) == ("text", 0.3)
    assert grkv("doctor", "--port", "31000", "--memory", "4").exit_code == status
    assert (seen["run_doctor"][0][0].port, seen["run_doctor"][0][0].memory_gib) == (31000, 4.0)


def test_inspect_passes_its_arguments(monkeypatch):
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(inspect, "run_inspect", lambda *_, **fields: seen.append(fields))
    assert grkv("inspect").exit_code == grkv("inspect", "--watch", "--interval", "5").exit_code == 0
    assert grkv("inspect", "--json").exit_code == 0
    assert seen == [
        {"watch_s": None, "json": False}, {"watch_s": 5.0, "json": False}, {"watch_s": None, "json": True},
    ]  # fmt: skip
