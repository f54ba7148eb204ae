"""A question is answered: sections are found, the prompt is made, and what the model says is streamed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from grkv_sglang.client import AsyncTextStream, Completion, CompressionOptions, GrkvError, Served
from grkv_sglang.client.state import tokens_sha256
from grkv_sglang.services.common.engine import problem_of
from grkv_sglang.services.common.markdown import render
from grkv_sglang.services.common.web import ServiceError
from grkv_sglang.services.rag.citations import cited_numbers
from grkv_sglang.services.rag.engine import Engine
from grkv_sglang.services.rag.gate import Gate
from grkv_sglang.services.rag.prompts import prompt_messages, section_ends, section_message
from grkv_sglang.services.rag.retrieval import FoundSection, Retriever
from grkv_sglang.services.rag.settings import RagSettings
from grkv_sglang.services.rag.store import Store, Tenant
from grkv_sglang.services.rag.views import Answer, PassageView, QuestionIn, Source, page_at
from grkv_sglang.services.rag.warmup import Warmer

logger = logging.getLogger(__name__)

KEPT = "your documents are kept"
_MOST_KNOWN_PREFIXES = 10_000
_LEAST_ANSWER_TOKENS = 16


@dataclass(frozen=True)
class Prompt:
    """A prompt in tokens.

    Attributes:
        ends: where each section's reusable prefix ends; empty where nobody needs to know.
        marked: the prefix that the engine is to compress, by its index in `ends`; None: it has all.
    """

    ids: list[int]
    sections: tuple[FoundSection, ...]
    ends: tuple[int, ...]
    marked: int | None


class Answerer:
    """Answers questions, a bounded number at a time."""

    def __init__(
        self, settings: RagSettings, store: Store, retriever: Retriever, engine: Engine, warmer: Warmer
    ) -> None:
        self._settings, self._store, self._retriever = settings, store, retriever
        self.engine, self._warmer = engine, warmer
        self._gate = Gate(settings.concurrency, settings.queue)
        self._known: OrderedDict[tuple[str, ...], None] = OrderedDict()
        """Combinations of sections whose prefix the engine was asked to compress, latest last."""

    async def ask(self, tenant: Tenant, question: QuestionIn) -> RunningAnswer:
        """Start an answer. It must be closed, whatever happens.

        Raises:
            ServiceError: there is nothing to answer from, too much is being asked, the engine is not reached,
                or refuses.
        """
        started = time.monotonic()
        await self._gate.enter()
        try:
            most = question.sections or self._settings.sections_per_answer
            found = await asyncio.to_thread(
                self._retriever.find, tenant.id, question.question, most, question.document_ids
            )
            if not found:
                raise ServiceError(
                    409, "no_documents", "There is no document to answer from yet: upload one and wait until "
                    "it is indexed.",
                )  # fmt: skip
            num_sections = await asyncio.to_thread(
                self._store.num_sections, [item.document.id for item in found]
            )
            max_tokens = min(
                question.max_tokens or self._settings.answer_tokens, self._settings.answer_tokens
            )
            prompt = await self._prompt(found, question.question, max_tokens)
            stream = await self._open(tenant, prompt, max_tokens)
        except GrkvError as error:
            self._gate.leave()
            problem = problem_of(error, self.engine.url, kept=KEPT)
            raise ServiceError(problem.status, problem.code, problem.message) from error
        except BaseException:
            self._gate.leave()
            raise
        sources = [
            _source(number, item, num_sections) for number, item in enumerate(prompt.sections, start=1)
        ]
        return RunningAnswer(self, tenant, prompt, sources, stream, started)

    async def _prompt(self, found: Sequence[FoundSection], question: str, max_tokens: int) -> Prompt:
        """The prompt of as many of the sections, best first, as the model's context has room for."""
        client, context = self.engine.client, await self.engine.context_tokens()
        chosen = list(found)
        while True:
            messages = prompt_messages(
                self._settings.instructions,
                [
                    section_message(number, item.document.name, item.section.heading, item.text)
                    for number, item in enumerate(chosen, start=1)
                ],
                f"Question: {question.strip()}",
            )
            ids = await client.tokenize(messages)
            if len(ids) + max(max_tokens, _LEAST_ANSWER_TOKENS) <= context:
                break
            if len(chosen) == 1:
                raise ServiceError(
                    413, "context_full",
                    f"Question and section have {len(ids):,} tokens; with an answer of {max_tokens} that is "
                    f"more than the {context:,} that the model reads. Ask a shorter question.",
                )  # fmt: skip
            chosen.remove(min(chosen, key=lambda item: item.score))
        known = [self._is_known(chosen[: count + 1]) for count in range(len(chosen))]
        if known == [True]:
            return Prompt(ids, tuple(chosen), (), None)  # the usual case: its section is warm
        ends = await section_ends(client, messages, ids)
        # One after the other, so that there is a span for each section's end: see `prompts`.
        marked = known.index(False) if False in known else None
        if marked is not None and ends[marked] < self._settings.min_compressed_tokens:
            marked = None
        return Prompt(ids, tuple(chosen), tuple(ends), marked)

    async def _open(self, tenant: Tenant, prompt: Prompt, max_tokens: int) -> AsyncTextStream:
        settings = self._settings
        end = None if prompt.marked is None else prompt.ends[prompt.marked]
        if end is not None and prompt.marked is not None:
            documents = [item.document.id for item in prompt.sections[: prompt.marked + 1]]
            digest = tokens_sha256(prompt.ids[:end])
            await asyncio.to_thread(self._store.mark_prefix, tenant.id, digest, documents)
        options = CompressionOptions(
            prefix_end_tokens=end,
            profile=None if end is None else settings.profile,
            budget=settings.budget,
            min_quality=settings.min_quality,
        )
        stream = await self.engine.client.stream_generate(
            prompt.ids, max_tokens=max_tokens, options=options, cache_salt=tenant.cache_salt
        )
        if prompt.marked is not None:
            self._remember(prompt.sections[: prompt.marked + 1])
        return stream

    def _is_known(self, sections: Sequence[FoundSection]) -> bool:
        """Whether their prefix is compressed, or on its way, as far as the service knows."""
        warm = len(sections) == 1 and sections[0].section.status in ("ready", "exact")
        return warm or _key(sections) in self._known

    def _remember(self, sections: Sequence[FoundSection]) -> None:
        self._known[_key(sections)] = None
        self._known.move_to_end(_key(sections))
        while len(self._known) > _MOST_KNOWN_PREFIXES:
            self._known.popitem(last=False)

    async def learn(self, prompt: Prompt, served: Served | None) -> None:
        """Notice what the engine has lost, by a restart or for want of room, and have it made again."""
        if served is None:
            return
        first = prompt.sections[0].section
        covered = served.exact_tokens + served.span_tokens
        for count, end in enumerate(prompt.ends):
            if covered < end and count != prompt.marked:
                self._known.pop(_key(prompt.sections[: count + 1]), None)
        lost = first.status == "ready" and not served.span_tokens
        refused = self._settings.min_quality is not None and (first.quality or 0) < self._settings.min_quality
        if lost and not refused:
            logger.info("section %s is not in the engine any more: compressing it again", first.id)
            await asyncio.to_thread(self._store.set_section, first.id, "queued", tries=0)
            self._warmer.wake()

    def done(self) -> None:
        self._gate.leave()


