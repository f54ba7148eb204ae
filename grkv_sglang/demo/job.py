"""The main job on one server: for each document a cold question, then warm ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape

from grkv_sglang.client.state import spans_of
from grkv_sglang.demo.client import Generation, SglangClient
from grkv_sglang.demo.documents import DocumentPrompts
from grkv_sglang.demo.result import EngineRun, RequestRecord, SpanRecord
from grkv_sglang.serving import Engine


@dataclass(frozen=True)
class DocumentOutcome:
    """What one server made of one document; `span` only where the plugin runs."""

    run: EngineRun
    span: SpanRecord | None


def ask_about(
    client: SglangClient, engine: Engine, prompts: DocumentPrompts, new_tokens: int, console: Console
) -> DocumentOutcome:
    """Ask a document's questions one after the other, streaming the answers to the console.

    Raises:
        ClientError: the server failed, or did not compress the document.
    """
    prefix = prompts.prompts[0][: prompts.prefix_tokens]
    compressing = engine == "grkv"
    before = client.grkv_state() if compressing else None
    compressed = before
    requests = []
    for number, question in enumerate(prompts.document.questions):
        options = {"prefix_end_tokens": len(prefix)} if compressing and number == 0 else None
        generation = _ask(client, prompts.prompts[number], question, new_tokens, options, console)
        requests.append(_record(question, generation, len(prefix)))
        if compressing and number == 0:
            with console.status("compressing the document"):
                client.wait_for_span(prefix)
            compressed = client.grkv_state()
    run = summarise_run(requests, len(prefix))
    if before is None or compressed is None:
        return DocumentOutcome(run, None)
    after = client.grkv_state()
    spans = spans_of(after, prefix)
    done = after.counters.compressions_done - before.counters.compressions_done
    last = spans[-1]
    span = SpanRecord(
        compressions=done,
        compressed_slots=len(prefix) - sum(s.tokens - s.slots for s in spans),
        twin_freed=last.twin_freed,
        budget=last.budget,
        profile=last.profile,
        quality=last.quality,
        error_before=last.error_before,
        error_after=last.error_after,
        compress_s=sum(s.compress_s for s in spans),
        probe_s=sum(s.probe_s for s in spans),
        pass_s=sum(s.pass_s for s in spans),
        select_s=sum(s.select_s for s in spans),
        regress_s=sum(s.regress_s for s in spans),
        copy_s=sum(s.copy_s for s in spans),
        span_hits=sum(s.hits for s in spans),
        free_slots_before=before.pool.free_slots,
        free_slots_after_compression=compressed.pool.free_slots,
        free_slots_after=after.pool.free_slots,
    )
    return DocumentOutcome(run, span)


def summarise_run(requests: Sequence[RequestRecord], prefix_tokens: int) -> EngineRun:
    """Cold and warm times of a document's requests, and what the warm ones computed again of its prefix."""
    cold, *warm = requests
    return EngineRun(
        cold_ttft_s=cold.ttft_s,
        warm_ttft_s=[request.ttft_s for request in warm],
        answers=[request.answer for request in requests],
        reprefilled_document_tokens_warm=sum(max(0, prefix_tokens - r.cached_tokens) for r in warm),
        requests=list(requests),
    )


def _ask(
    client: SglangClient,
    prompt: Sequence[int],
    question: str,
    new_tokens: int,
    options: dict[str, Any] | None,
    console: Console,
) -> Generation:
    console.print(f"[bold]{escape(question)}[/bold]")

    def show(piece: str) -> None:
        console.print(escape(piece), end="", highlight=False, soft_wrap=True)

    generation = client.stream(prompt, new_tokens, options=options, on_text=show)
    console.print(
        f"\n[dim]first token after {generation.ttft_s:.2f} s, "
        f"{generation.cached_tokens} of {generation.prompt_tokens} prompt tokens cached[/dim]"
    )
    return generation


def _record(question: str, generation: Generation, prefix_tokens: int) -> RequestRecord:
    report = generation.grkv or {}
    span_tokens, span_slots = report.get("span_tokens", 0), report.get("span_slots", 0)
    return RequestRecord(
        question=question,
        answer=generation.text.strip(),
        prompt_tokens=generation.prompt_tokens,
        cached_tokens=generation.cached_tokens,
        output_tokens=len(generation.output_ids),
        ttft_s=generation.ttft_s,
        total_s=generation.total_s,
        document_slots=prefix_tokens - (span_tokens - span_slots),
        span_tokens=span_tokens,
        span_slots=span_slots,
    )
