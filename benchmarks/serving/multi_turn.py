"""Chats that grow until the pool overflows: ``python -m benchmarks.serving multi-turn``.

Every user's chat is about a text of their own: each turn brings the next piece of it and a question. The
reply is what the server says, of a fixed length, and becomes part of the history; so all servers get prompts
of the same length, with the same messages. In a turn all users are asked once, in an order of its own; the
turns go to the servers one after the other, turned around every time.

Nobody marks anything: the plugin runs with its default triggers, as it would for a client that does not know
it. The history of a turn is the user's last prompt and reply; its tokens that are not cached are prefilled
again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from pydantic import Field
from transformers import AutoTokenizer

from benchmarks.serving import stats
from benchmarks.serving.client import Answer, closed_loop
from benchmarks.serving.engines import Live, in_turn, measure
from benchmarks.serving.options import Benchmark, Run, ServingSettings, reference_of
from benchmarks.serving.plots import new_figure
from benchmarks.serving.progress import progress_bar
from benchmarks.serving.quality import COLUMNS, Quality
from benchmarks.serving.record import AnswerRow, Frozen, Result, measured
from benchmarks.serving.tables import Table
from benchmarks.serving.workload import Request, cut_documents
from benchmarks.texts import text_tokens

NAME = "multi-turn"
BEFORE, BETWEEN, AFTER = (
    "<|im_start|>user\nHere is what comes next:\n",
    "\nWho is in it?",
    "<|im_end|>\n<|im_start|>assistant\n",
)
CLOSING = "<|im_end|>\n"


class ChatSettings(ServingSettings):
    """Quick mode."""

    users: int = Field(8, ge=2, description="Chats that grow at the same time.")
    turns: int = Field(8, ge=2, description="Turns of every chat.")
    message_tokens: int = Field(224, ge=8, description="Tokens of text that each message brings.")
    output_tokens: int = Field(32, ge=1, description="Tokens of every reply.")
    pool_tokens: int = Field(7168, ge=256, description="Slots of the pool.")
    clients: int = Field(2, ge=1, description="Requests that run at once.")
    min_span_tokens: int = Field(512, ge=2, description="The plugin's setting: shorter stretches stay exact.")
    triggers: str = Field("explicit,reuse,pressure", description="The plugin's setting, its default here.")
    repeats: int = Field(1, ge=1, description="Runs of all chats, each with an empty cache and other texts.")


class FullChatSettings(ChatSettings):
    """Full mode: hours on a CPU."""

    engines: tuple[str, ...] = ("off", "grkv:0.1", "grkv:0.2", "grkv:0.5")
    users: int = 16
    turns: int = 14
    message_tokens: int = 320
    output_tokens: int = 64
    pool_tokens: int = 24576
    clients: int = 4
    repeats: int = 3


class TurnRow(AnswerRow):
    """One turn of one user. The history is the prompt and reply of the turn before."""

    engine: str
    repeat: int
    turn: int
    user: int
    history_tokens: int

    @property
    def prefilled_again(self) -> int:
        return self.history_tokens - min(self.cached_tokens, self.history_tokens)


class TurnBlock(Frozen):
    """One turn of all users on one server."""

    engine: str
    repeat: int
    turn: int
    wall_s: float
    settle_s: float
    evicted_slots: int


class ChatResult(Result):
    """Rows of all turns. A part is a repeat: a chat cannot be gone on with on a new server."""

    settings: ChatSettings
    turns: list[TurnRow] = Field(default_factory=list)
    blocks: list[TurnBlock] = Field(default_factory=list)

    def of(self, engine: str, turn: int) -> list[TurnRow]:
        """One turn on one server, repeats and users in order."""
        rows = [row for row in self.turns if (row.engine, row.turn) == (engine, turn)]
        return sorted(rows, key=lambda row: (row.repeat, row.user))

    @property
    def repeats(self) -> int:
        """That are complete."""
        return len(self.done)


def messages_of(
    tokenizer: Any, text: Sequence[int], users: int, turns: int, tokens: int
) -> list[list[tuple[int, ...]]]:
    """[user][turn] token ids of a user's message in ChatML, with the header of the reply.

    Raises:
        WorkloadError: as `cut_documents`.
    """
    before, between, after = (
        tuple(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in (BEFORE, BETWEEN, AFTER)
    )
    texts = cut_documents(text, users, turns * tokens)
    return [
        [(*before, *own[turn * tokens : (turn + 1) * tokens], *between, *after) for turn in range(turns)]
        for own in texts
    ]


def run(run: Run[ChatResult]) -> None:
    """Chats of many users that grow until the pool overflows: TTFT by turn."""
    result = run.result
    settings = result.settings
    missing = [n for n in range(settings.repeats) if part_name(n) not in result.done]
    if not missing:
        return
    tokenizer = AutoTokenizer.from_pretrained(settings.model_path())
    text = text_tokens(tokenizer, settings.texts)
    closing: list[int] = tokenizer(CLOSING, add_special_tokens=False)["input_ids"]
    config = {
        "triggers": settings.triggers,
        "profile": settings.profile,
        "min_span_tokens": settings.min_span_tokens,
    }

    async def work(engines: list[Live]) -> None:
        with progress_bar(run.console) as progress:
            for repeat in missing:
                # Other texts in every repeat: the documents are cut from another place on.
                turned = turned_text(text, repeat, settings.repeats)
                messages = messages_of(
                    tokenizer, turned, settings.users, settings.turns, settings.message_tokens
                )
                chats = [_Chats(engine, repeat, messages, closing, settings) for engine in engines]
                total = settings.turns * settings.users * len(engines)
                task = progress.add_task(part_name(repeat), total=total)
                rng = np.random.default_rng([settings.seed, repeat])
                turns: list[TurnRow] = []
                blocks: list[TurnBlock] = []
                for engine in engines:
                    await engine.flush()
                for turn in range(settings.turns):
                    order = [int(user) for user in rng.permutation(settings.users)]
                    for chat in in_turn(chats, turn):
                        block, rows = await chat.turn(turn, order, partial(progress.advance, task))
                        blocks.append(block)
                        turns += rows
                result.turns += turns
                result.blocks += blocks
                result.done.append(part_name(repeat))
                run.save()

    sizes = settings.sizes(run.log_folder, settings.pool_tokens)
    measure(settings.choices, sizes, config, run.console, work)


def part_name(repeat: int) -> str:
    """Of a repeat in `Result.done`."""
    return f"repeat {repeat + 1}"


def turned_text(text: Sequence[int], repeat: int, repeats: int) -> list[int]:
    """The text from another place on for every repeat."""
    start = repeat * len(text) // repeats
    return [*text[start:], *text[:start]]


class _Chats:
    """All users' chats with one server."""

    def __init__(
        self,
        engine: Live,
        repeat: int,
        messages: Sequence[Sequence[tuple[int, ...]]],
        closing: Sequence[int],
        settings: ChatSettings,
    ) -> None:
        self._engine, self._repeat, self._settings = engine, repeat, settings
        self._messages, self._closing = messages, closing
        self._history: list[tuple[int, ...]] = [()] * settings.users
        self._known = [0] * settings.users
        """Tokens of the history that the server has computed."""

    async def turn(
        self, turn: int, order: Sequence[int], advance: Callable[[], None]
    ) -> tuple[TurnBlock, list[TurnRow]]:
        """Ask every user's next message."""
        engine, settings = self._engine, self._settings

        async def send(request: Request) -> Answer:
            answer = await engine.ask(request.prompt, settings.output_tokens)
            advance()
            return answer

        requests = [
            Request(n, user, (*self._history[user], *self._messages[user][turn]), self._known[user])
            for n, user in enumerate(order)
        ]
        evicted = await engine.evicted_slots()
        started = time.perf_counter()
        answers = await closed_loop(requests, settings.clients, send)
        settle_s = await engine.settle()
        block = TurnBlock(
            engine=engine.name,
            repeat=self._repeat,
            turn=turn + 1,
            wall_s=round(time.perf_counter() - started, 4),
            settle_s=round(settle_s, 4),
            evicted_slots=await engine.evicted_slots() - evicted,
        )
        rows = []
        for request, answer in zip(requests, answers, strict=True):
            user = request.document
            # The last token of a reply is not in the cache: it was never an input.
            self._known[user] = len(request.prompt) + len(answer.output_ids) - 1
            self._history[user] = (*request.prompt, *answer.output_ids, *self._closing)
            rows.append(self._row(turn + 1, request, answer))
        return block, rows

    def _row(self, turn: int, request: Request, answer: Answer) -> TurnRow:
        return TurnRow(
            engine=self._engine.name,
            repeat=self._repeat,
            turn=turn,
            user=request.document,
            history_tokens=request.document_tokens,
            **measured(answer),
        )


