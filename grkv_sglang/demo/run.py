"""The whole demo: three servers in turn, then two side by side for the cost without long prefixes."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from grkv_sglang.client.state import CensusState
from grkv_sglang.demo import identity, overhead
from grkv_sglang.demo.client import Generation, SglangClient
from grkv_sglang.demo.documents import Document, DocumentPrompts, document_prompts, load_documents
from grkv_sglang.demo.job import DocumentOutcome, ask_about
from grkv_sglang.demo.result import (
    ENGINES,
    DemoResult,
    DocumentResult,
    MemoryChecks,
    NoLongPrefixResult,
    Summary,
    Versions,
)
from grkv_sglang.serving import (
    MEMORY_CHECKS,
    Engine,
    RunningServer,
    ServerSpec,
    detect_device,
    running_server,
)

PACKAGES = ("grkv-sglang", "sglang", "torch", "transformers")
WARMUP_TOKENS = range(2000, 2064)
"""A prompt of no meaning: the first forward pass of a process is slower than all later ones."""

PREFILL_CHUNK_TOKENS = 8192
"""Longer than any prompt here: every engine prefills a document in one piece, which is fastest."""


@dataclass(frozen=True)
class DemoSettings:
    """What can be chosen for a run. The pool holds the three documents at full size, in every engine."""

    model_path: Path
    log_dir: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="grkv-demo-")))
    quick: bool = False
    budget: float = 0.1
    profile: str = "default"
    seed: int = 0
    pool_tokens: int = 16384

    @property
    def new_tokens(self) -> int:
        return 16 if self.quick else 48

    @property
    def pairs(self) -> int:
        return 5 if self.quick else 24

    def documents(self) -> list[Document]:
        """All documents, or the first one with two questions."""
        documents = load_documents()
        if not self.quick:
            return documents
        first = documents[0]
        return [Document(first.name, first.text, first.questions[:2])]

    def server(self, engine: Engine, *, checked: bool, name: str | None = None) -> ServerSpec:
        """One server of the demo; `checked` switches the memory checks on."""
        plugin = {"budget": self.budget, "profile": self.profile, "allow_forced": True}
        return ServerSpec(
            model_path=self.model_path,
            engine=engine,
            log_path=self.log_dir / f"{name or engine}.log",
            max_total_tokens=self.pool_tokens,
            chunked_prefill_size=PREFILL_CHUNK_TOKENS,
            grkv_config=plugin if engine == "grkv" else {},
            memory_checks=checked,
            random_seed=self.seed,
            device=detect_device(),
        )


@dataclass
class _Measured:
    """What the three checked servers leave behind, by engine."""

    start_s: dict[str, float] = field(default_factory=dict)
    outcomes: dict[Engine, list[DocumentOutcome]] = field(default_factory=dict)
    answers: dict[str, list[Generation]] = field(default_factory=dict)
    census: CensusState | None = None


def run_demo(settings: DemoSettings, console: Console) -> DemoResult:
    """Run everything and return the figures; answers and progress appear on the console as they come.

    Raises:
        ServerError: a server did not come up.
        ClientError: a server refused a request, or a document was not compressed.
    """
    tokenizer = _load_tokenizer(settings.model_path)
    prompts = [document_prompts(document, tokenizer) for document in settings.documents()]
    groups = identity.build_groups(load_documents(), tokenizer)[: 1 if settings.quick else None]
    bursts = overhead.build_bursts(load_documents(), tokenizer, settings.pairs + overhead.WARMUP_PAIRS)
    console.print(f"[dim]server logs: {settings.log_dir}[/dim]")

    measured = _Measured()
    for engine in ENGINES:
        console.rule(f"[bold]{engine}[/bold]")
        with _connected(settings.server(engine, checked=True), console) as (server, client):
            measured.start_s[engine] = server.start_s
            measured.outcomes[engine] = _ask_all(client, engine, prompts, settings.new_tokens, console)
            measured.answers |= _identity_runs(client, engine, groups, console)
            if engine == "grkv":
                measured.census = client.grkv_state().census

    console.rule("[bold]no long prefix: off and grkv side by side[/bold]")
    no_long_prefix = _measure_overhead(settings, bursts, console)
    return _assemble(settings, prompts, groups, measured, no_long_prefix)


def _load_tokenizer(model_path: Path) -> Any:
    # Imported here: transformers takes seconds to load.
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path)


@contextmanager
def _connected(spec: ServerSpec, console: Console) -> Iterator[tuple[RunningServer, SglangClient]]:
    with running_server(spec, console) as server, SglangClient(server.base_url) as client:
        client.generate([WARMUP_TOKENS], 4)
        client.flush_cache()
        yield server, client


def _ask_all(
    client: SglangClient,
    engine: Engine,
    prompts: Sequence[DocumentPrompts],
    new_tokens: int,
    console: Console,
) -> list[DocumentOutcome]:
    outcomes = []
    for document in prompts:
        console.print(
            f"\n[bold]{document.document.name}[/bold], {document.prefix_tokens} tokens, on {engine}"
        )
        outcomes.append(ask_about(client, engine, document, new_tokens, console))
    return outcomes


def _identity_runs(
    client: SglangClient, engine: Engine, groups: Sequence[identity.PrefixGroup], console: Console
) -> dict[str, list[Generation]]:
    total = sum(len(group.prompts) for group in groups)

    def run(name: str, action: Callable[[identity.Advance], list[Generation]]) -> list[Generation]:
        with _progress(f"identity, {name}", total, console) as advance:
            return action(advance)

    if engine == "stock":
        return {
            "stock": run("stock, one by one", lambda a: identity.run_exact(client, groups, a)),
            "stock_batched": run("stock, in batches", lambda a: identity.run_batched(client, groups, a)),
        }
    if engine == "off":
        return {"off": run("off", lambda a: identity.run_exact(client, groups, a))}
    dummies = identity.DUMMY_TOKENS
    return {
        "grkv": run("spans that keep all", lambda a: identity.run_spans(client, groups, a)),
        "sentinels": run("behind sentinels", lambda a: identity.run_spans(client, groups, a, dummies)),
    }


def _measure_overhead(
    settings: DemoSettings, bursts: Sequence[overhead.Burst], console: Console
) -> NoLongPrefixResult:
    # Without the memory checks: they are no part of what a request costs.
    off_spec = settings.server("off", checked=False, name="off-short")
    grkv_spec = settings.server("grkv", checked=False, name="grkv-short")
    with (
        _connected(off_spec, console) as (_, off),
        _connected(grkv_spec, console) as (_, grkv),
        _progress("bursts of short prompts", len(bursts), console) as advance,
    ):
        return overhead.measure_overhead(off, grkv, bursts, advance)


@contextmanager
def _progress(description: str, total: int, console: Console) -> Iterator[Callable[[], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(description, total=total)
        yield lambda: progress.advance(task)


def _assemble(
    settings: DemoSettings,
    prompts: Sequence[DocumentPrompts],
    groups: Sequence[identity.PrefixGroup],
    measured: _Measured,
    no_long_prefix: NoLongPrefixResult,
) -> DemoResult:
    documents = [_document_result(p, measured, number) for number, p in enumerate(prompts)]
    census = measured.census
    if census is None:
        raise RuntimeError("the grkv server was not measured")
    return DemoResult(
        model=settings.model_path.name,
        seed=settings.seed,
        quick=settings.quick,
        budget=settings.budget,
        profile=settings.profile,
        pool_tokens=settings.pool_tokens,
        new_tokens=settings.new_tokens,
        server_start_s=measured.start_s,
        versions=_versions(),
        summary=summarise(documents),
        documents=documents,
        identity=identity.identity_result(groups=groups, **measured.answers),
        no_long_prefix=no_long_prefix,
        memory_checks=MemoryChecks(
            switches={
                "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
                **MEMORY_CHECKS,
                "GRKV_CENSUS": "true",
            },
            census_ok=census.ok,
            census_checks=census.checks,
            census_last_error=census.last_error,
        ),
    )


def _document_result(prompts: DocumentPrompts, measured: _Measured, number: int) -> DocumentResult:
    stock, off, grkv = (measured.outcomes[engine][number] for engine in ENGINES)
    if grkv.span is None:
        raise RuntimeError("the grkv server reported no span")
    return DocumentResult(
        **grkv.span.model_dump(),
        name=prompts.document.name,
        tokens=prompts.prefix_tokens,
        full_slots=prompts.prefix_tokens,
        reprefilled_document_tokens_warm=grkv.run.reprefilled_document_tokens_warm,
        stock=stock.run,
        off=off.run,
        grkv=grkv.run,
    )


def summarise(documents: Sequence[DocumentResult]) -> Summary:
    """Medians over documents and warm requests."""
    warm_ratios = [
        ours / theirs
        for document in documents
        for ours, theirs in zip(document.grkv.warm_ttft_s, document.off.warm_ttft_s, strict=True)
    ]
    return Summary(
        warm_ttft_ratio_grkv_off=statistics.median(warm_ratios),
        compress_s=statistics.median(d.compress_s for d in documents),
        compress_share_of_grkv_cold_ttft=statistics.median(
            d.compress_s / d.grkv.cold_ttft_s for d in documents
        ),
        compress_share_of_off_cold_ttft=statistics.median(
            d.compress_s / d.off.cold_ttft_s for d in documents
        ),
        compressed_share=sum(d.compressed_slots for d in documents) / sum(d.full_slots for d in documents),
        reprefilled_document_tokens_warm=sum(d.reprefilled_document_tokens_warm for d in documents),
    )


def _versions() -> Versions:
    versions = {name.replace("-", "_"): importlib.metadata.version(name) for name in PACKAGES}
    return Versions(
        **versions,
        python=platform.python_version(),
        platform=platform.platform(),
        device=detect_device(),
        cpu_count=os.cpu_count() or 1,
    )
