"""The servers that are compared, started with the same model and pool, all alive at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from benchmarks.serving.client import TIMEOUT_S, Answer, ServingError, ask
from benchmarks.serving.workload import Request
from grkv_sglang.client.state import GrkvState
from grkv_sglang.serving import Engine, RunningServer, ServerSpec, detect_device, running_server

WARMUP_TOKENS = range(2000, 2256)
"""A prompt of no meaning: the first passes of a process are slower than all later ones."""

WARMUP_OPTIONS = {"prefix_end_tokens": 240, "budget": 0.5}

FAILURES = frozenset(
    {"budget_too_small", "too_short", "unsupported_model", "non_finite", "exception", "incomplete"}
)
"""Reasons for which a prefix will never be compressed: a benchmark that went on would measure something else.
The others, such as a lack of room, are part of what is measured."""

SETTLE_TIMEOUT_S = 300.0
POLL_S = 0.1
FLUSH_TIMEOUT_S = 60
EVICTED = "sglang:evicted_tokens_total"
"""KV slots that the radix tree gave up because the pool ran low, in SGLang's tree as in ours. The full-size
KV that the plugin frees once its span is made is not counted: nothing is lost with it."""


class EngineError(ValueError):
    """An engine that does not exist; the message names those that do."""


@dataclass(frozen=True)
class EngineChoice:
    """One server of a comparison: `stock`, `off`, or `grkv` at a budget."""

    engine: Engine
    budget: float | None = None

    @property
    def name(self) -> str:
        """As in tables: ``grkv 0.1``."""
        return self.engine if self.budget is None else f"{self.engine} {self.budget:g}"


def parse_engines(names: Sequence[str]) -> list[EngineChoice]:
    """From ``stock``, ``off``, ``grkv:0.1``.

    Raises:
        EngineError: something else, or one twice.
    """
    found: list[EngineChoice] = []
    for name in names:
        kind, _, budget = name.partition(":")
        if kind == "grkv" and budget:
            try:
                share = float(budget)
            except ValueError:
                raise EngineError(f"engine {name!r}: expected a budget such as grkv:0.1") from None
            if not 0 < share <= 1:
                raise EngineError(f"engine {name!r}: a budget is above 0 and at most 1")
            found.append(EngineChoice("grkv", share))
        elif name == "stock":
            found.append(EngineChoice("stock"))
        elif name == "off":
            found.append(EngineChoice("off"))
        else:
            raise EngineError(f"engine {name!r}: expected stock, off, or grkv with a budget (grkv:0.1)")
    if len(set(found)) < len(found) or not found:
        raise EngineError(f"expected one or more different engines, got {', '.join(names) or 'none'}")
    return found


@dataclass(frozen=True)
class ServerSizes:
    """What all servers of a comparison share."""

    model_path: Path
    log_folder: Path
    pool_tokens: int
    chunk_tokens: int
    seed: int
    dtype: str = "float32"


def server_spec(choice: EngineChoice, sizes: ServerSizes, config: Mapping[str, Any]) -> ServerSpec:
    """How one server is started. `config` goes to the plugin where there is one."""
    plugin = {"budget": choice.budget, **config} if choice.engine == "grkv" else {}
    return ServerSpec(
        model_path=sizes.model_path,
        engine=choice.engine,
        log_path=sizes.log_folder / f"{choice.name.replace(' ', '-')}.log",
        max_total_tokens=sizes.pool_tokens,
        chunked_prefill_size=sizes.chunk_tokens,
        extra_args=("--enable-metrics",),
        grkv_config=plugin,
        random_seed=sizes.seed,
        device=detect_device(),
        dtype=sizes.dtype,
    )


@contextmanager
def running_servers(
    choices: Sequence[EngineChoice], sizes: ServerSizes, config: Mapping[str, Any], console: Console
) -> Iterator[dict[str, RunningServer]]:
    """All servers by name, started one after the other."""
    with ExitStack() as stack:
        yield {
            choice.name: stack.enter_context(running_server(server_spec(choice, sizes, config), console))
            for choice in choices
        }


class Live:
    """One running server, and what the benchmarks ask of it besides answers."""

    def __init__(self, choice: EngineChoice, http: httpx.AsyncClient) -> None:
        self.choice = choice
        self._http = http

    @property
    def name(self) -> str:
        return self.choice.name

    @property
    def compresses(self) -> bool:
        return self.choice.engine == "grkv"

    async def ask(
        self, prompt: Sequence[int], new_tokens: int, options: dict[str, Any] | None = None
    ) -> Answer:
        """One request; `options` are the plugin's and left out where there is none."""
        return await ask(self._http, prompt, new_tokens, options if self.compresses else None)

    async def ask_about(self, request: Request, new_tokens: int) -> Answer:
        """A request that says where its document ends, as a service that knows its documents would."""
        return await self.ask(request.prompt, new_tokens, {"prefix_end_tokens": request.document_tokens})

    async def settle(self) -> float:
        """Wait until no compression is waiting or in work; returns the seconds it took.

        Raises:
            ServingError: a compression failed for one of `FAILURES`.
            TimeoutError: it did not come to an end.
        """
        if not self.compresses:
            return 0.0
        started = time.perf_counter()
        while True:
            state = await self.state()
            failed = {r: n for r, n in state.counters.compressions_failed.items() if r in FAILURES}
            if failed:
                raise ServingError(
                    f"{self.name}: compressions failed, which would not be measured as such: {failed}; the "
                    "server's log says why (budget_too_small: give longer documents or a larger budget)"
                )
            if state.counters.jobs_waiting == 0 and state.pool.in_work_slots == 0:
                return time.perf_counter() - started
            if time.perf_counter() - started > SETTLE_TIMEOUT_S:
                raise TimeoutError(f"{self.name}: compressions still waiting: {state.counters}")
            await asyncio.sleep(POLL_S)

    async def state(self) -> GrkvState:
        """The plugin's own state."""
        response = await self._http.get("/grkv/state")
        response.raise_for_status()
        return GrkvState.model_validate(response.json()[0])

    async def evicted_slots(self) -> int:
        """`EVICTED` so far; 0 until the first eviction."""
        response = await self._http.get("/metrics")
        response.raise_for_status()
        return evicted_in(response.text)

    async def flush(self) -> None:
        """Empty the radix tree."""
        response = await self._http.post("/flush_cache", params={"timeout": FLUSH_TIMEOUT_S})
        response.raise_for_status()


