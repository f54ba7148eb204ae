"""The same measures through a running engine: what its users get, by log-probabilities over HTTP.

The engine tells the likeliest token and the log-probability of the token that came, so top-1 agreement and
the increase of the negative log-likelihood are measured; KL divergences are not. Only profiles that the
server knows by name can be asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from transformers import AutoTokenizer

from benchmarks.fidelity.cases import Case
from benchmarks.fidelity.run import Measure, Row, case_id
from grkv_sglang.core import profile_names, slots_for_budget
from grkv_sglang.serving import ServerSpec, running_server

NAN = float("nan")
SETTLE_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Read:
    """Per measured token of one sequence: log-probability of the token that came, and the likeliest token."""

    log_probs: list[float]
    likeliest: list[int]


class ServedHost:
    """A server with the plugin and its tokenizer."""

    def __init__(self, base_url: str, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        limits = httpx.Limits(keepalive_expiry=2)  # the server closes idle connections after five seconds
        self._http = httpx.Client(base_url=base_url, timeout=1200, limits=limits)

    def generate(self, prompt: Sequence[int], salt: str, max_new_tokens: int) -> list[int]:
        """Greedy, on exact KV, without an end-of-sequence token."""
        answer = self._post(prompt, salt, {"mode": "exact"}, max_new_tokens)
        ids: list[int] = answer["output_ids"]
        ends = {self.tokenizer.eos_token_id}
        return ids[:-1] if ids and ids[-1] in ends else ids

    def read(
        self, prefix: Sequence[int], tokens: Sequence[int], first: int, salt: str, options: dict[str, Any]
    ) -> Read:
        """Read `tokens` from `first` on, teacher-forced behind `prefix`.

        Raises:
            RuntimeError: options that ask for a span, and no span over exactly the prefix served.
        """
        start = len(prefix) + first
        answer = self._post(
            [*prefix, *tokens], salt, options, 1,
            return_logprob=True, logprob_start_len=start - 1, top_logprobs_num=1,
        )  # fmt: skip
        meta = answer["meta_info"]
        served = meta["grkv"][0]
        if options["mode"] != "exact" and served["span_tokens"] != len(prefix):
            raise RuntimeError(f"expected a span of {len(prefix)} tokens to serve, got {served}")
        count = len(tokens) - first
        return Read(
            [entry[0] for entry in meta["input_token_logprobs"][-count:]],
            [entry[0][1] for entry in meta["input_top_logprobs"][-count:]],
        )

    def compress(self, prefix: Sequence[int], salt: str, profile: str, budget: float) -> dict[str, Any]:
        """Have the prefix compressed; returns the span as the server lists it."""
        options = {"prefix_end_tokens": len(prefix), "profile": profile, "budget": budget}
        failed = self._state()["counters"]["compressions_failed"]
        # The token behind the prefix is not part of the span.
        self._post([*prefix, prefix[0]], salt, options, 1)
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while time.monotonic() < deadline:
            state = self._state()
            for span in state["spans"]:
                if span["end_tokens"] == len(prefix) and span["profile"] == profile and not span["hits"]:
                    found: dict[str, Any] = span
                    return found
            if state["counters"]["compressions_failed"] != failed:
                raise RuntimeError(f"the server did not compress: {state['counters']['compressions_failed']}")
            time.sleep(0.1)
        raise RuntimeError(f"no span of {len(prefix)} tokens within {SETTLE_TIMEOUT_S:.0f} s")

    def _state(self) -> dict[str, Any]:
        found: dict[str, Any] = self._http.get("/grkv/state").raise_for_status().json()[0]
        return found

    def flush(self) -> None:
        """Forget all prefixes."""
        self._http.post("/flush_cache").raise_for_status()

    def _post(
        self, ids: Sequence[int], salt: str, options: dict[str, Any], max_new_tokens: int, **fields: Any
    ) -> dict[str, Any]:
        params = {
            "temperature": 0,
            "max_new_tokens": max_new_tokens,
            "custom_params": {"grkv": options},
        }
        body = {"input_ids": list(ids), "sampling_params": params, "cache_salt": salt, **fields}
        response = self._http.post("/generate", json=body)
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer


@contextmanager
def served_host(model_dir: Path, *, device: str, dtype: str, context_tokens: int) -> Iterator[ServedHost]:
    """Start a server that compresses only what it is told to."""
    spec = ServerSpec(
        model_path=model_dir,
        engine="grkv",
        log_path=Path("fidelity-server.log"),
        max_total_tokens=4 * context_tokens + 4096,
        device=device,
        dtype=dtype,
        grkv_config={"triggers": "explicit", "min_span_tokens": 64},
    )
    with running_server(spec) as server:
        yield ServedHost(server.base_url, AutoTokenizer.from_pretrained(model_dir))


def measure_case_served(
    host: ServedHost,
    case: Case,
    runs: Sequence[tuple[str, float]],
    *,
    answer_tokens: int,
    on_row: Callable[[], None] = lambda: None,
) -> list[Row]:
    """All rows of one case: profiles, each at a budget. Fields that the engine does not tell are NaN.

    Raises:
        ValueError: a method is no profile of the server.
    """
    unknown = [name for name, _ in runs if name not in profile_names()]
    if unknown:
        raise ValueError(f"expected profiles ({', '.join(profile_names())}) for a server, got {unknown}")
    exact: dict[str, Any] = {"mode": "exact"}
    salt = case_id(case)
    asked: list[tuple[Measure, list[int], int]] = []
    if case.continuation:
        asked.append(("continuation", case.continuation, 1))
    for question in case.questions:
        answer = host.generate([*case.context, *question], salt, answer_tokens)
        if answer:
            asked.append(("answers", [*question, *answer], len(question)))
    asked += [("needles", [*suffix, *value], len(suffix)) for suffix, value in case.facts]
    full = [host.read(case.context, tokens, first, salt, exact) for _, tokens, first in asked]
    rows: list[Row] = []
    for profile, budget in runs:
        own_salt = f"{salt}/{profile}/{budget}"
        span = host.compress(case.context, own_salt, profile, budget)
        options = {"mode": "prefer_compressed", "budget": budget}
        found = [host.read(case.context, tokens, first, own_salt, options) for _, tokens, first in asked]
        for measure in sorted({name for name, _, _ in asked}):
            members = [i for i, (name, _, _) in enumerate(asked) if name == measure]
            rows.append(_row(case, profile, budget, measure, span, members, asked, full, found))
        on_row()
    host.flush()
    return rows


def _row(
    case: Case,
    profile: str,
    budget: float,
    measure: Measure,
    span: dict[str, Any],
    members: list[int],
    asked: list[tuple[Measure, list[int], int]],
    full: list[Read],
    found: list[Read],
) -> Row:
    increase = [a - b for i in members for a, b in zip(full[i].log_probs, found[i].log_probs, strict=True)]
    same = [a == b for i in members for a, b in zip(full[i].likeliest, found[i].likeliest, strict=True)]
    exact = exact_full = NAN
    if measure == "needles":
        exact, exact_full = (
            sum(table[i].likeliest == asked[i][1][asked[i][2] :] for i in members) / len(members)
            for table in (found, full)
        )
    return Row(
        case=case.name,
        kind=case.kind,
        context_tokens=len(case.context),
        method=profile,
        budget=budget,
        slots=slots_for_budget(len(case.context), share=budget, tokens=None),
        measure=measure,
        tokens=len(same),
        kl=NAN,
        kl_p90=NAN,
        top1=sum(same) / len(same),
        nll_increase=sum(increase) / len(increase),
        exact=exact,
        exact_full=exact_full,
        attention_error=1.0 - span["quality"],
        prefill_s=NAN,
        compress_s=span["compress_s"],
        pass_s=NAN,
    )
