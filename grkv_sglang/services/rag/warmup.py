"""Sections are compressed before they are asked about."""

from __future__ import annotations

import asyncio
import logging
import time

from grkv_sglang.client import CompressionOptions, GrkvApiError, GrkvError
from grkv_sglang.client.state import namespace_name, tokens_sha256
from grkv_sglang.commands.compressing import (
    FIRST_POLL_S,
    LONGEST_POLL_S,
    CompressedPrefix,
    CompressingError,
    SharedPrefix,
    find_prefix,
    happened_since,
)
from grkv_sglang.services.common.engine import problem_of
from grkv_sglang.services.rag.engine import Engine
from grkv_sglang.services.rag.prompts import PROBES, prompt_messages, section_ends, section_message
from grkv_sglang.services.rag.settings import RagSettings
from grkv_sglang.services.rag.store import Store, WarmJob

logger = logging.getLogger(__name__)

MOST_TRIES = 3
_PAUSE_AFTER_FAILURE_S = 1.0
_TOO_SHORT = ("failed: budget_too_small", "failed: too_short")
"""What the engine counts where the budget leaves fewer slots than are always kept. No further try helps."""


class Warmer:
    """Works through queued sections; `wake` it when there is a new one."""

    def __init__(self, settings: RagSettings, store: Store, engine: Engine) -> None:
        self._settings, self._store, self._engine = settings, store, engine
        self._wake = asyncio.Event()

    def wake(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled; several may run at a time."""
        while True:
            self._wake.clear()
            job = await asyncio.to_thread(self._store.take_section)
            if job is None:
                await self._wake.wait()
                continue
            pause_s = await self._warm(job)
            await asyncio.sleep(pause_s)

    async def _warm(self, job: WarmJob) -> float:
        """Compress a section and note what became of it; seconds to wait before the next one."""
        try:
            await self._compress(job)
        except CompressingError as error:
            again = job.tries < MOST_TRIES
            await self._set(job, "queued" if again else "failed", problem=str(error))
            return _PAUSE_AFTER_FAILURE_S * job.tries
        except GrkvError as error:
            problem = problem_of(error, self._engine.url, kept="the document is kept").message
            if isinstance(error, GrkvApiError) and error.status < 500:
                await self._set(job, "failed", problem=problem)
                return 0.0
            # The engine's fault, not the section's: not counted as an attempt.
            await self._set(job, "queued", problem=problem, tries=job.tries - 1)
            return self._settings.retry_s
        except Exception:  # a section that cannot be compressed must not stop the others
            logger.exception("section %s was not compressed", job.section_id)
            await self._set(job, "failed", problem="not compressed; the service's log says why")
        return 0.0

    async def _compress(self, job: WarmJob) -> None:
        client, settings = self._engine.client, self._settings
        section = section_message(1, job.document_name, job.heading, job.text)
        messages = prompt_messages(settings.instructions, [section], PROBES[0])
        ids = await client.tokenize(messages)
        end = (await section_ends(client, messages, ids))[0]
        if end < settings.min_compressed_tokens:
            await self._leave_exact(job, end)
            return
        # The engine leaves a prefix alone for a while after a failure. One token less is another prefix.
        marked = end - (job.tries - 1)
        digest = tokens_sha256(ids[:marked])
        await asyncio.to_thread(self._store.mark_prefix, job.tenant_id, digest, [job.document_id])
        before = await client.state()
        options = CompressionOptions(
            prefix_end_tokens=marked, profile=settings.profile, budget=settings.budget
        )
        await client.chat(messages, max_tokens=1, options=options, cache_salt=job.cache_salt)
        deadline, pause_s = time.monotonic() + settings.timeout_s, FIRST_POLL_S
        shared = SharedPrefix(tuple(ids[:marked]), by_template=False)
        while True:
            state = await client.state()
            found = find_prefix(state, shared, namespace_name(job.cache_salt), settings.budget or 0.0)
            if found is not None:
                await self._ready(job, found, digest)
                return
            if state.counters.jobs_waiting == 0:
                happened = happened_since(before, state)
                if any(reason in happened for reason in _TOO_SHORT):
                    await self._leave_exact(job, end)
                    return
                raise CompressingError(happened)
            if time.monotonic() > deadline:
                raise CompressingError(f"no span within {settings.timeout_s:.0f} s")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_POLL_S)

    async def _leave_exact(self, job: WarmJob, tokens: int) -> None:
        await self._set(job, "exact", prefix_tokens=tokens, prefix_slots=tokens, quality=None, problem=None)

    async def _ready(self, job: WarmJob, prefix: CompressedPrefix, digest: str) -> None:
        kept = await self._set(
            job,
            "ready",
            problem=None,
            prefix_tokens=prefix.tokens,
            prefix_slots=prefix.slots,
            quality=prefix.quality,
        )
        if not kept:  # the document was deleted while it was compressed
            await self._engine.delete_prefixes(job.cache_salt, [digest])

    async def _set(self, job: WarmJob, status: str, **values: object) -> bool:
        return await asyncio.to_thread(self._store.set_section, job.section_id, status, **values)
