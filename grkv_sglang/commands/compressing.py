"""Have a prefix compressed by a request that marks it, and wait for the span. For `warm` and `verify`."""

from __future__ import annotations

import time
from dataclasses import dataclass

from grkv_sglang.client import Completion, CompressionOptions, GrkvClient, GrkvState, SpanState
from grkv_sglang.client.state import namespace_name, spans_of
from grkv_sglang.commands.documents import Document, Layout
from grkv_sglang.demo.documents import common_prefix_length

PROBE_QUESTIONS = ("Who is it?", "1 or 2?")
"""Begin differently, for any tokenizer: what their prompts share is what all prompts share."""

END_SLACK_TOKENS = 64
"""What all prompts share may go on behind the document by the header of the next message."""

FIRST_POLL_S, LONGEST_POLL_S = 0.05, 2.0
"""Reading the state takes the scheduler's time: long compressions are asked about less often."""


class CompressingError(RuntimeError):
    """The server answered, but made no span; the message says what it counted instead."""


@dataclass(frozen=True)
class SharedPrefix:
    """What all prompts about one document share, in the server's own tokens."""

    token_ids: tuple[int, ...]
    by_template: bool
    """Its end is the end of the first user message, which the chat template marks."""

    def end_options(self) -> dict[str, object]:
        """The options that tell a server where it ends."""
        if self.by_template:
            return {"prefix_end": "document"}
        return {"prefix_end_tokens": len(self.token_ids)}


@dataclass(frozen=True)
class CompressedPrefix:
    """A prefix that ends with a span: its tokens, and the slots that hold it, exact ones included."""

    tokens: int
    slots: int
    quality: float | None
    """The worst of its spans'."""
    spans: tuple[SpanState, ...]

    @property
    def saving(self) -> float:
        """Share of the full-size slots that is not needed any more."""
        return 1.0 - self.slots / self.tokens


def shared_prefix(client: GrkvClient, layout: Layout, document: Document) -> SharedPrefix:
    """Ask the server's tokenizer what all prompts about a document share."""
    prompts = [client.tokenize(layout.messages(document, question)) for question in PROBE_QUESTIONS]
    shared = common_prefix_length(prompts)
    return SharedPrefix(tuple(prompts[0][:shared]), layout.ends_with_first_user_message(document))


def compress_prefix(
    client: GrkvClient,
    layout: Layout,
    document: Document,
    shared: SharedPrefix,
    options: CompressionOptions,
    *,
    cache_salt: str | None,
    wait_s: float,
) -> tuple[Completion, CompressedPrefix]:
    """Send the request that has the prefix compressed, and wait until a span ends it.

    Args:
        options: where the prefix ends (`SharedPrefix.end_options`) and how it is compressed.
        cache_salt: the namespace.
        wait_s: seconds to wait for the span behind the request.

    Raises:
        CompressingError: no span was made.
        GrkvError: the server refused, or was not reached.
    """
    before = client.state()
    answer = client.chat(
        layout.messages(document, PROBE_QUESTIONS[0]), max_tokens=1, options=options, cache_salt=cache_salt
    )
    deadline, pause_s = time.monotonic() + wait_s, FIRST_POLL_S
    while True:
        state = client.state()
        found = find_prefix(state, shared, namespace_name(cache_salt), options.budget or 0.0)
        if found is not None:
            return answer, found
        if state.counters.jobs_waiting == 0:
            raise CompressingError(f"not compressed: {happened_since(before, state)}")
        if time.monotonic() > deadline:
            raise CompressingError(f"no span within {wait_s:.0f} s: {state.counters.jobs_waiting} waiting")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_POLL_S)


def find_prefix(
    state: GrkvState, shared: SharedPrefix, namespace: str | None, least_budget: float
) -> CompressedPrefix | None:
    """The prefix as the tree holds it, if a span of the namespace ends it that keeps enough."""
    spans = [span for span in spans_of(state, shared.token_ids) if span.namespace == namespace]
    end = len(shared.token_ids)
    last = [
        span
        for span in spans
        if span.end_tokens >= end - END_SLACK_TOKENS and span.budget >= least_budget - 1e-9
    ]
    if not last:
        return None
    # The state lists the latest first, and so does a stable sort by position.
    chain = [last[0]]
    while before := [span for span in spans if span.end_tokens <= chain[0].start_tokens]:
        chain.insert(0, max(before, key=lambda span: span.end_tokens))
    saved = sum(span.tokens - span.slots for span in chain)
    tokens = chain[-1].end_tokens
    qualities = [span.quality for span in chain if span.quality is not None]
    return CompressedPrefix(tokens, tokens - saved, min(qualities, default=None), tuple(chain))


def happened_since(before: GrkvState, after: GrkvState) -> str:
    """The server's reasons: counters of failed and skipped compressions that went up."""
    reasons = [
        f"{kind} {name} {count - earlier.get(name, 0)}"
        for kind, earlier, counts in (
            ("failed:", before.counters.compressions_failed, after.counters.compressions_failed),
            ("skipped:", before.counters.compressions_skipped, after.counters.compressions_skipped),
        )
        for name, count in counts.items()
        if count > earlier.get(name, 0)
    ]
    if reasons:
        return f"the server counted since then: {'; '.join(reasons)}"
    if not after.config.get("compression", True):
        return "the server's setting compression is off"
    if "explicit" not in after.config.get("triggers", ()):
        return "the server's triggers do not include explicit"
    floor = after.config.get("quality_floor", 0.0)
    return f"the server gives no reason (its quality_floor is {floor:g})"
