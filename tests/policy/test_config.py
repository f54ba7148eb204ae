"""Configuration from file and environment; wrong keys and values name the right ones."""

from __future__ import annotations

import pytest

from grkv_sglang.config import GrkvConfig, load_config, to_environment
from grkv_sglang.settings import ConfigError


def test_defaults_need_no_source():
    config = load_config({})
    assert config == GrkvConfig()
    assert config.model_dump() == {
        "compression": True,
        "mode": "prefer_compressed",
        "budget": 0.1,
        "budget_tokens": None,
        "budget_min": 0.01,
        "budget_max": 1.0,
        "profile": "default",
        "min_quality": 0.0,
        "quality_floor": 0.0,
        "protect_system": False,
        "triggers": ("explicit", "reuse", "pressure"),
        "min_span_tokens": 512,
        "reuse_min_hits": 1,
        "cooldown_requests": 32,
        "step_tokens": 1024,
        "pressure_watermark": 0.15,
        "pressure_reserve": 0.02,
        "merge_after_spans": 4,
        "max_generations": 2,
        "pin_share": 0.5,
        "ttl_s": None,
        "free_exact_twin": "at_once",
        "allow_forced": False,
        "census": False,
    }


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.toml", 'budget = 0.3\nmode = "exact"\ntriggers = ["insert", "reuse"]'),
        ("c.yaml", "budget: 0.3\nmode: exact\ntriggers: [insert, reuse]"),
        ("c.json", '{"budget": 0.3, "mode": "exact", "triggers": "insert, reuse"}'),
    ],
)
def test_file_then_environment(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    env = {"GRKV_CONFIG_FILE": str(path)}
    config = load_config(env)
    assert (config.budget, config.mode, config.triggers) == (0.3, "exact", ("insert", "reuse"))
    env["GRKV_BUDGET"] = "0.5"
    env["GRKV_TRIGGERS"] = "explicit"
    config = load_config(env)
    assert (config.budget, config.mode, config.triggers) == (0.5, "exact", ("explicit",))


@pytest.mark.parametrize(
    ("text", "triggers"),
    [
        ("explicit,insert", ("explicit", "insert")),
        (" pressure , reuse ,", ("pressure", "reuse")),
        ("insert", ("insert",)),
        ("", ()),
        (" , ", ()),
    ],
)
def test_triggers_as_text(text, triggers):
    assert load_config({"GRKV_TRIGGERS": text}).triggers == triggers


def test_settings_as_text():
    config = load_config(
        {
            "GRKV_REUSE_MIN_HITS": "3",
            "GRKV_COOLDOWN_REQUESTS": "5",
            "GRKV_STEP_TOKENS": "256",
            "GRKV_PRESSURE_WATERMARK": "0.3",
            "GRKV_PRESSURE_RESERVE": "0.3",
            "GRKV_MERGE_AFTER_SPANS": "2",
            "GRKV_MAX_GENERATIONS": "0",
            "GRKV_PIN_SHARE": "1",
            "GRKV_TTL_S": "90.5",
        }
    )
    assert (config.reuse_min_hits, config.cooldown_requests, config.step_tokens) == (3, 5, 256)
    assert (config.pressure_watermark, config.pressure_reserve) == (0.3, 0.3)
    assert (config.merge_after_spans, config.max_generations) == (2, 0)
    assert (config.pin_share, config.ttl_s) == (1.0, 90.5)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"GRKV_BUDGTE": "0.1"}, "unknown field 'budgte'; valid fields are compression, mode, budget"),
        ({"GRKV_AUTO_REUSE": "false"}, "unknown field 'auto_reuse'; valid fields are .*triggers"),
        ({"GRKV_BUDGET": "ten percent"}, "budget: Input should be a valid number"),
        ({"GRKV_BUDGET": "1.5"}, "budget: Input should be less than or equal to 1"),
        ({"GRKV_MODE": "fast"}, "mode: Input should be 'exact', 'prefer_exact' or 'prefer_compressed'"),
        (
            {"GRKV_TRIGGERS": "reuse,sometimes"},
            r"triggers\.1: Input should be 'explicit', 'insert', 'reuse' or 'pressure' \(got 'sometimes'\)",
        ),
        ({"GRKV_REUSE_MIN_HITS": "0"}, "reuse_min_hits: Input should be greater than or equal to 1"),
        ({"GRKV_STEP_TOKENS": "0"}, "step_tokens: Input should be greater than or equal to 1"),
        ({"GRKV_MERGE_AFTER_SPANS": "1"}, "merge_after_spans: Input should be greater than or equal to 2"),
        ({"GRKV_PRESSURE_WATERMARK": "1"}, "pressure_watermark: Input should be less than 1"),
        ({"GRKV_BUDGET_MIN": "0"}, "budget_min: Input should be greater than 0"),
        ({"GRKV_BUDGET_MAX": "1.5"}, "budget_max: Input should be less than or equal to 1"),
        ({"GRKV_QUALITY_FLOOR": "1"}, "quality_floor: Input should be less than 1"),
        ({"GRKV_QUALITY_FLOOR": "-0.1"}, "quality_floor: Input should be greater than or equal to 0"),
        ({"GRKV_PROTECT_SYSTEM": "always"}, "protect_system: Input should be a valid boolean"),
        ({"GRKV_PIN_SHARE": "1.01"}, "pin_share: Input should be less than or equal to 1"),
        ({"GRKV_TTL_S": "0"}, "ttl_s: Input should be greater than 0"),
        ({"GRKV_CONFIG_FILE": "/does/not/exist.toml"}, "cannot read"),
    ],
)
def test_wrong_settings_are_refused(env, message):
    with pytest.raises(ConfigError, match=message):
        load_config(env)


