"""The GPU script at tiny sizes on the CPU: every part, what it writes, and that failures are failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import correctness, report
from benchmarks.gpu.__main__ import main, parse
from benchmarks.gpu.compare import worst_error
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.rows import Aborted, Figure, Row
from benchmarks.gpu.runner import run_here, run_in_children
from benchmarks.gpu.setup import TINY, Setup

ROOT = Path(__file__).parents[2]
SETUP = Setup(torch.device("cpu"), TINY, 0, time.monotonic() + 1e6)
KERNELS = {
    "window_scores", "window_attention", "ridged_gram", "transposed_product", "key_jvp", "key_vjp",
    "gather_tokens", "scatter_tokens", "ragged_attention", "merge_splits", "merge_states",
}  # fmt: skip


def run(tmp_path: Path, *arguments: str) -> tuple[int, dict]:
    status = main(["--device", "cpu", "--tiny", "--out", str(tmp_path), *arguments])
    # Strict: what is not finite must not have become the word NaN.
    text = (tmp_path / report.JSON_NAME).read_text()
    return status, json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} in the JSON"))


def test_everything(tmp_path):
    status, result = run(tmp_path, "--seed", "3")
    assert status == 0
    assert result["failed"] == 0
    assert result["aborted"] == []
    assert result["settings"]["seed"] == 3
    assert result["machine"]["torch"] == torch.__version__
    checks = result["checks"]
    assert {check["name"].split(":")[0] for check in checks} == KERNELS
    assert all(check["passed"] and 0 <= check["worst_error"] <= check["tolerance"] for check in checks)
    # Something was computed in another precision: not every difference is 0.
    assert any(check["worst_error"] > 0 for check in checks if check["against"] == "float64")
    assert {check["against"] for check in checks} == {"torch reference", "float64", "its transpose"}
    assert [row["needs"] for row in result["skipped"]] == ["a CUDA device"]
    assert all(row["median_ms"] > 0 for row in result["measurements"])
    figures = {figure["name"]: figure["value"] for figure in result["figures"]}
    share = figures["compression"] / figures["prefill floor"]
    assert figures["compression / prefill floor"] == pytest.approx(share)
    assert 0 < figures["error of the selection"] < 1
    parts = {row["part"] for group in ("checks", "measurements", "skipped") for row in result[group]}
    assert parts == set(PARTS)
    table = (tmp_path / report.MARKDOWN_NAME).read_text()
    assert table.count("| ok |") == len(checks)
    assert "ended early" not in table.lower()


@pytest.mark.parametrize("broken", ["wrong", "nan", "shape", "raises"])
def test_a_broken_kernel_fails(tmp_path, monkeypatch, broken):
    intact = correctness.merge_states

    def merge_states(*states):
        output, lse = intact(*states)
        if broken == "raises":
            raise RuntimeError("an illegal memory access")
        if broken == "shape":
            return output[:-1], lse
        output[1, 2, 3] = output[1, 2, 3] + 0.1 if broken == "wrong" else torch.nan
        return output, lse

    monkeypatch.setattr(correctness, "merge_states", merge_states)
    status, result = run(tmp_path, "--only", "correctness/merging")
    assert status == 1
    failed = [check for check in result["checks"] if not check["passed"]]
    assert {check["name"] for check in failed} >= {"merge_states: output"}
    assert result["failed"] == len(failed)
    assert all(check["name"].startswith("merge_states") for check in failed)
    assert any(check["name"].startswith("merge_splits") and check["passed"] for check in result["checks"])
    if broken == "wrong":
        assert all(check["worst_error"] > check["tolerance"] for check in failed)
    else:
        assert all(check["worst_error"] is None for check in failed)
    if broken == "raises":
        assert {check["error"] for check in failed} == {"RuntimeError: an illegal memory access"}


def test_without_time_benchmarks_are_named_and_checks_still_run(tmp_path):
    status, result = run(tmp_path, "--budget-s", "0", "--only", "compression/regression")
    assert status == 0
    assert {row["needs"] for row in result["skipped"]} == {"time to begin within --budget-s"}
    assert any("key step, kernel" in row["name"] for row in result["skipped"])
    status, result = run(tmp_path, "--budget-s", "0", "--only", "correctness/merging")
    assert status == 0
    assert result["skipped"] == []
    assert result["checks"]


def test_the_kernels_themselves_in_the_interpreter(tmp_path):
    child = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--tiny", "--out", str(tmp_path),
         "--only", "correctness/merging"],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT / "kernels")},
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stdout
    result = json.loads((tmp_path / report.JSON_NAME).read_text())
    assert result["settings"]["kernels"] == "interpreted"
    assert any(check["worst_error"] > 0 for check in result["checks"] if "reference" in check["against"])


def test_worst_error():
    expected = torch.tensor([1.0, -3.0, -torch.inf, 0.0])
    assert worst_error(expected.clone(), expected) == 0
    # The mean size is 4 / 3.
    assert worst_error(torch.tensor([1.0, -3.0, -torch.inf, 0.1]), expected) == pytest.approx(0.075)
    assert worst_error(torch.tensor([1.0, -4.0, -torch.inf, 0.0]), expected) == pytest.approx(3 / 13)
    for wrong in (torch.nan, 5.0, torch.inf):
        error = worst_error(torch.tensor([1.0, -3.0, wrong, 0.0]), expected)
        assert not error <= 1e30


def _row(name: str) -> Figure:
    return Figure("part", name, "", 1.0, "")


def _good(setup: Setup) -> Iterator[Row]:
    yield _row("good")


def _raises(setup: Setup) -> Iterator[Row]:
    yield _row("before")
    raise RuntimeError("lost the device")


def _ends(setup: Setup) -> Iterator[Row]:
    yield _row("before")
    os._exit(7)


def test_a_part_that_raises_leaves_the_others():
    rows = list(run_here(SETUP, {"bad": _raises, "good": _good}))
    assert rows == [_row("before"), Aborted("bad", "RuntimeError: lost the device"), _row("good")]
    assert [row.failed for row in rows] == [False, True, False]


def test_a_part_that_ends_its_process_leaves_the_others():
    rows = list(run_in_children(SETUP, {"bad": _ends, "good": _good}))
    reason = "its process ended with exit status 7"
    assert rows == [_row("before"), Aborted("bad", reason), _row("good")]


def test_a_silent_part_is_ended():
    # Before the child has imported anything.
    rows = list(run_in_children(SETUP, {"silent": _good}, silence_s=0.01))
    assert rows == [Aborted("silent", "no row for 0.01 s")]


@pytest.mark.parametrize("arguments", [["--device", "cpu"], ["--only", "nothing"], ["--quick"]])
def test_refused(arguments, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        parse(arguments)
    assert stopped.value.code == 2
    assert "error:" in capsys.readouterr().err
