"""GPUs, and whether the installed SGLang is what the plugin was written against."""

from __future__ import annotations

import importlib.metadata
import os

from grkv_sglang.commands.doctor.findings import Finding
from grkv_sglang.config import FLASHINFER_ATTENTION, TORCH_ATTENTION, TRITON_ATTENTION
from grkv_sglang.contract import ATTENTION_SYMBOLS, HOST_SYMBOLS, TESTED_SGLANG, contract_problems

GIB = 1024**3


def check_device() -> list[Finding]:
    """Every GPU with its memory, or what there is without one."""
    try:
        import torch
    except ImportError as error:
        return [Finding("problem", "device", f"torch cannot be imported: {error}", "install it again")]
    if not torch.cuda.is_available():
        memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
        cores = len(os.sched_getaffinity(0))
        found = f"no GPU: {cores} CPU cores, {memory_gib:.0f} GiB of memory (platform grkv_cpu, fp32)"
        return [Finding("ok", "device", found)]
    findings = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        found = f"{torch.cuda.get_device_name(index)}, {free / GIB:.0f} of {total / GIB:.0f} GiB free"
        findings.append(Finding("ok", f"GPU {index}", found))
    return findings


def check_contracts() -> list[Finding]:
    """Every SGLang symbol that the plugin relies on: for the cache, and for the attention backends that this
    machine can run."""
    install = f"pip install 'sglang=={TESTED_SGLANG}'"
    groups = {"cache and hooks": HOST_SYMBOLS}
    groups |= {name: ATTENTION_SYMBOLS[name] for name in attention_backends()}
    findings = []
    for name, symbols in groups.items():
        topic = f"contract: {name}"
        try:
            problems = contract_problems(symbols)
        except importlib.metadata.PackageNotFoundError:
            return [Finding("problem", topic, "SGLang is not installed", install)]
        findings += [Finding("problem", topic, problem, install) for problem in problems]
        if not problems:
            findings.append(Finding("ok", topic, f"{len(symbols)} symbols of SGLang as expected"))
    return findings


def attention_backends() -> list[str]:
    """Ours that this machine can run; none without torch."""
    try:
        import torch
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return [TORCH_ATTENTION]
    backends = [TORCH_ATTENTION, TRITON_ATTENTION]
    try:
        importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return backends
    return [*backends, FLASHINFER_ATTENTION]
