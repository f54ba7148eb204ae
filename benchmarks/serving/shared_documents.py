"""Questions about documents that many ask for: ``python -m benchmarks.serving shared-documents``.

D documents of L tokens, a pool of a fixed number of full documents and room for questions and answers. For
each D and popularity, all servers get the same requests.

*Cold*: every document is asked for once, in order, one token each; reported by itself. *Warm-up*: a few
requests of the stream that bring the cache into the popularity's steady state; not counted. *Measured*: the
rest, in blocks that the servers get in turn. A block ends when its last request is answered and no
compression waits: the work it leaves behind is paid for in its throughput. Where all documents fit the pool,
a block has one request per client and the ratio of TTFT is one of paired blocks; popularity does not matter
there, and only the first one is measured.

A request's document tokens count as *hit* as far as its ``cached_tokens`` cover them, the others as
*prefilled again* (every document was prefilled before). *Evicted* are KV slots (SGLang's own
``evicted_tokens_total``) within the measured requests.

*Resident* documents are found by sending each document's last request again at the end of a phase, for one
token, the latest first, and counting those that are wholly cached: under LRU the first ones, which are used
by that and so not evicted. The asking stops after a few in a row that are not, because each of these evicts
others. It is the same for all servers and needs no view into any of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from matplotlib.figure import Figure
from pydantic import Field, field_validator
from rich.progress import Progress
from transformers import AutoTokenizer

from benchmarks.serving import stats
from benchmarks.serving.client import Answer, closed_loop, open_loop
from benchmarks.serving.engines import Live, in_turn, measure
from benchmarks.serving.options import Benchmark, Run, ServingSettings, reference_of, split
from benchmarks.serving.plots import bar_text, new_figure
from benchmarks.serving.progress import progress_bar
from benchmarks.serving.quality import COLUMNS, Quality
from benchmarks.serving.record import AnswerRow, Frozen, Result, measured
from benchmarks.serving.tables import Table
from benchmarks.serving.workload import (
    Popularity,
    Questions,
    Request,
    blocks_of,
    cut_documents,
    last_of_each,
    one_each,
    popularity,
    questions_of,
    request_stream,
)
from benchmarks.texts import text_tokens

NAME = "shared-documents"
MISSES_THAT_END_A_PROBE = 3
Phase = Literal["cold", "uniform", "zipf"]


class SharedSettings(ServingSettings):
    """Quick mode."""

    documents: tuple[int, ...] = Field((4, 32), description="Numbers of documents to measure.")
    document_tokens: int = Field(1792, ge=64, description="Length of a document, L.")
    pool_documents: int = Field(8, ge=1, description="Full documents that the pool holds, beside the room.")
    popularities: tuple[Popularity, ...] = Field(("uniform", "zipf"), description="uniform, zipf.")
    clients: int = Field(2, ge=1, description="Clients that each wait for their answer (closed loop).")
    rate: float | None = Field(
        None, gt=0, description="Poisson arrivals per second instead of waiting clients."
    )
    requests: int = Field(40, ge=2, description="Measured requests where the documents do not fit the pool.")
    pairs: int = Field(24, ge=2, description="Measured blocks where they fit, one request per client each.")
    block_requests: int = Field(8, ge=1, description="Requests of a block where they do not fit.")
    warmup_requests: int = Field(8, ge=0, description="Requests before the measured ones.")

    @field_validator("documents", "popularities", mode="before")
    @classmethod
    def _split_lists(cls, value: Any) -> Any:
        return split(value)

    def room_tokens(self, question_tokens: int) -> int:
        """Beside the documents: questions and answers of twice as many requests as run at once."""
        return 2 * self.clients * (question_tokens + self.output_tokens)

    def pool_tokens(self, question_tokens: int) -> int:
        return self.pool_documents * self.document_tokens + self.room_tokens(question_tokens)

    def fits(self, documents: int) -> bool:
        """Whether all documents stay in the pool at full size."""
        return documents < self.pool_documents

    def phases(self, documents: int) -> tuple[Popularity, ...]:
        return self.popularities[:1] if self.fits(documents) else self.popularities


class FullSharedSettings(SharedSettings):
    """Full mode: hours on a CPU."""

    engines: tuple[str, ...] = ("off", "grkv:0.1", "grkv:0.2", "grkv:0.5")
    documents: tuple[int, ...] = (4, 8, 16, 32, 64)
    document_tokens: int = 2048
    clients: int = 4
    requests: int = 192
    block_requests: int = 16
    pairs: int = 40
    warmup_requests: int = 32


class RequestRow(AnswerRow):
    """One request. Document tokens as far as cached are hits."""

    engine: str
    documents: int
    phase: Phase
    block: int  # -1: warm-up
    number: int
    document: int
    document_tokens: int

    @property
    def hit_tokens(self) -> int:
        return min(self.cached_tokens, self.document_tokens)

    @property
    def prefilled_again(self) -> int:
        return self.document_tokens - self.hit_tokens


class BlockRow(Frozen):
    """One block on one server. `wall_s` until no compression waited, `settle_s` of it after the last
    answer."""

    engine: str
    documents: int
    phase: Phase
    block: int
    requests: int
    wall_s: float
    settle_s: float


class PhaseRow(Frozen):
    """The measured part of a phase on one server."""

    engine: str
    documents: int
    phase: Phase
    evicted_slots: int
    resident_documents: int
    probed_documents: int
    spans: int | None  # None without the plugin
    span_slots: int | None


class SharedResult(Result):
    """Rows of all phases."""

    settings: SharedSettings
    pool_tokens: int = 0
    question_tokens: int = 0
    requests: list[RequestRow] = Field(default_factory=list)
    blocks: list[BlockRow] = Field(default_factory=list)
    phases: list[PhaseRow] = Field(default_factory=list)

    def of(self, engine: str, documents: int, phase: Phase) -> list[RequestRow]:
        """Measured requests of one phase on one server, in their order."""
        return [
            row
            for row in self.requests
            if (row.engine, row.documents, row.phase) == (engine, documents, phase) and row.block >= 0
        ]

    def blocks_of(self, engine: str, documents: int, phase: Phase) -> list[BlockRow]:
        return [
            row
            for row in self.blocks
            if (row.engine, row.documents, row.phase) == (engine, documents, phase) and row.block >= 0
        ]


def part_name(documents: int, phase: Phase) -> str:
    """Of a phase in `Result.done`."""
    return f"{documents} documents, {phase}"


def missing_parts(result: SharedResult) -> dict[int, list[Popularity]]:
    """Popularities that are still to be measured, by number of documents."""
    settings = result.settings
    missing = {
        count: [p for p in settings.phases(count) if part_name(count, p) not in result.done]
        for count in settings.documents
    }
    return {count: phases for count, phases in missing.items() if phases}


def run(run: Run[SharedResult]) -> None:
    """Questions about documents that many ask for, from half of the pool to several times the pool."""
    result = run.result
    settings = result.settings
    wanted = missing_parts(result)
    if not wanted:
        return
    tokenizer = AutoTokenizer.from_pretrained(settings.model_path())
    questions = questions_of(tokenizer)
    text = text_tokens(tokenizer, settings.texts)
    result.question_tokens = questions.tokens
    result.pool_tokens = settings.pool_tokens(questions.tokens)
    sizes = settings.sizes(run.log_folder, result.pool_tokens)
    config = {"triggers": "explicit", "profile": settings.profile}

    async def work(engines: list[Live]) -> None:
        with progress_bar(run.console) as progress:
            for count, phases in wanted.items():
                documents = cut_documents(text, count, settings.document_tokens)
                await _Documents(run, engines, documents, questions, progress).measure(phases)

    measure(settings.choices, sizes, config, run.console, work)


class _Documents:
    """All phases of one number of documents."""

    def __init__(
        self,
        run: Run[SharedResult],
        engines: Sequence[Live],
        documents: Sequence[tuple[int, ...]],
        questions: Questions,
        progress: Progress,
    ) -> None:
        self._run, self._engines, self._documents = run, engines, documents
        self._questions, self._progress = questions, progress
        self._settings = run.result.settings
        self._cold: list[Request] = []

    @property
    def _count(self) -> int:
        return len(self._documents)

    async def measure(self, phases: Sequence[Popularity]) -> None:
        """Fill the caches, then each popularity. A phase is saved when it is complete."""
        for engine in self._engines:
            await engine.flush()
        await self._fill()
        for phase in phases:
            await self._phase(phase)
            self._run.result.done.append(part_name(self._count, phase))
            self._run.save()

    async def _fill(self) -> None:
        """Every document once. After a run that was broken off this is needed again, and recorded once."""
        result = self._run.result
        result.requests = [
            r for r in result.requests if not (r.documents == self._count and r.phase == "cold")
        ]
        result.blocks = [b for b in result.blocks if not (b.documents == self._count and b.phase == "cold")]
        requests = one_each(self._documents, range(self._count), self._questions, place=0)
        self._cold = requests
        await self._send("cold", requests, self._settings.block_requests, 0, output_tokens=1)

    async def _phase(self, phase: Popularity) -> None:
        settings = self._settings
        fits = settings.fits(self._count)
        size = settings.clients if fits else settings.block_requests
        measured = settings.pairs * settings.clients if fits else settings.requests
        # Another seed per phase: streams of different phases should have nothing in common.
        seed = settings.seed + 1000 * self._count + (1 if phase == "zipf" else 0)
        stream = request_stream(
            self._documents,
            popularity(phase, self._count, seed),
            settings.warmup_requests + measured,
            self._questions,
            seed,
            settings.rate,
        )
        warmup, counted = stream[: settings.warmup_requests], stream[settings.warmup_requests :]
        if warmup:
            await self._send(phase, warmup, len(warmup), -1)
        before = {engine.name: await engine.evicted_slots() for engine in self._engines}
        await self._send(phase, counted, size, 0)
        for engine in self._engines:
            evicted = await engine.evicted_slots() - before[engine.name]
            spans = await engine.state() if engine.compresses else None
            again = last_of_each([*self._cold, *warmup, *counted])
            resident, probed = await resident_documents(engine, again, MISSES_THAT_END_A_PROBE)
            self._run.result.phases.append(
                PhaseRow(
                    engine=engine.name,
                    documents=self._count,
                    phase=phase,
                    evicted_slots=evicted,
                    resident_documents=resident,
                    probed_documents=probed,
                    spans=spans.num_spans if spans else None,
                    span_slots=spans.pool.span_slots if spans else None,
                )
            )

    async def _send(
        self,
        phase: Phase,
        requests: Sequence[Request],
        size: int,
        first_block: int,
        output_tokens: int | None = None,
    ) -> None:
        """Requests in blocks to all engines in turn; rows go into the result."""
        settings, result = self._settings, self._run.result
        tokens = output_tokens or settings.output_tokens
        label = f"{self._count} documents, {'warm-up' if first_block < 0 else phase}"
        task = self._progress.add_task(label, total=len(requests) * len(self._engines))
        for number, block in enumerate(blocks_of(requests, size), first_block):
            for engine in in_turn(self._engines, number):

                async def send(request: Request, engine: Live = engine) -> Answer:
                    answer = await engine.ask_about(request, tokens)
                    self._progress.advance(task)
                    return answer

                started = time.perf_counter()
                if settings.rate is not None and phase != "cold":
                    answers = await open_loop(block, send)
                else:
                    answers = await closed_loop(block, settings.clients, send)
                settle_s = await engine.settle()
                result.blocks.append(
                    BlockRow(
                        engine=engine.name,
                        documents=self._count,
                        phase=phase,
                        block=number,
                        requests=len(block),
                        wall_s=round(time.perf_counter() - started, 4),
                        settle_s=round(settle_s, 4),
                    )
                )
                result.requests += [
                    self._row(engine, phase, number, request, answer)
                    for request, answer in zip(block, answers, strict=True)
                ]

    def _row(self, engine: Live, phase: Phase, block: int, request: Request, answer: Answer) -> RequestRow:
        return RequestRow(
            engine=engine.name,
            documents=self._count,
            phase=phase,
            block=block,
            number=request.number,
            document=request.document,
            document_tokens=request.document_tokens,
            **measured(answer),
        )


async def resident_documents(
    engine: Live, requests: Sequence[Request], patience: int, advance: Callable[[], None] = lambda: None
) -> tuple[int, int]:
    """Ask again in order until `patience` documents in a row are not cached.

    The requests are the last ones of each document, so that asking takes almost no room in the pool.

    Returns:
        Documents that are wholly cached, and how many were asked for.
    """
    hits = asked = misses = 0
    for request in requests:
        answer = await engine.ask_about(request, 1)
        asked += 1
        advance()
        hit = answer.cached_tokens >= request.document_tokens
        hits += hit
        misses = 0 if hit else misses + 1
        if misses == patience:
            break
    return hits, asked


# Figures


def _parts(result: SharedResult) -> Iterator[tuple[int, Phase]]:
    for count in result.settings.documents:
        for phase in result.settings.phases(count):
            if part_name(count, phase) in result.done:
                yield count, phase


def tables(result: SharedResult, quality: Quality) -> list[Table]:
    """What the servers did, and the others beside the reference."""
    settings = result.settings
    parts = list(_parts(result))
    note = (
        f"Pool {result.pool_tokens:,} slots: {settings.pool_documents} documents of "
        f"{settings.document_tokens:,} tokens and room for questions and answers. Chunk "
        f"{settings.chunk_tokens} tokens, {settings.output_tokens} output tokens, {_arrivals(settings)}. "
        f"{quality.note(settings.profile, settings.document_tokens)}"
    )
    found = [
        Table(
            "Shared documents: measured",
            (
                "documents", "popularity", "engine", "TTFT mean, s", "p50", "p95", "ITL mean, ms", "p50",
                "p95", "tokens/s", "hit rate", "resident", "evicted slots", "prefilled again", *COLUMNS,
            ),
            tuple(
                _measured_row(result, quality, *part, c.name, c.budget)
                for part in parts
                for c in settings.choices
            ),
            note,
        )
    ]  # fmt: skip
    reference = reference_of(settings.engines)
    if reference is not None:
        rows = [
            _ratio_row(result, count, phase, reference, c.name)
            for count, phase in parts
            for c in settings.choices
            if c.name != reference
        ]
        found.append(
            Table(
                f"Shared documents: beside {reference}, with 95% intervals",
                (
                    "documents", "popularity", "engine", "TTFT mean, ratio", "TTFT p95, ratio",
                    "ITL mean, ratio", "tokens/s, ratio", "prefilled again, ratio", "pairs",
                ),
                tuple(rows),
                "Ratios below 1 are shorter times; of tokens/s above 1 is more. Paired bootstrap over "
                "requests; mean TTFT and ITL where the documents fit the pool over blocks of one request per "
                "client, tokens/s always over blocks.",
            )
        )  # fmt: skip
    counts = list(dict.fromkeys(count for count, _ in parts))
    found.append(
        Table(
            "Shared documents: cold, each document once",
            ("documents", "engine", "TTFT mean, s", "p95", "document tokens/s, compression included"),
            tuple(_cold_row(result, count, c.name) for count in counts for c in settings.choices),
        )
    )
    return found


def _arrivals(settings: SharedSettings) -> str:
    if settings.rate is not None:
        return f"Poisson arrivals, {settings.rate:g} per second within a block"
    return f"{settings.clients} clients that wait for their answers"


def _measured_row(
    result: SharedResult, quality: Quality, count: int, phase: Phase, engine: str, budget: float | None
) -> tuple[str, ...]:
    rows = result.of(engine, count, phase)
    ttft = [r.ttft_s for r in rows]
    gaps = [gap for r in rows for gap in r.gaps_ms]
    end = next(p for p in result.phases if (p.engine, p.documents, p.phase) == (engine, count, phase))
    settings = result.settings
    return (
        f"{count} ({count / settings.pool_documents:.2g} × pool)",
        phase,
        engine,
        f"{stats.mean_interval(ttft)}",
        f"{stats.percentile(ttft, 50):.2f}",
        f"{stats.percentile(ttft, 95):.2f}",
        f"{_mean(gaps):.1f}",
        f"{stats.percentile(gaps, 50):.1f}",
        f"{stats.percentile(gaps, 95):.1f}",
        f"{throughput(result, engine, count, phase):.1f}",
        f"{hit_rate(rows):.1%}",
        str(end.resident_documents),
        f"{end.evicted_slots:,}",
        f"{sum(r.prefilled_again for r in rows):,}",
        *quality.cells(settings.profile, budget, settings.document_tokens),
    )


def hit_rate(rows: Sequence[RequestRow]) -> float:
    """Share of the document tokens that were cached."""
    return sum(r.hit_tokens for r in rows) / sum(r.document_tokens for r in rows)


def throughput(result: SharedResult, engine: str, documents: int, phase: Phase) -> float:
    """Output tokens per second of the measured blocks."""
    blocks = result.blocks_of(engine, documents, phase)
    return result.settings.output_tokens * sum(b.requests for b in blocks) / sum(b.wall_s for b in blocks)


class Ratios(Frozen):
    """One engine over the reference, in one phase."""

    ttft: stats.Interval
    ttft_p95: stats.Interval
    itl: stats.Interval
    tokens_per_s: stats.Interval
    prefilled_again: float | None  # None where the reference prefilled nothing again
    pairs: int


def ratios(result: SharedResult, documents: int, phase: Phase, reference: str, engine: str) -> Ratios:
    """Paired: request by request, or block by block where the documents fit (see the module's docstring)."""
    ours, theirs = (result.of(name, documents, phase) for name in (engine, reference))
    fits = result.settings.fits(documents)

    def paired(rows: list[RequestRow], value: Callable[[RequestRow], float]) -> list[float]:
        if not fits:
            return [value(r) for r in rows]
        blocks = dict.fromkeys(r.block for r in rows)
        return [_mean([value(r) for r in rows if r.block == block]) for block in blocks]

    def ttft(r: RequestRow) -> float:
        return r.ttft_s

    def itl(r: RequestRow) -> float:
        return _mean(r.gaps_ms)

    walls = [[b.wall_s for b in result.blocks_of(name, documents, phase)] for name in (reference, engine)]
    again_below = sum(r.prefilled_again for r in theirs)
    return Ratios(
        ttft=stats.paired_ratio(paired(ours, ttft), paired(theirs, ttft)),
        ttft_p95=stats.paired_percentile_ratio([r.ttft_s for r in ours], [r.ttft_s for r in theirs], 95),
        itl=stats.paired_ratio(paired(ours, itl), paired(theirs, itl)),
        tokens_per_s=stats.paired_ratio(walls[0], walls[1]),
        prefilled_again=sum(r.prefilled_again for r in ours) / again_below if again_below else None,
        pairs=len(paired(ours, ttft)),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _ratio_row(
    result: SharedResult, documents: int, phase: Phase, reference: str, engine: str
) -> tuple[str, ...]:
    found = ratios(result, documents, phase, reference, engine)
    again = "–" if found.prefilled_again is None else f"{found.prefilled_again:.3f}"
    return (
        str(documents), phase, engine, str(found.ttft), str(found.ttft_p95), str(found.itl),
        str(found.tokens_per_s), again, str(found.pairs),
    )  # fmt: skip


def _cold_row(result: SharedResult, documents: int, engine: str) -> tuple[str, ...]:
    rows = result.of(engine, documents, "cold")
    blocks = result.blocks_of(engine, documents, "cold")
    tokens_per_s = sum(r.document_tokens for r in rows) / sum(b.wall_s for b in blocks)
    ttft = [r.ttft_s for r in rows]
    return (
        str(documents),
        engine,
        f"{stats.mean_interval(ttft)}",
        f"{stats.percentile(ttft, 95):.2f}",
        f"{tokens_per_s:.0f}",
    )


def figure(result: SharedResult) -> Figure:
    """Mean TTFT and throughput over documents by pool, per popularity; hit rate below."""
    settings = result.settings
    parts = list(_parts(result))
    figure = new_figure(11, 6.5)
    axes = figure.subplots(2, 2)
    values: dict[str, Callable[[str, int, Phase], float]] = {
        "mean TTFT, s": lambda e, n, p: _mean([r.ttft_s for r in result.of(e, n, p)]),
        "output tokens per second": lambda e, n, p: throughput(result, e, n, p),
        "hit rate, tokens": lambda e, n, p: hit_rate(result.of(e, n, p)),
        "mean inter-token latency, ms": lambda e, n, p: _mean(
            [gap for r in result.of(e, n, p) for gap in r.gaps_ms]
        ),
    }
    width = 0.8 / max(1, len(settings.choices))
    for place, (label, value) in zip(axes.flat, values.items(), strict=True):
        for shift, choice in enumerate(settings.choices):
            heights = [value(choice.name, count, phase) for count, phase in parts]
            bars = place.bar(
                [i + shift * width for i in range(len(parts))], heights, width, label=choice.name
            )
            place.bar_label(bars, fmt=bar_text, fontsize=8)
        ticks = [i + width * (len(settings.choices) - 1) / 2 for i in range(len(parts))]
        place.set_xticks(
            ticks, [f"{n / settings.pool_documents:.2g} × pool\n{phase}" for n, phase in parts], fontsize=8
        )
        place.set_ylabel(label)
        place.margins(y=0.25)
    axes[0, 0].legend(fontsize=8)
    return figure


BENCHMARK = Benchmark(
    name=NAME,
    title="Shared documents",
    settings=SharedSettings,
    full=FullSharedSettings,
    result=SharedResult,
    run=run,
    tables=tables,
    figure=figure,
)
