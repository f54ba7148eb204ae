"""The Compose files and the image: what they name exists, what they set is a setting, and nothing is open
that need not be. Needs no Docker."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from grkv_sglang.cli import app
from grkv_sglang.config import ENV_PREFIX, GrkvConfig
from grkv_sglang.services.chat.settings import ENV_PREFIX as CHAT_PREFIX
from grkv_sglang.services.chat.settings import ChatSettings
from grkv_sglang.services.rag.settings import ENV_PREFIX as RAG_PREFIX
from grkv_sglang.services.rag.settings import RagSettings
from grkv_sglang.settings import load_settings

ROOT = Path(__file__).parents[1]
FILES = ("docker-compose.yml", "docker-compose.cpu.yml")
MODELS: dict[str, type[BaseModel]] = {
    ENV_PREFIX: GrkvConfig,
    CHAT_PREFIX: ChatSettings,
    RAG_PREFIX: RagSettings,
}
VARIABLE = re.compile(r"(?<!\$)\$\{(?P<name>\w+)(?::(?P<kind>[-?])(?P<rest>[^}]*))?\}")
SECRET = re.compile(r"KEY|PASSWORD")
CHOSEN = {"CHAT_REGISTRATION": "closed"}
"""What a user has to choose; secrets are chosen too, see `chosen`."""


class ComposeLoader(yaml.SafeLoader):
    """YAML with Compose's tags for what an override replaces."""


ComposeLoader.add_constructor("!override", lambda loader, node: loader.construct_sequence(node, deep=True))  # type: ignore[arg-type]
ComposeLoader.add_constructor("!reset", lambda loader, node: None)


def load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.load((ROOT / name).read_text(encoding="utf-8"), ComposeLoader)
    return loaded


def chosen(text: str) -> str:
    """`text` with its variables replaced, as Compose does with a filled .env."""

    def value(match: re.Match[str]) -> str:
        name = match["name"]
        if SECRET.search(name):
            return "0123456789abcdef"
        return CHOSEN[name] if name in CHOSEN else match["rest"]

    return VARIABLE.sub(value, text)


BASE = load("docker-compose.yml")
SERVICES: dict[str, dict[str, Any]] = BASE["services"]
GPU_FREE: dict[str, dict[str, Any]] = load("docker-compose.cpu.yml")["services"]


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_a_service_is_watched_limited_and_locked(name):
    service = SERVICES[name]
    check = service["healthcheck"]
    assert check["test"][0] == "CMD"
    assert {"interval", "timeout", "retries", "start_period"} <= set(check)
    assert set(service["deploy"]["resources"]["limits"]) == {"cpus", "memory", "pids"}
    assert service["restart"] == "unless-stopped"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["user"].split(":")[0] not in ("root", "0")
    assert service["logging"]["options"] == {"max-size": "10m", "max-file": "3"}
    assert "privileged" not in service


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_only_pages_are_published_and_only_here(name):
    service = SERVICES[name]
    assert BASE["networks"]["inside"] == {"internal": True}
    published = {chosen(port) for port in service.get("ports", ())}
    ports = {"chat": 8100, "rag": 8200, "grafana": 3000}
    assert published == ({f"127.0.0.1:{ports[name]}:{ports[name]}"} if name in ports else set())
    # Docker publishes no port of a container that is on internal networks alone.
    assert ("outside" in service["networks"]) == bool(published)
    assert "inside" in service["networks"]


@pytest.mark.parametrize("services", [SERVICES, GPU_FREE], ids=FILES)
def test_every_image_has_a_version(services):
    for service in services.values():
        tag = service["image"].rpartition(":")[2]
        assert tag == service.get("build", {}).get("target") or re.search(r"\d+\.\d+", tag), service["image"]


