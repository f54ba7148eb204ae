"""Answers in the making. Each is a task of this server, not of the request that asked for it: a phone that
loses its connection finds the answer going on when it comes back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from grkv_sglang.client import (
    AsyncGrkvClient,
    AsyncTextStream,
    Completion,
    CompressionOptions,
    GrkvError,
    RetryPolicy,
    Timeouts,
)
from grkv_sglang.services.chat.database import TurnState
from grkv_sglang.services.chat.history import (
    common_prefix,
    prompt_messages,
    tokens_to_mark,
    without_question,
)
from grkv_sglang.services.chat.settings import ChatSettings
from grkv_sglang.services.chat.store import Outcome, Store, TurnToAnswer
from grkv_sglang.services.common.engine import Problem, context_tokens, problem_of
from grkv_sglang.services.common.events import PING, event
from grkv_sglang.services.common.markdown import render

logger = logging.getLogger(__name__)

KEEP_EVERY_S = 1.0
"""How much of an answer a crash may lose."""

SEND_EVERY_S = 0.08
"""Least time between two states of an answer on the way to a page."""

PING_AFTER_S = 15.0

LEAST_ROOM_TOKENS = 16
"""Room for an answer, below which a conversation counts as full."""

_FAILED = Problem(500, "internal", "The chat server failed; your message is kept. Its log says why.")
_RESTARTED = Problem(503, "server_restarted", "The chat server was stopped while it answered.")


@dataclass
class Running:
    """One answer in the making."""

    turn: TurnToAnswer
    text: str = ""
    version: int = 0
    ended: bool = False
    stopped_by_user: bool = False
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    task: asyncio.Task[None] | None = None

    async def beyond(self, version: int) -> None:
        """Back once the answer has grown since `version`, or has ended."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.ended or self.version != version)

    async def tell(self) -> None:
        async with self.changed:
            self.version += 1
            self.changed.notify_all()


