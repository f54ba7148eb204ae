"""When to compress, and what: jobs and the rules that make them. Counts tokens; knows no tensors."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Literal

from grkv_sglang.config import GrkvConfig
from grkv_sglang.policy.acceptance import Acceptance, Budget, acceptance_of, budget_of
from grkv_sglang.policy.options import NO_OPTIONS, RequestOptions

REUSE_MARGIN_TOKENS = 16
"""A stretch found by reuse ends this much before the point where two prompts diverged: prompts that go on
alike by chance (the same first words of two questions) must not push the end past the document."""


@dataclass(frozen=True)
class CompressionJob:
    """Compress the tokens behind the last span of a path, up to `end_tokens`."""

    token_ids: array[int]
    """The prefix, ``[0, end_tokens)``."""
    extra_key: str | None
    cache_salt: str | None
    reason: Literal["explicit", "reuse"]
    budget: Budget
    profile: str
    forced: Literal["all", "none"] | None = None

    @property
    def end_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def acceptance(self) -> Acceptance:
        """A span that makes this job needless: of this budget or more, whatever its quality turned out to
        be (compressing once more would not change it)."""
        return Acceptance("prefer_compressed", self.budget, min_quality=0.0)

    @property
    def identity(self) -> tuple[object, ...]:
        return (self.token_ids.tobytes(), self.extra_key, self.cache_salt, self.budget, self.forced)


@dataclass
class RequestState:
    """What the cache remembers of a running request."""

    options: RequestOptions
    acceptance: Acceptance
    admitted: bool = False
    reuse_end_tokens: int | None = None

    @classmethod
    def of(cls, options: RequestOptions, config: GrkvConfig) -> RequestState:
        return cls(options, acceptance_of(options, config))


def reuse_end(
    *, matched_tokens: int, last_span_end: int, config: GrkvConfig, page_size: int, mode: str
) -> int | None:
    """Where a stretch ends that this request just reused, or None if it is not worth compressing.

    `matched_tokens` of the prompt were cached when the request was admitted; what lies behind the last
    span is exact KV that another request computed.
    """
    if not (config.compression and config.auto_reuse) or mode == "exact":
        return None
    end = (matched_tokens - REUSE_MARGIN_TOKENS) // page_size * page_size
    return end if end - last_span_end >= config.min_span_tokens else None


def make_job(
    state: RequestState,
    token_ids: array[int],
    *,
    extra_key: str | None,
    cache_salt: str | None,
    config: GrkvConfig,
    page_size: int,
) -> CompressionJob | None:
    """The work a finished request leaves behind, if any. `token_ids` are its prompt."""
    if not config.compression:
        return None
    options = state.options
    reason: Literal["explicit", "reuse"]
    forced: Literal["all", "none"] | None
    if options.prefix_end_tokens is not None:
        end = options.prefix_end_tokens // page_size * page_size
        budget = budget_of(options, config)
        profile, forced, reason = options.profile or config.profile, options.forced, "explicit"
    elif state.reuse_end_tokens is not None:
        end = state.reuse_end_tokens
        # Made for everyone, so by the server's settings and not by one request's.
        budget = budget_of(NO_OPTIONS, config)
        profile, forced, reason = config.profile, None, "reuse"
    else:
        return None
    if end == 0 or end >= len(token_ids):
        return None
    return CompressionJob(token_ids[:end], extra_key, cache_salt, reason, budget, profile, forced)
