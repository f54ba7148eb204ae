"""What is installed, against what is pinned: by this package, SGLang (FlashInfer) and torch (Triton)."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Iterable

from grkv_sglang.commands.doctor.findings import Finding

DISTRIBUTION = "grkv-sglang"
ALWAYS_NEEDED = ("sglang", "torch", "transformers")
NEEDED_ON_A_GPU = (("flashinfer-python", "sglang"), ("triton", "torch"))
"""Distribution, and whose requirements pin it."""


def check_versions() -> list[Finding]:
    """Python, and every distribution whose version decides whether the plugin fits."""
    try:
        needed = importlib.metadata.metadata(DISTRIBUTION)["Requires-Python"].removeprefix(">=")
    except importlib.metadata.PackageNotFoundError:
        todo = "pip install it: SGLang finds it by its entry points"
        return [Finding("problem", DISTRIBUTION, "is not installed", todo)]
    ours = pinned_versions(_requires(DISTRIBUTION))
    return [
        check_python(platform.python_version(), needed),
        *(compare_version(name, ours.get(name), gpu_only=False) for name in ALWAYS_NEEDED),
        *(
            compare_version(name, pinned_versions(_requires(by)).get(name), gpu_only=True)
            for name, by in NEEDED_ON_A_GPU
        ),
    ]


def check_python(version: str, needed: str) -> Finding:
    """`version` against the least one."""
    if _numbers(version) < _numbers(needed):
        return Finding("problem", "python", version, f"use Python {needed} or later")
    return Finding("ok", "python", version)


def compare_version(name: str, expected: str | None, *, gpu_only: bool) -> Finding:
    """What is installed of a distribution against what is pinned (None: nothing is).

    `gpu_only`: without a GPU the plugin runs on torch alone, so that another version is only worth a warning.
    """
    install = f"pip install '{name}=={expected}'" if expected else f"pip install {name}"
    if gpu_only:
        install = f"on a GPU: {install}"
    try:
        installed = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding("warning" if gpu_only else "problem", name, "is not installed", install)
    # A local version ("2.14.1+cu130") is another build of the same release.
    if expected is not None and installed.split("+")[0] != expected.split("+")[0]:
        found = f"{installed}, expected {expected}"
        return Finding("warning" if gpu_only else "problem", name, found, install)
    return Finding("ok", name, installed)


def pinned_versions(requirements: Iterable[str]) -> dict[str, str]:
    """Distribution -> version, of requirements such as ``torch==2.14.1`` or
    ``flashinfer_python[cu13]==0.7.2``; those of extras are left out."""
    pins = {}
    for requirement in requirements:
        if re.search(r";.*\bextra\b", requirement):
            continue
        match = re.match(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*==\s*([^;,\s]+)", requirement)
        if match:
            pins[re.sub(r"[-_.]+", "-", match[1]).lower()] = match[2]
    return pins


def _requires(name: str) -> list[str]:
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
