"""The peers' files and pins, without the peers' environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import benchmarks.peers as peers
from benchmarks.peers import PEERS, WORKER, Peer, read_selection
from benchmarks.peers.environment import (
    PYTHON_VERSION,
    PeersError,
    _step,
    environment_dir,
    pins,
    python_of,
)
from benchmarks.peers.worker import (
    is_complete,
    merged,
    pack_mask,
    parse_arguments,
    read_cases,
    read_exported,
    unpack_mask,
)

LAYERS, HEADS, TOKENS = 3, 2, 37


def even_mask(n_kept: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(LAYERS, HEADS, TOKENS, generator=generator).argsort(-1)
    return order < n_kept


def write_case(path: Path, methods: dict[str, Any], fingerprint: str = "digest") -> None:
    found = {"fingerprint": fingerprint, "n_tokens": TOKENS, "n_layers": LAYERS, "n_kv_heads": HEADS}
    seconds = dict.fromkeys(methods, 0.5)
    torch.save({**found, "prefill_seconds": 1.5, "seconds": seconds, "methods": methods}, path)


@given(st.lists(st.booleans(), min_size=1, max_size=70))
def test_a_packed_mask_comes_back(flags):
    mask = torch.tensor(flags)
    packed = pack_mask(mask)
    assert packed.dtype == torch.uint8
    assert unpack_mask(packed, mask.shape).equal(mask)


def test_the_first_flag_is_the_highest_bit():
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[0, 0] = mask[1, 4] = True
    assert pack_mask(mask).tolist() == [0b1000_0000, 0b0100_0000]


@pytest.mark.parametrize("packed", [torch.zeros(2, dtype=torch.uint8), torch.zeros(3)])
def test_a_mask_of_another_size_is_refused(packed):
    with pytest.raises(ValueError, match="expected 3 bytes"):
        unpack_mask(packed, (2, 11))


def test_a_selection_is_read_as_it_was_written(tmp_path):
    mask = even_mask(9)
    values = torch.randn(LAYERS, HEADS, 9, 4)
    entries = {"kept": pack_mask(mask)}
    write_case(
        tmp_path / "a.pt", {"snapkv": {"0.25": entries}, "cam": {"0.25": {**entries, "values": values}}}
    )
    selection = read_selection(tmp_path / "a.pt")
    assert (selection.n_tokens, selection.prefill_seconds) == (TOKENS, 1.5)
    assert selection.seconds == {"snapkv": 0.5, "cam": 0.5}
    plain, merged = selection.kept("snapkv", 0.25), selection.kept("cam", 0.25)
    assert plain.mask.equal(mask)
    assert plain.values is None
    assert plain.keys is None
    assert merged.values is not None
    assert merged.values.equal(values)


def test_an_absent_method_or_budget_is_named(tmp_path):
    write_case(tmp_path / "a.pt", {"snapkv": {"0.25": {"kept": pack_mask(even_mask(9))}}})
    selection = read_selection(tmp_path / "a.pt")
    for method, budget in [("snapkv", 0.5), ("kvzip", 0.25)]:
        with pytest.raises(KeyError, match="no selection of"):
            selection.kept(method, budget)


def test_a_mask_that_its_method_cannot_have_is_refused(tmp_path):
    uneven = even_mask(9)
    uneven[0, 0] = ~uneven[0, 0]
    entry = {"0.25": {"kept": pack_mask(uneven)}}
    write_case(tmp_path / "a.pt", {"snapkv": entry, "adakv": entry, "kvzip": entry})
    selection = read_selection(tmp_path / "a.pt")
    for method in ("snapkv", "adakv"):
        with pytest.raises(ValueError, match="is not stored"):
            selection.kept(method, 0.25)
    assert selection.kept("kvzip", 0.25).mask.equal(uneven)


def test_values_of_another_size_than_the_mask_are_refused(tmp_path):
    entry = {"kept": pack_mask(even_mask(9)), "values": torch.randn(LAYERS, HEADS, 8, 4)}
    write_case(tmp_path / "a.pt", {"cam": {"0.25": entry}})
    with pytest.raises(ValueError, match="do not fit its mask"):
        read_selection(tmp_path / "a.pt").kept("cam", 0.25)


def test_only_a_whole_file_of_the_same_case_is_complete(tmp_path):
    path = tmp_path / "a.pt"
    assert not is_complete(read_exported(path, "digest"), ["snapkv"], [0.25])
    write_case(path, {"snapkv": {"0.25": {"kept": pack_mask(even_mask(9))}}})
    found = read_exported(path, "digest")
    assert is_complete(found, ["snapkv"], [0.25])
    assert not is_complete(found, ["snapkv"], [0.25, 0.5])
    assert not is_complete(found, ["snapkv", "adakv"], [0.25])
    assert read_exported(path, "another") == {}
    path.write_bytes(path.read_bytes()[:100])
    assert read_exported(path, "digest") == {}


def test_a_later_export_keeps_the_methods_and_budgets_of_an_earlier_one(tmp_path):
    old, new = ({"kept": pack_mask(even_mask(9, seed))} for seed in (0, 1))
    write_case(tmp_path / "a.pt", {"snapkv": {"0.25": old, "0.5": old}, "kvzip": {"0.25": old}})
    found = read_exported(tmp_path / "a.pt", "digest")
    exported = {"methods": {"snapkv": {"0.25": new}, "adakv": {"0.25": new}}}
    later = merged(found, {**exported, "seconds": {"snapkv": 1.0, "adakv": 1.0}})
    assert later["methods"]["snapkv"]["0.25"] is new
    assert later["methods"]["snapkv"]["0.5"]["kept"].equal(old["kept"])
    assert later["seconds"] == {"snapkv": 1.0, "adakv": 1.0, "kvzip": 0.5}
    assert list(later["methods"]) == ["snapkv", "adakv", "kvzip"]


def test_the_peers_are_the_workers_methods():
    assert PEERS["snapkv"] == Peer("snapkv", "even", extra_prefill=False)
    assert PEERS["adakv"].storage == "per_head"
    assert PEERS["kvzip"] == Peer("kvzip", "none", extra_prefill=True)
    assert {name for name, peer in PEERS.items() if peer.extra_prefill} == {
        "kvzip",
        "kvzip_even",
        "kvzip_layerwise",
    }
    assert all(name == peer.name for name, peer in PEERS.items())


@pytest.mark.parametrize("extra", [["--budgets", "0.1,1"], ["--methods", "snapkv,nonsense"]])
def test_the_worker_refuses_other_budgets_and_methods(extra, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--model", "m", "--cases", "c", "--out", "o", *extra])
    assert "error: argument" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cases", "message"),
    [
        ([{"id": "../a", "context_ids": [1] * 65}], "no file name"),
        ([{"id": "a", "context_ids": [1] * 64}], "needs a longer context"),
        ([{"id": "a", "context_ids": [1] * 65}] * 2, "must differ"),
    ],
)
def test_the_worker_refuses_unusable_cases(tmp_path, cases, message):
    (tmp_path / "cases.json").write_text(json.dumps({"cases": cases}))
    with pytest.raises(SystemExit, match=message):
        read_cases(tmp_path / "cases.json")


def test_the_worker_imports_nothing_of_the_project():
    imported = [line for line in WORKER.read_text().splitlines() if "import " in line]
    assert not [line for line in imported if "grkv" in line or "benchmarks" in line]


def test_kvpress_and_what_it_runs_on_are_pinned():
    pinned = pins()
    assert pinned["kvpress"] == "0.5.5"
    assert {"torch", "transformers", "accelerate", "numpy"} <= pinned.keys()
    # kvpress 0.5.5 declares transformers >=4.56,<5.3.
    assert (4, 56) <= tuple(int(part) for part in pinned["transformers"].split(".")[:2]) < (5, 3)


def test_every_pin_says_why():
    lines = (Path(peers.__file__).parent / "requirements.txt").read_text().splitlines()
    assert all("  # " in line for line in lines if "==" in line)


def test_a_requirement_that_is_no_pin_is_refused(tmp_path):
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("# why\nkvpress==0.5.5  # peer\n\nnumpy>=2\n")
    with pytest.raises(ValueError, match="'numpy>=2' is not name==version"):
        pins(requirements)


def test_only_pins_and_python_choose_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    requirements = tmp_path / "requirements.txt"
    folders = []
    for text in ("a==1\nb==2  # why\n", "# a comment\nb==2\na==1\n", "a==1\nb==3\n"):
        requirements.write_text(text)
        folders.append(environment_dir(requirements))
    assert folders[0] == folders[1] != folders[2]
    assert folders[0].parent == tmp_path / "grkv_sglang"
    assert folders[0].name.startswith("peers-")
    monkeypatch.setattr("benchmarks.peers.environment.PYTHON_VERSION", PYTHON_VERSION + "0")
    assert environment_dir(requirements) != folders[2]


def test_a_failed_step_shows_the_end_of_its_output():
    from rich.console import Console

    console = Console(quiet=True)
    command = ["python3", "-c", "print('no such release'); raise SystemExit(3)"]
    with pytest.raises(PeersError, match=r"(?s)install failed with exit status 3.*no such release"):
        _step(console, "install", command)
    with pytest.raises(PeersError, match="did not start"):
        _step(console, "install", [str(python_of(Path("nowhere")))])


def test_an_unknown_method_is_refused_before_anything_is_made(tmp_path):
    cases = {"a": np.arange(70).tolist()}
    with pytest.raises(ValueError, match="unknown methods"):
        peers.export_selections(cases, model=tmp_path, budgets=[0.1], methods=["nonsense"], out_dir=tmp_path)
    with pytest.raises(ValueError, match="at least one case"):
        peers.export_selections({}, model=tmp_path, budgets=[0.1], methods=["snapkv"], out_dir=tmp_path)
