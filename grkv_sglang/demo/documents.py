"""The demo's three documents, their questions, and the prompts made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

SYSTEM_MESSAGE = "You answer questions about a document in one or two sentences."


@dataclass(frozen=True)
class Document:
    """A text that ships with the package and four questions about it.

    The questions begin with different words, so that what all prompts share ends with the document.
    """

    name: str
    text: str
    questions: tuple[str, ...]


@dataclass(frozen=True)
class DocumentPrompts:
    """A document's prompts as token ids, one per question."""

    document: Document
    prefix_tokens: int
    """Tokens that all prompts share: system message, document, and the words before the question."""
    prompts: tuple[tuple[int, ...], ...]


QUESTIONS: dict[str, tuple[str, ...]] = {
    "sherlock_holmes": (
        "Who is the visitor that wears a mask?",
        "What does Holmes find out about the paper of the note?",
        "How many steps lead up from the hall to the room?",
        "Why does the King want the photograph back?",
    ),
    "alice": (
        "Who sits at the table under the tree?",
        "What is strange about the Hatter's watch?",
        "Why is it always six o'clock at the tea-party?",
        "How do the gardeners change the roses?",
    ),
    "frankenstein": (
        "What does the creature look like when it opens its eyes?",
        "Where does the narrator meet Clerval again?",
        "How does Clerval help while the narrator is ill?",
        "Who wrote the letter that Clerval hands over?",
    ),
}


def load_documents() -> list[Document]:
    """The shipped documents, in the order in which the demo asks about them."""
    texts = files("grkv_sglang.demo") / "texts"
    return [
        Document(name, (texts / f"{name}.txt").read_text(encoding="utf-8").strip(), questions)
        for name, questions in QUESTIONS.items()
    ]


def document_prompts(document: Document, tokenizer: Any) -> DocumentPrompts:
    """Render every question through the model's chat template.

    Args:
        document: text and questions.
        tokenizer: a Hugging Face tokenizer with a chat template.

    Raises:
        ValueError: there are fewer than two questions, so that "what they share" means nothing.
    """
    prompts = tuple(tuple(chat_prompt(document.text, q, tokenizer)) for q in document.questions)
    return DocumentPrompts(document, common_prefix_length(prompts), prompts)


def chat_prompt(text: str, question: str, tokenizer: Any) -> list[int]:
    """Token ids of a chat whose user message is a document followed by a question."""
    messages = [
        {"role": "system", "content": SYSTEM_MESSAGE},
        {"role": "user", "content": f"{text}\n\nQuestion: {question}"},
    ]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    # The template has written the special tokens already.
    ids: list[int] = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    return ids


def common_prefix_length(sequences: Sequence[Sequence[int]]) -> int:
    """Number of leading tokens that all sequences share.

    Not the tokens of the shared text: a tokenizer may merge the text's end with what follows.

    Raises:
        ValueError: fewer than two sequences.
    """
    if len(sequences) < 2:
        raise ValueError(f"a common prefix needs at least two sequences, got {len(sequences)}")
    for position, tokens in enumerate(zip(*sequences, strict=False)):
        if len(set(tokens)) > 1:
            return position
    return min(len(sequence) for sequence in sequences)
