"""The whole server on one GPU, end to end: ``python -m benchmarks.gpu.server --model PATH``.

For a machine with everything installed. Three servers in turn: SGLang as it is, with our attention alone, and
with the plugin. Each gets questions about one long document (a cold one, then warm ones) and the prompts of
the identity check. Exit status 1 if spans that keep every token change an answer, or are not used.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from grkv_sglang.demo import identity
from grkv_sglang.demo.client import Generation, SglangClient
from grkv_sglang.demo.documents import Document, DocumentPrompts, document_prompts, load_documents
from grkv_sglang.demo.job import DocumentOutcome, ask_about
from grkv_sglang.demo.result import ENGINES, IdentityResult, RequestRecord
from grkv_sglang.serving import Engine, ServerSpec, running_server

WARMUP_TOKENS = range(2000, 2064)
POOL_SHARE = 3
"""The pool holds the document so many times over: at full size, compressed, and the identity's prompts."""
SLACK_TOKENS = 8192


@dataclass(frozen=True)
class Settings:
    """The command line; see ``--help``."""

    model: Path
    device: str
    dtype: str
    tokens: int
    new_tokens: int
    budget: float
    profile: str
    out: Path

    def server(self, engine: Engine, log_dir: Path) -> ServerSpec:
        """One of the servers; SGLang as it is gets the attention that ours is built on."""
        plugin = {"budget": self.budget, "profile": self.profile, "allow_forced": True}
        stock_attention = ("--attention-backend", "flashinfer" if self.device == "cuda" else "torch_native")
        return ServerSpec(
            model_path=self.model,
            engine=engine,
            log_path=log_dir / f"{engine}.log",
            max_total_tokens=POOL_SHARE * self.tokens + SLACK_TOKENS,
            extra_args=stock_attention if engine == "stock" else (),
            grkv_config={**plugin, "triggers": "explicit"} if engine == "grkv" else {},
            device=self.device,
            dtype=self.dtype,
        )


@dataclass(frozen=True)
class EngineTimes:
    """One server. Times in seconds.

    Attributes:
        start_s: until it answered.
        cold_ttft_s, warm_ttft_s: time to the first token, of the first question and the median of the others.
        warm_itl_s: time between tokens of the warm answers, the median over them.
        document_tokens, document_slots: the shared prefix, and what the last question read it from.
    """

    engine: Engine
    start_s: float
    cold_ttft_s: float
    warm_ttft_s: float
    warm_itl_s: float
    document_tokens: int
    document_slots: int


