"""Measures methods on cases: every compressed prefix against the full one, token by token."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import Tensor

from benchmarks.fidelity.cases import Case
from benchmarks.fidelity.host import Host, Prefix
from benchmarks.fidelity.measures import deviation, exact_match
from benchmarks.fidelity.methods import Method
from grkv_sglang.core import slots_for_budget

Measure = Literal["continuation", "answers", "needles"]


@dataclass(frozen=True)
class Row:
    """One measure of one method at one budget on one document.

    Attributes:
        case: name of the document; `kind`: prose, code or filler.
        context_tokens: length of the span.
        method, budget: as asked for; `slots` per KV head that came of it.
        measure: continuation, answers or needles.
        tokens: predicted tokens that were measured.
        kl, kl_p90: mean and 90th percentile of KL(full || compressed) per token, nats.
        top1: share of tokens at which both find the same token likeliest.
        nll_increase: mean, nats per token, of the tokens that came.
        exact: needles: share of the planted values that greedy decoding would give; `exact_full`: with the
            full cache. NaN for other measures.
        attention_error: relative error of attention outputs on held-out queries; NaN where unknown.
        prefill_s, compress_s, pass_s: seconds of the prefill, of selection and regression, and of passes over
            the prefix beyond the prefill.
    """

    case: str
    kind: str
    context_tokens: int
    method: str
    budget: float
    slots: int
    measure: Measure
    tokens: int
    kl: float
    kl_p90: float
    top1: float
    nll_increase: float
    exact: float
    exact_full: float
    attention_error: float
    prefill_s: float
    compress_s: float
    pass_s: float


@dataclass(frozen=True)
class Asked:
    """Sequences behind a case's prefix, and what the full cache makes of them.

    Attributes:
        measure: per sequence.
        sequences: token ids; `first`: the first token of each that is measured.
        log_probs: per sequence [t, vocabulary], of the full cache.
    """

    measure: list[Measure]
    sequences: list[list[int]]
    first: list[int]
    log_probs: list[Tensor]

    def came(self, index: int) -> Tensor:
        """[t] the measured tokens of a sequence."""
        return torch.tensor(self.sequences[index][self.first[index] :], device=self.log_probs[index].device)


def ask_full(host: Host, prefix: Prefix, case: Case, answer_tokens: int) -> Asked:
    """Let the full cache answer greedily, and read its predictions of everything that is measured."""
    measure: list[Measure] = []
    sequences: list[list[int]] = []
    first: list[int] = []
    if case.continuation:
        # What the first token of the continuation is, the prefix itself predicts, compressed or not.
        measure.append("continuation")
        sequences.append(case.continuation)
        first.append(1)
    full = host.full(prefix)
    answers = host.generate(full, case.questions, answer_tokens) if case.questions else []
    for question, answer in zip(case.questions, answers, strict=True):
        if answer:
            measure.append("answers")
            sequences.append([*question, *answer])
            first.append(len(question))
    for question, value in case.facts:
        measure.append("needles")
        sequences.append([*question, *value])
        first.append(len(question))
    return Asked(measure, sequences, first, host.log_probs(full, sequences, first))


def measure_case(
    host: Host,
    case: Case,
    runs: Sequence[tuple[Method, float]],
    *,
    answer_tokens: int,
    on_row: Callable[[], None] = lambda: None,
) -> list[Row]:
    """All rows of one case: methods, each at a budget. `on_row` is called after each, for progress."""
    prefix = host.prefill(case.context)
    asked = ask_full(host, prefix, case, answer_tokens)
    rows: list[Row] = []
    for method, budget in runs:
        n_slots = slots_for_budget(prefix.n_tokens, share=budget, tokens=None)
        compressed = method.compress(host, prefix, case_id(case), budget, n_slots)
        found = host.log_probs(compressed, asked.sequences, asked.first)
        for name in sorted(set(asked.measure)):
            members = [i for i, m in enumerate(asked.measure) if m == name]
            parts = [deviation(asked.log_probs[i], found[i], asked.came(i)) for i in members]
            kl = torch.cat([part.kl for part in parts])
            exact = exact_full = float("nan")
            if name == "needles":
                exact, exact_full = (
                    sum(exact_match(table[i], asked.came(i)) for i in members) / len(members)
                    for table in (found, asked.log_probs)
                )
            rows.append(
                Row(
                    case=case.name,
                    kind=case.kind,
                    context_tokens=prefix.n_tokens,
                    method=method.name,
                    budget=budget,
                    slots=n_slots,
                    measure=name,
                    tokens=len(kl),
                    kl=float(kl.mean()),
                    kl_p90=float(kl.quantile(0.9)),
                    top1=float(torch.cat([part.top1 for part in parts]).mean()),
                    nll_increase=float(torch.cat([part.nll_increase for part in parts]).mean()),
                    exact=exact,
                    exact_full=exact_full,
                    attention_error=compressed.error_after,
                    prefill_s=prefix.prefill_s,
                    compress_s=compressed.select_s + compressed.regress_s,
                    pass_s=compressed.pass_s,
                )
            )
        on_row()
    return rows


def case_id(case: Case) -> str:
    """A file name for a case: of its name and length."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", case.name) + f"-{len(case.context)}"


def as_dict(row: Row) -> dict[str, object]:
    """For JSON, which knows no NaN: those become None."""
    return {key: None if value != value else value for key, value in asdict(row).items()}


def from_dict(values: dict[str, object]) -> Row:
    """The inverse of `as_dict`."""
    return Row(**{key: float("nan") if value is None else value for key, value in values.items()})  # type: ignore[arg-type]
