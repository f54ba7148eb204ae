"""The parts of a run, in order. A section is what comes before the slash."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.gpu import compression, correctness, decode, graphs, steps
from benchmarks.gpu.runner import Part

PARTS: dict[str, Part] = {
    "correctness/scoring": correctness.scoring,
    "correctness/regression": correctness.regression,
    "correctness/moves": correctness.moves,
    "correctness/attention": correctness.attention,
    "correctness/merging": correctness.merging,
    "graphs/attention": graphs.attention,
    "compression/layer": compression.layer,
    "compression/scoring": steps.scoring,
    "compression/regression": steps.regression,
    "decode/attention": decode.attention,
    "decode/shared": decode.shared,
    "decode/moves": decode.moves,
}

SECTIONS = tuple(dict.fromkeys(name.split("/")[0] for name in PARTS))


def parts_of(only: str | None) -> Sequence[str]:
    """The names of a section's parts, of one part, or of all for None."""
    return [name for name in PARTS if only in (None, name, name.split("/")[0])]
