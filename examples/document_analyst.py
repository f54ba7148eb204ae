"""One document, many questions: each question is a fork of the same program state.

`s.fork` sends the document once, by itself. The first question that reuses it has it compressed, and the
later ones are served from the span. Nothing in the program knows of the plugin: the server's default triggers
see to it.

    grkv serve -- --model-path "$(grkv model --path)" --port 30000
    python examples/document_analyst.py --chat-template chatml
    python examples/document_analyst.py --document report.txt --words 0
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import sglang as sgl
import typer
from served import Answer, answer_of, read_document, show

QUESTIONS = (
    "Who sits at the table?",
    "What time is it there?",
    "What is Alice offered to drink?",
    "Which animal falls asleep?",
    "What riddle is asked?",
    "How does Alice leave?",
)


@sgl.function
def analyse(
    s: Any, document: str, questions: Sequence[str], at_once: int, answer_tokens: int
) -> list[Answer]:
    s += sgl.system("You answer questions about a document in one short sentence.")
    s += sgl.user_begin()
    s += document + "\n\n"
    # Otherwise `fork` may look before the text is there (SGLang 0.5.23), and then does not send it.
    s.sync()
    forks = s.fork(len(questions))
    answers = []
    for first in range(0, len(questions), at_once):
        now = range(first, min(first + at_once, len(questions)))
        for i in now:
            forks[i] += f"Question: {questions[i]}"
            forks[i] += sgl.user_end()
            forks[i] += sgl.assistant(sgl.gen("answer", max_tokens=answer_tokens, temperature=0))
        answers += [answer_of(forks[i], "answer", questions[i]) for i in now]
    return answers


def run(
    url: str,
    document: str,
    questions: Sequence[str] = QUESTIONS,
    *,
    at_once: int = 2,
    answer_tokens: int = 24,
    chat_template: str | None = None,
) -> list[Answer]:
    """Ask all questions, `at_once` of them at a time. Raises RuntimeError with the server's message."""
    backend = sgl.RuntimeEndpoint(url, chat_template_name=chat_template)
    state = analyse.run(document, questions, at_once, answer_tokens, backend=backend)
    answers: list[Answer] = state.ret_value
    return answers


def main(
    url: Annotated[str, typer.Option(help="The server, without /v1.")] = "http://127.0.0.1:30000",
    document: Annotated[Path | None, typer.Option(help="A text. Default: one that is shipped.")] = None,
    words: Annotated[int, typer.Option(min=0, help="Use its first words only; 0: all.")] = 1500,
    question: Annotated[list[str] | None, typer.Option(help="Give it again for each question.")] = None,
    at_once: Annotated[int, typer.Option(min=1, help="Questions that run at the same time.")] = 2,
    chat_template: Annotated[
        str | None, typer.Option(help="SGLang's name of it. Default: told from the model's path.")
    ] = None,
) -> None:
    """Ask many questions about one document."""
    text = read_document(document, words)
    try:
        answers = run(url, text, question or QUESTIONS, at_once=at_once, chat_template=chat_template)
    except (OSError, RuntimeError) as error:
        raise SystemExit(f"{url}: {error}") from error
    show(answers, "One document, many questions")


if __name__ == "__main__":
    typer.run(main)
