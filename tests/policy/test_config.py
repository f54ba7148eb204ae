"""Configuration from file and environment; wrong keys and values name the right ones."""

from __future__ import annotations

import pytest

from grkv_sglang.config import ConfigError, GrkvConfig, load_config, to_environment


def test_defaults_need_no_source():
    config = load_config({})
    assert config == GrkvConfig()
    assert (config.mode, config.budget, config.profile) == ("prefer_compressed", 0.1, "default")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.toml", 'budget = 0.3\nmode = "exact"'),
        ("c.yaml", "budget: 0.3\nmode: exact"),
        ("c.json", '{"budget": 0.3, "mode": "exact"}'),
    ],
)
def test_file_then_environment(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    env = {"GRKV_CONFIG_FILE": str(path)}
    assert (load_config(env).budget, load_config(env).mode) == (0.3, "exact")
    env["GRKV_BUDGET"] = "0.5"
    env["GRKV_AUTO_REUSE"] = "false"
    config = load_config(env)
    assert (config.budget, config.mode, config.auto_reuse) == (0.5, "exact", False)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"GRKV_BUDGTE": "0.1"}, "unknown field 'budgte'; valid fields are compression, mode, budget"),
        ({"GRKV_BUDGET": "ten percent"}, "budget: Input should be a valid number"),
        ({"GRKV_BUDGET": "1.5"}, "budget: Input should be less than or equal to 1"),
        ({"GRKV_MODE": "fast"}, "mode: Input should be 'exact', 'prefer_exact' or 'prefer_compressed'"),
        ({"GRKV_CONFIG_FILE": "/does/not/exist.toml"}, "cannot read"),
    ],
)
def test_wrong_settings_are_refused(env, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        load_config(env)


def test_unreadable_files(tmp_path):
    for name, text, message in [
        ("c.toml", "budget = ", "is not valid"),
        ("c.ini", "x", "must end in .toml"),
        ("c.json", "[1]", "a table"),
    ]:
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_config({"GRKV_CONFIG_FILE": str(path)})


def test_environment_round_trip():
    values = {"budget": 0.25, "auto_reuse": False, "mode": "exact", "budget_tokens": None}
    config = load_config(to_environment(values))
    assert (config.budget, config.auto_reuse, config.mode, config.budget_tokens) == (
        0.25,
        False,
        "exact",
        None,
    )
    with pytest.raises(ConfigError, match="unknown"):
        to_environment({"budgets": 1})
