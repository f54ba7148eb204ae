"""Results as files: settings, where they were measured, and rows; a file that is there is gone on with."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from benchmarks.serving.client import Answer

PACKAGES = ("grkv-sglang", "sglang", "torch", "transformers", "triton", "numpy")


class RecordError(ValueError):
    """A result file cannot be read or gone on with; the message says what to do."""


class Frozen(BaseModel):
    """A row: nothing unknown in it, nothing changed."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class AnswerRow(Frozen):
    """What a row keeps of an answer (`client.Answer`); `measured` fills it."""

    prompt_tokens: int
    cached_tokens: int
    span_tokens: int
    span_slots: int
    ttft_s: float
    total_s: float
    gaps_ms: list[float]


def measured(answer: Answer) -> dict[str, Any]:
    """The fields of `AnswerRow`, rounded to what a clock can tell."""
    return {
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "span_tokens": answer.span_tokens,
        "span_slots": answer.span_slots,
        "ttft_s": round(answer.ttft_s, 4),
        "total_s": round(answer.total_s, 4),
        "gaps_ms": [round(1000 * gap, 3) for gap in answer.gaps_s],
    }


class Environment(Frozen):
    """Where and with what a run was made. A result that was gone on with has one per run."""

    started: str
    commit: str | None  # None outside a git checkout
    modified: bool  # files differ from the commit
    processor: str
    cores: int
    memory_gib: float
    device: str
    platform: str
    python: str
    versions: dict[str, str]


class Result(BaseModel):
    """What every benchmark writes, besides rows of its own.

    Attributes:
        benchmark: its name; the report knows it by this.
        done: names of the parts that are complete, which a later run skips.
    """

    model_config = ConfigDict(extra="forbid")

    benchmark: str
    settings: Any
    environments: list[Environment] = Field(default_factory=list)
    done: list[str] = Field(default_factory=list)


R = TypeVar("R", bound=Result)


def environment(device: str) -> Environment:
    """This machine, these versions, this commit, now."""
    commit, modified = _commit(Path(__file__).parent)
    return Environment(
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=commit,
        modified=modified,
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        device=device,
        platform=platform.platform(),
        python=platform.python_version(),
        versions={name: importlib.metadata.version(name) for name in PACKAGES},
    )


def open_result(path: Path | None, empty: R) -> R:
    """`empty`, or what `path` holds of a run with the same settings.

    Raises:
        RecordError: the file is of another benchmark, of other settings, or no result at all.
    """
    if path is None or not path.exists():
        return empty
    kind = type(empty)
    try:
        found = kind.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        raise RecordError(
            f"{path} is no result of {empty.benchmark}: {error}; give another file, or remove this one"
        ) from error
    mine, theirs = empty.settings.model_dump(), found.settings.model_dump()
    different = [
        f"{name} (there {theirs[name]!r}, now {mine[name]!r})" for name in mine if mine[name] != theirs[name]
    ]
    if different:
        raise RecordError(
            f"{path} was measured with other settings: {', '.join(different)}; "
            "give another file, remove this one, or repeat its settings to go on with it"
        )
    return found


def save_result(path: Path | None, result: Result) -> None:
    """Write a result so that a run broken off leaves the old file or the new one; rows stand one to a
    line."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(_formatted(result.model_dump(mode="json")), encoding="utf-8")
    unfinished.replace(path)


def _formatted(values: dict[str, Any]) -> str:
    fields = []
    for name, value in values.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            rows = ",\n".join("    " + json.dumps(row) for row in value)
            fields.append(f"  {json.dumps(name)}: [\n{rows}\n  ]")
        else:
            fields.append(f"  {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(fields) + "\n}\n"


def _commit(folder: Path) -> tuple[str | None, bool]:
    def git(*arguments: str) -> str | None:
        try:
            answer = subprocess.run(
                ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=30
            )
        except (OSError, subprocess.SubprocessError):
            return None  # no git, or no checkout: the record says None
        return answer.stdout.strip()

    return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no"))


def _processor() -> str:
    """The processor's model where Linux tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
