"""How every program of this package reads its settings: one pydantic model, filled once from a file, the
environment and the command line."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

CONFIG_FILE = "CONFIG_FILE"
"""Behind a program's prefix: the variable that names its settings file."""

Model = TypeVar("Model", bound=BaseModel)


class ConfigError(ValueError):
    """The configuration is wrong; the message says where and what is valid."""


def load_settings(
    model: type[Model],
    prefix: str,
    *,
    environ: Mapping[str, str] | None = None,
    config_file: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    label: str,
) -> Model:
    """Settings from a file (.toml, .json, .yaml: `config_file`, or else the one that ``<prefix>CONFIG_FILE``
    names), then environment variables ``<prefix><FIELD>``, then `overrides` that are not None; later wins.

    Raises ConfigError for an unreadable file, an unknown key (naming the valid ones) or a bad value; its
    message begins with `label`.
    """
    env = os.environ if environ is None else environ
    file_variable = prefix + CONFIG_FILE
    values: dict[str, Any] = {}
    if config_file is not None:
        values.update(_read_file(config_file, "--config"))
    elif env.get(file_variable):
        values.update(_read_file(Path(env[file_variable]), file_variable))
    for name, raw in env.items():
        if name.startswith(prefix) and name != file_variable:
            values[name[len(prefix) :].lower()] = raw
    values.update({name: value for name, value in (overrides or {}).items() if value is not None})
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{label}: {describe_errors(error, model)}") from error


def as_text(value: Any) -> str:
    """A setting as an environment variable holds it."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, list | tuple) else str(value)


def describe_errors(error: ValidationError, model: type[BaseModel]) -> str:
    """One line for people: which field, what is wrong, and which fields exist if one does not."""
    parts = []
    for item in error.errors():
        where = ".".join(str(p) for p in item["loc"]) or "value"
        if item["type"] == "extra_forbidden":
            parts.append(f"unknown field {where!r}; valid fields are {', '.join(model.model_fields)}")
        else:
            parts.append(f"{where}: {item['msg']} (got {item['input']!r})")
    return "; ".join(parts)


def _read_file(path: Path, source: str) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{source}: cannot read {path}: {error}") from error
    try:
        if path.suffix == ".toml":
            values: Any = tomllib.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            import yaml

            values = yaml.safe_load(text) or {}
        elif path.suffix == ".json":
            values = json.loads(text)
        else:
            raise ConfigError(f"{source}: {path} must end in .toml, .yaml, .yml or .json")
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{source}: {path} is not valid: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{source}: {path} must hold a table of settings, got {type(values).__name__}")
    return values
