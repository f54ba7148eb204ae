"""`grkv verify`: an end-to-end check of a running server, by what the server itself says of each answer.

In two namespaces of its own, which are deleted at the end: in one everything is exact; in the other the
document is compressed. So no answer can be served by what other traffic, or the other half, left behind.
"""

from __future__ import annotations

import statistics
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from grkv_sglang.client import Completion, CompressionOptions, GrkvClient, Served
from grkv_sglang.client.state import namespace_name
from grkv_sglang.commands.compressing import (
    CompressedPrefix,
    CompressingError,
    SharedPrefix,
    compress_prefix,
    shared_prefix,
)
from grkv_sglang.commands.documents import Document, Layout
from grkv_sglang.demo.documents import SYSTEM_MESSAGE, load_documents
from grkv_sglang.policy.options import OPTIONS_KEY

DOCUMENT_CHARACTERS = 6000
"""Of the built-in document: about 1,500 tokens, which fit into small servers."""

# The question in the document's own message: every chat template can render that.
LAYOUT = Layout(system=SYSTEM_MESSAGE, template="{document}\n\nQuestion: {question}")
QUESTION = "What happens in this text?"


@dataclass(frozen=True)
class VerifySettings:
    """What is asked for.

    Attributes:
        text: the document.
        budget, profile, min_quality: of the compression, and of the request that should be served from it;
            None: the server's.
        answer_tokens: length of the compared answers.
        max_gap: largest mean loss of log-probability per answer token, in nats, that passes.
        wait_s: seconds to wait for the compression.
    """

    text: str
    budget: float | None = None
    profile: str | None = None
    min_quality: float | None = None
    answer_tokens: int = 32
    max_gap: float = 1.0
    wait_s: float = 600.0

    def options(self, **further: Any) -> CompressionOptions:
        """Options of a request. Raises pydantic's ValidationError for values out of range."""
        given = {"budget": self.budget, "min_quality": self.min_quality, **further}
        return CompressionOptions.model_validate(given)


@dataclass(frozen=True)
class Step:
    """One request: what it was for, and what the server says served its prompt."""

    name: str
    prompt_tokens: int
    cached_tokens: int
    served_from: str


@dataclass(frozen=True)
class Check:
    """One thing that must hold, and what was found."""

    name: str
    ok: bool
    found: str


@dataclass
class VerifyReport:
    """Everything that was done and found."""

    steps: list[Step] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    prefix: CompressedPrefix | None = None
    mean_gap: float | None = None
    """Mean loss of log-probability per answer token, exact minus compressed, in nats."""
    max_gap: float | None = None

    @property
    def ok(self) -> bool:
        return bool(self.checks) and all(check.ok for check in self.checks)


def default_text() -> str:
    """A built-in document in the public domain."""
    return load_documents()[0].text[:DOCUMENT_CHARACTERS]


def verify(
    client: GrkvClient, settings: VerifySettings, on_step: Callable[[str], None] = lambda name: None
) -> VerifyReport:
    """Do all steps; delete what they left on the server, also after a failure.

    Args:
        on_step: told the name of each step before it begins.

    Raises:
        GrkvError: the server refused a request, or was not reached.
    """
    client.state()  # a server without the plugin is told before anything is sent
    run = _Run(client, settings, on_step)
    try:
        run.all_steps()
    finally:
        run.clean_up()
    return run.report


