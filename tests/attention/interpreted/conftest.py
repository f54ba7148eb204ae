"""Tests that run SGLang's Triton kernels on the CPU, in Triton's interpreter.

The interpreter is chosen when a kernel's module is imported, for the whole process. So these tests are
collected only where it was chosen from the start; ``tests/attention/test_interpreted.py`` runs them in such a
process. By hand: ``TRITON_INTERPRET=1 python -m pytest tests/attention/interpreted``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    """SGLang's process-wide configuration: defaults, one rank."""
    from sglang.srt.runtime_context import get_context, get_parallel

    with get_context().override_server_args(), get_parallel().override(
        attn_tp_size=1, attn_dcp_size=1, attn_dcp_rank=0
    ):  # fmt: skip
        yield
