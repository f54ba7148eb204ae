"""The page of all settings, made from the models that the programs read:
``python -m grkv_sglang.commands.reference`` prints it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from grkv_sglang.config import ENV_PREFIX, GrkvConfig
from grkv_sglang.policy.options import RequestOptions
from grkv_sglang.services.chat.settings import ENV_PREFIX as CHAT_PREFIX
from grkv_sglang.services.chat.settings import ChatSettings
from grkv_sglang.services.rag.settings import ENV_PREFIX as RAG_PREFIX
from grkv_sglang.services.rag.settings import RagSettings
from grkv_sglang.settings import CONFIG_FILE, as_text

COMMAND = "python -m grkv_sglang.commands.reference > docs/configuration.md"


@dataclass(frozen=True)
class Program:
    """A program whose settings are one model."""

    title: str
    command: str
    prefix: str
    model: type[BaseModel]


PROGRAMS = (
    Program("The server's plugin", "grkv serve", ENV_PREFIX, GrkvConfig),
    Program("The chat server", "grkv chat", CHAT_PREFIX, ChatSettings),
    Program("The RAG service", "grkv rag", RAG_PREFIX, RagSettings),
)

_HEAD = f"""# Configuration

<!-- Made by `{COMMAND}`; do not edit. -->

Every program reads one model of settings, once, at its start: from a file, then environment variables,
then flags; later ones win. An unknown name or a bad value stops the program with a message that names it.
Lists are given as text, with commas between the names.
"""

_OPTIONS = """
## Options of a request

In `custom_params.grkv` of an OpenAI chat, or in `sampling_params.custom_params.grkv` of SGLang's own API. A
wrong one is answered with status 400 and the valid names.

| option | type | meaning |
|---|---|---|
"""


def page() -> str:
    """The whole page as Markdown."""
    options = "".join(
        _row(f"`{name}`", _kind(field), field.description)
        for name, field in RequestOptions.model_fields.items()
    )
    return _HEAD + "".join(section(program) for program in PROGRAMS) + _OPTIONS + options


def section(program: Program) -> str:
    """The table of one program's settings, in the order of its model."""
    head = (
        f"\n## {program.title}\n\nFlags of `{program.command}`; the file is named by `--config` or "
        f"`{program.prefix}{CONFIG_FILE}` (.toml, .yaml, .json).\n\n"
        "| setting, variable, flag | type | default | meaning |\n|---|---|---|---|\n"
    )
    rows = []
    for name, field in program.model.model_fields.items():
        names = "<br>".join(f"`{n}`" for n in (name, program.prefix + name.upper(), _flag(name, field)))
        rows.append(_row(names, _kind(field), _default(field), field.description))
    return head + "".join(rows)


def _row(*cells: str | None) -> str:
    return "| " + " | ".join((cell or "").replace("|", "\\|") for cell in cells) + " |\n"


def _flag(name: str, field: FieldInfo) -> str:
    flag = name.replace("_", "-")
    return f"--{flag} / --no-{flag}" if field.annotation is bool else f"--{flag}"


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "unset"
    return f"`{as_text(value)}`" if as_text(value) else "empty"


def _kind(field: FieldInfo) -> str:
    """Type and bounds in words."""
    return ", ".join([_type_name(field.annotation), *_bounds(field.metadata)])


def _type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return " or ".join(_type_name(a) for a in arguments if a is not NoneType)
    if origin is Literal:
        *others, last = (f"`{value}`" for value in arguments)
        return f"{', '.join(others)} or {last}" if others else last
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}"
    names = {bool: "true or false", int: "integer", float: "number", str: "text"}
    return names.get(annotation) or str(annotation.__name__).lower()


def _bounds(metadata: Iterable[Any]) -> list[str]:
    words = []
    for item in metadata:
        if isinstance(item, Gt):
            words.append(f"> {item.gt:,g}")
        elif isinstance(item, Ge):
            words.append(f"≥ {item.ge:,g}")
        elif isinstance(item, Lt):
            words.append(f"< {item.lt:,g}")
        elif isinstance(item, Le):
            words.append(f"≤ {item.le:,g}")
        elif isinstance(item, MinLen):
            words.append("not empty" if item.min_length == 1 else f"at least {item.min_length} long")
        elif isinstance(item, MaxLen):
            words.append(f"at most {item.max_length} long")
        elif getattr(item, "pattern", None) is not None:
            words.append(f"matching `{item.pattern}`")
        elif getattr(item, "strict", None) is None:
            raise TypeError(f"the reference does not know how to write {item!r}")
    return words


if __name__ == "__main__":
    print(page(), end="")