@pytest.mark.parametrize("name", ["sglang", "chat", "rag"])
def test_what_is_set_is_a_setting(name):
    environment = {key: chosen(value) for key, value in SERVICES[name]["environment"].items()}
    of_ours = {key for key in environment if key.startswith("GRKV")}
    assert of_ours
    for prefix, model in MODELS.items():
        # Raises for an unknown name, and for a value that the program would refuse.
        settings = load_settings(model, prefix, environ=environment, label=name)
        set_here = {key.removeprefix(prefix).lower() for key in of_ours if key.startswith(prefix)}
        assert set_here <= set(model.model_fields)
        if set_here and prefix != ENV_PREFIX:
            # The service listens where its port is published and its health is asked.
            port = environment[f"{prefix}PORT"]
            assert str(settings.model_dump()["port"]) == port
            assert SERVICES[name]["ports"][0].endswith(f":{port}")
            assert f":{port}/healthz" in SERVICES[name]["healthcheck"]["test"][-1]


def test_no_secret_is_written_down_and_none_has_a_default():
    variables = [match for name in FILES for match in VARIABLE.finditer((ROOT / name).read_text())]
    assert {m["name"] for m in variables if SECRET.search(m["name"])} == {
        "ENGINE_API_KEY",
        "ENGINE_ADMIN_API_KEY",
        "POSTGRES_PASSWORD",
        "CHAT_DB_PASSWORD",
        "RAG_DB_PASSWORD",
        "QDRANT_API_KEY",
        "GRAFANA_ADMIN_PASSWORD",
    }
    for match in variables:
        must_be_set = bool(SECRET.search(match["name"])) or match["name"] in CHOSEN
        assert match["kind"] == ("?" if must_be_set else "-"), match[0]
    for name, service in SERVICES.items():
        for key, value in service.get("environment", {}).items():
            if SECRET.search(key):
                assert VARIABLE.fullmatch(value), f"{name}: {key}"
            if "://" in value and "@" in value:
                assert "${" in value, f"{name}: {key}"


def test_the_example_names_every_variable_and_its_default():
    lines = (ROOT / ".env.example").read_text(encoding="utf-8").splitlines()
    to_fill = {line.partition("=")[0]: line.partition("=")[2] for line in lines if re.match(r"\w+=", line)}
    optional = {m[1]: m[2] for line in lines if (m := re.fullmatch(r"# ([A-Z_]+)=(.*)", line))}
    assert set(to_fill.values()) == {""}
    wanted: dict[str, set[str | None]] = {}
    for match in VARIABLE.finditer((ROOT / "docker-compose.yml").read_text()):
        wanted.setdefault(match["name"], set()).add(None if match["kind"] == "?" else match["rest"])
    assert set(to_fill) == {name for name, defaults in wanted.items() if defaults == {None}}
    assert {name: {default} for name, default in optional.items()} == {
        name: defaults for name, defaults in wanted.items() if defaults != {None}
    }
    assert (
        ".env" not in {path.name for path in ROOT.iterdir()}
        or "\n.env\n" in (ROOT / ".gitignore").read_text()
    )


def test_what_is_mounted_and_built_is_there():
    for service in (*SERVICES.values(), *GPU_FREE.values()):
        for volume in service.get("volumes", ()):
            if isinstance(volume, dict):
                # The model: the user's, and Docker must not make an empty folder in its place.
                assert volume["bind"] == {"create_host_path": False}
                continue
            source, _, target = volume.partition(":")
            assert target.startswith("/")
            if source.startswith("."):
                assert (ROOT / source).exists(), source
                assert target.endswith(":ro")
            else:
                assert source in BASE["volumes"], source
        if "dockerfile" in service.get("build", {}):
            assert (ROOT / service["build"]["dockerfile"]).is_file()


def test_the_image_is_built_from_files_that_are_there():
    dockerfile = ROOT / "deploy/docker/grkv.Dockerfile"
    text = dockerfile.read_text(encoding="utf-8")
    ignored = Path(f"{dockerfile}.dockerignore").read_text(encoding="utf-8").splitlines()
    copied = [
        source
        for line in re.findall(r"^COPY (?!.*--from)(?:--\S+ )*(.*)$", text, re.MULTILINE)
        for source in line.split()[:-1]
    ]
    assert copied
    assert {line[1:] for line in ignored if line.startswith("!")} == set(copied)
    assert all((ROOT / source).exists() for source in copied)
    targets = set(re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE))
    used = {s["build"]["target"] for s in (*SERVICES.values(), *GPU_FREE.values()) if "build" in s}
    assert used == {"cpu", "gpu"}
    assert used <= targets
    assert all(":" in image for image in re.findall(r"^ARG \w+_IMAGE=(\S+)$", text, re.MULTILINE))
    user = re.search(r"useradd --uid (\d+)", text)
    assert user is not None
    assert SERVICES["chat"]["user"] == f"{user[1]}:{user[1]}"


