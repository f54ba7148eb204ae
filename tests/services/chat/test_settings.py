"""Where settings come from, and which are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from grkv_sglang.services.chat.command import load_chat_settings
from grkv_sglang.services.chat.settings import ChatSettings, default_database_url
from grkv_sglang.settings import ConfigError


def test_file_environment_and_flags_in_this_order(tmp_path: Path):
    file = tmp_path / "chat.toml"
    file.write_text('port = 1\nmax_tokens = 1\nsystem_message = "Hi."\n')
    found = load_chat_settings(file, {"port": 3, "host": None}, {"GRKVCHAT_MAX_TOKENS": "2"})
    assert (found.port, found.max_tokens, found.system_message) == (3, 2, "Hi.")
    assert found.host == "127.0.0.1"


def test_unknown_setting_is_refused_with_the_valid_ones():
    with pytest.raises(ConfigError, match=r"unknown field 'prot'; valid fields are host, port"):
        load_chat_settings(None, {}, {"GRKVCHAT_PROT": "1"})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "chat.example.org"])
def test_registration_must_be_decided_where_others_reach_the_server(host: str):
    with pytest.raises(ConfigError, match="set registration to open or closed"):
        load_chat_settings(None, {"host": host, "database_url": "postgresql://u:secret@h/d"}, {})
    assert not load_chat_settings(None, {"host": host, "registration": "closed"}, {}).registration_open


def test_errors_do_not_tell_secrets():
    with pytest.raises(ConfigError) as caught:
        load_chat_settings(None, {"host": "0.0.0.0", "database_url": "postgresql://u:secret@h/d"}, {})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.9.10"])
def test_registration_is_open_on_loopback(host: str):
    assert ChatSettings(host=host).registration_open


@pytest.mark.parametrize(
    "values", [{"port": 0}, {"budget": 0.0}, {"temperature": 3}, {"engine_url": "localhost:30000"}]
)
def test_values_out_of_range_are_refused(values: dict[str, object]):
    with pytest.raises(ConfigError, match=next(iter(values))):
        load_chat_settings(None, values, {})


def test_every_setting_is_described():
    assert [name for name, field in ChatSettings.model_fields.items() if not field.description] == []


def test_the_documentation_lists_every_setting():
    text = Path("docs/chat.md").read_text(encoding="utf-8")
    assert [name for name in ChatSettings.model_fields if f"| `{name}` |" not in text] == []


def test_default_database_is_in_the_users_data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_database_url() == f"sqlite:///{tmp_path}/grkv_sglang/chat.db"
    assert (tmp_path / "grkv_sglang").is_dir()
