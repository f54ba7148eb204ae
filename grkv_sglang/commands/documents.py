"""Documents to warm: read from files, and laid out as the requests that will come."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grkv_sglang.client import Message

TEXT_SUFFIXES = (".txt", ".md")
SUFFIXES = (*TEXT_SUFFIXES, ".jsonl")
DOCUMENT, QUESTION = "{document}", "{question}"


class DocumentError(ValueError):
    """A document or a layout is wrong; the message names the file and the line."""


@dataclass(frozen=True)
class Document:
    """What many requests start with: a text, or messages as they are."""

    name: str
    text: str = ""
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True)
class Layout:
    """How a document and a question become a chat.

    Attributes:
        system: the system message; None: none. Put before messages that have none of their own.
        template: the user message, with ``{document}`` and then ``{question}`` in it; None: the document is a
            user message of its own, and the question the next one.
    """

    system: str | None = None
    template: str | None = None

    def __post_init__(self) -> None:
        if self.template is None:
            return
        counts = [self.template.count(name) for name in (DOCUMENT, QUESTION)]
        if counts != [1, 1] or self.template.index(DOCUMENT) > self.template.index(QUESTION):
            raise DocumentError(
                f"the template must hold {DOCUMENT} once and then {QUESTION} once, got {self.template!r}"
            )

    def messages(self, document: Document, question: str) -> list[Message]:
        """The chat that asks `question` about a document."""
        given = list(document.messages)
        if self.system is not None and not (given and given[0]["role"] == "system"):
            given.insert(0, Message(role="system", content=self.system))
        if document.messages:
            return [*given, Message(role="user", content=question)]
        if self.template is None:
            document_message = Message(role="user", content=document.text)
            return [*given, document_message, Message(role="user", content=question)]
        # Not str.format: documents and templates hold braces of their own.
        before, rest = self.template.split(DOCUMENT)
        between, after = rest.split(QUESTION)
        content = f"{before}{document.text}{between}{question}{after}"
        return [*given, Message(role="user", content=content)]

    def ends_with_first_user_message(self, document: Document) -> bool:
        """Whether what requests share is exactly what the option ``prefix_end: document`` marks."""
        if not document.messages:
            return self.template is None
        roles = [message["role"] for message in document.messages]
        return roles.count("user") == 1 and roles[-1] == "user"


def load_documents(paths: Iterable[Path]) -> list[Document]:
    """All documents of files and folders, folders with what is below them, in the order of their names.

    Raises:
        DocumentError: nothing was found, a file is not UTF-8, empty, or a line of JSON is no document.
    """
    documents = [document for path in paths for file in _files(path) for document in _read(file)]
    if not documents:
        raise DocumentError(f"no documents found; files must end in {', '.join(SUFFIXES)}")
    return documents


def read_text(file: Path) -> str:
    """A text as its bytes say, line ends included: what is warmed must be what requests send.

    Raises:
        DocumentError: it cannot be read, is not UTF-8, or empty.
    """
    try:
        text = file.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DocumentError(f"{file}: cannot be read as UTF-8 text: {error}") from error
    if not text.strip():
        raise DocumentError(f"{file}: is empty")
    return text


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.is_file() and file.suffix in SUFFIXES)
    if not path.is_file():
        raise DocumentError(f"{path}: no such file or folder")
    if path.suffix not in SUFFIXES:
        raise DocumentError(f"{path}: must end in {', '.join(SUFFIXES)}")
    return [path]


def _read(file: Path) -> Iterator[Document]:
    text = read_text(file)
    if file.suffix in TEXT_SUFFIXES:
        yield Document(file.name, text)
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _of_json(line, f"{file}:{number}", f"{file.name}:{number}")


def _of_json(line: str, where: str, name: str) -> Document:
    """One line of JSON: ``{"text": "..."}`` or ``{"messages": [...]}``, with a ``"name"`` if it likes."""
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise DocumentError(f"{where}: not JSON: {error}") from error
    if not isinstance(entry, dict) or ("text" in entry) == ("messages" in entry):
        raise DocumentError(f'{where}: expected {{"text": "..."}} or {{"messages": [...]}}')
    name = str(entry.get("name", name))
    if "text" in entry:
        if not isinstance(entry["text"], str) or not entry["text"].strip():
            raise DocumentError(f"{where}: text must be a string that is not empty")
        return Document(name, text=entry["text"])
    return Document(name, messages=_messages(entry["messages"], where))


def _messages(found: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(found, list) or not found:
        raise DocumentError(f"{where}: messages must be a list that is not empty")
    messages = []
    for message in found:
        fields = message if isinstance(message, dict) else {}
        role, content = fields.get("role"), fields.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            raise DocumentError(f"{where}: every message needs a role and a content, both text")
        messages.append(Message(role=role, content=content))
    return tuple(messages)