def test_the_image_installs_what_the_package_declares():
    script = ROOT / "deploy/docker/requirements.py"
    printed = subprocess.run([sys.executable, script], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = printed.stdout.splitlines()
    assert "sglang==0.5.23" in lines
    assert any(line.startswith("fastapi") for line in lines)
    assert any(line.startswith("qdrant-client") for line in lines)
    assert not any(line.startswith("grkv") for line in lines)


@pytest.mark.parametrize("services", [SERVICES, GPU_FREE], ids=FILES)
def test_commands_are_those_of_grkv(services):
    known = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    for service in services.values():
        command = service.get("command", [])
        if command[:1] == ["grkv"]:
            assert command[1] in known, command


def test_monitoring_finds_what_it_asks():
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    (target,) = config["scrape_configs"][0]["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert f"--port={port}" in SERVICES[host]["command"]
    assert "--enable-metrics" in SERVICES[host]["command"]
    source = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    provider = yaml.safe_load((ROOT / "deploy/grafana/provisioning/dashboards/dashboards.yml").read_text())
    folder = provider["providers"][0]["options"]["path"]
    assert f"./deploy/grafana/dashboards:{folder}:ro" in SERVICES["grafana"]["volumes"]


def test_without_a_gpu_nothing_asks_for_one():
    assert SERVICES["sglang"]["deploy"]["resources"]["reservations"]["devices"]
    assert GPU_FREE["sglang"]["deploy"]["resources"]["reservations"] is None
    assert GPU_FREE["sglang"]["volumes"] == ["engine-cache:/home/grkv/.cache"]
    built_from = {name for name, service in SERVICES.items() if "build" in service}
    assert built_from <= set(GPU_FREE)
    # Made once, by the one service that reaches a package index, and not watched: it ends.
    model = GPU_FREE["model"]
    assert model["restart"] == "no"
    assert model["networks"] == ["outside"]
    assert GPU_FREE["sglang"]["depends_on"] == {"model": {"condition": "service_completed_successfully"}}


def start_engine(tmp_path: Path, **keys: str) -> subprocess.CompletedProcess[str]:
    """serve.sh with a `grkv` that prints its arguments, its environment's keys and the file."""
    grkv = tmp_path / "grkv"
    grkv.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\necho "key=${ENGINE_API_KEY:-}"\n')
    grkv.chmod(0o755)
    return subprocess.run(
        [ROOT / "deploy/docker/serve.sh", "--model-path=/model"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "TMPDIR": str(tmp_path), **keys},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_engine_gets_its_keys_from_a_file_that_sglang_reads(tmp_path, model_path):
    result = start_engine(tmp_path, ENGINE_API_KEY="a1", ENGINE_ADMIN_API_KEY="b2")
    assert result.returncode == 0, result.stderr
    serve, dashes, config, keys, model, environment = result.stdout.splitlines()
    assert (serve, dashes, config, model) == ("serve", "--", "--config", "--model-path=/model")
    assert environment == "key="
    assert Path(keys).stat().st_mode & 0o777 == 0o600

    from sglang.srt.server_args import prepare_server_args

    arguments = prepare_server_args(["--device", "cpu", "--config", keys, "--model-path", str(model_path)])
    assert (arguments.api_key, arguments.admin_api_key) == ("a1", "b2")


def test_the_engine_does_not_start_without_keys(tmp_path):
    result = start_engine(tmp_path, ENGINE_API_KEY="a1")
    assert result.returncode != 0
    assert "set ENGINE_ADMIN_API_KEY" in result.stderr
    assert not result.stdout
