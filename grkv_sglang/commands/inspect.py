"""`grkv inspect`: the tree of a running server, in the terminal."""

from __future__ import annotations

import time

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from grkv_sglang.client import GrkvClient, GrkvState, SpanState
from grkv_sglang.client.state import Counters, PoolState

BAR_CHARACTERS = 60
NAME_CHARACTERS = 12


def run_inspect(client: GrkvClient, console: Console, *, watch_s: float | None, json: bool) -> None:
    """Print the state once, or again every `watch_s` seconds until interrupted.

    Raises:
        GrkvError: the server is not reached, or has no plugin.
    """
    state = client.state()
    if json:
        console.print(state.model_dump_json(indent=2), markup=False, highlight=False, soft_wrap=True)
        return
    if watch_s is None:
        console.print(render(state))
        return
    with Live(render(state), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(watch_s)
            live.update(render(client.state()), refresh=True)


def render(state: GrkvState) -> Group:
    """Pool, spans, counters and totals."""
    return Group(pool_text(state.pool), spans_table(state), counters_text(state.counters), totals(state))


def pool_text(pool: PoolState) -> Text:
    """A bar of the pool's slots and its figures."""
    other = pool.total_slots - pool.free_slots - pool.exact_slots - pool.span_slots - pool.in_work_slots
    parts = (
        ("exact", pool.exact_slots, "blue"),
        ("spans", pool.span_slots, "green"),
        ("in work", pool.in_work_slots, "yellow"),
        ("running requests", max(0, other), "magenta"),
        ("free", pool.free_slots, "bright_black"),
    )
    text = Text("pool ", style="bold")
    filled = 0
    counted = 0
    for _, slots, style in parts:
        counted += slots
        until = round(BAR_CHARACTERS * counted / pool.total_slots) if pool.total_slots else 0
        text.append("█" * max(0, until - filled), style=style)
        filled = max(filled, until)
    text.append(f" {pool.total_slots:,} slots\n")
    for name, slots, style in parts:
        text.append("     ■ ", style=style)
        text.append(f"{name} {slots:,} ({slots / max(1, pool.total_slots):.0%})")
    text.append(f"\n     pinned {pool.pinned_slots:,}\n")
    return text


def spans_table(state: GrkvState) -> Table:
    """The spans that the server lists, latest first."""
    listed = len(state.spans)
    count = f"{listed} of {state.num_spans}" if listed < state.num_spans else f"{listed}"
    table = Table("span", "positions", title=f"spans: {count}", title_justify="left")
    for heading in ("tokens", "slots", "saving", "quality", "hits", "age"):
        table.add_column(heading, justify="right")
    for heading in ("profile", "made by", "kept", "namespace"):
        table.add_column(heading)
    for span in state.spans:
        table.add_row(
            span.tokens_sha256[:NAME_CHARACTERS],
            f"{span.start_tokens:,}-{span.end_tokens:,}",
            f"{span.tokens:,}",
            f"{span.slots:,}",
            f"{1 - span.slots / span.tokens:.0%}",
            "" if span.quality is None else f"{span.quality:.3f}",
            f"{span.hits:,}",
            duration(span.age_s),
            span.profile,
            span.reason,
            _kept(span),
            span.namespace or "",
        )
    return table


def _kept(span: SpanState) -> str:
    wishes = ["pinned"] if span.pinned else []
    if span.ttl_s is not None:
        wishes.append(f"{duration(span.ttl_s)} unused")
    return ", ".join(wishes)


def counters_text(counters: Counters) -> Text:
    """What happened since the server started; what never happened is left out."""
    text = Text()
    for name, value in counters.model_dump().items():
        if isinstance(value, dict):
            value = ", ".join(f"{reason} {count:,}" for reason, count in sorted(value.items()))
        if not value:
            continue
        text.append(f"{name.replace('_', ' ')}: ", style="bold")
        text.append(f"{value:,}\n" if isinstance(value, int) else f"{value}\n")
    return text


def totals(state: GrkvState) -> Text:
    """What the listed spans save, and the census."""
    tokens = sum(span.tokens for span in state.spans)
    slots = sum(span.slots for span in state.spans)
    text = Text(f"{tokens:,} tokens in {slots:,} slots: {tokens - slots:,} slots saved", style="bold")
    if not state.census.ok:
        text.append(f"\ncensus FAILED: {state.census.last_error}", style="bold red")
    return text


def duration(seconds: float) -> str:
    """Seconds as people read them: 5s, 3m, 2h, 4d."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.0f}s"