class Answers:
    """All answers in the making, at most one for each conversation."""

    def __init__(self, store: Store, settings: ChatSettings) -> None:
        self._store, self._settings = store, settings
        self._client = AsyncGrkvClient(
            settings.engine_url,
            api_key=settings.engine_api_key,
            timeouts=Timeouts(connect_s=5.0, read_s=settings.silence_s),
            # Somebody is waiting: told soon rather than tried long.
            retry=RetryPolicy(attempts=2),
        )
        self._running: dict[str, Running] = {}

    async def close(self) -> None:
        """End all answers, keep what there is of them, close the connections."""
        running = list(self._running.values())
        for run in running:
            if run.task is not None:
                run.task.cancel()
        await asyncio.gather(*(run.task for run in running if run.task is not None), return_exceptions=True)
        await self._client.close()

    async def engine_is_up(self) -> bool:
        return await self._client.health()

    def start(self, turn: TurnToAnswer) -> Running:
        """Begin to answer; the turn is marked as being answered already."""
        run = Running(turn)
        run.task = asyncio.create_task(self._answer(run), name=f"answer {turn.turn_id}")
        self._running[turn.conversation_id] = run
        return run

    def find(self, conversation_id: str) -> Running | None:
        return self._running.get(conversation_id)

    async def stop(self, conversation_id: str) -> None:
        """End a conversation's answer, if one is being made; back when what there is of it is kept."""
        run = self._running.get(conversation_id)
        if run is None or run.task is None:
            return
        run.stopped_by_user = True
        run.task.cancel()
        await asyncio.wait([run.task])

    async def follow(self, run: Running) -> AsyncIterator[bytes]:
        """Events of an answer until its end: ``answer`` with its HTML so far. One that is slow to read skips
        states, not ends."""
        version = 0
        while True:
            try:
                async with asyncio.timeout(PING_AFTER_S):
                    await run.beyond(version)
            except TimeoutError:
                yield PING
                continue
            if run.ended:
                return
            version = run.version
            began = time.monotonic()
            yield event("answer", {"html": render(run.text)})
            # A long answer takes longer to render; it must not take all of the time there is.
            await asyncio.sleep(max(SEND_EVERY_S, 4 * (time.monotonic() - began)))

    async def _answer(self, run: Running) -> None:
        outcome = Outcome("failed", "", _FAILED)
        try:
            outcome = await self._generate(run)
        except Exception:
            outcome = Outcome("interrupted" if run.text else "failed", run.text, _FAILED)
            logger.exception("answering turn %s", run.turn.turn_id)
        finally:
            await asyncio.to_thread(self._store.end_turn, run.turn.turn_id, outcome)
            self._running.pop(run.turn.conversation_id, None)
            run.ended = True
            await run.tell()

    async def _generate(self, run: Running) -> Outcome:
        """Make the answer; every way in which it can end is an outcome."""
        turn, settings = run.turn, self._settings
        began, ttft_s = time.monotonic(), None
        marked: int | None = None
        problem: Problem | None
        stream: AsyncTextStream | None = None
        try:
            messages = prompt_messages(turn.system_message, turn.answered, turn.question)
            ids = await self._client.tokenize(messages)
            # Asked each time: an engine may be replaced by another while this server runs.
            room = await context_tokens(self._client) - len(ids) - 1
            if room < LEAST_ROOM_TOKENS:
                return Outcome("failed", "", _full(len(ids), bool(turn.answered)))
            if turn.answered and len(ids) - turn.covered_tokens >= settings.compress_after_tokens:
                history = common_prefix(ids, await self._client.tokenize(without_question(messages)))
                marked = tokens_to_mark(history, turn.covered_tokens, settings.compress_after_tokens)
            stream = await self._client.stream_generate(
                ids,
                max_tokens=min(settings.max_tokens, room),
                temperature=settings.temperature,
                options=CompressionOptions(
                    prefix_end_tokens=marked, budget=settings.budget, profile=settings.profile
                ),
                cache_salt=turn.cache_salt,
            )
            kept_at = began
            async with stream:
                async for piece in stream:
                    now = time.monotonic()
                    ttft_s = now - began if ttft_s is None else ttft_s
                    run.text += piece
                    await run.tell()
                    if now - kept_at >= KEEP_EVERY_S:
                        kept_at = now
                        await asyncio.to_thread(self._store.keep_progress, turn.turn_id, run.text)
            result = stream.result
            return Outcome(
                "done",
                result.text,
                finish_reason=result.finish_reason,
                usage=result.usage,
                served=result.grkv,
                ttft_s=ttft_s,
                marked_tokens=marked,
            )
        except GrkvError as error:
            logger.warning("answering turn %s: %s", turn.turn_id, error)
            problem = problem_of(error, settings.engine_url)
        except asyncio.CancelledError:
            problem = None if run.stopped_by_user else _RESTARTED
        told = stream.so_far if stream is not None else None
        return _without_end(run.text, told, problem, ttft_s, marked)


def _without_end(
    text: str, told: Completion | None, problem: Problem | None, ttft_s: float | None, marked: int | None
) -> Outcome:
    """An answer that was stopped (no `problem`) or broke off: it counts as far as the engine `told` of it."""
    state: TurnState = "stopped" if problem is None else "interrupted" if text else "failed"
    if told is None or not text:
        return Outcome(state, text, problem)
    return Outcome(
        state,
        told.text,  # may have more than `text`: what was received and not handed on yet
        problem,
        usage=told.usage,
        served=told.grkv,
        ttft_s=ttft_s,
        marked_tokens=marked,
    )


def _full(prompt_tokens: int, has_history: bool) -> Problem:
    if has_history:
        return Problem(
            413,
            "context_full",
            f"This conversation is full: with this message it has {prompt_tokens:,} tokens, and the model "
            "reads no more. Start a new conversation, or send a shorter message.",
        )
    return Problem(
        413,
        "context_full",
        f"This message is too long for the model: {prompt_tokens:,} tokens. Send a shorter one.",
    )
