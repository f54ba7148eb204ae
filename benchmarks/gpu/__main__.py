"""Checks and measurements of the kernels and the core on one GPU.

Exit status 0 if all went well, 1 if anything failed, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import report
from benchmarks.gpu.machine import describe
from benchmarks.gpu.parts import PARTS, SECTIONS, parts_of
from benchmarks.gpu.rows import Row
from benchmarks.gpu.runner import run_here, run_in_children
from benchmarks.gpu.setup import LLAMA_31_8B, QUICK, TINY, Setup


@dataclass(frozen=True)
class Arguments:
    """The command line; see ``--help``."""

    device: str
    tiny: bool
    quick: bool
    only: str | None
    out: Path
    budget_s: float
    seed: int


def parse(argv: Sequence[str] | None) -> Arguments:
    """Exits with status 2 and a message if something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU, to test this script")
    parser.add_argument("--quick", action="store_true", help="the shortest span, small batches, few repeats")
    parser.add_argument(
        "--only", choices=(*SECTIONS, *PARTS), metavar="WHAT",
        help=f"one section ({', '.join(SECTIONS)}) or part ({', '.join(PARTS)}); without it, all",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of the two reports")
    parser.add_argument(
        "--budget-s", type=float, default=480.0, help="benchmarks that would begin later are skipped"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = Arguments(**vars(parser.parse_args(argv)))
    if arguments.device == "cpu" and not arguments.tiny:
        parser.error("--device cpu is for testing this script: add --tiny")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --device cpu --tiny tests the script without one")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print each row as it comes, write the reports; returns the exit status."""
    arguments = parse(argv)
    started = time.monotonic()
    sizes = TINY if arguments.tiny else QUICK if arguments.quick else LLAMA_31_8B
    setup = Setup(torch.device(arguments.device), sizes, arguments.seed, started + arguments.budget_s)
    run: dict[str, Any] = {
        "machine": describe(setup.device),
        "settings": {
            "sizes": "tiny" if arguments.tiny else "quick" if arguments.quick else "Llama-3.1-8B",
            "only": arguments.only,
            "seed": arguments.seed,
            "budget_s": arguments.budget_s,
            "kernels": setup.kernels,
        },
        "seconds": 0.0,
    }
    for what, value in run["machine"].items():
        print(f"{what}: {value}")
    parts = {name: PARTS[name] for name in parts_of(arguments.only)}
    rows: list[Row] = []
    for row in run_in_children(setup, parts) if setup.on_gpu else run_here(setup, parts):
        rows.append(row)
        run["seconds"] = round(time.monotonic() - started, 1)
        print(f"{run['seconds']:6.1f} s  {row.line()}", flush=True)
        report.write(arguments.out, run, rows)
    failed = sum(row.failed for row in rows)
    print(f"{len(rows)} rows, {failed} failed; {arguments.out / report.MARKDOWN_NAME}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
