"""A judge: a long rubric, a document and a question in front of every candidate answer and every criterion.

Rubric, document and question are sent once (`s.fork`), compressed when the first candidate reuses them, and
read from the span by the judgements that follow.

    grkv serve -- --model-path "$(grkv model --path)" --port 30000
    python examples/judge.py --chat-template chatml
    python examples/judge.py --document report.txt --question "..." --candidate "..." --candidate "..."
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import sglang as sgl
import typer
from served import Answer, answer_of, read_document, show

RUBRIC = Path(__file__).parent / "data" / "rubric.md"
CRITERIA = ("support", "completeness", "brevity")
QUESTION = "Who sits at the table, and what are they doing?"
CANDIDATES = (
    "The March Hare and the Hatter are having tea, and a Dormouse sleeps between them.",
    "As an introduction, it should be said that this is a good question about a well-known book.",
    "The Queen of Hearts and the White Rabbit are playing chess.",
)


@sgl.function
def judge(
    s: Any, rubric: str, document: str, question: str, candidates: Sequence[str]
) -> dict[tuple[int, str], Answer]:
    s += sgl.system(rubric)
    s += sgl.user_begin()
    s += f"Document:\n{document}\n\nQuestion: {question}\n\n"
    # Otherwise `fork` may look before the text is there (SGLang 0.5.23), and then does not send it.
    s.sync()
    marks = {}
    for number, candidate_state in enumerate(s.fork(len(candidates))):
        candidate_state += f"Answer: {candidates[number]}\n"
        candidate_state.sync()
        criteria = candidate_state.fork(len(CRITERIA))
        for i, criterion in enumerate(CRITERIA):
            criteria[i] += f"Mark the {criterion} of this answer."
            criteria[i] += sgl.user_end()
            criteria[i] += sgl.assistant(
                f"The {criterion} is marked " + sgl.gen("mark", regex="[1-5]", max_tokens=1, temperature=0)
            )
        for i, criterion in enumerate(CRITERIA):
            marks[number, criterion] = answer_of(criteria[i], "mark", f"{number + 1}: {criterion}")
    return marks


def run(
    url: str,
    document: str,
    question: str = QUESTION,
    candidates: Sequence[str] = CANDIDATES,
    *,
    rubric: str | None = None,
    chat_template: str | None = None,
) -> dict[tuple[int, str], Answer]:
    """Marks of every candidate by criterion. Raises RuntimeError with the server's message."""
    backend = sgl.RuntimeEndpoint(url, chat_template_name=chat_template)
    text = RUBRIC.read_text(encoding="utf-8") if rubric is None else rubric
    state = judge.run(text, document, question, candidates, backend=backend)
    marks: dict[tuple[int, str], Answer] = state.ret_value
    return marks


def main(
    url: Annotated[str, typer.Option(help="The server, without /v1.")] = "http://127.0.0.1:30000",
    document: Annotated[Path | None, typer.Option(help="A text. Default: one that is shipped.")] = None,
    words: Annotated[int, typer.Option(min=0, help="Use its first words only; 0: all.")] = 1200,
    question: Annotated[str, typer.Option(help="What the candidates answer.")] = QUESTION,
    candidate: Annotated[list[str] | None, typer.Option(help="Give it again for each candidate.")] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="SGLang's name of it. Default: told from the model's path.")
    ] = None,
) -> None:
    """Judge candidate answers to a question about a document, and name the best."""
    candidates = candidate or CANDIDATES
    try:
        text = read_document(document, words)
        marks = run(url, text, question, candidates, chat_template=chat_template)
    except (OSError, RuntimeError) as error:
        raise SystemExit(f"{url}: {error}") from error
    show(list(marks.values()), question)
    totals = [
        sum(int(mark.text) for (of, _), mark in marks.items() if of == number)
        for number in range(len(candidates))
    ]
    for number, total in enumerate(totals):
        print(f"{number + 1}: {total:2d} of {5 * len(CRITERIA)}  {candidates[number]}")
    print(f"best: {totals.index(max(totals)) + 1}")


if __name__ == "__main__":
    typer.run(main)
