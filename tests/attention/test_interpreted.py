"""Runs ``tests/attention/interpreted`` in a process where Triton interprets its kernels on the CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "interpreted"


def test_in_the_interpreter() -> None:
    """One process for all of them: most of its time goes into importing SGLang."""
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", str(FOLDER)]
    done = subprocess.run(
        command,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # Tests that were skipped, or not collected, have shown nothing.
    assert re.search(r"^\d+ passed in ", done.stdout, re.MULTILINE), done.stdout
