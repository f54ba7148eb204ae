"""How many documents a pool holds: ``python -m benchmarks.serving capacity``.

Each server gets more documents than it can hold, one after the other, one token each. Then they are asked for
again, the latest first, by the same requests; a document is *resident* when all of its tokens are cached.
Under LRU the resident ones come first and are used by the asking, so that it evicts none of them; after a few
in a row that are not resident the asking ends, because each of these evicts others.

*Theory*: full-size KV: pool / tokens. A server that compresses needs a document's full size while it is
prefilled, so (pool - tokens) / slots of a span; how much less the pressure reserve and the tails of answers
leave is what the measurement shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from matplotlib.figure import Figure
from pydantic import Field
from transformers import AutoTokenizer

from benchmarks.serving.engines import EngineChoice, Live, measure
from benchmarks.serving.options import Benchmark, Run, ServingSettings, reference_of
from benchmarks.serving.plots import new_figure
from benchmarks.serving.progress import progress_bar
from benchmarks.serving.quality import COLUMNS, Quality
from benchmarks.serving.record import Frozen, Result
from benchmarks.serving.shared_documents import MISSES_THAT_END_A_PROBE, resident_documents
from benchmarks.serving.tables import Table
from benchmarks.serving.workload import cut_documents, one_each, questions_of
from benchmarks.texts import text_tokens
from grkv_sglang.core.budget import slots_for_budget

NAME = "capacity"
MORE_THAN_THEORY = 1.2
"""So many times the documents that fit in theory are sent."""


class CapacitySettings(ServingSettings):
    """Quick mode."""

    engines: tuple[str, ...] = Field(
        ("off", "grkv:0.1", "grkv:0.2"), description="Servers to compare, as for the other benchmarks."
    )
    document_tokens: int = Field(768, ge=64, description="Length of a document.")
    pool_documents: int = Field(8, ge=2, description="Full documents that the pool holds, beside the room.")
    room_tokens: int = Field(
        128, ge=64, description="Slots of the pool beside the documents, for one question."
    )


class FullCapacitySettings(CapacitySettings):
    """Full mode: hours on a CPU."""

    engines: tuple[str, ...] = ("stock", "off", "grkv:0.05", "grkv:0.1", "grkv:0.2", "grkv:0.5")
    document_tokens: int = 2048


class CapacityRow(Frozen):
    """One server."""

    engine: str
    documents: int  # sent
    theory: int
    slots_per_document: int
    resident_documents: int
    probed_documents: int
    spans: int | None
    span_slots: int | None
    evicted_slots: int


class CapacityResult(Result):
    """A part is a server."""

    settings: CapacitySettings
    pool_tokens: int = 0
    rows: list[CapacityRow] = Field(default_factory=list)


def slots_per_document(settings: CapacitySettings, choice: EngineChoice) -> int:
    """KV slots that a document of its length holds."""
    if choice.budget is None:
        return settings.document_tokens
    return slots_for_budget(settings.document_tokens, share=choice.budget, tokens=None)


def theory(settings: CapacitySettings, choice: EngineChoice, pool_tokens: int) -> int:
    """Documents that fit; see the module's docstring."""
    slots = slots_per_document(settings, choice)
    free = pool_tokens if choice.budget is None else pool_tokens - settings.document_tokens
    return free // slots


