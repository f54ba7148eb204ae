"""Documents out of files, and the chats made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grkv_sglang.commands.documents import Document, DocumentError, Layout, load_documents


def write(folder: Path, **files: str | bytes) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def test_a_folder_is_read_with_what_is_below_it(tmp_path: Path):
    write(
        tmp_path, b_txt="two", a_md="one", sub__c_txt="three", notes_pdf=b"\xff", d_jsonl='{"text": "four"}'
    )
    found = load_documents([tmp_path])
    assert [(document.name, document.text) for document in found] == [
        ("a.md", "one"), ("b.txt", "two"), ("d.jsonl:1", "four"), ("c.txt", "three"),
    ]  # fmt: skip


def test_texts_stay_as_their_bytes_are(tmp_path: Path):
    text = "\ufeffOne.\r\n\r\nTwo — 鐘.\n"
    write(tmp_path, a_txt=text)
    assert load_documents([tmp_path / "a.txt"])[0].text == text


def test_lines_of_json(tmp_path: Path):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u\u2028v"}]
    lines = [
        json.dumps({"text": "one"}),
        "",
        json.dumps({"messages": messages, "name": "chat"}, ensure_ascii=False),
    ]
    write(tmp_path, x_jsonl="\n".join(lines))
    assert load_documents([tmp_path]) == [
        Document("x.jsonl:1", "one"),
        Document("chat", messages=tuple(messages)),  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "x.jsonl:1: not JSON"),
        ("5", 'expected {"text"'),
        ("{}", 'expected {"text"'),
        ('{"text": "a", "messages": []}', 'expected {"text"'),
        ('{"text": 5}', "text must be a string"),
        ('{"text": " "}', "text must be a string that is not empty"),
        ('{"messages": []}', "a list that is not empty"),
        ('{"messages": "u"}', "a list that is not empty"),
        ('{"messages": [{"role": "user"}]}', "a role and a content"),
        ('{"messages": [{"role": "user", "content": [1]}]}', "a role and a content"),
        ('{"messages": ["u"]}', "a role and a content"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, line: str, message: str):
    write(tmp_path, x_jsonl=line)
    with pytest.raises(DocumentError) as error:
        load_documents([tmp_path])
    assert message in str(error.value)
    assert f"{tmp_path}/x.jsonl:1" in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\xff\xfe", "cannot be read as UTF-8"),
        ("a.txt", b" \n", "is empty"),
        ("a.pdf", b"x", "must end in .txt, .md, .jsonl"),
        ("a.jsonl", b"", "is empty"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, name: str, content: bytes, message: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DocumentError, match=message):
        load_documents([tmp_path / name])


def test_nothing_to_warm(tmp_path: Path):
    with pytest.raises(DocumentError, match="no documents found"):
        load_documents([tmp_path])
    with pytest.raises(DocumentError, match="no such file"):
        load_documents([tmp_path / "gone.txt"])


def contents(messages: list[Any]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


def test_a_document_is_a_message_of_its_own():
    layout, document = Layout(system="Answer."), Document("d", "Text.")
    assert contents(layout.messages(document, "Who?")) == [
        ("system", "Answer."), ("user", "Text."), ("user", "Who?"),
    ]  # fmt: skip
    assert layout.ends_with_first_user_message(document)
    assert contents(Layout().messages(document, "Who?")) == [("user", "Text."), ("user", "Who?")]


def test_a_template_puts_both_into_one_message():
    layout = Layout("Answer.", "<{document}>\n{x}\nQuestion: {question}!")
    document = Document("d", "About {question} and {document}.")
    assert contents(layout.messages(document, "Who {document}?")) == [
        ("system", "Answer."),
        ("user", "<About {question} and {document}.>\n{x}\nQuestion: Who {document}?!"),
    ]
    assert not layout.ends_with_first_user_message(document)


@given(st.text(), st.text(min_size=1))
def test_whatever_a_document_holds_comes_before_the_question(text: str, question: str):
    (message,) = Layout(template="{document}|{question}").messages(Document("d", text), question)
    assert message["content"] == f"{text}|{question}"


SYSTEM = {"role": "system", "content": "Own."}
USER = {"role": "user", "content": "Text."}
REPLY = {"role": "assistant", "content": "Reply."}


@pytest.mark.parametrize(
    ("given_messages", "system", "roles", "by_template"),
    [
        ((USER,), "Answer.", ["system", "user", "user"], True),
        ((SYSTEM, USER), "Answer.", ["system", "user", "user"], True),
        ((SYSTEM, USER, REPLY), None, ["system", "user", "assistant", "user"], False),
        ((USER, REPLY, USER), None, ["user", "assistant", "user", "user"], False),
    ],
)
def test_messages_are_taken_as_they_are(given_messages, system, roles, by_template):
    document = Document("d", messages=given_messages)
    messages = Layout(system).messages(document, "Who?")
    assert [message["role"] for message in messages] == roles
    assert messages[-1]["content"] == "Who?"
    assert SYSTEM not in given_messages or messages[0]["content"] == "Own."
    assert Layout(system).ends_with_first_user_message(document) == by_template


@pytest.mark.parametrize(
    "template", ["{document}", "{question}", "{question} {document}", "{document}{document}{question}", ""]
)
def test_wrong_templates(template: str):
    with pytest.raises(DocumentError, match="the template must hold"):
        Layout(template=template)
