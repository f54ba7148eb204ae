"""The report: every result of a folder on one page, quality beside speed."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import overhead
from benchmarks.overhead import OverheadResult, OverheadSettings, Row
from benchmarks.report.__main__ import main
from benchmarks.report.page import ReportError, build, environments_text, html
from benchmarks.serving.quality import Quality
from benchmarks.serving.record import Environment, Result, save_result
from grkv_sglang.demo.result import NoLongPrefixResult
from tests.benchmarks.serving_results import (
    bench_serving_result,
    capacity_result,
    chat_result,
    decode_result,
    shared_result,
)

HERE = Environment(
    started="2026-01-02T03:04:05+00:00",
    commit="0123456789abcdef0123456789abcdef01234567",
    modified=False,
    processor="A processor",
    cores=2,
    memory_gib=23.5,
    device="cpu",
    platform="Linux",
    python="3.11.7",
    versions={"sglang": "0.5.23", "torch": "2.14.1"},
)


def fidelity_row(budget: float, measure: str, kl: float, top1: float, **changes: Any) -> dict[str, Any]:
    row = {
        "case": "a", "kind": "prose", "context_tokens": 2048, "method": "default", "budget": budget,
        "measure": measure, "kl": kl, "top1": top1,
    }  # fmt: skip
    return row | changes


def overhead_result() -> OverheadResult:
    parts = {"probe": 0.5, "pass": 0.0, "select": 0.2, "regress": 0.3, "copy": 0.0}
    return OverheadResult(
        benchmark="overhead",
        settings=OverheadSettings(),
        done=["compression", "no long prefix"],
        rows=[
            Row(profile="default", tokens=4096, prefill_s=10.0, compress_s=c, parts_s=parts)
            for c in (1.0, 1.2, 1.5)
        ],
        no_long_prefix=NoLongPrefixResult(
            pairs=2, prompts_per_burst=4, prompt_tokens=60, new_tokens=16, mean_cost=0.015, median_cost=0.01,
            upper_95=0.04, off_s=[1.0, 1.0], grkv_s=[1.01, 1.02],
        ),
    )  # fmt: skip


def write_results(folder: Path) -> Path:
    """One result of every benchmark, a file of fidelity, and one that is something else."""
    rows = [
        fidelity_row(0.1, "continuation", 0.10, 0.90),
        fidelity_row(0.1, "continuation", 0.30, 0.80, case="b"),
        fidelity_row(0.1, "answers", 0.50, 0.70),
        fidelity_row(0.1, "answers", 99.0, 0.0, case="f", kind="filler"),
        fidelity_row(0.1, "needles", 77.0, 0.0),
        fidelity_row(0.1, "answers", 55.0, 0.0, method="copy"),
    ]
    every: dict[str, Result] = {
        "shared": shared_result(),
        "chats": chat_result(),
        "room": capacity_result(),
        "decode": decode_result(),
        "own": bench_serving_result(),
        "cost": overhead_result(),
    }
    for name, result in every.items():
        result.environments.append(HERE)
        save_result(folder / f"{name}.json", result)
    (folder / "fidelity-2048.json").write_text(json.dumps({"settings": {"model": "small"}, "rows": rows}))
    gap = {
        "benchmark": "inter-token-gap", "environments": [HERE.model_dump()], "tokens": 4000, "streams": 8,
        "chunk_tokens": 512,
        "events": [
            {"kind": "compression", "gap_s": 0.8, "steady_gap_s": 0.2},
            {"kind": "compression", "gap_s": 1.0, "steady_gap_s": 0.3},
        ],
    }  # fmt: skip
    (folder / "gap.json").write_text(json.dumps(gap))
    (folder / "soak-cpu.json").write_text(json.dumps({"requests": 3}))
    return folder


@dataclass(frozen=True)
class Page:
    """What `build` made of `write_results`."""

    results: Path
    path: Path
    text: str
    left_out: list[Path]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    folder = tmp_path_factory.mktemp("report")
    results = write_results(folder / "results")
    path = folder / "page.md"
    text, left_out = build(results, path)
    return Page(results, path, text, left_out)


def test_fidelity_is_of_text_and_of_the_profile(page: Page):
    found = Quality.load(page.results).of("default", 0.1, 1000)
    assert found is not None
    assert (found.kl_continuation, found.kl_answers) == pytest.approx((0.2, 0.5))
    assert (found.top1_continuation, found.top1_answers) == pytest.approx((0.85, 0.7))
    assert found.documents == 2


def test_page_has_every_result_with_where_and_what(page: Page):
    text = page.text
    headings = re.findall(r"(?m)^## (.+)$", text)
    assert headings == [
        "Quality",
        "Shared documents",
        "Multi-turn chats",
        "Capacity",
        "Decode latency",
        "SGLang's own benchmark",
        "Overhead",
        "Inter-token gap",
    ]
    assert [path.name for path in page.left_out] == ["soak-cpu.json"]
    assert text.count("commit 0123456789ab: A processor, 2 cores, 23.5 GiB, device cpu") == 7
    assert "sglang 0.5.23, torch 2.14.1" in text
    assert "seed 0" in text
    assert "| default | 0.1 | 2,048 | 2 | 0.200 | 0.500 | 0.85 | 0.70 |" in text
    assert "| compression | 0.90 | 1.00 |" in text
    assert "| default | 4,096 | 10.00 | 1.20 | 12.0% (10.0%–15.0%) | 5.0% |" in text
    assert "| +1.5% | +1.0% | +4.0% |" in text


def test_every_speed_row_carries_its_fidelity(page: Page):
    text = page.text
    measured = next(line for line in text.splitlines() if "| uniform | grkv 0.1 |" in line)
    assert measured.endswith("| 0.200 | 0.500 | 0.70 |")
    off = next(line for line in text.splitlines() if "| uniform | off |" in line)
    assert off.endswith("| 0 | 0 | 1 |")
    decode = next(line for line in text.splitlines() if line.startswith("| 4,000 | grkv 0.1 |"))
    assert decode.endswith("| 0.200 | 0.500 | 0.70 |")


def test_html_holds_its_plots(page: Page):
    shown = html(page.text, page.path.parent)
    assert shown.count('src="data:image/png;base64,iVBOR') == 6
    assert len(list(page.path.with_suffix("").glob("*.png"))) == 6
    assert shown.count("<table>") == len(re.findall(r"(?m)^\|(?:---\|)+$", page.text)) == 12
    assert "<script" not in shown


def test_command(tmp_path: Path):
    results = tmp_path / "results"
    save_result(results / "room.json", capacity_result())
    (results / "soak-cpu.json").write_text(json.dumps({"requests": 3}))
    app = typer.Typer()
    app.command()(main)
    done = CliRunner().invoke(app, ["--results", str(results), "--out", str(tmp_path / "page.md")])
    assert done.exit_code == 0, done.output
    assert "soak-cpu.json" in done.output.replace("\n", "")
    assert (tmp_path / "page.md").read_text().startswith("# Benchmarks")
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    empty = tmp_path / "empty"
    empty.mkdir()
    refused = CliRunner().invoke(app, ["--results", str(empty)])
    assert refused.exit_code == 2
    assert "no results" in refused.output


@pytest.mark.parametrize(
    ("content", "message"), [("{", "no JSON"), ('{"benchmark": "capacity"}', "no result of capacity")]
)
def test_damaged_files_are_named(tmp_path: Path, content: str, message: str):
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(ReportError, match=rf"bad\.json.*{message}"):
        build(tmp_path, tmp_path / "page.md")


def test_environments_say_what_is_unknown():
    lines = environments_text(
        [HERE.model_copy(update={"commit": None}), HERE.model_copy(update={"modified": True})]
    )
    assert "no commit: A processor" in lines
    assert "commit 0123456789ab with local changes: A processor" in lines


def test_overhead_without_long_prefixes_may_be_missing():
    result = overhead_result()
    result.no_long_prefix = None
    assert [table.title for table in overhead.tables(result, Quality({}, ""))] == [
        "Compression beside the prefill of the same tokens"
    ]
