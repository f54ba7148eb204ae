"""What comes back from a request, as typed models."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from grkv_sglang.config import MatchMode


class Served(BaseModel):
    """What a prompt was served from, as the plugin tells it in ``meta_info["grkv"]``. In tokens and slots."""

    model_config = ConfigDict(frozen=True)

    mode: MatchMode
    exact_tokens: int
    span_tokens: int
    span_slots: int
    spans: int
    budget: float | None
    """Kept share of the deepest span."""
    quality: float | None
    """The worst of the spans'."""
    profile: str | None
    reprefilled_tokens: int
    """Prefilled again although a span held them: the request asked for exact KV, or for better."""


class Usage(BaseModel):
    """Token counts of one request."""

    model_config = ConfigDict(frozen=True)

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int
    """Of the prompt, exact or compressed."""


class Completion(BaseModel):
    """One answer, of a chat or of a text completion.

    Attributes:
        text: the answer.
        finish_reason: ``stop``, ``length``, ...; None where the server gave none.
        usage: token counts.
        grkv: what served the prompt; None where the server does not tell: on ``/v1/completions``, in
            streams of the OpenAI API, and without the plugin. `usage.cached_tokens` is there in all of them.
        request_id: the id under which the server's log knows the request.
        model: the model's name as the server gives it; empty on the native route.
        reasoning: the reasoning that the server parsed out of a chat's answer, if it does.
        tool_calls: as the server gives them.
        prompt_token_ids, token_ids: where they were asked for (``return_token_ids``).
    """

    model_config = ConfigDict(frozen=True)

    text: str
    finish_reason: str | None
    usage: Usage
    grkv: Served | None = None
    request_id: str
    model: str
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
