"""What one compression costs without an engine: selection and regression, by profile and size.

Random keys, values and queries of a model's shape; the time does not depend on what they hold. The forward
passes (probe, requests, repetition) are not part of it: `grkv demo` measures the whole, against the cold
prefill. Sizes are interleaved, so that drift of the machine falls on all of them alike; medians are reported.
"""

from __future__ import annotations

import json
import platform
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from grkv_sglang.core import (
    LayerInputs,
    PassStatistics,
    RotaryTable,
    compress_layer,
    get_profile,
    plan_queries,
    slots_for_budget,
)


@dataclass(frozen=True)
class Shape:
    """Attention shape of one layer, and how many layers there are."""

    kv_heads: int = 3
    group: int = 3
    head_dim: int = 64
    hidden: int = 576
    layers: int = 30


@dataclass(frozen=True)
class Row:
    profile: str
    tokens: int
    slots: int
    queries: int
    select_ms_per_layer: float
    regress_ms_per_layer: float
    model_s: float
    """Seconds for all layers."""


def measure(profile_name: str, tokens: int, budget: float, shape: Shape, seed: int) -> tuple[float, float]:
    """Seconds of selection and regression of one layer."""
    generator = torch.Generator().manual_seed(seed)
    profile = get_profile(profile_name)
    plan = plan_queries(tokens, profile)
    heads = shape.kv_heads * shape.group

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    angles = torch.outer(torch.arange(tokens), 10_000 ** -torch.linspace(0, 1, shape.head_dim // 2))
    inputs = LayerInputs(
        keys=draw(tokens, shape.kv_heads, shape.head_dim),
        values=draw(tokens, shape.kv_heads, shape.head_dim),
        queries=2 * draw(len(plan.positions), heads, shape.head_dim),
        scale=shape.head_dim**-0.5,
        ancestor_keys=None,
        ancestor_values=None,
        output_projection=draw(shape.hidden, heads * shape.head_dim),
        passes={
            kind: PassStatistics(*(draw(shape.kv_heads, tokens).square() for _ in range(3)))
            for kind in profile.passes
        },
        pass_queries={
            kind: 2 * draw(count, heads, shape.head_dim) for kind, count in profile.fitted_of_passes.items()
        },
    )
    with torch.no_grad():
        result = compress_layer(
            inputs,
            plan,
            profile,
            n_slots=slots_for_budget(tokens, share=budget, tokens=None),
            starts_sequence=True,
            rotary=RotaryTable(torch.cat([angles.cos(), angles.sin()], 1), shape.head_dim, is_neox=True),
        )
    return result.select_s, result.regress_s


def main(
    profiles: Annotated[str, typer.Option(help="Comma-separated.")] = "default,best,paper,release,copy",
    tokens: Annotated[str, typer.Option(help="Span lengths, comma-separated.")] = "1536,4096,8000",
    budget: Annotated[float, typer.Option(help="Kept share.")] = 0.1,
    repetitions: Annotated[int, typer.Option(help="Measurements of each, after one warm-up.")] = 10,
    out: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Time selection and regression of one layer of a SmolLM2-135M-shaped model."""
    shape = Shape()
    cases = [(p, int(n)) for p in profiles.split(",") for n in tokens.split(",")]
    times: dict[tuple[str, int], list[tuple[float, float]]] = {case: [] for case in cases}
    for repetition in track(range(repetitions + 1), "measuring"):
        for case in cases:
            measured = measure(*case, budget, shape, seed=repetition)
            if repetition:
                times[case].append(measured)
    rows = []
    for (profile, n), measured_times in times.items():
        select, regress = (statistics.median(t[i] for t in measured_times) for i in (0, 1))
        rows.append(
            Row(
                profile=profile,
                tokens=n,
                slots=slots_for_budget(n, share=budget, tokens=None),
                queries=len(plan_queries(n, get_profile(profile)).positions),
                select_ms_per_layer=select * 1e3,
                regress_ms_per_layer=regress * 1e3,
                model_s=(select + regress) * shape.layers,
            )
        )
    table = Table(
        "profile", "tokens", "slots", "queries", "select ms", "regress ms", f"{shape.layers} layers, s"
    )
    for row in rows:
        table.add_row(
            row.profile, str(row.tokens), str(row.slots), str(row.queries), f"{row.select_ms_per_layer:.1f}",
            f"{row.regress_ms_per_layer:.1f}", f"{row.model_s:.2f}",
        )  # fmt: skip
    Console().print(table)
    if out is not None:
        figures = {
            "shape": asdict(shape),
            "budget": budget,
            "repetitions": repetitions,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "machine": platform.platform(),
            "rows": [asdict(row) for row in rows],
        }
        out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
