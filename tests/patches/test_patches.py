"""The patches in ``patches/`` apply to the installed SGLang and do what they say, on a copy of it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "patches"
STRICT = FOLDER / "0001-plugin-failures-fatal-on-request.patch"
PHYSICAL = FOLDER / "0002-physical-prefix-length-in-the-prefix-cache-interface.patch"
PATCHES = (STRICT, PHYSICAL)

FAKE_PLUGIN = """
from sglang.srt.plugins.hook_registry import HookRegistry

ran = []

class Class:
    pass

def target():
    return "stock"

def run_error():
    raise OSError("no licence file")

def absent_hook():
    HookRegistry.register("fake_plugin.absent", lambda result: "hooked")

def class_hook():
    HookRegistry.register("fake_plugin.Class", lambda result: "hooked")

def none():
    pass

def good():
    ran.append("good")
    HookRegistry.register("fake_plugin.target", lambda result: "hooked")
"""
ENTRY_POINTS = """[sglang.srt.plugins]
import_error = fake_plugin_of_another_release:register
run_error = fake_plugin:run_error
absent_hook = fake_plugin:absent_hook
class_hook = fake_plugin:class_hook
none = fake_plugin:none
good = fake_plugin:good
"""


def patched_files(*patches: Path) -> set[str]:
    return {name for p in patches for name in re.findall(r"^\+\+\+ b/(\S+)$", p.read_text(), re.MULTILINE)}


def mirror(source: Path, copy: Path, files: set[str]) -> None:
    """`source` as a folder of links, except for the named files, which are copied."""
    copy.mkdir(parents=True)
    folders = {name.split("/")[0] for name in files if "/" in name}
    for entry in source.iterdir():
        if entry.name in files:
            shutil.copyfile(entry, copy / entry.name)
        elif entry.name in folders:
            inner = {name.partition("/")[2] for name in files if name.startswith(f"{entry.name}/")}
            mirror(entry, copy / entry.name, inner)
        elif entry.name != "__pycache__":
            (copy / entry.name).symlink_to(entry)


def run_tool(folder: Path, *command: str) -> None:
    tool = command[0]
    assert shutil.which(tool), f"{tool} is not installed; this test applies patches with git and with patch"
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
    for word in ("fuzz", "offset", "Skipped"):
        assert word not in done.stdout + done.stderr, done.stdout + done.stderr


def sglang_copy(folder: Path, *patches: Path) -> Path:
    """A folder with the installed `sglang`, patched; what either set of files needs is a real copy."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations
    files = {name.removeprefix("sglang/") for name in patched_files(*PATCHES)}
    mirror(Path(spec.submodule_search_locations[0]), folder / "sglang", files)
    for patch in patches:
        run_tool(folder, "patch", "-p1", "--fuzz=0", "--dry-run", "--forward", "-i", str(patch))
        run_tool(folder, "git", "apply", "-p1", "--check", str(patch))
        run_tool(folder, "git", "apply", "-p1", "--verbose", str(patch))
    return folder


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    root = tmp_path_factory.mktemp("sglang")
    return {
        "stock": sglang_copy(root / "stock"),
        "strict": sglang_copy(root / "strict", STRICT),
        "physical": sglang_copy(root / "physical", PHYSICAL),
        "both": sglang_copy(root / "both", STRICT, PHYSICAL),
    }


