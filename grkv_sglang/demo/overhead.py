"""What the plugin costs where no prefix is long: bursts of short prompts on two servers in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from grkv_sglang.demo.client import SglangClient
from grkv_sglang.demo.cost import relative_cost
from grkv_sglang.demo.documents import Document
from grkv_sglang.demo.result import NoLongPrefixResult

PROMPTS_PER_BURST = 4
PROMPT_TOKENS = 60
NEW_TOKENS = 16
WARMUP_PAIRS = 2

Burst = tuple[tuple[int, ...], ...]


def build_bursts(documents: Sequence[Document], tokenizer: Any, count: int) -> list[Burst]:
    """Bursts of short prompts out of the documents; no two prompts overlap, so nothing is found cached.

    Raises:
        ValueError: the documents have too few tokens.
    """
    pieces: list[tuple[int, ...]] = []
    for document in documents:
        ids = tokenizer(document.text, add_special_tokens=False)["input_ids"]
        starts = range(0, len(ids) - PROMPT_TOKENS + 1, PROMPT_TOKENS)
        pieces += [tuple(ids[start : start + PROMPT_TOKENS]) for start in starts]
    if len(pieces) < count * PROMPTS_PER_BURST:
        raise ValueError(
            f"{count} bursts need {count * PROMPTS_PER_BURST} prompts, the documents give {len(pieces)}"
        )
    return [tuple(pieces[n * PROMPTS_PER_BURST : (n + 1) * PROMPTS_PER_BURST]) for n in range(count)]


def measure_overhead(
    off: SglangClient, grkv: SglangClient, bursts: Sequence[Burst], advance: Callable[[], None]
) -> NoLongPrefixResult:
    """Time every burst on both servers, one right after the other, in alternating order.

    The first `WARMUP_PAIRS` bursts are not counted.
    """
    times: dict[str, list[float]] = {"off": [], "grkv": []}
    for number, burst in enumerate(bursts):
        order = [("off", off), ("grkv", grkv)]
        if number % 2:
            order.reverse()
        for name, client in order:
            times[name].append(client.generate(burst, NEW_TOKENS)[0].total_s)
        advance()
    off_s, grkv_s = times["off"][WARMUP_PAIRS:], times["grkv"][WARMUP_PAIRS:]
    cost = relative_cost(grkv_s, off_s)
    return NoLongPrefixResult(
        pairs=len(off_s),
        prompts_per_burst=PROMPTS_PER_BURST,
        prompt_tokens=PROMPT_TOKENS,
        new_tokens=NEW_TOKENS,
        mean_cost=cost.mean,
        median_cost=cost.median,
        upper_95=cost.upper_95,
        off_s=off_s,
        grkv_s=grkv_s,
    )
