"""The doctor on what is right and on what is broken."""

from __future__ import annotations

import importlib.metadata
import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from grkv_sglang.client import GrkvClient, RetryPolicy
from grkv_sglang.commands import doctor
from grkv_sglang.commands.doctor import DoctorSettings, machine, versions
from grkv_sglang.commands.doctor.findings import Finding, print_finding
from grkv_sglang.commands.doctor.model import ModelFigures, capacity, check_model, weight_bytes
from grkv_sglang.commands.doctor.server import check_server
from grkv_sglang.commands.doctor.setup import check_config, check_entry_points, check_port
from grkv_sglang.contract import HostSymbol
from tests.commands.states import raw_state


def levels(findings: list[Finding]) -> list[str]:
    return [finding.level for finding in findings]


def the_problem(findings: list[Finding]) -> Finding:
    (problem,) = [finding for finding in findings if finding.level == "problem"]
    assert problem.todo
    return problem


# Versions


def test_what_is_installed_is_what_is_pinned():
    found = versions.check_versions()
    assert [finding.topic for finding in found] == [
        "python", "sglang", "torch", "transformers", "flashinfer-python", "triton",
    ]  # fmt: skip
    assert "problem" not in levels(found)


def test_pins_are_read_from_requirements():
    assert versions.pinned_versions(
        [
            "torch==2.14.1",
            "flashinfer_python[cu13]==0.7.2",
            "Numpy>=1.26",
            "x.y==1.0 ; python_version > '3'",
            "ruff==0.1; extra == 'dev'",
        ]
    ) == {"torch": "2.14.1", "flashinfer-python": "0.7.2", "x-y": "1.0"}


@pytest.mark.parametrize(
    ("installed", "gpu_only", "level"),
    [
        ("2.14.1", False, "ok"),
        ("2.14.1+cu130", False, "ok"),
        ("2.14.2", False, "problem"),
        ("2.14.2", True, "warning"),
        (None, False, "problem"),
        (None, True, "warning"),
    ],
)
def test_versions_are_compared(monkeypatch, installed: str | None, gpu_only: bool, level: str):
    def version(name: str) -> str:
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.metadata, "version", version)
    finding = versions.compare_version("torch", "2.14.1", gpu_only=gpu_only)
    assert finding.level == level
    assert level == "ok" or "pip install 'torch==2.14.1'" in finding.todo


@pytest.mark.parametrize(("version", "level"), [("3.10.9", "problem"), ("3.11.0", "ok"), ("3.12.1rc1", "ok")])
def test_python(version: str, level: str):
    assert versions.check_python(version, "3.11").level == level


# Entry points, configuration, port


def test_entry_points():
    assert levels(check_entry_points({})) == ["ok", "ok"]
    assert levels(check_entry_points({"SGLANG_PLUGINS": "other, grkv"})) == ["ok", "ok"]
    assert "leaves the plugin out" in the_problem(check_entry_points({"SGLANG_PLUGINS": "other"})).found


def test_an_installation_without_entry_points(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: importlib.metadata.EntryPoints(()))
    assert levels(check_entry_points({})) == ["problem", "problem"]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"GRKV_BUGDET": "0.1"}, "unknown field 'bugdet'; valid fields are"),
        ({"GRKV_BUDGET": "7"}, "budget: Input should be less than or equal to 1"),
        ({"GRKV_CONFIG_FILE": "/no/such.toml"}, "cannot read /no/such.toml"),
        ({"GRKV_PROFILE": "bset"}, "profile: "),
    ],
)
def test_a_wrong_configuration(environment: dict[str, str], message: str):
    assert message in the_problem(check_config(environment)).found


def test_a_wrong_file(tmp_path: Path):
    file = tmp_path / "grkv.toml"
    file.write_text("budget = ")
    assert "is not valid" in the_problem(check_config({"GRKV_CONFIG_FILE": str(file)})).found


def test_a_right_configuration():
    assert levels(check_config({"HOME": "/x", "GRKV_BUDGET": "0.2"})) == ["ok"]
    assert levels(check_config({"GRKV_COMPRESSION": "false"})) == ["ok", "warning"]
    assert levels(check_config({"GRKV_TRIGGERS": ""})) == ["ok", "warning"]


def test_a_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        taken = check_port(port)
    assert (taken.level, taken.found) == ("warning", "is in use")
    assert check_port(port).level == "ok"


# Machine


def test_this_machine_has_a_device():
    assert levels(machine.check_device())[0] == "ok"


def test_the_installed_sglang_is_the_one():
    found = machine.check_contracts()
    assert set(levels(found)) == {"ok"}
    assert found[0].topic == "contract: cache and hooks"


def test_a_broken_contract(monkeypatch):
    gone = HostSymbol("sglang.srt.utils.auth.no_such_thing", (), "admin")
    monkeypatch.setattr(machine, "HOST_SYMBOLS", (gone,))
    found = machine.check_contracts()
    assert "no_such_thing is missing" in the_problem(found).found
    assert "pip install" in the_problem(found).todo


# Server


def client_of(**routes: httpx.Response) -> GrkvClient:
    """A client of a server with these routes, `/` written as `_`."""

    def answer(request: httpx.Request) -> httpx.Response:
        name = request.url.path.removeprefix("/").replace("/", "_")
        return routes.get(name, httpx.Response(404, json={"detail": "Not Found"}))

    return GrkvClient("http://s", transport=httpx.MockTransport(answer), retry=RetryPolicy(attempts=1))