def run(run: Run[CapacityResult]) -> None:
    """How many documents stay resident in a given pool, per budget, beside theory."""
    result = run.result
    settings = result.settings
    missing = [choice for choice in settings.choices if choice.name not in result.done]
    if not missing:
        return
    tokenizer = AutoTokenizer.from_pretrained(settings.model_path())
    questions = questions_of(tokenizer)
    text = text_tokens(tokenizer, settings.texts)
    result.pool_tokens = settings.pool_documents * settings.document_tokens + settings.room_tokens
    # One server at a time: there is no time in the result that could drift.
    for choice in missing:
        fitting = theory(settings, choice, result.pool_tokens)
        count = math.ceil(MORE_THAN_THEORY * fitting) + 1
        documents = cut_documents(text, count, settings.document_tokens)

        async def work(engines: list[Live], documents: Sequence[tuple[int, ...]] = documents) -> None:
            (engine,) = engines
            with progress_bar(run.console) as progress:
                fill = progress.add_task(f"{engine.name}, sent", total=len(documents))
                evicted = await engine.evicted_slots()
                requests = one_each(documents, range(len(documents)), questions, place=0)
                for request in requests:
                    await engine.ask_about(request, 1)
                    await engine.settle()
                    progress.advance(fill)
                evicted = await engine.evicted_slots() - evicted
                state = await engine.state() if engine.compresses else None
                probe = progress.add_task(f"{engine.name}, asked for again", total=len(documents))
                resident, probed = await resident_documents(
                    engine,
                    list(reversed(requests)),
                    MISSES_THAT_END_A_PROBE,
                    partial(progress.advance, probe),
                )
            result.rows.append(
                CapacityRow(
                    engine=engine.name,
                    documents=len(documents),
                    theory=theory(settings, engine.choice, result.pool_tokens),
                    slots_per_document=slots_per_document(settings, engine.choice),
                    resident_documents=resident,
                    probed_documents=probed,
                    spans=state.num_spans if state else None,
                    span_slots=state.pool.span_slots if state else None,
                    evicted_slots=evicted,
                )
            )
            result.done.append(engine.name)
            run.save()

        sizes = settings.sizes(run.log_folder, result.pool_tokens)
        measure([choice], sizes, {"triggers": "explicit", "profile": settings.profile}, run.console, work)


def tables(result: CapacityResult, quality: Quality) -> list[Table]:
    """Documents per server, beside theory and the reference."""
    settings = result.settings
    reference = next((r for r in result.rows if r.engine == reference_of(settings.engines)), None)
    budgets = {choice.name: choice.budget for choice in settings.choices}
    rows = tuple(
        (
            row.engine,
            f"{row.slots_per_document:,}",
            f"{row.documents}",
            str(row.theory),
            str(row.resident_documents),
            f"{row.resident_documents / row.theory:.2f}",
            _times(row, reference),
            "–" if row.spans is None else str(row.spans),
            *quality.cells(settings.profile, budgets[row.engine], settings.document_tokens),
        )
        for row in result.rows
    )
    return [
        Table(
            "Capacity",
            (
                "engine", "slots per document", "sent", "theory", "resident", "of theory",
                "times the reference", "spans", *COLUMNS,
            ),
            rows,
            f"Pool {result.pool_tokens:,} slots, documents of {settings.document_tokens:,} tokens. "
            f"{quality.note(settings.profile, settings.document_tokens)}",
        )
    ]  # fmt: skip


def _times(row: CapacityRow, reference: CapacityRow | None) -> str:
    if reference is None or not reference.resident_documents:
        return "–"
    return f"{row.resident_documents / reference.resident_documents:.1f}"


def figure(result: CapacityResult) -> Figure:
    """Documents measured and in theory, per server."""
    figure = new_figure(6.5, 3.6)
    axes = figure.subplots()
    places = range(len(result.rows))
    for shift, (label, values) in enumerate(
        {
            "theory": [row.theory for row in result.rows],
            "resident": [row.resident_documents for row in result.rows],
        }.items()
    ):
        bars = axes.bar([p + 0.4 * shift for p in places], values, 0.4, label=label)
        axes.bar_label(bars, fontsize=8)
    axes.set_xticks([p + 0.2 for p in places], [row.engine for row in result.rows])
    axes.set_ylabel(f"documents in {result.pool_tokens:,} slots")
    axes.margins(y=0.15)
    axes.legend()
    return figure


BENCHMARK = Benchmark(
    name=NAME,
    title="Capacity",
    settings=CapacitySettings,
    full=FullCapacitySettings,
    result=CapacityResult,
    run=run,
    tables=tables,
    figure=figure,
)