@pytest.fixture(scope="module")
def seen(copies):
    """What ``probe.py`` saw on each copy. The processes run side by side: importing SGLang is most of it."""
    wanted = {
        "stock": ["plugins", "prefix_cache"],
        "strict": ["plugins"],
        "physical": ["prefix_cache"],
    }
    for copy in (copies[name] for name in wanted):
        (copy / "fake_plugin.py").write_text(FAKE_PLUGIN)
        info = copy / "fake_plugin-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-plugin\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(ENTRY_POINTS)
    probe = str(Path(__file__).with_name("probe.py"))
    running = {}
    for name, probes in wanted.items():
        settings = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_PLUGINS")}
        running[name] = subprocess.Popen(
            [sys.executable, probe, *probes],
            env={**settings, "PYTHONPATH": str(copies[name]), "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    outcome = {}
    for name, process in running.items():
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, f"{name}: {err[-4000:]}"
        outcome[name] = json.loads(out.splitlines()[-1])
    for name, probes in outcome.items():
        for probe_seen in probes.values():
            assert probe_seen["file"].startswith(str(copies[name])), "the copy was not what was imported"
    return outcome


def test_there_is_no_other_patch():
    assert sorted(FOLDER.glob("*.patch")) == sorted(PATCHES)


def test_every_patch_applies_alone_and_in_order(copies):
    """`sglang_copy` applied them with both tools; here: nothing but the named files changed."""
    changed = {
        name: {
            file
            for file in patched_files(*PATCHES)
            if (copy / file).read_bytes() != (copies["stock"] / file).read_bytes()
        }
        for name, copy in copies.items()
    }
    assert changed["stock"] == set()
    assert changed["strict"] == patched_files(STRICT)
    assert changed["physical"] == patched_files(PHYSICAL)
    # Neither patch touches the other's files: what holds for one alone holds for both.
    assert not patched_files(STRICT) & patched_files(PHYSICAL)
    for name, patch in (("strict", STRICT), ("physical", PHYSICAL)):
        for file in patched_files(patch):
            assert (copies["both"] / file).read_bytes() == (copies[name] / file).read_bytes()


def test_a_patch_that_does_not_fit_is_not_applied(copies):
    with pytest.raises(AssertionError, match="patch -p1"):
        run_tool(copies["both"], "patch", "-p1", "--fuzz=0", "--dry-run", "--forward", "-i", str(STRICT))
    with pytest.raises(AssertionError, match="patch does not apply"):
        run_tool(copies["both"], "git", "apply", "-p1", "--check", str(PHYSICAL))


FAILURES = {
    "import_error": (
        "ModuleNotFoundError",
        "Failed to load plugin import_error from group sglang.srt.plugins",
    ),
    "run_error": ("OSError", "Failed to execute general plugin: run_error"),
    "absent_hook": ("AttributeError", "Failed to apply hooks to fake_plugin.absent"),
    "class_hook": ("TypeError", "Failed to apply hooks to fake_plugin.Class"),
}


@pytest.mark.parametrize("bad", FAILURES)
def test_strict_plugins(seen, bad):
    error, message = FAILURES[bad]
    skipped = {"raised": None, "errors": [message], "good_ran": ["good"], "good_hook": "hooked"}
    for flag in (None, "0", "1"):
        assert seen["stock"]["plugins"][f"{bad} {flag}"] == skipped
    for flag in (None, "0"):
        assert seen["strict"]["plugins"][f"{bad} {flag}"] == skipped
    # Hooks are applied after all plugins ran, in order of their targets: the bad one is the first.
    ran = ["good"] if bad.endswith("hook") else []
    raised = {"raised": error, "errors": [message], "good_ran": ran, "good_hook": "stock"}
    assert seen["strict"]["plugins"][f"{bad} 1"] == raised


def test_strict_plugins_without_failure(seen):
    fine = {"raised": None, "errors": [], "good_ran": ["good"], "good_hook": "hooked"}
    for copy in ("stock", "strict"):
        for flag in (None, "0", "1"):
            assert seen[copy]["plugins"][f"none {flag}"] == fine


def test_stock_tree_is_unchanged(seen):
    stock, patched = seen["stock"]["prefix_cache"], seen["physical"]["prefix_cache"]
    for part in ("page 1", "page 4", "decode pool"):
        assert patched[part] == stock[part]
    # [evictable, protected, total, free in the pool], after inserts, a lock, evictions and an unlock
    steps = patched["page 1"]
    assert steps[0] == [16, 0, 16, 16]
    assert steps[1] == [*range(1, 9), *range(13, 21)]
    assert steps[3:5] == [-8, [8, 8, 16, 16]]
    assert steps[5:8] == [8, [0, 8, 8, 24], 8]
    assert steps[8:11] == [[8, 0, 8, 24], 4, [4, 0, 4, 28]]
    assert steps[12] == [1, 2, 3, 4, 21, 22, 23]  # a row: four tokens of the tree, three new slots
    assert steps[14:16] == [4, [0, 0, 0, 29]]
    assert patched["decode pool"] == [1, 2, 3]


def test_a_span_is_counted_in_slots(seen):
    """Four exact tokens; on them a span of six tokens in two slots with three exact tokens behind it, and
    four other exact tokens. Only the accessors are overridden."""
    spans = seen["physical"]["prefix_cache"]["spans"]
    assert spans["inserted"] == [13, 0, 13, 19]
    assert spans["slots"] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 14, 15, 16, 17]
    assert spans["locked"] == [-9, [4, 9, 13, 19]]
    assert [line.split()[0] for line in spans["printed"]] == ["0", "4", "4", "6", "3", "#tokens:"]
    assert spans["unlocked"] == [9, [13, 0, 13, 19]]
    # One slot is asked for each time: the tail, the exact node, the span (two slots), the shared node.
    assert spans["evicted"] == [
        [3, [10, 0, 10, 22], True],
        [4, [6, 0, 6, 26], True],
        [2, [4, 0, 4, 28], False],
        [4, [0, 0, 0, 32], False],
    ]
    assert spans["free"] == list(range(1, 33))


def test_without_the_patch_a_span_is_counted_in_tokens(seen):
    spans = seen["stock"]["prefix_cache"]["spans"]
    assert spans["slots"] == [0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 14, 15, 16, 17]
    assert spans["inserted"] == [13, 0, 17, 19]
    assert spans["locked"] == [-13, [0, 13, 17, 19]]


def test_row_starts_are_recorded_by_alloc_for_extend(seen):
    """A prefix of 13 tokens in 9 slots; `starts` is by row, row 0 is SGLang's padding row."""
    spans = seen["physical"]["prefix_cache"]["spans"]
    assert spans["untracked"] == "Rows start at columns [4], but no attention backend reads row starts."
    assert spans["same_tensor"] is True
    assert spans["row"] == [0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 20, 21]
    assert spans["starts"] == [0, 0, 0, 0, 4]
    assert spans["chunk_row"] == [*spans["row"], 22]
    assert spans["chunk_starts"] == [0, 0, 0, 0, 4]
    assert spans["beam_starts"] == [0, 0, 4, 4, 4]
    assert spans["reused_row"] == [1, 2, 3, 4, 14, 15, 16, 17, 23]
    assert spans["reused_starts"] == [0, 0, 4, 4, 0]
