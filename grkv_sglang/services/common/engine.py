"""What every service asks of its engine, and errors of the engine's client as what a person is told."""

from __future__ import annotations

from dataclasses import dataclass

import httpx

from grkv_sglang.client import AsyncGrkvClient, GrkvApiError, GrkvConnectionError, GrkvError

_FULL_WORDS = ("context length", "longer than the model", "maximum allowed length", "too long")


@dataclass(frozen=True)
class Problem:
    """What went wrong.

    Attributes:
        status: of the HTTP answer that tells it.
        code: for programs: ``engine_down``, ``engine_timeout``, ``engine_broke_off``, ``engine_refused``,
            ``context_full``, ``engine_error``; services have further ones of their own.
        message: for people: what happened and what to do, in whole sentences.
    """

    status: int
    code: str
    message: str


async def context_tokens(client: AsyncGrkvClient) -> int:
    """Tokens that the model reads and writes at most.

    Raises:
        GrkvError: the engine is not reached, or something else than SGLang answers there.
    """
    models = await client.get("/v1/models")
    try:
        return int(models["data"][0]["max_model_len"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise GrkvConnectionError("/v1/models: not an answer of SGLang") from error


def problem_of(error: GrkvError, engine_url: str, *, kept: str = "your message is kept") -> Problem:
    """What to tell of an error between a service and its engine.

    Args:
        kept: what of the user's is not lost, as half a sentence.
    """
    if isinstance(error, GrkvApiError):
        return _refused(error, engine_url, kept)
    cause = error.__cause__
    silent = isinstance(cause, httpx.TimeoutException) and not isinstance(cause, httpx.ConnectTimeout)
    if silent or "no answer within" in str(error):
        return Problem(
            504,
            "engine_timeout",
            f"The model server at {engine_url} took too long to answer; {kept}. It may be busy: try again.",
        )
    if isinstance(cause, httpx.ConnectError | httpx.ConnectTimeout):
        return Problem(
            503,
            "engine_down",
            f"The model server at {engine_url} does not answer; {kept}. Try again once it is running.",
        )
    if isinstance(error, GrkvConnectionError):
        return Problem(
            502,
            "engine_broke_off",
            f"The model server at {engine_url} broke off its answer; {kept}. Try again.",
        )
    return Problem(502, "engine_error", f"The model server at {engine_url}: {error}")


def _refused(error: GrkvApiError, engine_url: str, kept: str) -> Problem:
    words = error.message.rstrip(".")
    if error.status in (400, 413, 422):
        if any(part in words for part in _FULL_WORDS):
            return Problem(413, "context_full", f"This is longer than the model can read: {words}.")
        return Problem(error.status, "engine_refused", f"The model server refused the request: {words}.")
    if error.status in (401, 403):
        return Problem(
            502,
            "engine_refused",
            f"The model server at {engine_url} does not accept this service's key; {kept}. "
            "Its operator must set the engine's API key.",
        )
    if error.status in (429, 502, 503, 504):
        return Problem(
            503,
            "engine_down",
            f"The model server at {engine_url} cannot answer now ({error.status}: {words}); {kept}. "
            "Try again in a moment.",
        )
    return Problem(
        502,
        "engine_error",
        f"The model server at {engine_url} failed ({error.status}: {words}); {kept}. Try again.",
    )
