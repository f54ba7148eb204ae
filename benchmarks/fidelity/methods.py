"""What `--methods` may name, and how each turns a prefilled prefix into a compressed one.

default, best, ...       a profile
snapkv, kvzip+snapkv     a selection method or a rank sum of several; the selected tokens as they are
snapkv/grkv              the same, then the regression of profile `default`
default[cap_k=none;...]  any of these with other settings of the profile
merge:cam                a merging baseline
peer:snapkv              a selection method of kvpress, see benchmarks.peers
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from benchmarks.fidelity.host import Compressed, Host, LayerCache, Prefix, compressed_of
from benchmarks.fidelity.merging import MERGING_METHODS, MergingMethod, merge_layer
from benchmarks.peers import PEERS, read_selection
from grkv_sglang.core import Profile, get_profile, get_scorer, plan_queries, profile_names

GRKV_SUFFIX = "/grkv"
N_STRATA = 64
"""Strata queries of a method that is named by itself and looks at such."""
Held = Literal["even", "per_head", "none"]
"""What a server can hold: even budgets; per-head ones with equal layer totals (ragged storage); neither."""


class Method(Protocol):
    """A way to compress."""

    @property
    def name(self) -> str:
        """As asked for."""

    @property
    def held(self) -> Held:
        """What can hold its result."""

    @property
    def extra_prefill(self) -> bool:
        """Whether it costs another pass over the prefix."""

    def compress(self, host: Host, prefix: Prefix, case_id: str, budget: float, n_slots: int) -> Compressed:
        """Compress a prefix into `n_slots` slots per KV head (on average): `budget` of its tokens."""


@dataclass(frozen=True)
class ProfileMethod:
    """Selection and regression of a profile."""

    name: str
    profile: Profile

    @property
    def held(self) -> Held:
        storage = get_scorer(self.profile.scorer).storage
        return "none" if storage == "per_layer" else storage

    @property
    def extra_prefill(self) -> bool:
        return self.profile.extra_prefills > 0

    def compress(self, host: Host, prefix: Prefix, case_id: str, budget: float, n_slots: int) -> Compressed:
        return host.compress(prefix, self.profile, n_slots)


@dataclass(frozen=True)
class MergeMethod:
    """A merging baseline over SnapKV's selection."""

    name: str
    method: MergingMethod
    held: Held = "even"
    extra_prefill: bool = False

    def compress(self, host: Host, prefix: Prefix, case_id: str, budget: float, n_slots: int) -> Compressed:
        profile = get_profile("paper")
        plan = plan_queries(prefix.n_tokens, profile)
        results = [
            merge_layer(
                self.method,
                host.layer_inputs(prefix, layer, plan, profile),
                plan,
                profile,
                n_slots=n_slots,
                starts_sequence=True,
                rotary=host.rotary,
            )
            for layer in range(host.n_layers)
        ]
        compressed = compressed_of(prefix.n_tokens, results)
        for layer, result in zip(compressed.layers, results, strict=True):
            layer.log_counts = result.log_counts
        return compressed


@dataclass(frozen=True)
class PeerMethod:
    """What kvpress keeps of this very prefix, read from its export."""

    name: str
    peer: str
    folder: Path

    @property
    def held(self) -> Held:
        return PEERS[self.peer].storage

    @property
    def extra_prefill(self) -> bool:
        return PEERS[self.peer].extra_prefill

    def compress(self, host: Host, prefix: Prefix, case_id: str, budget: float, n_slots: int) -> Compressed:
        selection = read_selection(self.folder / f"{case_id}.pt")
        chosen = selection.kept(self.peer, budget)
        layers = []
        for layer, kept in enumerate(chosen.mask):
            cached = prefix.layers[layer]
            counts = kept.sum(dim=-1)
            width = int(counts.max())
            index = kept.int().argsort(dim=-1, descending=True, stable=True)[:, :width].to(cached.keys.device)
            valid = torch.arange(width) < counts[:, None]
            head = torch.arange(len(kept))[:, None]
            keys, values = cached.keys[head, index], cached.values[head, index]
            if chosen.keys is not None:
                keys = chosen.keys[layer].to(keys)
            if chosen.values is not None:
                values = chosen.values[layer].to(values)
            layers.append(LayerCache(keys, values, None if valid.all() else valid.to(index.device)))
        # Theirs is a time of another environment: related to the prefill measured there.
        share = selection.seconds[self.peer] / selection.prefill_seconds
        return Compressed(prefix.n_tokens, layers, select_s=share * prefix.prefill_s)


def parse_methods(text: str, peer_folder: Path | None) -> list[Method]:
    """Methods out of a comma-separated list.

    Raises:
        ValueError: an unknown name or setting; the message lists the valid ones.
    """
    names = [name.strip() for name in re.split(r",(?![^\[]*\])", text) if name.strip()]
    if not names:
        raise ValueError("expected at least one method")
    return [_parse(name, peer_folder) for name in names]


def _parse(name: str, peer_folder: Path | None) -> Method:
    kind, _, rest = name.partition(":")
    if rest and kind == "merge":
        merging = next((known for known in MERGING_METHODS if known == rest), None)
        if merging is None:
            raise ValueError(f"expected merge: one of {', '.join(MERGING_METHODS)}, got {rest!r}")
        return MergeMethod(name, merging)
    if rest and kind == "peer":
        if rest not in PEERS:
            raise ValueError(f"expected peer: one of {', '.join(PEERS)}, got {rest!r}")
        if peer_folder is None:
            raise ValueError(f"{name} needs the folder of kvpress's exports")
        return PeerMethod(name, rest, peer_folder)
    base, bracket, settings = name.partition("[")
    profile = _profile(base)
    if bracket:
        if not settings.endswith("]"):
            raise ValueError(f"expected settings such as 'default[steps=2;cap_k=none]', got {name!r}")
        profile = _with_settings(profile, settings.removesuffix("]"))
    return ProfileMethod(name, replace(profile, name=name))


def _profile(name: str) -> Profile:
    if name in profile_names():
        return get_profile(name)
    default = get_profile("default")
    scorer = name.removesuffix(GRKV_SUFFIX)
    try:
        queries = get_scorer(scorer).queries
    except ValueError as error:
        raise ValueError(f"expected a profile ({', '.join(profile_names())}) or {error}") from error
    return replace(
        default,
        scorer=scorer,
        n_strata=N_STRATA if "strata" in queries else 0,
        value_step=name.endswith(GRKV_SUFFIX),
        key_step=name.endswith(GRKV_SUFFIX),
    )


def _with_settings(profile: Profile, text: str) -> Profile:
    known: Mapping[str, Any] = {field.name: getattr(profile, field.name) for field in fields(profile)}
    changes: dict[str, Any] = {}
    for setting in text.split(";"):
        key, _, raw = setting.partition("=")
        if key not in known:
            raise ValueError(f"expected a setting out of {', '.join(known)}, got {key!r}")
        changes[key] = _value(raw)
    try:
        return replace(profile, **changes)
    except TypeError as error:
        raise ValueError(f"expected settings of the right types, got {text!r}: {error}") from error


def _value(raw: str) -> Any:
    words = {"none": None, "true": True, "false": False}
    if raw.lower() in words:
        return words[raw.lower()]
    for kind in (int, float):
        try:
            return kind(raw)
        except ValueError:
            continue
    return raw
