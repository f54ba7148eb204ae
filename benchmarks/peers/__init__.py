"""What other compression methods keep of a cache: kvpress's selections, exported to be measured with ours.

kvpress runs in an environment of its own (`environment`), as a subprocess (`worker`, whose docstring lists
the methods and the file format). Here its files are made and read:

    paths = export_selections(cases, model=folder, budgets=[0.3], methods=["snapkv", "kvzip"], out_dir=out)
    selection = read_selection(paths["moby_dick"])
    selection.kept("kvzip", 0.3).mask  # bool [L, Hkv, n]
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor

from benchmarks.peers.worker import DEFAULT_SEED, SECOND_PASS, STORAGE, unpack_mask

if TYPE_CHECKING:
    from rich.console import Console

Storage = Literal["even", "per_head", "none"]

WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True)
class Peer:
    """A method that is compared with.

    Attributes:
        name: its name in files and on the worker's command line.
        storage: "even" when all heads of all layers keep the same number of tokens (a cache with one slot
            index per layer holds it), "per_head" when only the layers' totals are equal, "none" otherwise.
        extra_prefill: it reads the context a second time to score it.
    """

    name: str
    storage: Storage
    extra_prefill: bool


PEERS: dict[str, Peer] = {
    name: Peer(name, cast(Storage, storage), name in SECOND_PASS) for name, storage in STORAGE.items()
}


@dataclass(frozen=True)
class Kept:
    """What a method keeps at a budget.

    Attributes:
        mask: bool ``[L, Hkv, n]``, true for kept tokens.
        values: ``[L, Hkv, c, dv]``, the kept tokens' new values in ascending token order, or None where the
            method does not change them.
        keys: likewise, ``[L, Hkv, c, d]``.
    """

    mask: Tensor
    values: Tensor | None = None
    keys: Tensor | None = None


@dataclass(frozen=True)
class Selection:
    """A case's file: what every method keeps of its context.

    Attributes:
        n_tokens: length of the context, n.
        prefill_seconds: its prefill in the peers' environment, without any method.
        seconds: per method, what computing one budget took on top, all layers together.
        entries: what `kept` unpacks, as the file has it.
    """

    n_tokens: int
    n_layers: int
    n_kv_heads: int
    prefill_seconds: float
    seconds: Mapping[str, float]
    entries: Mapping[str, Mapping[str, Mapping[str, Tensor]]]

    def kept(self, method: str, budget: float) -> Kept:
        """What `method` keeps at `budget`, checked against how the method can be stored.

        Raises:
            KeyError: the file has no such method or budget.
            ValueError: the entry does not fit the file's sizes or the method's storage.
        """
        try:
            entry = self.entries[method][str(float(budget))]
        except KeyError:
            there = {name: list(budgets) for name, budgets in self.entries.items()}
            raise KeyError(f"no selection of {method!r} at {budget}; the file has {there}") from None
        mask = unpack_mask(entry["kept"], (self.n_layers, self.n_kv_heads, self.n_tokens))
        counts = mask.sum(-1)
        totals = counts.sum(-1)
        storage = STORAGE.get(method, "none")
        if (storage == "even" and (counts != counts[0, 0]).any()) or (
            storage == "per_head" and (totals != totals[0]).any()
        ):
            raise ValueError(
                f"{method} at {budget} is not stored {storage!r}: tokens per head {counts.tolist()}"
            )
        for name in {"keys", "values"} & entry.keys():
            if entry[name].shape[:3] != (self.n_layers, self.n_kv_heads, int(counts[0, 0])):
                raise ValueError(
                    f"{method} at {budget}: {name} {list(entry[name].shape)} do not fit its mask"
                )
        return Kept(mask, entry.get("values"), entry.get("keys"))


def read_selection(path: Path) -> Selection:
    """Read a case's file.

    Raises:
        OSError: the file cannot be read.
        KeyError: it is no selection.
    """
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return Selection(
        n_tokens=found["n_tokens"],
        n_layers=found["n_layers"],
        n_kv_heads=found["n_kv_heads"],
        prefill_seconds=found["prefill_seconds"],
        seconds=found["seconds"],
        entries=found["methods"],
    )


def export_selections(
    cases: Mapping[str, Sequence[int]],
    *,
    model: Path,
    budgets: Sequence[float],
    methods: Sequence[str],
    out_dir: Path,
    seed: int = DEFAULT_SEED,
    dtype: str = "float32",
    console: Console | None = None,
) -> dict[str, Path]:
    """Have kvpress's methods select tokens of every case; what `out_dir` has already is not computed again.

    Args:
        cases: token ids of the context (more than 64) by the case's id, a file name of letters, digits, '.',
            '_' and '-'.
        model: Hugging Face model folder with its tokenizer.
        budgets: shares of tokens to keep, between 0 and 1.
        methods: names in `PEERS`.
        out_dir: folder for the files; made when missing.
        seed: of the methods that draw.
        dtype: of weights and cache: "float32", "bfloat16" or "float16".
        console: where the making of the environment is shown; standard error unless given. The worker's
            lines go to standard error.

    Returns:
        The files by case id, for `read_selection`.

    Raises:
        ValueError: a method is unknown, or there is nothing to do.
        PeersError: the environment could not be made, or the worker failed (its output is on standard error).
    """
    from benchmarks.peers.environment import PeersError, ensure_environment

    if unknown := [name for name in methods if name not in PEERS]:
        raise ValueError(f"unknown methods {unknown}; there are {list(PEERS)}")
    if not (cases and budgets and methods):
        raise ValueError("expected at least one case, one budget and one method")
    python = ensure_environment(console=console)
    out_dir.mkdir(parents=True, exist_ok=True)
    listed = [{"id": name, "context_ids": list(ids)} for name, ids in cases.items()]
    with tempfile.TemporaryDirectory() as scratch:
        cases_file = Path(scratch) / "cases.json"
        cases_file.write_text(json.dumps({"cases": listed}), encoding="utf-8")
        command = [str(python), "-P", str(WORKER), "--model", str(model), "--cases", str(cases_file)]
        command += ["--out", str(out_dir), "--budgets", ",".join(str(float(budget)) for budget in budgets)]
        command += ["--methods", ",".join(methods), "--dtype", dtype, "--seed", str(seed)]
        done = subprocess.run(command, check=False)
    paths = {name: out_dir / f"{name}.pt" for name in cases}
    missing = [name for name, path in paths.items() if not path.is_file()]
    if done.returncode or missing:
        raise PeersError(
            f"the export failed with exit status {done.returncode}; missing: {missing or 'none'}"
        )
    return paths
