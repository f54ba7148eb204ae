"""What the compression of a budget loses, beside what it gains: fidelity's results looked up by budget."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "results"
FILES = ("fidelity-2048.json", "fidelity-4096.json")
COLUMNS = ("KL text", "KL answers", "top-1 answers")
"""Of `Quality.cells`."""


@dataclass(frozen=True)
class Fidelity:
    """Means over the documents of one length, against the full cache, nats per token and shares."""

    context_tokens: int
    documents: int
    kl_continuation: float
    kl_answers: float
    top1_continuation: float
    top1_answers: float


class Quality:
    """Fidelity of a profile by budget and length.

    Attributes:
        model: whose fidelity it is; a benchmark of another model shows it as such.
    """

    def __init__(self, found: dict[tuple[str, float, int], Fidelity], model: str) -> None:
        self._found = found
        self.model = model

    @classmethod
    def load(cls, folder: Path = RESULTS, files: Sequence[str] = FILES) -> Quality:
        """Out of the fidelity benchmark's files; those that are missing are left out."""
        found: dict[tuple[str, float, int], Fidelity] = {}
        model = ""
        for path in (folder / name for name in files):
            if not path.exists():
                continue
            content = json.loads(path.read_text(encoding="utf-8"))
            model = content["settings"]["model"]
            # Documents of filler hold no text worth continuing; fidelity's own tables leave them out too.
            rows = [row for row in content["rows"] if row["kind"] != "filler"]
            for key in dict.fromkeys((r["method"], r["budget"], r["context_tokens"]) for r in rows):
                own = [r for r in rows if (r["method"], r["budget"], r["context_tokens"]) == key]
                answers = [r for r in own if r["measure"] == "answers"]
                text = [r for r in own if r["measure"] == "continuation"]
                if answers and text:
                    found[key] = Fidelity(
                        context_tokens=key[2],
                        documents=len({r["case"] for r in own}),
                        kl_continuation=statistics.fmean(r["kl"] for r in text),
                        kl_answers=statistics.fmean(r["kl"] for r in answers),
                        top1_continuation=statistics.fmean(r["top1"] for r in text),
                        top1_answers=statistics.fmean(r["top1"] for r in answers),
                    )
        return cls(found, model)

    def for_model(self, folder: Path | None) -> Quality:
        """For a benchmark of the model in `folder` (None: the default one, which fidelity is measured on):
        without results where it is another model."""
        return self if folder is None or folder.name == self.model else Quality({}, self.model)

    def rows(self, profiles: Sequence[str]) -> list[tuple[str, float, Fidelity]]:
        """Profile, budget and fidelity of all that was measured of some profiles, in their order."""
        keys = sorted(
            (key for key in self._found if key[0] in profiles),
            key=lambda key: (profiles.index(key[0]), key[2], key[1]),
        )
        return [(key[0], key[1], self._found[key]) for key in keys]

    def of(self, profile: str, budget: float, tokens: int) -> Fidelity | None:
        """At the measured length nearest to `tokens`; None where this budget was not measured."""
        lengths = [length for name, share, length in self._found if (name, share) == (profile, budget)]
        if not lengths:
            return None
        return self._found[profile, budget, min(lengths, key=lambda length: abs(length - tokens))]

    def cells(self, profile: str, budget: float | None, tokens: int) -> tuple[str, str, str]:
        """For a table: `COLUMNS` of a budget; a server that compresses nothing loses nothing."""
        if budget is None:
            return "0", "0", "1"
        found = self.of(profile, budget, tokens)
        if found is None:
            return ("not measured",) * 3
        return (
            f"{found.kl_continuation:.3f}",
            f"{found.kl_answers:.3f}",
            f"{found.top1_answers:.2f}",
        )

    def note(self, profile: str, tokens: int) -> str:
        """Whose fidelity the cells show."""
        lengths = [length for name, _, length in self._found if name == profile]
        if not lengths:
            return "Fidelity: no results found; run `python -m benchmarks.fidelity`."
        nearest = min(lengths, key=lambda length: abs(length - tokens))
        documents = max(
            found.documents
            for (name, _, length), found in self._found.items()
            if (name, length) == (profile, nearest)
        )
        return (
            f"KL (nats per token) and top-1 against the full cache: profile `{profile}` on {documents} "
            f"documents of {nearest:,} tokens, {self.model} (`benchmarks.fidelity`), not on the texts sent "
            "here."
        )
