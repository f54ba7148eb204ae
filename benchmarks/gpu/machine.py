"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from typing import Any

import torch
import triton

_PATIENCE_S = 20.0


def describe(device: torch.device) -> dict[str, Any]:
    """Card, driver and versions; None for what this machine does not have or say."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "triton": triton.__version__,
        "nvcc": _version(["nvcc", "--version"], r"release (\S+), "),
        "driver": _version(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], r"(\S+)"),
        "cpus": os.cpu_count(),
        "float32_products": torch.get_float32_matmul_precision(),
    }
    if device.type != "cuda":
        return {"card": None, "capability": None} | found
    card = torch.cuda.get_device_properties(device)
    return {
        "card": card.name,
        "capability": f"{card.major}.{card.minor}",
        "multiprocessors": card.multi_processor_count,
        "memory_gib": round(card.total_memory / 2**30, 1),
        "l2_mib": round(card.L2_cache_size / 2**20, 1),
    } | found


def _version(command: list[str], pattern: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE_S)
    match = re.search(pattern, answer.stdout)
    return match[1] if answer.returncode == 0 and match is not None else None
