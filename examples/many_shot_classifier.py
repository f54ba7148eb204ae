"""Many labelled examples in front of every input: they are compressed once and reused by all of them.

`run_batch` sends what all prompts begin with once, by itself, because the examples are bound to the program.
That tells the plugin where the shared prefix ends. Without it the first prefix that it sees reused would be
that of one input and its choices, which no other input shares: every input would be prefilled from the start.

`choices` asks for log-probabilities of the choices only (`logprob_start_len`), so that the prefix is served
from the cache, compressed or not. SGLang does not hand on what served them; for `reason`, which continues the
same prompt, it does.

    grkv serve -- --model-path "$(grkv model --path)" --port 30000
    python examples/many_shot_classifier.py
    python examples/many_shot_classifier.py --examples labelled.tsv --inputs inputs.txt
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import sglang as sgl
import typer
from served import Answer, answer_of, show

DATA = Path(__file__).parent / "data"


@sgl.function
def classify(s: Any, examples: str, labels: Sequence[str], message: str) -> None:
    s += examples
    s += "Message: " + message + "\nLabel:"
    s += sgl.gen("label", choices=[f" {label}" for label in labels])
    s += "\nWord that tells:" + sgl.gen("reason", max_tokens=4, stop="\n", temperature=0)


def read_examples(path: Path) -> list[tuple[str, str]]:
    """Lines of ``label<TAB>message``. Raises ValueError for a line without a tab."""
    pairs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        label, tab, message = line.partition("\t")
        if not tab:
            raise ValueError(f"{path}, line {number}: expected a label, a tab and a message")
        pairs.append((label, message))
    return pairs


def run(
    url: str, examples: Sequence[tuple[str, str]], messages: Sequence[str], *, at_once: int = 2
) -> list[Answer]:
    """A label for every message, and what served it. Raises RuntimeError with the server's message."""
    backend = sgl.RuntimeEndpoint(url)
    shown = "".join(f"Message: {message}\nLabel: {label}\n\n" for label, message in examples)
    program = classify.bind(examples=shown, labels=sorted({label for label, _ in examples}))
    states = program.run_batch([{"message": m} for m in messages], backend=backend, num_threads=at_once)
    served = [answer_of(state, "reason", message) for state, message in zip(states, messages, strict=True)]
    return [
        replace(answer, text=state["label"].strip()) for answer, state in zip(served, states, strict=True)
    ]


def main(
    url: Annotated[str, typer.Option(help="The server, without /v1.")] = "http://127.0.0.1:30000",
    examples: Annotated[Path, typer.Option(help="Lines of label, tab, message.")] = DATA
    / "labelled_messages.tsv",
    inputs: Annotated[Path, typer.Option(help="One message per line.")] = DATA / "messages.txt",
    at_once: Annotated[int, typer.Option(min=1, help="Messages that run at the same time.")] = 2,
) -> None:
    """Label messages by many examples."""
    try:
        messages = inputs.read_text(encoding="utf-8").splitlines()
        answers = run(url, read_examples(examples), messages, at_once=at_once)
    except (OSError, RuntimeError, ValueError) as error:
        raise SystemExit(f"{url}: {error}") from error
    show(answers, "Many examples, many inputs")


if __name__ == "__main__":
    typer.run(main)