def evicted_in(metrics: str) -> int:
    """`EVICTED` out of a ``/metrics`` page, summed over its labels."""
    return round(
        sum(
            sample.value
            for family in text_string_to_metric_families(metrics)
            for sample in family.samples
            if sample.name == EVICTED
        )
    )


@asynccontextmanager
async def connected(
    choices: Sequence[EngineChoice], servers: Mapping[str, RunningServer]
) -> AsyncIterator[list[Live]]:
    """A client per server, each warmed up and with an empty tree."""
    limits = httpx.Limits(max_connections=None)
    async with AsyncExitStack() as stack:
        engines = []
        for choice in choices:
            http = httpx.AsyncClient(base_url=servers[choice.name].base_url, timeout=TIMEOUT_S, limits=limits)
            engine = Live(choice, await stack.enter_async_context(http))
            await engine.ask(WARMUP_TOKENS, 4, WARMUP_OPTIONS)
            await engine.settle()
            await engine.flush()
            engines.append(engine)
        yield engines


def measure(
    choices: Sequence[EngineChoice],
    sizes: ServerSizes,
    config: Mapping[str, Any],
    console: Console,
    work: Callable[[list[Live]], Coroutine[Any, Any, None]],
) -> None:
    """Start all servers, run `work` with them, end them."""

    async def inside(servers: Mapping[str, RunningServer]) -> None:
        async with connected(choices, servers) as engines:
            await work(engines)

    with running_servers(choices, sizes, config, console) as servers:
        asyncio.run(inside(servers))


T = TypeVar("T")


def in_turn(engines: Sequence[T], block: int) -> list[T]:
    """The order in which a block is sent to the engines: turned around with every block."""
    return list(engines) if block % 2 == 0 else list(reversed(engines))
