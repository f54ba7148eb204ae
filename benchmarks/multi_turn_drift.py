"""What repeated compression costs a growing chat: ``python -m benchmarks.multi_turn_drift``.

A chat about a text grows turn by turn. The reply of each turn is what the full cache says; every setting is
then made to say the same reply (its log-probabilities are read as input log-probabilities), with its own
history compressed behind it: span after span, or spans merged into each other. The loss of a turn is the
increase of the reply's negative log-likelihood per token, beside the top-1 agreement with the full cache.

Replies are mostly about the newest message, which is exact. So after the last turn every earlier message is
asked for: its first words are given, and the text that follows them is read. Copying it needs the old KV.
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
    "spans": {"max_generations": 0},
    "merged": {"merge_after_spans": 2, "max_generations": 2},
    "no limit": {"merge_after_spans": 2, "max_generations": 99},
}
CUE_TOKENS, RECALLED_TOKENS = 24, 32
"""Of an earlier message: how much of its text is given, how much is read."""


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


@dataclass(frozen=True)
class Recall:
    """An earlier message asked for after the last turn."""

    setting: str
    turn: int
    full_nll: float
    nll: float
    top1_agreement: float


class Chat:
    """One server's view of the conversation."""

    def __init__(self, base_url: str) -> None:
        limits = httpx.Limits(keepalive_expiry=2)  # the server closes idle connections after five seconds
        self._http = httpx.Client(base_url=base_url, timeout=600, limits=limits)

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
        """How often the oldest KV that any span holds was compressed again."""
        spans = self._http.get("/grkv/state").json()[0]["spans"]
        return max((span["generation"] for span in spans), default=0)

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        response = self._http.post("/generate", json=body)
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer


def pieces_of_text(tokenizer: Any, turns: int, tokens_per_turn: int) -> list[list[int]]:
    """Consecutive pieces of the shipped texts, one per turn."""
    text = "\n\n".join(d.text for d in load_documents())
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [ids[turn * tokens_per_turn : (turn + 1) * tokens_per_turn] for turn in range(turns)]


def user_message(tokenizer: Any, text: str) -> list[int]:
    """In the chat template, with the header of the reply."""
    rendered = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    ids: list[int] = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    return ids


def conversation(tokenizer: Any, pieces: list[list[int]]) -> list[list[int]]:
    """User messages: each hands over the next piece."""
    return [
        user_message(
            tokenizer,
            f"Here is what comes next:\n{tokenizer.decode(piece)}\nWho is in it, and what do they do?",
        )
        for piece in pieces
    ]


def recall(
    name: str, chat: Chat, tokenizer: Any, pieces: list[list[int]], history: list[int]
) -> list[Recall]:
    """Ask for all messages but the newest."""
    rows = []
    for turn, piece in enumerate(pieces[:-1], 1):
        cue, wanted = piece[:CUE_TOKENS], piece[CUE_TOKENS : CUE_TOKENS + RECALLED_TOKENS]
        prompt = [*history, *user_message(tokenizer, f"Repeat message {turn} word by word."), *cue]
        full, full_best, _ = chat.read(prompt, wanted, exact=True)
        ours, best, _ = chat.read(prompt, wanted, exact=False)
        rows.append(
            Recall(
                name, turn, -statistics.fmean(full), -statistics.fmean(ours), _share_equal(best, full_best)
            )
        )
    return rows


def _share_equal(a: list[int], b: list[int]) -> float:
    return statistics.fmean(x == y for x, y in zip(a, b, strict=True))


def run_setting(
    name: str,
    chat: Chat,
    messages: list[list[int]],
    replies: list[list[int]],
    closing: list[int],
    reply_tokens: int,
) -> tuple[list[Turn], list[int]]:
    """All turns on one server, and the history they leave. `replies` is filled on the first server and kept
    for the others."""
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
                top1_agreement=_share_equal(best, full_best),
            )
        )
        history = [*prompt, *reply, *closing]
    return turns, history


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
    pieces = pieces_of_text(tokenizer, turns, tokens_per_turn)
    messages = conversation(tokenizer, pieces)
    closing = tokenizer("<|im_end|>\n", add_special_tokens=False)["input_ids"]
    replies: list[list[int]] = []
    rows: list[Turn] = []
    recalled: list[Recall] = []
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
                chat = Chat(server.base_url)
                own, history = run_setting(name, chat, messages, replies, closing, reply_tokens)
                rows += own
                recalled += recall(name, chat, tokenizer, pieces, history)
    result = {
        "turns": turns,
        "tokens_per_turn": tokens_per_turn,
        "budget": budget,
        "settings": SETTINGS,
        "mean": {name: _mean(rows, recalled, name) for name in SETTINGS},
        "rows": [asdict(row) for row in rows],
        "recalled": [asdict(row) for row in recalled],
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
        _plot(rows, recalled, plot)


def _mean(rows: list[Turn], recalled: list[Recall], setting: str) -> dict[str, float]:
    served = _served(rows, setting)
    asked = [row for row in recalled if row.setting == setting]
    return {
        "reply_nll_increase": statistics.fmean(r.nll - r.full_nll for r in served),
        "reply_top1_agreement": statistics.fmean(r.top1_agreement for r in served),
        "recall_full_nll": statistics.fmean(r.full_nll for r in asked),
        "recall_nll_increase": statistics.fmean(r.nll - r.full_nll for r in asked),
        "recall_top1_agreement": statistics.fmean(r.top1_agreement for r in asked),
    }


def _served(rows: list[Turn], setting: str) -> list[Turn]:
    return [row for row in rows if row.setting == setting and row.span_tokens]


def _plot(rows: list[Turn], recalled: list[Recall], path: Path) -> None:
    figure, (loss, memory, slots) = plt.subplots(1, 3, figsize=(12, 3.5))
    for name in SETTINGS:
        own = [row for row in rows if row.setting == name]
        loss.plot([r.turn for r in own], [r.nll - r.full_nll for r in own], "o-", label=name)
        asked = [row for row in recalled if row.setting == name]
        memory.plot([r.turn for r in asked], [r.nll - r.full_nll for r in asked], "o-", label=name)
        held = [r.history_tokens - r.span_tokens + r.span_slots for r in own]
        slots.plot([r.turn for r in own], held, "o-", label=name)
    own = [row for row in rows if row.setting == next(iter(SETTINGS))]
    slots.plot([r.turn for r in own], [r.history_tokens for r in own], "k--", label="full cache")
    loss.set_title("reply")
    memory.set_title("earlier message, asked for at the end")
    slots.set_title("KV slots of the history")
    for axes in (loss, memory):
        axes.set_ylabel("increase of NLL per token (nats)")
    for axes in (loss, memory, slots):
        axes.set_xlabel("turn")
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    typer.run(main)