class _Run:
    def __init__(self, client: GrkvClient, settings: VerifySettings, on_step: Callable[[str], None]) -> None:
        self._client, self._settings, self._on_step = client, settings, on_step
        self._document = Document("verify", settings.text)
        name = f"grkv-verify-{uuid.uuid4().hex}"
        self._exact_salt, self._span_salt = f"{name}-exact", f"{name}-span"
        self.report = VerifyReport()

    def all_steps(self) -> None:
        """Cold exact, compress, compressed, exact again, and the gap between the two kinds."""
        exact = CompressionOptions(mode="exact")
        cold = self._ask("cold, exact", exact, self._exact_salt)
        self._check("the cold prompt is computed, not served", cold.usage.cached_tokens == 0, _served(cold))
        shared = shared_prefix(self._client, LAYOUT, self._document)
        if not self._compress(shared):
            return
        options = self._settings.options(mode="prefer_compressed")
        if not self._check_hit(self._ask("compressed", options, self._span_salt)):
            return
        # Before anything exact comes to lie beside the span.
        compressed = self._log_probs("read on compressed", cold, options, self._span_salt, from_span=True)
        again = self._ask("exact again", exact, self._span_salt)
        self._check(
            "exact is served from no span",
            again.grkv is not None and again.grkv.span_tokens == 0,
            _served(again),
        )
        self._check_same(cold, again)
        full = self._log_probs("read on exact", cold, exact, self._exact_salt, from_span=False)
        self._check_gap([a - b for a, b in zip(full, compressed, strict=True)])

    def clean_up(self) -> None:
        """Delete both namespaces, and look that nothing of them is left."""
        self._on_step("cleaning up")
        for salt in (self._exact_salt, self._span_salt):
            state = self._client.command("delete", cache_salt=salt)
            left = [span for span in state.spans if span.namespace == namespace_name(salt)]
            if left:
                self._check("nothing is left behind", False, f"{len(left)} spans")

    def _ask(self, name: str, options: CompressionOptions, salt: str) -> Completion:
        self._on_step(name)
        answer = self._client.chat(
            LAYOUT.messages(self._document, QUESTION),
            max_tokens=self._settings.answer_tokens,
            options=options,
            cache_salt=salt,
            return_token_ids=True,
        )
        self._note(name, answer)
        return answer

    def _note(self, name: str, answer: Completion) -> None:
        usage = answer.usage
        self.report.steps.append(Step(name, usage.prompt_tokens, usage.cached_tokens, _served(answer)))

    def _check(self, name: str, ok: bool, found: str) -> None:
        self.report.checks.append(Check(name, ok, found))

    def _compress(self, shared: SharedPrefix) -> bool:
        self._on_step("compress")
        settings = self._settings
        try:
            answer, prefix = compress_prefix(
                self._client,
                LAYOUT,
                self._document,
                shared,
                settings.options(profile=settings.profile, **shared.end_options()),
                cache_salt=self._span_salt,
                wait_s=settings.wait_s,
            )
        except CompressingError as error:
            self._check("the document is compressed", False, str(error))
            return False
        self._note("compress", answer)
        self.report.prefix = prefix
        quality = "" if prefix.quality is None else f", quality {prefix.quality:.3f}"
        found = f"{prefix.tokens:,} tokens in {prefix.slots:,} slots{quality}"
        self._check("the document is compressed", prefix.slots < prefix.tokens, found)
        return True

    def _check_hit(self, warm: Completion) -> bool:
        """Whether the answer came from the span, by both of the server's own accounts."""
        served, prefix = warm.grkv, self.report.prefix
        if served is None or prefix is None or served.span_tokens == 0:
            found = _served(warm)
            if prefix is not None and prefix.quality is not None:
                found += (
                    f"; the span's quality is {prefix.quality:.3f}: is the least quality asked for higher?"
                )
            self._check("a warm request is served from the span", False, found)
            return False
        made = sum(span.tokens for span in prefix.spans)
        self._check(
            "a warm request is served from the span",
            served.span_tokens == made and served.span_slots < served.span_tokens,
            _served(warm),
        )
        self._check(
            "its cached tokens are those of the span and what is exact",
            warm.usage.cached_tokens == served.span_tokens + served.exact_tokens
            and warm.usage.cached_tokens >= prefix.tokens,
            f"{warm.usage.cached_tokens:,} = {served.span_tokens:,} + {served.exact_tokens:,}",
        )
        return True

    def _check_same(self, cold: Completion, again: Completion) -> None:
        first, second = cold.token_ids or [], again.token_ids or []
        pairs = zip(first, second, strict=False)
        differs = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
        same = bool(first) and first == second
        found = f"{len(first)} of {len(first)} tokens" if same else f"the answers part at token {differs}"
        self._check("exact again is the cold answer, token by token", same, found)

    def _check_gap(self, gaps: list[float]) -> None:
        self.report.mean_gap, self.report.max_gap = statistics.fmean(gaps), max(gaps)
        limit = self._settings.max_gap
        self._check(
            f"on compressed KV the exact answer loses at most {limit:g} nats per token",
            self.report.mean_gap <= limit,
            f"mean {self.report.mean_gap:+.4f}, worst {self.report.max_gap:+.4f} over {len(gaps)} tokens",
        )

    def _log_probs(
        self, name: str, cold: Completion, options: CompressionOptions, salt: str, *, from_span: bool
    ) -> list[float]:
        """Log-probabilities, in nats, of the cold answer's tokens, read again behind its prompt."""
        self._on_step(name)
        prompt, answer = cold.prompt_token_ids or [], cold.token_ids or []
        body = {
            "input_ids": [*prompt, *answer],
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": 1,
                "custom_params": {OPTIONS_KEY: options.model_dump(exclude_none=True)},
            },
            "cache_salt": salt,
            "return_logprob": True,
            "logprob_start_len": len(prompt) - 1,
        }
        meta = self._client.post("/generate", body)["meta_info"]
        served = Served.model_validate(meta[OPTIONS_KEY][0])
        found = _served_from(served)
        self.report.steps.append(Step(name, meta["prompt_tokens"], meta["cached_tokens"], found))
        expected = f"{name}: {'a' if from_span else 'no'} span serves it"
        self._check(expected, (served.span_tokens > 0) == from_span, found)
        return [entry[0] for entry in meta["input_token_logprobs"][-len(answer) :]]


