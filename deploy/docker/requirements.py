"""What pyproject.toml says the package and its services need, one requirement a line: for the image, which
installs them before the code is there."""

from __future__ import annotations

import tomllib
from pathlib import Path

SERVICES = ("chat", "rag")


def requirements(pyproject: Path) -> list[str]:
    """Of the package and the extras of its services, without the package itself."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    extras = [line for name in SERVICES for line in project["optional-dependencies"][name]]
    return [line for line in (*project["dependencies"], *extras) if not line.startswith(project["name"])]


if __name__ == "__main__":
    print("\n".join(requirements(Path("pyproject.toml"))))
