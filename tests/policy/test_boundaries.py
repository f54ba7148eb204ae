"""Message boundaries by the template's own tokens, on the real tokenizer."""

from __future__ import annotations

import copy
from array import array
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grkv_sglang.policy.boundaries import (
    BoundaryError,
    find_prefix_end,
    last_turn_start,
    learn_markers,
    system_end,
)
from grkv_sglang.policy.jobs import natural_end
from grkv_sglang.policy.options import OptionsError
from grkv_sglang.policy.resolve import resolve_options


def render(tokenizer, *messages):
    roles = [{"role": role, "content": content} for role, content in messages]
    return list(tokenizer.apply_chat_template(roles, add_generation_prompt=True, tokenize=True)["input_ids"])


def test_markers_of_the_real_template(tokenizer):
    markers = learn_markers(tokenizer)
    assert tokenizer.decode(markers.end_of_message) == "<|im_end|>"
    assert tokenizer.decode(markers.user_header) == "<|im_start|>user"


@pytest.mark.parametrize("document", ["A fox.", "\n\nA fox.", "Text with <b> and\nlines.\n", "  user\n"])
def test_system_and_document_ends(tokenizer, document):
    markers = learn_markers(tokenizer)
    first = render(tokenizer, ("system", "Be brief."), ("user", document), ("user", "Who?"))
    second = render(tokenizer, ("system", "Be brief."), ("user", document), ("user", "Where is it?"))
    tails: dict[Literal["system", "document"], str] = {
        "system": "Be brief.<|im_end|>",
        "document": document + "<|im_end|>",
    }
    for which, tail in tails.items():
        end = find_prefix_end(first, markers, which)
        assert find_prefix_end(second, markers, which) == end
        assert first[:end] == second[:end]
        assert tokenizer.decode(first[:end]).endswith(tail)


@settings(max_examples=40, deadline=None)
@given(st.text(alphabet=st.characters(exclude_characters="<|>", codec="utf-8"), min_size=1, max_size=60))
def test_any_document_ends_at_its_own_marker(tokenizer, document):
    markers = learn_markers(tokenizer)
    ids = render(tokenizer, ("system", "S"), ("user", document), ("user", "Q"))
    end = find_prefix_end(ids, markers, "document")
    assert tokenizer.decode(ids[end:]).startswith("\n<|im_start|>user\nQ<|im_end|>")


def test_resolved_in_the_request(tokenizer):
    ids = render(tokenizer, ("system", "S"), ("user", "A long document."), ("user", "Q"))
    resolved = resolve_options({"grkv": {"prefix_end": "document"}}, ids, tokenizer)
    assert set(resolved) == {"prefix_end_tokens"}
    assert tokenizer.decode(ids[: resolved["prefix_end_tokens"]]).endswith("A long document.<|im_end|>")


def test_prompts_without_the_message_are_refused(tokenizer):
    markers = learn_markers(tokenizer)
    with pytest.raises(BoundaryError, match="no user message"):
        find_prefix_end(tokenizer.encode("plain text"), markers, "document")
    unfinished = render(tokenizer, ("system", "S"), ("user", "question"))
    cut = find_prefix_end(unfinished, markers, "document") - 1
    with pytest.raises(BoundaryError, match="does not end"):
        find_prefix_end(unfinished[:cut], markers, "document")
    with pytest.raises(OptionsError, match=r"prefix_end='system'.*give prefix_end_tokens instead"):
        resolve_options({"grkv": {"prefix_end": "system"}}, tokenizer.encode("plain text"), tokenizer)


def test_system_end(tokenizer):
    markers = learn_markers(tokenizer)
    one = render(tokenizer, ("system", "Be brief."), ("user", "Who?"))
    two = render(tokenizer, ("system", "Be brief."), ("user", "A fox."), ("assistant", "Yes."), ("user", "?"))
    end = system_end(one, markers)
    assert end == system_end(two, markers) == find_prefix_end(one, markers, "system")
    assert tokenizer.decode(one[:end]) == "<|im_start|>system\nBe brief.<|im_end|>"


def test_prompts_without_a_system_message_have_no_system_end(tokenizer):
    markers = learn_markers(tokenizer)
    prompt = render(tokenizer, ("system", "Be brief."), ("user", "Who?"))
    bare = prompt[last_turn_start(prompt, markers) :]
    assert tokenizer.decode(bare).startswith("<|im_start|>user\nWho?")
    others: list[list[int]] = [bare, [], tokenizer.encode("plain text"), prompt[:1]]
    for ids in others:
        assert system_end(ids, markers) is None


def test_last_turn_start(tokenizer):
    markers = learn_markers(tokenizer)
    turns = [("system", "S"), ("user", "A fox."), ("assistant", "Yes."), ("user", "Where?")]
    first = render(tokenizer, *turns[:2])
    second = render(tokenizer, *turns)
    assert tokenizer.decode(first[last_turn_start(first, markers) :]).startswith("<|im_start|>user\nA fox.")
    start = last_turn_start(second, markers)
    assert tokenizer.decode(second[start:]).startswith("<|im_start|>user\nWhere?")
    # Another question at the same place shares exactly what lies before.
    other = render(tokenizer, *turns[:3], ("user", "Why?"))
    assert last_turn_start(other, markers) == start
    assert other[:start] == second[:start]
    assert natural_end(array("q", second), len(second), markers) == start


def test_last_turn_start_at_the_edges(tokenizer):
    markers = learn_markers(tokenizer)
    header = list(markers.user_header)
    assert last_turn_start(header, markers) == 0
    assert last_turn_start([*header, 1, *header], markers) == len(header) + 1
    assert last_turn_start([*header, 1, *header[:-1]], markers) == 0
    without: list[list[int]] = [[], header[:-1], [1] * 50]
    for ids in without:
        assert last_turn_start(ids, markers) is None


def test_a_tokenizer_without_template_is_refused(tokenizer):
    bare = copy.copy(tokenizer)
    bare.chat_template = None
    with pytest.raises(BoundaryError, match="no chat template"):
        learn_markers(bare)


def test_a_template_without_special_tokens_is_refused(tokenizer):
    plain = copy.copy(tokenizer)
    plain.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    with pytest.raises(BoundaryError, match="special token"):
        learn_markers(plain)


def test_a_template_that_refuses_a_system_role_is_reported(tokenizer):
    strict = copy.copy(tokenizer)
    strict.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(BoundaryError, match=r"cannot render.*no system role"):
        learn_markers(strict)