def _served(answer: Completion) -> str:
    if answer.grkv is None:
        return "the server does not say: is the plugin's cache selected?"
    return _served_from(answer.grkv)


def _served_from(served: Served) -> str:
    parts = []
    if served.span_tokens:
        parts.append(f"span: {served.span_tokens:,} tokens in {served.span_slots:,} slots")
    if served.exact_tokens:
        parts.append(f"exact: {served.exact_tokens:,}")
    return ", ".join(parts) or "computed"


def run_verify(client: GrkvClient, settings: VerifySettings, console: Console) -> bool:
    """Verify with a status line, print tables and verdict; whether everything held.

    Raises:
        GrkvError: the server refused a request, or was not reached.
    """
    with console.status("verifying") as status:
        report = verify(client, settings, lambda name: status.update(f"verifying: {name}"))
    print_report(report, console)
    return report.ok


def print_report(report: VerifyReport, console: Console) -> None:
    """Where each answer came from, what was checked, and the verdict."""
    steps = Table("request", title="where each prompt was served from", title_justify="left")
    steps.add_column("prompt", justify="right")
    steps.add_column("cached", justify="right")
    steps.add_column("served from")
    for step in report.steps:
        steps.add_row(step.name, f"{step.prompt_tokens:,}", f"{step.cached_tokens:,}", step.served_from)
    console.print(steps)
    checks = Table("", "check", "found", title="checks", title_justify="left")
    for check in report.checks:
        mark = "[green]ok[/]" if check.ok else "[red]FAILED[/]"
        checks.add_row(mark, check.name, escape(check.found))
    console.print(checks)
    failed = sum(not check.ok for check in report.checks)
    if report.ok:
        console.print(f"[green]verified[/]: {len(report.checks)} checks held")
    else:
        console.print(f"[red]not verified[/]: {failed} of {len(report.checks)} checks failed")