def long_document(tokenizer: Any, n_tokens: int) -> Document:
    """The shipped texts one after the other, as often as it takes, with the questions about the first one."""
    documents = load_documents()
    text = "\n\n".join(document.text for document in documents)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    repeated = (ids * (n_tokens // len(ids) + 1))[:n_tokens]
    return Document("shipped texts", tokenizer.decode(repeated), documents[0].questions)


def summarise(engine: Engine, start_s: float, outcome: DocumentOutcome, prefix_tokens: int) -> EngineTimes:
    """The times of one server's requests."""
    _, *warm = outcome.run.requests
    return EngineTimes(
        engine=engine,
        start_s=start_s,
        cold_ttft_s=outcome.run.cold_ttft_s,
        warm_ttft_s=statistics.median(outcome.run.warm_ttft_s),
        warm_itl_s=statistics.median(_token_s(request) for request in warm),
        document_tokens=prefix_tokens,
        document_slots=warm[-1].document_slots,
    )


def _token_s(request: RequestRecord) -> float:
    return (request.total_s - request.ttft_s) / max(1, request.output_tokens - 1)


def identity_holds(result: IdentityResult) -> bool:
    """Every answer through a span that keeps all is that without the span; and they did come through one."""
    alike = result.versus_off.equal == result.prompts
    behind_sentinels = result.sentinels.versus_off.equal == result.sentinels.versus_off.prompts
    return alike and behind_sentinels and result.served_from_span > 0


@contextmanager
def _connected(spec: ServerSpec, console: Console) -> Iterator[tuple[float, SglangClient]]:
    with running_server(spec, console) as server, SglangClient(server.base_url) as client:
        # The first forward pass of a process is slower than all later ones.
        client.generate([WARMUP_TOKENS], 4)
        client.flush_cache()
        yield server.start_s, client


def _identity_answers(
    client: SglangClient, engine: Engine, groups: Sequence[identity.PrefixGroup]
) -> dict[str, list[Generation]]:
    def advance() -> None:
        """Nothing to show."""

    if engine == "grkv":
        return {
            "grkv": identity.run_spans(client, groups, advance),
            "sentinels": identity.run_spans(client, groups, advance, identity.DUMMY_TOKENS),
        }
    if engine == "off":
        return {"off": identity.run_exact(client, groups, advance)}
    return {
        "stock": identity.run_exact(client, groups, advance),
        "stock_batched": identity.run_batched(client, groups, advance),
    }


def run(settings: Settings, console: Console) -> dict[str, Any]:
    """All three servers; what goes into the JSON.

    Raises:
        ServerError: a server did not come up.
        ClientError: a server refused a request, or the document was not compressed.
    """
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    prompts: DocumentPrompts = document_prompts(long_document(tokenizer, settings.tokens), tokenizer)
    groups = identity.build_groups(load_documents(), tokenizer)
    log_dir = Path(tempfile.mkdtemp(prefix="grkv-gpu-"))
    console.print(f"server logs: {log_dir}")
    times: list[EngineTimes] = []
    answers: dict[str, list[Generation]] = {}
    outcomes: dict[str, DocumentOutcome] = {}
    for engine in ENGINES:
        console.rule(engine)
        with _connected(settings.server(engine, log_dir), console) as (start_s, client):
            outcomes[engine] = ask_about(client, engine, prompts, settings.new_tokens, console)
            times.append(summarise(engine, start_s, outcomes[engine], prompts.prefix_tokens))
            answers |= _identity_answers(client, engine, groups)
    span = outcomes["grkv"].span
    result = identity.identity_result(groups=groups, **answers)
    return {
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in asdict(settings).items()},
        "times": [asdict(line) for line in times],
        "span": None if span is None else span.model_dump(),
        "identity": result.model_dump(),
        "identity_holds": identity_holds(result),
        "answers": {engine: outcome.run.answers for engine, outcome in outcomes.items()},
    }


def table_of(times: Sequence[dict[str, Any]]) -> Table:
    """A line for each server."""
    table = Table("server", "cold TTFT s", "warm TTFT s", "warm ITL ms", "document tokens", "slots")
    for line in times:
        table.add_row(
            line["engine"], f"{line['cold_ttft_s']:.3f}", f"{line['warm_ttft_s']:.3f}",
            f"{line['warm_itl_s'] * 1e3:.2f}", f"{line['document_tokens']}", f"{line['document_slots']}",
        )  # fmt: skip
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Run and write the JSON; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.server", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of a model with a chat template")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", default="auto", help="of the model's numbers, as SGLang's --dtype")
    parser.add_argument("--tokens", type=int, default=16384, help="of the shared document")
    parser.add_argument("--new-tokens", type=int, default=64, help="of each answer at most")
    parser.add_argument("--budget", type=float, default=0.1, help="share of the document that is kept")
    parser.add_argument("--profile", default="default")
    parser.add_argument("--out", type=Path, default=Path("gpu-server.json"), help="the JSON file")
    settings = Settings(**vars(parser.parse_args(argv)))
    console = Console()
    result = run(settings, console)
    console.print(table_of(result["times"]))
    found = result["identity"]["versus_off"]
    console.print(f"identity: {found['equal']} of {found['prompts']} answers as without the span")
    settings.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if result["identity_holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
