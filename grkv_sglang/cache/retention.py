"""What an operator decides about spans: pin, time to live, delete.

Everything is soft: a pinned span goes last, but it goes before a request is refused; a deleted span that a
running request reads is out of reach at once and freed when that request is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from sglang.srt.mem_cache.radix_cache import TreeNode

from grkv_sglang.cache.span import SpanNode
from grkv_sglang.settings import describe_errors

if TYPE_CHECKING:
    from grkv_sglang.cache.grkv_cache import GrkvRadixCache


class CommandError(ValueError):
    """A command is wrong; the message names the valid fields."""


class Command(BaseModel):
    """What to do, and to which prefixes.

    `delete` with a namespace (`cache_salt`, `extra_key`, or both) drops all of its prefixes, exact ones too.
    With `tokens_sha256`, as listed in the state, any command concerns the span that ends there; `delete` then
    takes its exact copy as well.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    action: Literal["delete", "pin", "unpin"]
    tokens_sha256: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None

    @model_validator(mode="after")
    def _names_something(self) -> Command:
        namespace = self.cache_salt is not None or self.extra_key is not None
        if self.tokens_sha256 is None and not (namespace and self.action == "delete"):
            raise ValueError(
                "give tokens_sha256 of a span, or for delete a namespace: cache_salt, extra_key or both"
            )
        return self

    def names(self, node: TreeNode) -> bool:
        """Whether `node` is in the command's namespace (everything is, without one)."""
        key = node.key
        return (self.cache_salt is None or key.cache_salt == self.cache_salt) and (
            self.extra_key is None or key.extra_key == self.extra_key
        )


def parse_command(raw: Mapping[str, Any]) -> Command:
    """Raises CommandError."""
    try:
        return Command.model_validate(dict(raw))
    except ValidationError as error:
        raise CommandError(f"grkv command: {describe_errors(error, Command)}") from error


def execute(cache: GrkvRadixCache, command: Command) -> int:
    """Do a command; returns the slots that a deletion put out of reach. Raises CommandError."""
    deleted = _do(cache, command)
    if command.action == "delete":
        cache.end_lost_work("deleted")
    return deleted


def _do(cache: GrkvRadixCache, command: Command) -> int:
    if command.tokens_sha256 is None:
        tops = [n for n in cache.root_node.children.values() if command.names(n) and cache.in_reach(n)]
        return sum(cache.detach(node) for node in tops)
    deleted = 0
    for span in _named(cache, command):
        if command.action == "delete":
            copies = cache.exact_twins(span)
            deleted += cache.detach(span)
            deleted += sum(_delete_copy(cache, chain, span) for chain in copies)
        elif command.action == "pin":
            apply(cache, span, pin=True, ttl_s=None)
            if not span.pinned:
                raise CommandError(
                    f"grkv command: pinned spans may hold {cache.config.pin_share:.0%} of the pool"
                )
        else:
            span.pinned = False
    return deleted


def _named(cache: GrkvRadixCache, command: Command) -> list[SpanNode]:
    found = [
        span
        for span in cache.spans()
        if command.names(span)
        and cache.in_reach(span)
        and sha256(cache.path_tokens(span).tobytes()).hexdigest() == command.tokens_sha256
    ]
    if not found:
        raise CommandError(f"grkv command: no span has tokens_sha256 {command.tokens_sha256}")
    return found


def _delete_copy(cache: GrkvRadixCache, chain: list[TreeNode], span: SpanNode) -> int:
    """The exact nodes of a document that no other prompt shares, from its end up, with all behind them."""
    if sum(len(node.key) for node in chain) < len(span.key) and chain[-1].children:
        return 0  # prompts part before its end: nothing of it is its own
    top = chain[-1]
    for node in reversed(chain[:-1]):
        if len(node.children) > 1:
            break
        top = node
    return cache.detach(top)


def apply(cache: GrkvRadixCache, span: SpanNode, *, pin: bool, ttl_s: float | None) -> None:
    """Set what a request asked for, within the server's limit for pinned slots."""
    if pin and not span.pinned:
        limit = cache.config.pin_share * cache.token_to_kv_pool_allocator.size
        if pinned_slots(cache) + span.num_slots > limit:
            cache.counters.pins_refused += 1
        else:
            span.pinned = True
    if ttl_s is not None:
        span.ttl_s = ttl_s


def namespace_of(span: SpanNode) -> str | None:
    """A short name for a span's `extra_key` and `cache_salt`, which may be secrets; None without any."""
    key = span.key
    if key.extra_key is None and key.cache_salt is None:
        return None
    return sha256(repr((key.extra_key, key.cache_salt)).encode()).hexdigest()[:12]


def pinned_slots(cache: GrkvRadixCache) -> int:
    return sum(span.num_slots for span in cache.spans() if span.pinned)


def expired(cache: GrkvRadixCache, now_s: float) -> Iterator[SpanNode]:
    """Reachable spans that were unused for longer than they may be. (A span under another one is used
    whenever what lies behind it is.)"""
    for span in list(cache.spans()):
        if span.ttl_s is not None and now_s - span.used_at_s > span.ttl_s and cache.in_reach(span):
            yield span
