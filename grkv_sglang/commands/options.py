"""Command-line options made from a settings model, so that no field is listed twice."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_origin

import typer
from pydantic import BaseModel


def with_settings(command: Callable[..., Any], model: type[BaseModel]) -> Callable[..., Any]:
    """`command` for typer, with one option per field of `model` and ``--config`` for a file of them.

    Args:
        command: takes keyword arguments for the fields, None where the user gave nothing, and `config`
            (path or None). Its other parameters, as typer reads them, come first.
    """
    own = [
        parameter
        for name, parameter in inspect.signature(command, eval_str=True).parameters.items()
        if name != "config" and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    config_file = typer.Option(
        "--config", help="Settings from a .toml, .yaml or .json file.", exists=True, dir_okay=False
    )
    options: dict[str, Any] = {"config": Annotated[Path | None, config_file]}
    for name, field in model.model_fields.items():
        value = field.get_default(call_default_factory=True)
        text = ",".join(map(str, value)) if isinstance(value, tuple) else value
        default = f" Default: {text}." if value is not None else ""
        # Lists are given as text, which the model splits.
        annotation: Any = str if get_origin(field.annotation) is tuple else field.annotation
        options[name] = Annotated[annotation | None, typer.Option(help=f"{field.description}{default}")]
    keywords = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in options.items()
    ]
    command.__signature__ = inspect.Signature([*own, *keywords])  # type: ignore[attr-defined]
    return command
