"""What the example programs read, and what they print."""

from __future__ import annotations

import many_shot_classifier
import pytest
from served import Answer, Served, read_document, show


def test_a_document_is_cut_after_whole_words(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("one  two\nthree four two", encoding="utf-8")
    assert read_document(path, 3) == "one  two\nthree"
    assert read_document(path, 5) == "one  two\nthree four two"
    assert read_document(path, 0) == "one  two\nthree four two"
    assert len(read_document(None, 100).split()) == 100


def test_examples_are_labels_and_messages(tmp_path):
    assert len(many_shot_classifier.read_examples(many_shot_classifier.DATA / "labelled_messages.tsv")) == 60
    path = tmp_path / "bad.tsv"
    path.write_text("billing\tTwice.\nno tab\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 2"):
        many_shot_classifier.read_examples(path)


def test_the_table_sums_what_was_reused(capsys):
    span = Served(
        mode="prefer_compressed", exact_tokens=20, span_tokens=1000, span_slots=100, spans=1, budget=0.1,
        quality=0.8, profile="default", reprefilled_tokens=0,
    )  # fmt: skip
    show([Answer("a", "yes", 1030, 1020, span, 0.5), Answer("b", "no", 1000, 0, None, 2.0)], "title")
    printed = " ".join(capsys.readouterr().out.split())
    assert "1,020 of 2,030 prompt tokens were not computed again" in printed
    assert "1,000 of them were read from 100 slots" in printed


def test_a_server_that_is_not_there_is_one_line():
    with pytest.raises(SystemExit, match=r"127\.0\.0\.1:9.*refused"):
        many_shot_classifier.main(url="http://127.0.0.1:9")
