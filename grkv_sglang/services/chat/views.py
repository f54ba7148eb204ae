"""What the server tells a page, as typed models. Never a salt, a hash or a token."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel

from grkv_sglang.services.chat.database import Conversation, Turn
from grkv_sglang.services.common.markdown import render


class ProblemView(BaseModel):
    code: str
    message: str


class TurnView(BaseModel):
    """A question with its answer, as text and as HTML."""

    position: int
    question: str
    answer: str
    answer_html: str
    state: str
    problem: ProblemView | None
    finish_reason: str | None
    created_s: float


class Counters(BaseModel):
    """Of a conversation, in tokens; of turns that have an answer, whole or not."""

    prompt_tokens: int
    """Of all prompts: the history counts again with every turn."""
    completion_tokens: int
    cached_tokens: int
    """Of the prompts: prefill that was avoided."""
    span_tokens: int
    """Of the cached tokens: those served from compressed history."""
    compressions: int
    """Requests that asked to compress the history."""
    context_tokens: int
    """The conversation so far, the last prompt and its answer: its KV slots at full size."""
    held_slots: int
    """What it holds, as the last answer was served."""
    quality: float | None
    """The worst of its spans', 0 to 1."""
    ttft_s: float | None
    """From the last question to the first token of its answer."""


class ConversationSummary(BaseModel):
    id: str
    title: str
    updated_s: float


class ConversationView(ConversationSummary):
    turns: list[TurnView]
    counters: Counters


def turn_view(turn: Turn) -> TurnView:
    problem = None
    if turn.problem_code is not None:
        problem = ProblemView(code=turn.problem_code, message=turn.problem_message or "")
    return TurnView(
        position=turn.position,
        question=turn.question,
        answer=turn.answer,
        answer_html=render(turn.answer),
        state=turn.state,
        problem=problem,
        finish_reason=turn.finish_reason,
        created_s=turn.created_s,
    )


def counters_of(turns: Sequence[Turn]) -> Counters:
    told = [turn for turn in turns if turn.prompt_tokens is not None]
    last = told[-1] if told else None
    context = (last.prompt_tokens or 0) + (last.completion_tokens or 0) if last else 0
    return Counters(
        prompt_tokens=sum(turn.prompt_tokens or 0 for turn in told),
        completion_tokens=sum(turn.completion_tokens or 0 for turn in told),
        cached_tokens=sum(turn.cached_tokens or 0 for turn in told),
        span_tokens=sum(turn.span_tokens or 0 for turn in told),
        compressions=sum(turn.marked_tokens is not None for turn in told),
        context_tokens=context,
        held_slots=context - (last.span_tokens or 0) + (last.span_slots or 0) if last else 0,
        quality=last.quality if last else None,
        ttft_s=last.ttft_s if last else None,
    )


def summary(conversation: Conversation) -> ConversationSummary:
    return ConversationSummary(id=conversation.id, title=conversation.title, updated_s=conversation.updated_s)


def conversation_view(conversation: Conversation) -> ConversationView:
    return ConversationView(
        **summary(conversation).model_dump(),
        turns=[turn_view(turn) for turn in conversation.turns],
        counters=counters_of(conversation.turns),
    )
