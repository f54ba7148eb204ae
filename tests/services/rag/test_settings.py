"""Settings: where they come from, what is refused; and the command line of tenants and keys."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time

import httpx
import pytest
from typer.testing import CliRunner

from grkv_sglang.services.rag.command import admin_app, first_key
from grkv_sglang.services.rag.settings import RagSettings, load
from grkv_sglang.services.rag.store import Store
from grkv_sglang.serving import free_port
from grkv_sglang.settings import ConfigError


def test_every_setting_is_described():
    assert [name for name, field in RagSettings.model_fields.items() if not field.description] == []


def test_sources_of_settings(tmp_path, monkeypatch):
    file = tmp_path / "rag.toml"
    file.write_text('section_tokens = 800\nport = 1\nprofile = "best"\n')
    monkeypatch.setenv("GRKVRAG_PORT", "2")
    monkeypatch.setenv("GRKVRAG_QUEUE", "3")
    settings = load(file, {"queue": 4, "host": None})
    assert (settings.section_tokens, settings.port, settings.queue, settings.profile) == (800, 2, 4, "best")
    assert settings.host == "127.0.0.1"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"sections_per_answers": 1}, "unknown field 'sections_per_answers'; valid fields are host, port"),
        ({"section_tokens": 10}, "section_tokens: Input should be greater than or equal to 64 (got 10)"),
        ({"passage_words": 40}, "passage_overlap_words must be at most half of passage_words"),
        ({"engine_url": "localhost"}, "engine_url"),
    ],
)
def test_refused_settings(given, words):
    with pytest.raises(ConfigError) as raised:
        load(None, given)
    assert "grkv rag settings: " in str(raised.value)
    assert words in str(raised.value)


def test_sections_that_do_not_fit_into_the_context():
    RagSettings(section_tokens=1000, answer_tokens=256).check_context(1768)
    with pytest.raises(ConfigError, match=r"is 1001, .* reads 1768 tokens: set it to 1000 or less"):
        RagSettings(section_tokens=1001, answer_tokens=256).check_context(1768)


def run(*arguments, data_dir):
    return CliRunner().invoke(admin_app, arguments, env={"GRKVRAG_DATA_DIR": str(data_dir)})


def test_tenants_and_keys_by_command(tmp_path):
    added = run("tenant", "add", "acme", data_dir=tmp_path)
    assert added.exit_code == 0
    assert re.fullmatch(r"grkvrag_[\w-]{43}\n", added.stdout)
    assert run("tenant", "add", "acme", data_dir=tmp_path).exit_code == 1
    second = run("key", "add", "acme", data_dir=tmp_path).stdout.strip()
    listed = run("tenant", "list", data_dir=tmp_path).stdout
    assert "acme: 0 documents" in listed
    assert f"key 2: {second[:14]}..." in listed
    assert second not in listed
    assert run("key", "revoke", "2", data_dir=tmp_path).exit_code == 0
    assert re.search(r"key 2: .*, revoked \d{4}-", run("tenant", "list", data_dir=tmp_path).stdout)
    assert run("key", "revoke", "2", data_dir=tmp_path).exit_code == 1
    assert run("reindex", data_dir=tmp_path).exit_code == 0


def test_the_first_start_prints_a_link_with_a_key(tmp_path):
    port = free_port()
    command = [sys.executable, "-m", "grkv_sglang.services.rag", "--port", str(port)]
    command += ["--engine-url", f"http://127.0.0.1:{free_port()}", "--log-level", "error"]
    log = tmp_path / "log"
    with (
        log.open("w") as out,
        subprocess.Popen([*command, "--data-dir", str(tmp_path)], stdout=out, stderr=out) as process,
    ):
        try:
            assert wait_for(f"http://127.0.0.1:{port}/healthz", process) == {
                "status": "ok",
                "engine": "not reached",
            }
            link = re.search(rf"http://127\.0\.0\.1:{port}/#key=(grkvrag_[\w-]+)", log.read_text())
            assert link
            headers = {"Authorization": f"Bearer {link.group(1)}"}
            me = httpx.get(f"http://127.0.0.1:{port}/api/v1/me", headers=headers)
            assert me.json()["tenant"] == "default"
        finally:
            process.terminate()
    # uvicorn stops in order and then ends by the signal that it was sent.
    assert process.returncode == -signal.SIGTERM, log.read_text()


def test_a_second_start_makes_no_key(tmp_path):
    store = Store(f"sqlite:///{tmp_path / 'rag.sqlite3'}")
    key = first_key(store)
    assert key is not None
    assert [tenant.name for tenant, _, _ in store.list_tenants()] == ["default"]
    assert store.tenant_of_key(key) is not None
    assert first_key(store) is None
    store.close()


def wait_for(url, process):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None
        try:
            return httpx.get(url, timeout=30).json()
        except httpx.TransportError:
            time.sleep(0.3)
    raise AssertionError(f"{url} did not answer")