def all_tokens(result: ChatResult, turn: int) -> int:
    """Tokens of all chats of one repeat at the end of a turn: what the pool would have to hold at full
    size."""
    settings = result.settings
    rows = result.of(settings.choices[0].name, turn)
    return sum(row.prompt_tokens + settings.output_tokens for row in rows) // result.repeats


def tables(result: ChatResult, quality: Quality) -> list[Table]:
    """TTFT by turn, and the servers beside the reference."""
    settings = result.settings
    turns = range(1, settings.turns + 1) if result.turns else range(0)
    names = [choice.name for choice in settings.choices]
    by_turn = tuple(
        (
            str(turn),
            f"{all_tokens(result, turn) / settings.pool_tokens:.2f} × pool",
            *(str(stats.mean_interval([r.ttft_s for r in result.of(name, turn)])) for name in names),
            *(f"{sum(r.prefilled_again for r in result.of(name, turn)):,}" for name in names),
        )
        for turn in turns
    )
    longest = settings.turns * (settings.message_tokens + settings.output_tokens)
    found = [
        Table(
            "Multi-turn: by turn",
            (
                "turn", "all chats", *(f"TTFT mean, s, {name}" for name in names),
                *(f"prefilled again, {name}" for name in names),
            ),
            by_turn,
            f"{settings.users} users, {settings.clients} requests at once, pool {settings.pool_tokens:,} "
            f"slots, chunk {settings.chunk_tokens} tokens, {settings.output_tokens} output tokens; triggers "
            f"{settings.triggers}.",
        )
    ]  # fmt: skip
    reference = reference_of(settings.engines)
    if reference is not None and result.turns:
        full = [t for t in turns if all_tokens(result, t) > settings.pool_tokens]
        rows = [
            _beside(result, quality, reference, choice.name, choice.budget, label, some)
            for choice in settings.choices
            if choice.name != reference
            for label, some in (("all", list(turns)), ("beyond the pool", full))
            if some
        ]
        found.append(
            Table(
                f"Multi-turn: beside {reference}, with 95% intervals",
                (
                    "engine", "turns", "TTFT mean, ratio", "TTFT p95, ratio", "ITL mean, ratio",
                    "time of all, ratio", "prefilled again, ratio", *COLUMNS,
                ),
                tuple(rows),
                f"Paired bootstrap over turns of users. {quality.note(settings.profile, longest)}",
            )
        )  # fmt: skip
    return found


