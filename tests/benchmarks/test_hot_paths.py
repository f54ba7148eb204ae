"""The hot paths: what a sampled stack counts for, and py-spy itself."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import hot_paths
from benchmarks.hot_paths import HotPathsResult, HotPathsSettings, Row, profile_of, sampled, scheduler_of
from benchmarks.serving.client import ServingError
from benchmarks.serving.quality import Quality

WORK = "CompressionWork.step (/x/grkv_sglang/cache/work.py:168)"
ATTEND = "attend (/x/grkv_sglang/core/attention.py:99)"
LINEAR = "Linear.apply (/env/sglang/srt/layers/linear.py:5)"
TORCH = "Module._call_impl (/env/torch/nn/modules/module.py:1794)"
IDLE = "Scheduler.recv (/env/sglang/srt/managers/scheduler.py:7)"
ENTRY = ("grkv_sglang/cache/work.py",)


def stacks(*lines: tuple[list[str], int]) -> str:
    return "\n".join(f"{';'.join(frames)} {count}" for frames, count in lines)


def test_a_sample_counts_for_the_innermost_function_that_is_ours_or_the_models():
    text = stacks(
        ([IDLE, WORK], 1),
        ([IDLE, WORK, TORCH, ATTEND, TORCH], 20),
        ([IDLE, WORK, TORCH, LINEAR], 300),
        ([IDLE, WORK, TORCH, ATTEND], 4000),
    )
    assert profile_of(text, ENTRY) == {
        "grkv_sglang/cache/work.py: CompressionWork.step": 1,
        "grkv_sglang/core/attention.py: attend": 4020,
        "sglang/srt/layers/linear.py: Linear.apply": 300,
    }


def test_samples_outside_the_phase_are_left_out():
    text = stacks(([IDLE], 5), ([IDLE, ATTEND], 7), ([IDLE, LINEAR], 11))
    assert profile_of(text, ENTRY) == {}
    assert profile_of("", ENTRY) == {}
    # Not every file whose name begins or ends alike.
    assert profile_of(stacks((["f (/x/grkv_sglang/cache/work.pyc:1)", ATTEND], 3)), ENTRY) == {}


def test_functions_without_a_line_and_with_spaces_or_brackets():
    text = stacks(
        ([WORK, "key_step.<locals>.jacobian (/x/grkv_sglang/core/regression.py)"], 2),
        ([WORK, "<genexpr> (/x/grkv_kernels/slots.py:3)", "native code"], 3),
    )
    assert profile_of(text, ENTRY) == {
        "grkv_sglang/core/regression.py: key_step.<locals>.jacobian": 2,
        "grkv_kernels/slots.py: <genexpr>": 3,
    }


def test_tables_tell_shares_and_milliseconds_of_one_job():
    result = HotPathsResult(
        benchmark="hot-paths",
        settings=HotPathsSettings(documents=2, requests=3, samples_per_s=200),
        done=["compression", "warm request"],
        rows=[
            Row(phase="compression", function="a.py: f", samples=100),
            Row(phase="compression", function="b.py: g", samples=300),
            *(Row(phase="warm request", function=f"c.py: h{i}", samples=6) for i in range(14)),
        ],
    )
    compression, warm = hot_paths.tables(result, Quality({}, ""))
    # 300 samples at 200 per second are 1.5 s, of two compressions.
    assert compression.rows == (
        ("`b.py: g`", "75.0%", "750.0"),
        ("`a.py: f`", "25.0%", "250.0"),
        ("all others", "0.0%", "0.0"),
    )
    assert len(warm.rows) == 13
    assert warm.rows[0] == ("`c.py: h0`", "7.1%", "5.0")
    assert warm.rows[-1] == ("all others", "14.3%", "10.0")
    assert len(hot_paths.figure(result).axes) == 2


BUSY = """
import time

def waits_for_nothing():
    end = time.monotonic() + 60
    while time.monotonic() < end:
        pass

print("running", flush=True)
waits_for_nothing()
"""


def test_a_process_is_sampled(tmp_path: Path):
    if os.geteuid() != 0 and Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip() != "0":
        pytest.skip("needs the right to trace another process: root, or kernel.yama.ptrace_scope = 0")
    script = tmp_path / "busy.py"
    script.write_text(BUSY)
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        with sampled(process.pid, tmp_path / "stacks.txt", 100):
            time.sleep(1.0)
        assert process.poll() is None  # nothing happened to it
        counts = [
            int(line.rpartition(" ")[2])
            for line in (tmp_path / "stacks.txt").read_text().splitlines()
            if f"waits_for_nothing ({script}" in line
        ]
        assert 10 <= sum(counts) <= 400
        with (
            pytest.raises(ServingError, match=f"{process.pid} has no child that is named a scheduler"),
        ):
            scheduler_of(process.pid)
    finally:
        process.kill()
        process.wait()
    with (
        pytest.raises(ServingError, match="py-spy did not start"),
        sampled(process.pid, tmp_path / "no", 100),
    ):
        raise AssertionError("a process that is gone cannot be sampled")
