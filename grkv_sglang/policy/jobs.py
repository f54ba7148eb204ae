"""When to compress, and what: jobs and the rules that make them. Counts tokens; knows no tensors."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from typing import Literal

from grkv_sglang.config import GrkvConfig, Trigger
from grkv_sglang.policy.acceptance import Acceptance, Budget, acceptance_of, budget_of
from grkv_sglang.policy.boundaries import MessageMarkers, last_turn_start, tokens_before_user
from grkv_sglang.policy.options import NO_OPTIONS, RequestOptions
from grkv_sglang.policy.ranges import Ranges

MARGIN_TOKENS = 16
"""A stretch without a known end stops this much early. On reuse: prompts that go on alike by chance (the same
first words of two questions) must not push the end past the document. Elsewhere: the newest tokens stay
exact."""

HEADER_REACH_TOKENS = 64
"""On reuse the start of a user message this close before the point of divergence is taken as the end."""


@dataclass(frozen=True)
class CompressionJob:
    """Compress the tokens behind the last span of a path, up to `end_tokens`."""

    token_ids: array[int]
    """The prefix, ``[0, end_tokens)``."""
    extra_key: str | None
    cache_salt: str | None
    lora_id: str | None
    reason: Trigger
    budget: Budget
    profile: str
    forced: Literal["all", "none", "packed"] | None = None
    protected: Ranges = ()
    """Positions of the prompt that are kept as they are."""
    exact_tokens: int = 0
    """The prompt's first so many tokens stay exact: its system message, where the server protects that."""
    pin: bool = False
    ttl_s: float | None = None
    shared: bool = True
    """Other prompts part at its end (or may, for all that is known): see `SpanOrigin.shared`."""

    @property
    def end_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def acceptance(self) -> Acceptance:
        """A span that makes this job needless: of this budget or more, whatever its quality turned out to
        be (compressing once more would not change it)."""
        return Acceptance("prefer_compressed", self.budget, min_quality=0.0, protected=self.protected)

    @cached_property
    def identity(self) -> tuple[object, ...]:
        digest = sha256(self.token_ids.tobytes()).digest()
        kind = (self.budget, self.profile, self.forced, self.protected)
        return (digest, self.extra_key, self.cache_salt, *kind)

    def with_wishes_of(self, other: CompressionJob) -> CompressionJob:
        """This job, for a second request that wants the same prefix too."""
        return replace(
            self,
            reason="explicit" if "explicit" in (self.reason, other.reason) else self.reason,
            pin=self.pin or other.pin,
            ttl_s=self.ttl_s if other.ttl_s is None else max(self.ttl_s or 0.0, other.ttl_s),
            shared=self.shared or other.shared,
        )


@dataclass
class RequestState:
    """What the cache remembers of a running request."""

    options: RequestOptions
    acceptance: Acceptance
    admitted: bool = False
    reused_tokens: int = 0
    """How far the request was served from a stretch that is worth compressing; 0: no such stretch."""
    reused_whole: bool = False
    """What was reused had nothing behind it: the request continues it, as the next turn of a chat does."""
    last_span_end: int = 0

    @classmethod
    def of(cls, options: RequestOptions, config: GrkvConfig) -> RequestState:
        return cls(options, acceptance_of(options, config))


def reused_stretch(
    *, matched_tokens: int, last_span_end: int, hits: int, config: GrkvConfig, mode: str
) -> int:
    """`matched_tokens` if the exact stretch behind the last span that a request just reused is worth
    compressing, else 0.

    `hits` requests have reused it by now, this one included.
    """
    if "reuse" not in config.triggers or not config.compression or mode == "exact":
        return 0
    if hits < config.reuse_min_hits or matched_tokens - last_span_end < config.min_span_tokens:
        return 0
    return matched_tokens