def _beside(
    result: ChatResult,
    quality: Quality,
    reference: str,
    engine: str,
    budget: float | None,
    label: str,
    turns: Sequence[int],
) -> tuple[str, ...]:
    ours, theirs = ([r for t in turns for r in result.of(name, t)] for name in (engine, reference))
    walls = [
        sum(b.wall_s for b in result.blocks if b.engine == name and b.turn in turns)
        for name in (engine, reference)
    ]
    again = [sum(r.prefilled_again for r in rows) for rows in (ours, theirs)]
    settings = result.settings
    itl = [[_mean(r.gaps_ms) for r in rows] for rows in (ours, theirs)]
    return (
        engine,
        label,
        str(stats.paired_ratio([r.ttft_s for r in ours], [r.ttft_s for r in theirs])),
        str(stats.paired_percentile_ratio([r.ttft_s for r in ours], [r.ttft_s for r in theirs], 95)),
        str(stats.paired_ratio(itl[0], itl[1])),
        f"{walls[0] / walls[1]:.2f}",
        f"{again[0] / again[1]:.3f}" if again[1] else "–",
        *quality.cells(
            settings.profile, budget, settings.turns * (settings.message_tokens + settings.output_tokens)
        ),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def figure(result: ChatResult) -> Figure:
    """TTFT by turn with intervals, history prefilled again; the turn from which the pool is too small."""
    settings = result.settings
    figure = new_figure(11, 3.8)
    times, again = figure.subplots(1, 2)
    turns = list(range(1, settings.turns + 1)) if result.turns else []
    for choice in settings.choices:
        found = [stats.mean_interval([r.ttft_s for r in result.of(choice.name, t)]) for t in turns]
        errors = [[i.value - i.low for i in found], [i.high - i.value for i in found]]
        times.errorbar(turns, [i.value for i in found], yerr=errors, marker="o", capsize=3, label=choice.name)
        tokens = [sum(r.prefilled_again for r in result.of(choice.name, t)) for t in turns]
        again.plot(turns, tokens, "o-", label=choice.name)
    full = next((t for t in turns if all_tokens(result, t) > settings.pool_tokens), None)
    for axes, label in ((times, "mean TTFT, s"), (again, "history tokens prefilled again")):
        if full is not None:
            axes.axvline(full, color="gray", linestyle=":", label="chats exceed the pool")
        axes.set_xlabel("turn")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
    return figure


BENCHMARK = Benchmark(
    name=NAME,
    title="Multi-turn chats",
    settings=ChatSettings,
    full=FullChatSettings,
    result=ChatResult,
    run=run,
    tables=tables,
    figure=figure,
)