HEALTHY = {"health": httpx.Response(200), "server_info": httpx.Response(200, json={"version": "0.5.23"})}


def test_a_server_with_the_plugin():
    with client_of(**HEALTHY, grkv_state=httpx.Response(200, json=[raw_state()])) as client:
        found = check_server(client, "http://s")
    assert levels(found) == ["ok", "ok"]
    assert "1 spans; 113 of 120 slots free" in found[1].found


@pytest.mark.parametrize(
    ("routes", "message", "todo"),
    [
        ({}, "does not answer its health check", "start it"),
        ({"health": httpx.Response(200)}, "no route /server_info", "is it SGLang?"),
        (
            {"health": httpx.Response(200), "server_info": httpx.Response(200, text="<p>")},
            "not JSON",
            "SGLang",
        ),
        (HEALTHY, "no route /grkv/state", "--radix-cache-backend grkv"),
        (
            {**HEALTHY, "grkv_state": httpx.Response(401, json={"error": "Unauthorized"})},
            "Unauthorized",
            "admin key",
        ),
    ],
)
def test_a_server_that_is_not_right(routes: dict[str, httpx.Response], message: str, todo: str):
    with client_of(**routes) as client:
        problem = the_problem(check_server(client, "http://s"))
    assert message in problem.found
    assert todo in problem.todo


def test_a_server_of_another_version_with_failures():
    raw = raw_state()
    raw["counters"]["compressions_failed"] = {"no_room": 3}
    raw["census"] = {"ok": False, "checks": 1, "last_error": "slot 7 twice"}
    routes = {
        "health": httpx.Response(200),
        "server_info": httpx.Response(200, json={"version": "0.5.24"}),
        "grkv_state": httpx.Response(200, json=[raw]),
    }
    with client_of(**routes) as client:
        found = check_server(client, "http://s")
    assert levels(found) == ["problem", "ok", "problem", "warning"]
    assert ("slot 7 twice" in found[2].found, "no_room 3" in found[3].found) == (True, True)


# Model


def test_capacity_by_hand():
    """2 layers, 4 heads of 8 + 8 numbers of 2 bytes: 256 bytes per token; 1 GiB holds 4,194,304."""
    figures = ModelFigures(32768, layers=2, kv_heads=4, key_dim=8, value_dim=8, number_bytes=2)
    assert figures.kv_bytes_per_token == 256
    limits, fits = capacity("m", figures, 1.0, 0.1)
    assert "context of 32,768 tokens; 0.2 KiB" in limits.found
    assert "4,194,304 tokens: 512 documents of 8,192 tokens, or 5,120 at budget 0.1" in fits.found


def test_weights_that_leave_no_room(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"x" * 300)
    assert (weight_bytes(tmp_path), weight_bytes(Path("org/name"))) == (300, 0)
    figures = ModelFigures(512, layers=2, kv_heads=4, key_dim=8, value_dim=8, number_bytes=2)
    assert "no memory for KV: 1.5 GiB short" in the_problem(capacity("m", figures, -1.5, 0.1)).found


def test_the_demos_model_is_served(model_path: Path):
    found = check_model(str(model_path), memory_gib=2.0, budget=0.1)
    assert levels(found) == ["ok", "ok", "ok"]
    # 30 layers, 3 KV heads of 64, fp32 without a GPU.
    assert "context of 8,192 tokens; 45.0 KiB" in found[1].found


def write_config(folder: Path, **changes: Any) -> Path:
    plain = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "vocab_size": 128,
        "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 512, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**plain, **changes}))
    return folder


def test_a_model_that_is_not_served(tmp_path: Path):
    changes = {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attn_logit_softcapping": 50.0,
        "head_dim": 32, "sliding_window": 128,
    }  # fmt: skip
    found = check_model(str(write_config(tmp_path, **changes)), memory_gib=1.0, budget=0.1)
    assert set(levels(found)) == {"problem"}
    assert any("soft-capping" in finding.found for finding in found)
    assert all(finding.todo for finding in found)


def test_a_model_that_is_not_there(tmp_path: Path):
    for folder in (tmp_path, tmp_path / "gone"):
        problem = the_problem(check_model(str(folder), memory_gib=1.0, budget=0.1))
        assert "its configuration cannot be read" in problem.found
    (tmp_path / "config.json").write_text("{")
    assert "cannot be read" in the_problem(check_model(str(tmp_path), memory_gib=1.0, budget=0.1)).found


# All together


def test_problems_decide_the_exit(monkeypatch):
    good, bad = Finding("ok", "a", "fine"), Finding("problem", "b", "broken [x]", "mend it")
    for name in ("check_versions", "check_device", "check_contracts"):
        monkeypatch.setattr(doctor, name, lambda: [good])
    console = Console(width=100, record=True)
    assert doctor.run_doctor(DoctorSettings({}), console)
    monkeypatch.setattr(doctor, "check_device", lambda: [bad])
    assert not doctor.run_doctor(DoctorSettings({"GRKV_BUDGET": "9"}), console)
    text = console.export_text()
    assert "problems: 0" in text
    assert "problems: 2" in text
    assert "broken [x]" in text
    assert "-> mend it" in text


def test_a_finding_is_one_line_however_long():
    console = Console(width=40, record=True)
    print_finding(Finding("ok", "a", "word " * 30), console)
    assert len(console.export_text().splitlines()) == 1