def make_job(
    state: RequestState,
    token_ids: array[int],
    *,
    prompt_tokens: int,
    extra_key: str | None,
    cache_salt: str | None,
    lora_id: str | None,
    config: GrkvConfig,
    page_size: int,
    markers: MessageMarkers | None,
) -> CompressionJob | None:
    """The work a finished request leaves behind, if any.

    `token_ids` is what the tree holds of its prompt (`prompt_tokens` long) and its output, whole pages. A
    request's own mark comes first, then what it reused, then what it left.
    """
    if not config.compression:
        return None
    options = state.options
    explicit = options.prefix_end_tokens is not None and "explicit" in config.triggers
    ends: list[tuple[Trigger, int]] = []
    if explicit:
        ends.append(("explicit", options.prefix_end_tokens or 0))
    else:
        if state.reused_tokens:
            ends.append(("reuse", _reuse_end(token_ids, state.reused_tokens, markers)))
        if "insert" in config.triggers and state.acceptance.mode != "exact":
            ends.append(("insert", natural_end(token_ids, prompt_tokens, markers)))
    aligned = [(reason, end // page_size * page_size) for reason, end in ends]
    least = 1 if explicit else state.last_span_end + config.min_span_tokens
    fitting = [(reason, end) for reason, end in aligned if least <= end <= len(token_ids)]
    if not fitting:
        return None
    reason, end = fitting[0]
    return CompressionJob(
        token_ids[:end],
        extra_key,
        cache_salt,
        lora_id,
        reason,
        # Unless a request asks, spans are made for everyone: by the server's settings.
        budget_of(options if explicit else NO_OPTIONS, config),
        (options.profile if explicit else None) or config.profile,
        options.forced if explicit else None,
        state.acceptance.protected if explicit else (),
        exact_head(token_ids, config=config, page_size=page_size, markers=markers),
        bool(options.pin) if explicit else False,
        options.ttl_s if explicit else None,
        shared=explicit or (reason == "reuse" and not state.reused_whole),
    )


def exact_head(
    token_ids: array[int], *, config: GrkvConfig, page_size: int, markers: MessageMarkers | None
) -> int:
    """How much of a prompt no span may hold, in whole pages.

    `token_ids` must reach into the first user message, which is how a system message is recognised: a prefix
    that ends before it does not show that it is one.
    """
    if not config.protect_system or markers is None:
        return 0
    return -(-tokens_before_user(token_ids, markers) // page_size) * page_size


def _reuse_end(token_ids: array[int], reused_tokens: int, markers: MessageMarkers | None) -> int:
    """Where a reused stretch ends: at the last user message if two prompts diverged just behind its header
    (documents in messages of their own), else a margin before the divergence."""
    if markers is not None:
        near = token_ids[max(0, reused_tokens - HEADER_REACH_TOKENS) : reused_tokens]
        turn = last_turn_start(near, markers)
        if turn is not None:
            return reused_tokens - len(near) + turn
    return reused_tokens - MARGIN_TOKENS


def natural_end(token_ids: array[int], prompt_tokens: int, markers: MessageMarkers | None) -> int:
    """Where the reusable part of a path ends that nobody has marked or reused yet.

    In a chat: where the last user message starts. Elsewhere: a margin before the prompt's end.
    """
    if markers is not None:
        turn = last_turn_start(token_ids, markers)
        if turn is not None:
            return turn
    return prompt_tokens - MARGIN_TOKENS


def plan_parts(
    *, covered: int, end: int, cuts: Iterable[int], min_tokens: int, exact_until: int = 0
) -> list[tuple[int, int]]:
    """Split ``[covered, end)`` into the spans to make, ``(start, end)`` in order, each next to the other.

    `cuts` are positions where other prompts go other ways, or where the template ends a message. A shared
    header shorter than `min_tokens` stays exact, so that it is held once; a longer shared part becomes a
    span of its own, so that other prompts can use it. What lies before `exact_until` stays exact. No parts
    where nothing else is left.
    """
    covered = max(covered, exact_until)
    if covered >= end:
        return []
    start = covered
    parts = []
    for cut in sorted(set(cuts)):
        if not covered < cut <= end - min_tokens:
            continue
        if cut - covered < min_tokens:
            start = cut
        elif cut - start >= min_tokens:
            parts.append((start, cut))
            start = cut
    return [*parts, (start, end)]
