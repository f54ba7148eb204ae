"""The peers' own environment: kvpress wants an older transformers than the project.

Made once with `venv` and pip from ``requirements.txt`` beside this file, in a user cache folder whose name
carries a hash of the pins; later calls only look there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import platformdirs
from rich.console import Console

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
PYTHON_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
IMPORT_CHECK = "import kvpress, torch, transformers; print(torch.__version__, transformers.__version__)"
SHOWN_LOG_LINES = 25


class PeersError(RuntimeError):
    """The peers' environment could not be made, or the export in it failed; the message says why."""


def pins(requirements: Path = REQUIREMENTS) -> dict[str, str]:
    """The requirements as name -> version, comments left out.

    Raises:
        ValueError: a line pins nothing (it is not ``name==version``).
    """
    pinned = {}
    for line in requirements.read_text(encoding="utf-8").splitlines():
        requirement = line.partition("#")[0].strip()
        if not requirement:
            continue
        name, separator, version = requirement.partition("==")
        if not separator or not version:
            raise ValueError(f"{requirements.name}: {requirement!r} is not name==version")
        pinned[name.strip()] = version.strip()
    return pinned


def environment_dir(requirements: Path = REQUIREMENTS) -> Path:
    """Where the environment of these pins and this Python release is kept.

    Comments do not count: only another pin or another Python makes another environment.
    """
    lines = [f"{name}=={version}" for name, version in sorted(pins(requirements).items())]
    digest = hashlib.sha256("\n".join([PYTHON_VERSION, *lines]).encode()).hexdigest()
    return Path(platformdirs.user_cache_dir("grkv_sglang")) / f"peers-{digest[:16]}"


def python_of(environment: Path) -> Path:
    """The environment's interpreter."""
    return environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def ensure_environment(*, console: Console | None = None) -> Path:
    """The interpreter of the peers' environment, which is made on the first call (minutes, 1.4 GB).

    Args:
        console: where progress goes; standard error unless given.

    Raises:
        PeersError: a step failed; the message has the end of its output.
    """
    console = console or Console(stderr=True)
    target = environment_dir()
    if python_of(target).is_file():
        return python_of(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    console.print(f"Making the peers' environment in {target}")
    # Built beside its final place and renamed: what is there is complete. Only its interpreter is used, by
    # path; it finds its packages from wherever it lies (the scripts in bin/ would not).
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".peers-") as scratch_name:
        scratch = Path(scratch_name) / "environment"
        python = str(python_of(scratch))
        install = [python, "-m", "pip", "install", "--no-input", "--requirement", str(REQUIREMENTS)]
        _step(console, f"venv with Python {PYTHON_VERSION}", [sys.executable, "-m", "venv", str(scratch)])
        _step(console, f"pip install {', '.join(f'{name} {pin}' for name, pin in pins().items())}", install)
        _step(console, "import kvpress", [python, "-c", IMPORT_CHECK])
        try:
            scratch.rename(target)
        except OSError:
            # Another process was faster; its result is the same.
            if not python_of(target).is_file():
                raise
            shutil.rmtree(scratch)
    return python_of(target)


def _step(console: Console, title: str, command: list[str]) -> None:
    """Run a command, showing its title; its output only when it fails.

    Raises:
        PeersError: the command did not start, or its exit status is not 0.
    """
    with console.status(title):
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
            )
        except OSError as error:
            raise PeersError(f"{title}: {command[0]} did not start: {error}") from error
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-SHOWN_LOG_LINES:])
        raise PeersError(f"{title} failed with exit status {done.returncode}:\n{tail}")
    console.print(f"  {title}: done", highlight=False)


if __name__ == "__main__":
    print(ensure_environment())