@pytest.mark.parametrize(
    "env",
    [
        {"GRKV_PRESSURE_RESERVE": "0.16"},
        {"GRKV_PRESSURE_WATERMARK": "0.01"},
        {"GRKV_PRESSURE_WATERMARK": "0"},
    ],
)
def test_a_reserve_above_the_watermark_is_refused(env):
    with pytest.raises(ConfigError, match="pressure_reserve must not exceed pressure_watermark"):
        load_config(env)
    # Without the trigger neither number matters.
    assert "pressure" not in load_config({**env, "GRKV_TRIGGERS": "explicit,reuse"}).triggers


def test_budget_bounds():
    config = load_config({"GRKV_BUDGET_MIN": "0.05", "GRKV_BUDGET_MAX": "0.5"})
    assert (config.budget_min, config.budget_max) == (0.05, 0.5)
    same = load_config({"GRKV_BUDGET_MIN": "0.2", "GRKV_BUDGET_MAX": "0.2"})
    assert (same.budget_min, same.budget_max) == (0.2, 0.2)
    for env in ({"GRKV_BUDGET_MIN": "0.3", "GRKV_BUDGET_MAX": "0.2"}, {"GRKV_BUDGET_MAX": "0.005"}):
        with pytest.raises(ConfigError, match="budget_min must not exceed budget_max"):
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


def test_values_as_environment():
    values = {"budget": 0.25, "census": False, "triggers": ("insert", "reuse"), "budget_tokens": None}
    assert to_environment(values) == {
        "GRKV_BUDGET": "0.25",
        "GRKV_CENSUS": "false",
        "GRKV_TRIGGERS": "insert,reuse",
    }
    assert to_environment({"triggers": ["explicit"]}) == {"GRKV_TRIGGERS": "explicit"}
    with pytest.raises(ConfigError, match=r"unknown \['budgets'\]; valid are .*'triggers'"):
        to_environment({"budgets": 1})


@pytest.mark.parametrize(
    "config",
    [
        GrkvConfig(),
        GrkvConfig(triggers=(), compression=False, census=True, allow_forced=True),
        GrkvConfig(
            mode="exact", budget=1 / 3, budget_tokens=7, profile="paper", min_quality=0.1, min_span_tokens=2,
            triggers=("pressure", "insert"), reuse_min_hits=2, cooldown_requests=1, step_tokens=1,
            pressure_watermark=0.999, pressure_reserve=0.1, merge_after_spans=2, max_generations=0,
            pin_share=0.0, ttl_s=1e-3, free_exact_twin="under_pressure", budget_min=0.25, budget_max=0.75,
            quality_floor=0.5, protect_system=True,
        ),
    ],
)  # fmt: skip
def test_environment_round_trip(config):
    assert load_config(to_environment(config.model_dump())) == config
