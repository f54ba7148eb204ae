"""These tests need a process in which Triton interprets kernels; any other process does not collect them.

Triton reads ``TRITON_INTERPRET`` where a kernel is decorated, and for its own library that is when it is
imported: a process interprets or compiles, for good. ``tests/kernels/test_interpreted.py`` runs this folder
in a child with the variable set, so that SGLang's kernels and the compilation tests in the parent stay as
they are. By hand:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreted
"""

from __future__ import annotations

from grkv_kernels.dispatch import INTERPRETED

collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]
