"""The fidelity benchmark measures what the engine serves: one text, through the server and without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.fidelity.cases import Case, Chat
from benchmarks.fidelity.host import Host
from benchmarks.fidelity.methods import parse_methods
from benchmarks.fidelity.run import measure_case
from benchmarks.fidelity.served import ServedHost, measure_case_served
from benchmarks.multi_turn_drift import pieces_of_text
from tests.engine.client import Client

BUDGET = 0.2
CONTINUATION_TOKENS = 40


def check_agreement(
    client: Client, model_path: Path, tokenizer: Any, profiles: list[str], *, context_tokens: int
) -> None:
    """Both measure the same of each profile; the benchmark without an engine knows the loss in nats too."""
    (ids,) = pieces_of_text(tokenizer, 1, context_tokens + CONTINUATION_TOKENS)
    case = Case(
        name="agreement",
        kind="prose",
        context=ids[:context_tokens],
        continuation=ids[context_tokens:],
        questions=[Chat(tokenizer).suffix("What happens in this text?")],
        facts=[],
        fact_depths=[],
    )
    client.flush()
    served = measure_case_served(
        ServedHost(str(client.http.base_url), tokenizer),
        case,
        [(profile, BUDGET) for profile in profiles],
        answer_tokens=16,
    )
    methods = [(method, BUDGET) for method in parse_methods(",".join(profiles), None)]
    offline = measure_case(Host(model_path), case, methods, answer_tokens=16)
    assert [(r.method, r.measure) for r in served] == [(r.method, r.measure) for r in offline]
    for there, here in zip(served, offline, strict=True):
        assert there.slots == here.slots == round(BUDGET * context_tokens)
        assert there.tokens == here.tokens
        assert there.nll_increase == pytest.approx(here.nll_increase, abs=0.01)
        assert there.top1 == pytest.approx(here.top1, abs=1.01 / here.tokens)
        assert there.attention_error == pytest.approx(here.attention_error, abs=0.002)
        assert here.kl > 0
    assert client.settled_state()["spans"] == [], "the benchmark forgets its prefixes"
