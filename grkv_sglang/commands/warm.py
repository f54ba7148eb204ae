"""`grkv warm`: prefill and compress documents before traffic comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from grkv_sglang.client import CompressionOptions, GrkvClient, GrkvError
from grkv_sglang.commands.compressing import (
    END_SLACK_TOKENS,
    CompressedPrefix,
    CompressingError,
    SharedPrefix,
    compress_prefix,
    shared_prefix,
)
from grkv_sglang.commands.documents import Document, Layout

Status = Literal["compressed", "already there", "failed"]


@dataclass(frozen=True)
class WarmSettings:
    """How documents are warmed.

    Attributes:
        layout: how a document and a question become a chat.
        budget: share of a document's tokens to keep; None: the server's.
        profile: how to compress; None: the server's.
        pin: keep the spans as long as possible.
        ttl_s: seconds without use after which a span is dropped; None: the server's.
        cache_salt: the namespace; only requests with the same one are served.
        concurrency: documents in work at a time.
        wait_s: seconds to wait for a document's compression once it is prefilled.

    Raises:
        ValidationError: pydantic's, for values out of range.
    """

    layout: Layout
    budget: float | None = None
    profile: str | None = None
    pin: bool = False
    ttl_s: float | None = None
    cache_salt: str | None = None
    concurrency: int = 4
    wait_s: float = 600.0

    def __post_init__(self) -> None:
        self.options(SharedPrefix((), by_template=True))  # wrong values are refused before anything is sent

    def options(self, shared: SharedPrefix) -> CompressionOptions:
        """The options of a document's request."""
        return CompressionOptions.model_validate(
            {
                "budget": self.budget,
                "profile": self.profile,
                "pin": self.pin or None,
                "ttl_s": self.ttl_s,
                **shared.end_options(),
            }
        )


@dataclass(frozen=True)
class WarmResult:
    """What became of one document. Seconds from its first byte sent to its span in the tree."""

    name: str
    status: Status
    seconds: float
    prefix: CompressedPrefix | None = None
    problem: str = ""


def warm(
    client: GrkvClient,
    documents: Sequence[Document],
    settings: WarmSettings,
    on_result: Callable[[WarmResult], None] = lambda result: None,
) -> list[WarmResult]:
    """Warm all documents, several at a time; the results in the order of the documents."""
    with ThreadPoolExecutor(settings.concurrency) as threads:
        jobs = [threads.submit(warm_one, client, document, settings) for document in documents]
        for job in as_completed(jobs):
            on_result(job.result())
        return [job.result() for job in jobs]


def warm_one(client: GrkvClient, document: Document, settings: WarmSettings) -> WarmResult:
    """Warm one document; what goes wrong is in the result."""
    started = time.monotonic()
    try:
        shared = shared_prefix(client, settings.layout, document)
        answer, prefix = compress_prefix(
            client,
            settings.layout,
            document,
            shared,
            settings.options(shared),
            cache_salt=settings.cache_salt,
            wait_s=settings.wait_s,
        )
    except (GrkvError, CompressingError) as error:
        return WarmResult(document.name, "failed", time.monotonic() - started, problem=str(error))
    served = answer.grkv
    was_there = (
        served is not None
        and served.span_tokens > 0
        and served.span_tokens + served.exact_tokens >= len(shared.token_ids) - END_SLACK_TOKENS
    )
    status: Status = "already there" if was_there else "compressed"
    return WarmResult(document.name, status, time.monotonic() - started, prefix)


def run_warm(
    client: GrkvClient, documents: Sequence[Document], settings: WarmSettings, console: Console
) -> bool:
    """Warm with a progress bar, print the table; whether every document is there now.

    Raises:
        GrkvError: the server is not reached, or has no plugin.
    """
    server_budget = client.state().config.get("budget")
    columns = (TextColumn("warming"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(documents))
        results = warm(client, documents, settings, lambda _: progress.advance(task))
    console.print(results_table(results))
    done = [result.prefix for result in results if result.prefix is not None]
    if done:
        tokens, slots = sum(p.tokens for p in done), sum(p.slots for p in done)
        console.print(f"{len(done)} of {len(results)} documents: {tokens:,} tokens in {slots:,} slots")
    if settings.budget is not None and server_budget is not None and settings.budget < server_budget:
        console.print(
            f"Note: the server's own budget is {server_budget:g}. Requests are served from these spans only "
            f'if they ask for less: "custom_params": {{"grkv": {{"budget": {settings.budget:g}}}}}',
            markup=False,
        )
    return len(done) == len(results)


def results_table(results: Iterable[WarmResult]) -> Table:
    """One row per document."""
    table = Table("document", title="warmed")
    for heading in ("tokens", "slots", "saving", "quality", "seconds"):
        table.add_column(heading, justify="right")
    table.add_column("status", overflow="fold")
    for result in results:
        prefix = result.prefix
        figures = ["", "", "", ""]
        if prefix is not None:
            quality = "" if prefix.quality is None else f"{prefix.quality:.3f}"
            figures = [f"{prefix.tokens:,}", f"{prefix.slots:,}", f"{prefix.saving:.0%}", quality]
        status = f"[red]failed[/]: {escape(result.problem)}" if result.problem else result.status
        table.add_row(escape(result.name), *figures, f"{result.seconds:.1f}", status)
    return table
