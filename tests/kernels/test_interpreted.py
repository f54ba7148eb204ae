"""The kernels in Triton's interpreter, in a process of their own (``interpreted/conftest.py`` says why)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_FOLDER = Path(__file__).parent / "interpreted"


def test_kernels_in_the_interpreter():
    child = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(_FOLDER)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=_FOLDER.parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    # 5 would be: nothing collected.
    assert child.returncode == 0, child.stdout
