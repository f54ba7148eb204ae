"""A short soak; ``python -m benchmarks.soak`` runs a long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.soak import run

pytestmark = pytest.mark.engine


def test_a_mixed_life_with_faults_leaves_a_clean_pool(model_path: Path, server_dir: Path):
    result = run(requests=100, seed=7, folder=server_dir)
    assert result["problems"] == []
    assert result["census"]["ok"]
    assert result["counters"]["compressions_done"] > 15
    assert result["counts"]["served from spans"] > 10
    assert sum(result["counters"]["compressions_failed"].values()) > 0, "no fault was injected"
    assert result["retractions"] > 0