class RunningAnswer:
    """An answer on its way: iterate `events` once, then `close`."""

    def __init__(
        self,
        answerer: Answerer,
        tenant: Tenant,
        prompt: Prompt,
        sources: list[Source],
        stream: AsyncTextStream,
        started: float,
    ) -> None:
        self._answerer, self._tenant, self._prompt = answerer, tenant, prompt
        self._stream, self._started = stream, started
        self._open = True
        self.sources = sources

    async def events(self) -> AsyncIterator[tuple[str, dict[str, object]]]:
        """``sources``, then ``text`` for each piece, then ``done`` with the rest of the `Answer`; or
        ``error`` with ``code`` and ``message``."""
        yield "sources", {"sources": [source.model_dump() for source in self.sources]}
        try:
            async for name, data in self._told():
                yield name, data
        except GrkvError as error:
            problem = problem_of(error, self._answerer.engine.url, kept=KEPT)
            yield "error", {"code": problem.code, "message": problem.message}

    async def _told(self) -> AsyncIterator[tuple[str, dict[str, object]]]:
        ttft_s = None
        async for piece in self._stream:
            ttft_s = ttft_s or time.monotonic() - self._started
            yield "text", {"text": piece}
        result = self._stream.result
        await self._answerer.learn(self._prompt, result.grkv)
        yield "done", self._answer(result, ttft_s).model_dump(exclude={"sources"})

    def _answer(self, result: Completion, ttft_s: float | None) -> Answer:
        total_s = time.monotonic() - self._started
        text = result.text.strip()
        return Answer(
            text=text,
            html=render(text),
            finish_reason=result.finish_reason,
            cited=cited_numbers(text, len(self.sources)),
            sources=self.sources,
            usage=result.usage,
            served=result.grkv,
            ttft_s=total_s if ttft_s is None else ttft_s,
            total_s=total_s,
        )

    async def close(self) -> None:
        """End the answer; the engine stops generating it. May be called again."""
        if self._open:
            self._open = False
            self._answerer.done()
            await self._stream.close()


def _key(sections: Sequence[FoundSection]) -> tuple[str, ...]:
    # Ids of sections are unique over all tenants.
    return tuple(item.section.id for item in sections)


def _source(number: int, found: FoundSection, num_sections: dict[str, int]) -> Source:
    document, section = found.document, found.section
    return Source(
        number=number,
        document_id=document.id,
        document=document.name,
        section=section.number + 1,
        num_sections=num_sections[document.id],
        heading=section.heading,
        first_page=page_at(document.page_starts, section.start),
        last_page=page_at(document.page_starts, section.end - 1),
        score=found.score,
        passages=[
            PassageView(
                text=found.quote(hit),
                first_page=page_at(document.page_starts, hit.passage.start),
                last_page=page_at(document.page_starts, hit.passage.end - 1),
                score=hit.score,
            )
            for hit in found.hits
        ],
    )
