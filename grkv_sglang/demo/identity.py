"""The promise that compression machinery changes nothing by itself, checked on a running server.

Four shared prefixes with five continuations each, greedy. On the plugin's server every prefix becomes a
span that keeps all of its tokens (`forced: "all"`): requests run through spans, but the KV is the same.
In a second pass dummy tokens in front of every prompt become a span of zero slots (`forced: "none"`): each
row then begins with sentinels, and since RoPE is relative the outputs are those without dummies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from grkv_sglang.demo.client import Generation, SglangClient
from grkv_sglang.demo.documents import Document
from grkv_sglang.demo.result import Agreement, IdentityResult, SentinelResult

PREFIX_TOKENS = (300, 360, 430, 500)
"""Below the default `min_span_tokens`, so that nothing is compressed but what the requests ask for."""

CONTINUATIONS = (
    " The writer says that",
    " In other words, the",
    " After that, they",
    " What happens next is",
    " However, it is",
)
NEW_TOKENS = 24
BATCH = 4
DUMMY_TOKENS = tuple(range(1000, 1016))
"""Any tokens will do: nothing attends to them."""

Advance = Callable[[], None]


@dataclass(frozen=True)
class PrefixGroup:
    """Prompts that share exactly `prefix`."""

    prefix: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...]


def build_groups(documents: Sequence[Document], tokenizer: Any) -> list[PrefixGroup]:
    """Prefixes out of the documents, each at another place, with the continuations behind them.

    Raises:
        ValueError: the documents are too short, or prompts share more or less than a group's prefix.
    """
    endings = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in CONTINUATIONS]
    texts = [tokenizer(document.text, add_special_tokens=False)["input_ids"] for document in documents]
    groups = []
    for number, length in enumerate(PREFIX_TOKENS):
        ids = texts[number % len(texts)]
        start = number // len(texts) * max(PREFIX_TOKENS)
        prefix = tuple(ids[start : start + length])
        if len(prefix) < length:
            raise ValueError(f"document {number % len(texts)} has only {len(ids)} tokens")
        groups.append(PrefixGroup(prefix, tuple((*prefix, *ending) for ending in endings)))
    for what, firsts in (
        ("prefixes", [group.prefix[0] for group in groups]),
        ("continuations", [ending[0] for ending in endings]),
    ):
        if len(set(firsts)) < len(firsts):
            raise ValueError(f"two {what} begin with the same token: {firsts}")
    return groups


def run_exact(client: SglangClient, groups: Sequence[PrefixGroup], advance: Advance) -> list[Generation]:
    """All prompts one by one on a server that knows no spans, from an empty cache."""
    client.flush_cache()
    answers = []
    for prompt in _prompts(groups):
        answers += client.generate([prompt], NEW_TOKENS)
        advance()
    return answers


def run_batched(client: SglangClient, groups: Sequence[PrefixGroup], advance: Advance) -> list[Generation]:
    """The same prompts as concurrent batches of `BATCH`, from an empty cache."""
    client.flush_cache()
    prompts = _prompts(groups)
    answers = []
    for start in range(0, len(prompts), BATCH):
        batch = prompts[start : start + BATCH]
        answers += client.generate(batch, NEW_TOKENS)
        for _ in batch:
            advance()
    return answers


def run_spans(
    client: SglangClient, groups: Sequence[PrefixGroup], advance: Advance, dummies: Sequence[int] = ()
) -> list[Generation]:
    """All prompts one by one, the first of each group leaving a span that keeps the whole prefix.

    Args:
        client: of a server with the plugin and `allow_forced`.
        groups: the prompts.
        advance: called after each prompt.
        dummies: tokens put in front of every prompt and removed from attention by a span of zero slots.
    """
    client.flush_cache()
    if dummies:
        client.generate(
            [[*dummies, groups[0].prefix[0]]],
            1,
            options={"prefix_end_tokens": len(dummies), "forced": "none"},
        )
        client.wait_for_span(dummies)
    answers = []
    for group in groups:
        prefix = (*dummies, *group.prefix)
        for number, prompt in enumerate(group.prompts):
            options = {"prefix_end_tokens": len(prefix), "forced": "all"} if number == 0 else None
            answers += client.generate([[*dummies, *prompt]], NEW_TOKENS, options=options)
            if number == 0:
                client.wait_for_span(prefix)
            advance()
    return answers


def agreement(outputs: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> Agreement:
    """Where two runs of the same prompts gave different tokens.

    Raises:
        ValueError: the runs have different numbers of prompts.
    """
    pairs = list(zip(outputs, expected, strict=True))
    differing = [number for number, (ours, theirs) in enumerate(pairs) if tuple(ours) != tuple(theirs)]
    return Agreement(
        prompts=len(pairs),
        equal=len(pairs) - len(differing),
        differing_prompts=differing,
        first_difference_at=[_first_difference(*pairs[number]) for number in differing],
    )


def identity_result(
    *,
    groups: Sequence[PrefixGroup],
    stock: Sequence[Generation],
    stock_batched: Sequence[Generation],
    off: Sequence[Generation],
    grkv: Sequence[Generation],
    sentinels: Sequence[Generation],
) -> IdentityResult:
    """Put the runs beside each other."""
    stock_ids, off_ids, grkv_ids = _outputs(stock), _outputs(off), _outputs(grkv)
    dummies = len(DUMMY_TOKENS)
    return IdentityResult(
        prompts=len(grkv),
        prefixes=len(groups),
        new_tokens=NEW_TOKENS,
        versus_off=agreement(grkv_ids, off_ids),
        served_from_span=sum(_span_tokens(answer) > 0 for answer in grkv),
        versus_stock=agreement(grkv_ids, stock_ids),
        off_versus_stock=agreement(off_ids, stock_ids),
        stock_batched_versus_sequential=agreement(_outputs(stock_batched), stock_ids),
        sentinels=SentinelResult(
            dummy_tokens=dummies,
            versus_off=agreement(_outputs(sentinels), off_ids),
            served_from_span=sum(_span_tokens(answer) > dummies for answer in sentinels),
            sentinel_rows=sum(_gap(answer) >= dummies for answer in sentinels),
        ),
    )


def _prompts(groups: Sequence[PrefixGroup]) -> list[tuple[int, ...]]:
    return [prompt for group in groups for prompt in group.prompts]


def _outputs(answers: Sequence[Generation]) -> list[tuple[int, ...]]:
    return [answer.output_ids for answer in answers]


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    for position, (left, right) in enumerate(zip(ours, theirs, strict=False)):
        if left != right:
            return position
    return min(len(ours), len(theirs))


def _span_tokens(answer: Generation) -> int:
    return int(answer.grkv["span_tokens"]) if answer.grkv else 0


def _gap(answer: Generation) -> int:
    return int(answer.grkv["span_tokens"]) - int(answer.grkv["span_slots"]) if answer.grkv else 0
