"""A long, mixed life on the real engine: ``python -m benchmarks.soak --requests N --seed S --json OUT``.

A cut-down random model, a small pool, SGLang's memory checks and our census on, freed slots filled with NaN,
retractions forced and faults injected into compressions. Shared documents, growing chats, short prompts,
samples, tenants, pins, exact requests, aborts, clients that hang up, deletions and flushes come at random
from a seed. At the end the pool must be exactly as full as the tree says.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import psutil
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoTokenizer

from grkv_sglang.model import ensure_model
from tests.engine.client import Client
from tests.engine.conftest import engine
from tests.engine.tiny_model import ensure_tiny_model

POOL_TOKENS = 5000
CLIENTS = 8
DOCUMENTS = 14
CHATS = 6
CHAT_LIMIT_TOKENS = 1800
REFERENCES = 8
VOCABULARY = range(1000, 40000)
FAULTS = ("raise", "nan", "no_room", "probe")
LAYERS = 4
CONFIG = {
    "min_span_tokens": 200,
    "budget": 0.25,
    "step_tokens": 400,
    "triggers": "explicit,insert,reuse,pressure",
    "pressure_watermark": 0.3,
    "cooldown_requests": 4,
    "merge_after_spans": 2,
    "pin_share": 0.1,
    "reuse_min_hits": 1,
}


@dataclass
class Soak:
    """One run: the texts, what was asked, and what went wrong."""

    rng: random.Random
    http: httpx.AsyncClient
    folder: Path
    documents: list[list[int]] = field(default_factory=list)
    chats: list[list[int]] = field(default_factory=list)
    references: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """Prompts and their outputs when they were served alone and exact."""
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def tokens(self, count: int) -> list[int]:
        return [self.rng.choice(VOCABULARY) for _ in range(count)]

    # -- kinds of requests ---------------------------------------------------------------------------

    async def one(self, number: int) -> None:
        kinds = {
            self.ask_document: 45,
            self.continue_chat: 20,
            self.short: 10,
            self.exact_reference: 8,
            self.hang_up: 7,
            self.abort: 4,
            self.samples: 3,
            self.operate: 3,
        }
        (kind,) = self.rng.choices(list(kinds), list(kinds.values()))
        if self.rng.random() < 0.05:
            fault = self.folder / self.rng.choice(FAULTS)
            fault.write_text(str(self.rng.randrange(LAYERS)))
            self.counts["faults"] += 1
        self.counts[kind.__name__] += 1
        await kind(f"soak-{number}")

    async def ask_document(self, rid: str) -> None:
        index = min(int(self.rng.paretovariate(0.7)) - 1, DOCUMENTS - 1)  # few are popular, all are asked
        document = self.documents[index]
        options: dict[str, Any] = {}
        if self.rng.random() < 0.4:
            options["prefix_end_tokens"] = len(document)
            if self.rng.random() < 0.2:
                options["pin"] = True
            if self.rng.random() < 0.2:
                options["ttl_s"] = 5.0
            if self.rng.random() < 0.2:
                options["budget"] = self.rng.choice([0.2, 0.5])
        if self.rng.random() < 0.1:
            options["mode"] = self.rng.choice(["exact", "prefer_exact"])
        cut = len(document) if self.rng.random() < 0.9 else self.rng.randrange(1, len(document))
        if cut < len(document):
            options.pop("prefix_end_tokens", None)
            options = {name: value for name, value in options.items() if name == "mode"}
        salt: dict[str, Any] = (
            {"cache_salt": f"tenant-{self.rng.randrange(2)}"} if self.rng.random() < 0.15 else {}
        )
        await self.generate([*document[:cut], *self.tokens(self.rng.randrange(1, 12))], options, rid, **salt)

    async def continue_chat(self, rid: str) -> None:
        index = self.rng.randrange(CHATS)
        history = self.chats[index]
        prompt = [*history, *self.tokens(self.rng.randrange(20, 260))]
        answer = await self.generate(prompt, {}, rid)
        if answer is not None:
            grown = [*prompt, *answer["output_ids"]]
            self.chats[index] = grown if len(grown) < CHAT_LIMIT_TOKENS else self.tokens(5)

    async def short(self, rid: str) -> None:
        await self.generate(self.tokens(self.rng.randrange(1, 40)), {}, rid)

    async def exact_reference(self, rid: str) -> None:
        prompt, expected = self.rng.choice(self.references)
        answer = await self.generate(prompt, {"mode": "exact"}, rid, new_tokens=len(expected))
        if answer is not None and answer["output_ids"] != expected:
            self.problems.append(f"{rid}: an exact request gave {answer['output_ids']}, alone {expected}")

    async def samples(self, rid: str) -> None:
        await self.generate(self.rng.choice(self.documents), {}, rid, n=2)

    async def hang_up(self, rid: str) -> None:
        """A client that reads a little of its stream and leaves."""
        document = self.rng.choice(self.documents)
        body = self.body([*document, *self.tokens(3)], {}, 40) | {"stream": True, "rid": rid}
        async with self.http.stream("POST", "/generate", json=body) as response:
            lines = response.aiter_lines()
            for _ in range(self.rng.randrange(1, 6)):
                await anext(lines, None)

    async def abort(self, rid: str) -> None:
        document = self.rng.choice(self.documents)
        body = self.body([*self.tokens(2), *document], {}, 40) | {"rid": rid}
        request = asyncio.create_task(self.http.post("/generate", json=body))
        await asyncio.sleep(self.rng.uniform(0.0, 0.2))
        await self.http.post("/abort_request", json={"rid": rid})
        await request

    async def operate(self, rid: str) -> None:
        """What an operator does: list, delete, flush (which is refused while requests run)."""
        action = self.rng.random()
        if action < 0.4:
            command = {"action": "delete", "cache_salt": f"tenant-{self.rng.randrange(2)}"}
            answer = await self.http.post("/grkv/command", json=command)
        elif action < 0.8:
            spans = (await self.http.get("/grkv/state")).json()[0]["spans"]
            if not spans:
                return
            digest = self.rng.choice(spans)["tokens_sha256"]
            command = {"action": self.rng.choice(["delete", "pin", "unpin"]), "tokens_sha256": digest}
            answer = await self.http.post("/grkv/command", json=command)
        else:
            answer = await self.http.post("/flush_cache")
        self.counts[f"operate.{answer.status_code}"] += 1
        if answer.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
            self.problems.append(f"{rid}: {answer.status_code} {answer.text}")

    # -- one request ---------------------------------------------------------------------------------

    @staticmethod
    def body(prompt: list[int], options: dict[str, Any], new_tokens: int, n: int = 1) -> dict[str, Any]:
        params: dict[str, Any] = {
            "temperature": 0 if n == 1 else 1,
            "max_new_tokens": new_tokens,
            "ignore_eos": True,
            "n": n,
        }
        if options:
            params["custom_params"] = {"grkv": options}
        return {"input_ids": prompt, "sampling_params": params, "return_logprob": True}

    async def generate(
        self,
        prompt: list[int],
        options: dict[str, Any],
        rid: str,
        *,
        new_tokens: int | None = None,
        n: int = 1,
        **fields: Any,
    ) -> dict[str, Any] | None:
        """The (first) answer; a wrong one is noted."""
        count = self.rng.randrange(1, 20) if new_tokens is None else new_tokens
        response = await self.http.post("/generate", json=self.body(prompt, options, count, n) | fields)
        if response.status_code != httpx.codes.OK:
            self.problems.append(f"{rid}: {response.status_code} {response.text[:300]}")
            return None
        answers = response.json()
        for answer in answers if isinstance(answers, list) else [answers]:
            logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
            # A read of freed KV is a read of NaN.
            if len(logprobs) != count or not all(math.isfinite(value) for value in logprobs):
                self.problems.append(f"{rid}: {len(logprobs)} of {count} tokens, logprobs {logprobs}")
            served = answer["meta_info"]["grkv"][0]
            self.counts["served from spans"] += served["span_tokens"] > 0
        first: dict[str, Any] = answers[0] if isinstance(answers, list) else answers
        return first


async def _drive(soak: Soak, requests: int) -> list[float]:
    """All requests, a few at a time; returns the scheduler's memory in MiB along the way."""
    scheduler = _scheduler_process()
    soak.documents = [soak.tokens(soak.rng.randrange(300, 1500)) for _ in range(DOCUMENTS)]
    soak.chats = [soak.tokens(5) for _ in range(CHATS)]
    for document in soak.documents[:REFERENCES]:
        prompt = [*document, *soak.tokens(4)]
        answer = await soak.generate(prompt, {"mode": "exact"}, "reference", new_tokens=8)
        if answer is None:
            raise RuntimeError(f"no reference answer: {soak.problems}")
        soak.references.append((prompt, answer["output_ids"]))
    memory_mib: list[float] = []
    numbers = iter(track(range(requests), "requests"))

    async def work() -> None:
        for number in numbers:
            await soak.one(number)
            if number % max(1, requests // 50) == 0:
                memory_mib.append(scheduler.memory_info().rss / 2**20)

    await asyncio.gather(*(work() for _ in range(CLIENTS)))
    return memory_mib


def _scheduler_process() -> psutil.Process:
    """The scheduler among our servers' processes (SGLang names it so)."""
    for process in psutil.Process().children(recursive=True):
        if "scheduler" in process.name() or "scheduler" in " ".join(process.cmdline()[:1]):
            return process
    raise RuntimeError("no process of ours is named 'sglang::scheduler'")


def run(requests: int, seed: int, folder: Path) -> dict[str, Any]:
    """Start a server in `folder`, soak it, and say what came of it; raises nothing for a problem found."""
    model_path = ensure_model()
    model = ensure_tiny_model(model_path.parent / "tiny-model-seed-0", model_path, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    with engine(
        model,
        tokenizer,
        folder,
        grkv_config=CONFIG,
        extra_args=("--max-running-requests", str(CLIENTS)),
        environment={"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "23"},
        max_total_tokens=POOL_TOKENS,
        context_length=4096,
        chunked_prefill_size=256,
    ) as client:
        memory_mib, soak = asyncio.run(_soak(client, requests, seed, folder))
        for name in FAULTS:
            (folder / name).unlink(missing_ok=True)
        state = client.settled_state()
    log = (folder / "server.log").read_text(errors="replace")
    pool = state["pool"]
    held = pool["free_slots"] + pool["exact_slots"] + pool["span_slots"]
    if held != POOL_TOKENS:
        soak.problems.append(f"the pool has {POOL_TOKENS} slots, {held} are accounted for: {pool}")
    later = memory_mib[len(memory_mib) // 3 :]
    return {
        "requests": requests,
        "seed": seed,
        "config": CONFIG,
        "pool": pool,
        "census": state["census"],
        "counters": state["counters"],
        "counts": dict(sorted(soak.counts.items())),
        "retractions": sum(int(count) for count in re.findall(r"#retracted_reqs: (\d+)", log)),
        "scheduler_memory_mib": [round(value, 1) for value in memory_mib],
        "memory_growth_mib": round(later[-1] - later[0], 1) if later else 0.0,
        "problems": soak.problems,
    }


async def _soak(client: Client, requests: int, seed: int, folder: Path) -> tuple[list[float], Soak]:
    limits = httpx.Limits(max_connections=4 * CLIENTS)
    async with httpx.AsyncClient(base_url=client.http.base_url, timeout=300, limits=limits) as http:
        soak = Soak(random.Random(seed), http, folder)
        return await _drive(soak, requests), soak


def main(
    requests: Annotated[int, typer.Option(help="Number of requests.")] = 3000,
    seed: Annotated[int, typer.Option(help="Decides texts and order.")] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Where the result goes.")] = None,
) -> None:
    """Soak a server; exit status 1 when anything was wrong."""
    with tempfile.TemporaryDirectory(prefix="grkv-soak-") as folder:
        result = run(requests, seed, Path(folder))
    table = Table("what", "count", title=f"{requests} requests, seed {seed}")
    failed = {f"failed: {name}": count for name, count in result["counters"]["compressions_failed"].items()}
    made = {f"made: {name}": count for name, count in result["counters"]["spans_made"].items()}
    for name, count in {**result["counts"], **made, **failed}.items():
        table.add_row(name, str(count))
    for name in ("retractions", "memory_growth_mib"):
        table.add_row(name, str(result[name]))
    console = Console()
    console.print(table)
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=2) + "\n")
    for problem in result["problems"]:
        console.print(f"[red]{problem}")
    raise typer.Exit(1 if result["problems"] else 0)


if __name__ == "__main__":
    typer.run(main)
