"""What repeated compression costs a growing chat: ``python -m benchmarks.multi_turn_drift``.

A chat about a text grows turn by turn. The reply of each turn is what the full cache says; every other
setting is then made to say the same reply (its log-probabilities are read as input log-probabilities), with
its own history compressed behind it: span after span, or spans merged into each other. The loss of a turn is
the increase of the reply's negative log-likelihood per token, beside the top-1 agreement with the full cache.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import matplotlib
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoTokenizer

from grkv_sglang.demo.documents import load_documents
from grkv_sglang.model import ensure_model
from grkv_sglang.serving import ServerSpec, detect_device, running_server

matplotlib.use("Agg")
from matplotlib import pyplot as plt

SETTINGS: dict[str, dict[str, Any]] = {
    "span after span": {"max_generations": 0},
    "merged": {"merge_after_spans": 2, "max_generations": 2},
    "merged without limit": {"merge_after_spans": 2, "max_generations": 99},
}


@dataclass(frozen=True)
class Turn:
    """One turn of the chat under one setting. Sizes in tokens and slots, likelihoods in nats per token."""

    setting: str
    turn: int
    history_tokens: int
    cached_tokens: int
    span_tokens: int
    span_slots: int
    spans: int
    generation: int
    quality: float | None
    full_nll: float
    nll: float
    top1_agreement: float


class Chat:
    """One server's view of the conversation."""

    def __init__(self, base_url: str) -> None:
        self._http = httpx.Client(base_url=base_url, timeout=600)

    def reply(self, prompt: list[int], new_tokens: int) -> list[int]:
        """Greedy, from the full cache."""
        params = {
            "temperature": 0,
            "max_new_tokens": new_tokens,
            "custom_params": {"grkv": {"mode": "exact"}},
        }
        body = {"input_ids": prompt, "sampling_params": params, "cache_salt": "full"}
        answer = self._post(body)
        ids: list[int] = answer["output_ids"]
        return ids

    def read(self, prompt: list[int], reply: list[int], *, exact: bool) -> tuple[list[float], list[int], Any]:
        """Log-probabilities of `reply` behind `prompt`, the likeliest token at each place, what served it."""
        params: dict[str, Any] = {"temperature": 0, "max_new_tokens": 1}
        if exact:
            params["custom_params"] = {"grkv": {"mode": "exact"}}
        body = {
            "input_ids": [*prompt, *reply],
            "sampling_params": params,
            "cache_salt": "full" if exact else "chat",
            "return_logprob": True,
            "logprob_start_len": len(prompt) - 1,
            "top_logprobs_num": 1,
        }
        meta = self._post(body)["meta_info"]
        logprobs = [entry[0] for entry in meta["input_token_logprobs"][-len(reply) :]]
        best = [entry[0][1] for entry in meta["input_top_logprobs"][-len(reply) :]]
        return logprobs, best, meta["grkv"][0]

    def generation(self) -> int:
        """Of the span that reaches furthest: how often its oldest KV was compressed again."""
        spans = self._http.get("/grkv/state").json()[0]["spans"]
        return max(spans, key=lambda s: s["end_tokens"])["generation"] if spans else 0

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        response = self._http.post("/generate", json=body)
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer


def conversation(tokenizer: Any, turns: int, tokens_per_turn: int) -> list[list[int]]:
    """User messages in the chat template: each hands over the next piece of a text."""
    text = "\n\n".join(d.text for d in load_documents())
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    messages = []
    for turn in range(turns):
        piece = tokenizer.decode(ids[turn * tokens_per_turn : (turn + 1) * tokens_per_turn])
        asked = f"Here is what comes next:\n{piece}\nWho is in it, and what do they do?"
        rendered = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
        messages.append(tokenizer(rendered, add_special_tokens=False)["input_ids"])
    return messages


