"""What the service asks of SGLang beside answers: token counts, the model's context, the end of a span."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from grkv_sglang.client import AsyncGrkvClient, GrkvApiError, GrkvConnectionError, RetryPolicy, Timeouts
from grkv_sglang.client.state import namespace_name
from grkv_sglang.services.common.engine import context_tokens
from grkv_sglang.services.rag.settings import RagSettings

_BATCH_TEXTS = 2000
_QUICK_RETRIES = RetryPolicy(attempts=2, base_delay_s=0.3)
"""A person waits for the answer, and background work has retries of its own."""


class Engine:
    """The client with what the service needs of it."""

    def __init__(self, settings: RagSettings) -> None:
        self.client = AsyncGrkvClient(
            settings.engine_url,
            api_key=settings.engine_api_key,
            admin_api_key=settings.engine_admin_api_key,
            timeouts=Timeouts(connect_s=5.0, read_s=settings.timeout_s),
            retry=_QUICK_RETRIES,
        )
        self.url = settings.engine_url
        self._context_tokens: int | None = None

    async def close(self) -> None:
        await self.client.close()

    async def context_tokens(self, *, fresh: bool = False) -> int:
        """Tokens that the model reads and writes at most; asked for once, or again with `fresh`.

        Raises:
            GrkvError: the engine is not reached.
        """
        if self._context_tokens is None or fresh:
            self._context_tokens = await context_tokens(self.client)
        return self._context_tokens

    async def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text, without those that a tokenizer puts around one.

        Raises:
            GrkvError: the engine is not reached.
        """
        counts: list[int] = []
        for start in range(0, len(texts), _BATCH_TEXTS):
            batch = list(texts[start : start + _BATCH_TEXTS])
            answer = await self.client.post("/v1/tokenize", {"prompt": batch, "add_special_tokens": False})
            try:
                counts.extend(int(count) for count in answer["count"])
            except (KeyError, TypeError, ValueError) as error:
                raise GrkvConnectionError(f"{self.url}/v1/tokenize: not an answer of SGLang") from error
        if len(counts) != len(texts):
            raise GrkvConnectionError(f"{self.url}/v1/tokenize: {len(counts)} counts of {len(texts)} texts")
        return counts

    async def delete_prefixes(self, cache_salt: str, digests: Iterable[str]) -> int:
        """Delete the spans that end prefixes of one namespace, with their exact copies; how many there were.

        Raises:
            GrkvError: the engine is not reached, or refused.
        """
        state = await self.client.state()
        namespace = namespace_name(cache_salt)
        held = {span.tokens_sha256 for span in state.spans if span.namespace == namespace}
        complete = state.num_spans <= len(state.spans)  # it lists the latest only
        deleted = 0
        for digest in digests:
            if complete and digest not in held:
                continue  # nothing is there to delete
            try:
                await self.client.command("delete", tokens_sha256=digest, cache_salt=cache_salt)
                deleted += 1
            except GrkvApiError as error:
                if error.status != 404:  # gone by now
                    raise
        return deleted