def run_setting(
    name: str,
    chat: Chat,
    messages: list[list[int]],
    replies: list[list[int]],
    closing: list[int],
    reply_tokens: int,
) -> list[Turn]:
    """All turns on one server. `replies` is filled on the first server and kept for the others."""
    history: list[int] = []
    turns = []
    for number, message in enumerate(track(messages, name)):
        prompt = [*history, *message]
        if number == len(replies):
            replies.append(chat.reply(prompt, reply_tokens))
        reply = replies[number]
        full, full_best, _ = chat.read(prompt, reply, exact=True)
        ours, best, served = chat.read(prompt, reply, exact=False)
        turns.append(
            Turn(
                setting=name,
                turn=number + 1,
                history_tokens=len(history),
                cached_tokens=served["exact_tokens"] + served["span_tokens"],
                span_tokens=served["span_tokens"],
                span_slots=served["span_slots"],
                spans=served["spans"],
                generation=chat.generation(),
                quality=served["quality"],
                full_nll=-statistics.fmean(full),
                nll=-statistics.fmean(ours),
                top1_agreement=statistics.fmean(a == b for a, b in zip(best, full_best, strict=True)),
            )
        )
        history = [*prompt, *reply, *closing]
    return turns


def main(
    turns: Annotated[int, typer.Option(help="Turns of the chat.")] = 14,
    tokens_per_turn: Annotated[int, typer.Option(help="Tokens of each user message's text.")] = 320,
    reply_tokens: Annotated[int, typer.Option(help="Tokens of each reply.")] = 48,
    budget: Annotated[float, typer.Option(help="Kept share.")] = 0.2,
    json_path: Annotated[Path | None, typer.Option("--json", help="Where the result goes.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Where the plot goes (.png).")] = None,
) -> None:
    """Measure each setting on a server of its own."""
    console = Console()
    model = ensure_model()
    tokenizer = AutoTokenizer.from_pretrained(model)
    messages = conversation(tokenizer, turns, tokens_per_turn)
    closing = tokenizer("<|im_end|>\n", add_special_tokens=False)["input_ids"]
    replies: list[list[int]] = []
    rows: list[Turn] = []
    for name, setting in SETTINGS.items():
        with tempfile.TemporaryDirectory(prefix="grkv-drift-") as folder:
            spec = ServerSpec(
                model_path=model,
                engine="grkv",
                log_path=Path(folder) / "server.log",
                max_total_tokens=24576,
                chunked_prefill_size=512,
                grkv_config={"budget": budget, "min_span_tokens": 300, **setting},
                memory_checks=True,
                device=detect_device(),
            )
            with running_server(spec, console) as server:
                rows += run_setting(name, Chat(server.base_url), messages, replies, closing, reply_tokens)
    result = {
        "turns": turns,
        "tokens_per_turn": tokens_per_turn,
        "budget": budget,
        "settings": SETTINGS,
        "mean": {
            name: {
                "nll_increase": statistics.fmean(r.nll - r.full_nll for r in _served(rows, name)),
                "top1_agreement": statistics.fmean(r.top1_agreement for r in _served(rows, name)),
            }
            for name in SETTINGS
        },
        "rows": [asdict(row) for row in rows],
    }
    table = Table("setting", "turn", "history", "in spans", "slots", "spans", "generation", "NLL +", "top-1")
    for row in rows:
        table.add_row(
            row.setting, str(row.turn), str(row.history_tokens), str(row.span_tokens), str(row.span_slots),
            str(row.spans), str(row.generation), f"{row.nll - row.full_nll:+.3f}",
            f"{row.top1_agreement:.2f}",
        )  # fmt: skip
    console.print(table)
    console.print_json(data=result["mean"])
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=2) + "\n")
    if plot is not None:
        _plot(rows, plot)


def _served(rows: list[Turn], setting: str) -> list[Turn]:
    return [row for row in rows if row.setting == setting and row.span_tokens]


def _plot(rows: list[Turn], path: Path) -> None:
    figure, (loss, slots) = plt.subplots(1, 2, figsize=(10, 3.5))
    for name in SETTINGS:
        own = [row for row in rows if row.setting == name]
        loss.plot([r.turn for r in own], [r.nll - r.full_nll for r in own], "o-", label=name)
        slots.plot(
            [r.turn for r in own], [r.history_tokens - r.span_tokens + r.span_slots for r in own], "o-"
        )
    own = [row for row in rows if row.setting == next(iter(SETTINGS))]
    slots.plot([r.turn for r in own], [r.history_tokens for r in own], "k--", label="full cache")
    loss.set_ylabel("increase of NLL per token (nats)")
    slots.set_ylabel("KV slots of the history")
    for axes in (loss, slots):
        axes.set_xlabel("turn")
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    typer.run(main)
