"""The fidelity benchmark: documents, measures, methods, tables, and the host that runs a model."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import typer
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks import kv_dtypes
from benchmarks.fidelity.__main__ import load_rows, save
from benchmarks.fidelity.cases import (
    Case,
    Chat,
    build_cases,
    code_questions,
    prose_questions,
    text_files,
)
from benchmarks.fidelity.host import Compressed, Host, LayerCache, Prefix
from benchmarks.fidelity.measures import deviation, exact_match
from benchmarks.fidelity.merging import MERGING_METHODS
from benchmarks.fidelity.methods import MergeMethod, Method, PeerMethod, ProfileMethod, parse_methods
from benchmarks.fidelity.report import (
    HEADER,
    cells,
    markdown_table,
    paired_ratio,
    plot,
    rich_table,
    summarise,
    values_by_case,
)
from benchmarks.fidelity.run import Measure, Row, as_dict, case_id, from_dict, measure_case
from benchmarks.peers import PEERS
from grkv_sglang.core import (
    STORAGE_DTYPES,
    Storage,
    get_profile,
    get_scorer,
    plan_queries,
    profile_names,
    scorer_names,
)

# --- documents ----------------------------------------------------------------------------------------


class Words:
    """Words, gaps and other characters as tokens; ids in the order of their first use."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._texts: list[str] = []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        for piece in re.findall(r"\w+|\s+|[^\w\s]", text):
            if piece not in self._ids:
                self._ids[piece] = len(self._texts)
                self._texts.append(piece)
        return [self._ids[piece] for piece in re.findall(r"\w+|\s+|[^\w\s]", text)]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._texts[token] for token in ids)


class ChatWords(Words):
    chat_template = "a template"

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool = False
    ) -> str:
        assert not tokenize
        turns = [f"<{message['role']}>{message['content'].strip()}</>" for message in messages]
        return "".join(["<system>Be kind.</>", *turns, *(["<assistant>"] if add_generation_prompt else [])])


def prose(seed: int, n_paragraphs: int = 300) -> str:
    rng = random.Random(seed)
    words = ["river", "stone", "walked", "quietly", "morning", "letter", "answered", "the", "of", "never"]
    names = ["Marlow", "Agnes", "Theodora"]

    def sentence() -> str:
        drawn = [rng.choice(words) for _ in range(rng.randint(8, 14))]
        return f"{' '.join(drawn).capitalize()} with {rng.choice(names)} {rng.randrange(10**6)}."

    return "\n\n".join(" ".join(sentence() for _ in range(4)) for _ in range(n_paragraphs))


def code(seed: int, n_functions: int = 500) -> str:
    rng = random.Random(seed)
    functions = []
    for index in range(n_functions):
        lines = [f"    value_{rng.randrange(1000)} = left * {rng.randrange(1000)} + right" for _ in range(4)]
        functions.append(f"def compute_{seed}_{index}(left, right):\n" + "\n".join(lines) + "\n")
    return "\n".join(functions)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for seed, name in enumerate(("one.txt", "two.md", "three.txt")):
        (folder / name).write_text(prose(seed), encoding="utf-8")
    for seed, name in enumerate(("first.py", "second.rs")):
        (folder / name).write_text(code(seed), encoding="utf-8")
    (folder / "short.txt").write_text(prose(9, 10), encoding="utf-8")
    (folder / "numbers.csv").write_text("1,2,3\n" * 20_000, encoding="utf-8")
    return folder


def cases_of(
    folders: Sequence[Path],
    *,
    seed: int = 0,
    context_tokens: int = 700,
    tokenizer: Words | None = None,
    **changes: int,
) -> list[Case]:
    settings = {
        "documents": 4, "filler_documents": 2, "continuation_tokens": 60, "n_questions": 6,
        "facts_per_document": 3, **changes,
    }  # fmt: skip
    return build_cases(
        folders,
        ChatWords() if tokenizer is None else tokenizer,
        context_tokens=context_tokens,
        seed=seed,
        **settings,
    )


def planted(text: str) -> list[str]:
    return re.findall(r"The access code of the \w+ is \d{5}\.", text)


class TestCases:
    def test_everything_follows_from_the_seed(self, texts: Path):
        assert cases_of([texts]) == cases_of([texts])
        same, other = cases_of([texts]), cases_of([texts], seed=1)
        assert [case.kind for case in same] == [case.kind for case in other]
        assert all(a.context != b.context for a, b in zip(same, other, strict=True))
        assert all(a.facts != b.facts for a, b in zip(same, other, strict=True))

    def test_more_documents_leave_the_others_as_they_are(self, texts: Path):
        fewer = cases_of([texts], documents=2, filler_documents=1)
        more = cases_of([texts])
        assert [case.name for case in fewer] == [more[0].name, more[1].name, more[4].name]

    @pytest.mark.parametrize("tokenizer", [Words, ChatWords])
    @pytest.mark.parametrize("context_tokens", [500, 701])
    def test_lengths_are_exact(self, texts: Path, tokenizer: type[Words], context_tokens: int):
        for case in cases_of([texts], tokenizer=tokenizer(), context_tokens=context_tokens):
            assert len(case.context) == context_tokens
            assert len(case.continuation) == (0 if case.kind == "filler" else 60)
            assert len(case.questions) == (0 if case.kind == "filler" else 6)

    def test_kinds_and_files_take_turns(self, texts: Path):
        cases = cases_of([texts], documents=6)
        assert [case.kind for case in cases] == ["prose", "prose", "code"] * 2 + ["filler"] * 2
        names = [case.name.partition("@")[0] for case in cases]
        # The short file and the table are none of them; every other once before any is used again.
        assert set(names[:2] + names[3:4]) == {"one.txt", "two.md", "three.txt"}
        assert {names[2], names[5]} == {"first.py", "second.rs"}

    def test_facts_lie_in_the_context_where_they_say(self, texts: Path):
        tokenizer = ChatWords()
        for case in cases_of([texts], tokenizer=tokenizer, context_tokens=2500):
            text = tokenizer.decode(case.context)
            sentences = planted(text)
            assert len(sentences) == len(case.facts) == len(case.fact_depths)
            assert len(sentences) == (1 if case.kind == "filler" else 3)
            assert case.fact_depths == sorted(case.fact_depths)
            assert all(0 <= depth < 1 for depth in case.fact_depths)
            header = len(tokenizer.decode(Chat(tokenizer).header))
            for sentence, (suffix, value), depth in zip(sentences, case.facts, case.fact_depths, strict=True):
                place = re.findall(r"of the (\w+) is", sentence)[0]
                asked = tokenizer.decode(suffix)
                assert asked.startswith(f"\n\nWhat is the access code of the {place}?")
                assert asked.endswith(f"<assistant>The access code of the {place} is")
                assert sentence.endswith(f"is{tokenizer.decode(value)}.")
                # Filler counts whole units of its sentences.
                place_in_text = (text.index(sentence) - header) / (len(text) - header)
                assert depth == pytest.approx(place_in_text, abs=0.05 if case.kind == "filler" else 1e-3)

    def test_filler_holds_nothing_but_one_fact(self, texts: Path):
        tokenizer = ChatWords()
        cases = cases_of([texts], documents=0, filler_documents=6, tokenizer=tokenizer)
        assert len({case.fact_depths[0] for case in cases}) > 1
        for case in cases:
            assert case.kind == "filler"
            text = tokenizer.decode(case.context)
            (sentence,) = planted(text)
            assert text.count("access code") == 1
            rest = text.removeprefix("<system>Be kind.</><user>").replace(f"{sentence} ", "")
            unit = (
                "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
                "The river runs past the mill and the road follows it. "
            )
            assert (unit * 100).startswith(rest)

    def test_the_continuation_follows_the_context(self, texts: Path):
        tokenizer = ChatWords()
        for case in cases_of([texts], filler_documents=0, tokenizer=tokenizer):
            name, _, start = case.name.partition("@")
            text = (texts / name).read_text(encoding="utf-8")
            following = tokenizer.decode(case.continuation)
            at = text.index(following, int(start))
            assert tokenizer.decode(case.context).endswith(text[at - 20 : at])

    def test_unknown_and_too_short_files(self, texts: Path, tmp_path: Path):
        with pytest.raises(FileNotFoundError, match="nowhere"):
            cases_of([tmp_path / "nowhere"])
        with pytest.raises(ValueError, match=f"text or code files of 30,000 bytes or more in {tmp_path}"):
            cases_of([tmp_path])
        with pytest.raises(ValueError, match=r"files of 900,540 bytes or more"):
            cases_of([texts], context_tokens=100_000)

    @pytest.mark.parametrize("character", [" ", "x"])
    def test_a_text_of_few_tokens(self, tmp_path: Path, character: str):
        """There seems to be room for the context, and then is not."""
        (tmp_path / "dense.txt").write_text("\n\n" + character * 40_000, encoding="utf-8")
        with pytest.raises(ValueError, match=r"dense.txt to hold 7\d\d tokens behind 2"):
            cases_of([tmp_path], documents=1, filler_documents=0, facts_per_document=0)

    def test_contexts_too_short_for_their_facts(self, texts: Path):
        with pytest.raises(ValueError, match="a context that holds a fact between filler, got one of 50"):
            cases_of([texts], documents=0, context_tokens=50)
        with pytest.raises(ValueError, match="a context that holds 12 facts, got one of 200 tokens"):
            cases_of([texts], documents=1, context_tokens=200, facts_per_document=12)

    def test_files_of_both_kinds(self, texts: Path):
        found = text_files([texts])
        assert [path.name for path in found["prose"]] == ["one.txt", "three.txt", "two.md"]
        assert [path.name for path in found["code"]] == ["first.py", "second.rs"]

    def test_questions(self):
        kinds: dict[Any, str] = {prose_questions: prose(1, 5), code_questions: code(1, 5)}
        for generate, text in kinds.items():
            asked = generate(text, random.Random(0))
            assert len(set(asked)) == len(asked) == 6
            assert asked == generate(text, random.Random(0))
            assert asked != generate(text, random.Random(1))
            assert not any("access code" in question for question in asked)
        quoted = [q for q in prose_questions(prose(1, 5), random.Random(0)) if '"' in q]
        assert len(quoted) == 3
        assert all(re.findall('"(.*)"', question)[0] in prose(1, 5) for question in quoted)
        quoted = [q for q in code_questions(code(1, 5), random.Random(0)) if "`" in q]
        assert len(quoted) == 4
        assert all(re.findall("`(.*)`", question)[0] in code(1, 5) for question in quoted)

    def test_texts_with_nothing_to_ask_about(self):
        with pytest.raises(ValueError, match="text of at least 3 sentences to ask about, found 0"):
            prose_questions("Too short.", random.Random(0))
        with pytest.raises(ValueError, match="text of at least 2 lines to ask about, found 1"):
            code_questions("def compute(left, right):\n    x\n", random.Random(0))
        # No name of a person or a function is needed.
        plain = " ".join(f"a sentence of some forty letters number {i}." for i in range(4))
        assert "What do we learn about the narrator?" in prose_questions(plain, random.Random(0))
        assert "What does `main` do?" in code_questions(
            "first line of code\nanother line of code", random.Random(0)
        )

    def test_chat(self):
        tokenizer = ChatWords()
        chat = Chat(tokenizer)
        assert tokenizer.decode(chat.header) == "<system>Be kind.</><user>"
        assert tokenizer.decode(chat.suffix("Why?", "Because")) == "\n\nWhy?</><assistant>Because"
        assert tokenizer.decode(chat.turn(" And then? ")) == "</><user>And then?</><assistant>"
        plain = Words()
        assert Chat(plain).header == []
        assert plain.decode(Chat(plain).suffix("Why?", "Because")) == "\n\nWhy?\n\nBecause"


# --- measures and methods -----------------------------------------------------------------------------


def test_deviation_by_hand() -> None:
    full = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8], [1.0, 0.0, 0.0]]).log()
    other = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.1, 0.8], [0.5, 0.25, 0.25]]).log()
    # A probability of 0 adds nothing; its logarithm must not be infinite.
    full = full.clamp(min=-200.0)
    found = deviation(full, other, torch.tensor([0, 2, 1]))
    assert found.kl.dtype == torch.float64
    log2 = math.log(2)
    assert found.kl.tolist() == pytest.approx([0.5 * log2 - 0.25 * log2, 0.0, log2])
    assert found.top1.tolist() == [0.0, 1.0, 1.0]
    assert found.nll_increase.tolist() == pytest.approx([log2, 0.0, math.log(0.25) * -1 - 200.0])


def test_exact_match() -> None:
    table = torch.tensor([[0.1, 0.9], [0.8, 0.2]]).log()
    assert exact_match(table, torch.tensor([1, 0]))
    assert not exact_match(table, torch.tensor([1, 1]))


def parsed(name: str) -> Method:
    (method,) = parse_methods(name, Path("exports"))
    return method


def profile_of(name: str) -> Any:
    method = parsed(name)
    assert isinstance(method, ProfileMethod)
    assert method.name == method.profile.name == name
    return method.profile


class TestMethods:
    def test_profiles(self):
        for name in profile_names():
            assert profile_of(name) == get_profile(name)

    @pytest.mark.parametrize("scorer", ["snapkv", "kvzip+snapkv", "question_mass~snapkv", "adakv"])
    def test_selection_methods_with_and_without_the_regression(self, scorer: str):
        default = get_profile("default")
        assert profile_of(f"{scorer}/grkv") == replace(default, name=f"{scorer}/grkv", scorer=scorer)
        plain = profile_of(scorer)
        assert not plain.regresses
        assert plain == replace(default, name=scorer, scorer=scorer, value_step=False, key_step=False)

    def test_settings_in_brackets(self):
        name = "release[cap_k=none;steps=2;guard=false;lambda_k=0.5;scorer=snapkv+kvzip]"
        assert profile_of(name) == replace(
            get_profile("release"),
            name=name,
            cap_k=None,
            steps=2,
            guard=False,
            lambda_k=0.5,
            scorer="snapkv+kvzip",
        )
        assert profile_of("kvzip/grkv[repetition_reach_tokens=none]").repetition_reach_tokens is None

    def test_lists(self):
        names = ["default", "snapkv/grkv", "copy[sinks=2;n_held_out=4]", "merge:cam", "kvzip+snapkv"]
        assert [m.name for m in parse_methods(" , ".join(names) + ",", None)] == names
        with pytest.raises(ValueError, match="at least one method"):
            parse_methods(" ,, ", None)

    def test_baselines(self):
        for name in MERGING_METHODS:
            assert parsed(f"merge:{name}") == MergeMethod(f"merge:{name}", name)
        for peer in PEERS:
            assert parsed(f"peer:{peer}") == PeerMethod(f"peer:{peer}", peer, Path("exports"))
        with pytest.raises(ValueError, match="needs the folder of kvpress's exports"):
            parse_methods(f"peer:{next(iter(PEERS))}", None)

    def test_what_a_method_costs_and_what_can_hold_it(self):
        held = {name: parsed(name).held for name in ("default", "adakv", "pyramidkv", "merge:cam")}
        assert held == {"default": "even", "adakv": "per_head", "pyramidkv": "none", "merge:cam": "even"}
        names = ("default", "best", "paper", "kvzip", "h2o", "question_mass", "merge:cam")
        assert [name for name in names if parsed(name).extra_prefill] == ["best", "kvzip", "h2o"]

    @pytest.mark.parametrize(
        ("name", "valid"),
        [
            ("snapp", [*profile_names(), *scorer_names()]),
            ("snapp/grkv", [*profile_names(), *scorer_names()]),
            ("default/grkv", [*profile_names(), *scorer_names()]),
            ("snapp[steps=2]", [*profile_names(), *scorer_names()]),
            ("kvzip+snapp", scorer_names()),
            ("merge:snapp", MERGING_METHODS),
            ("peer:snapp", list(PEERS)),
            ("default[stepps=2]", [field.name for field in fields(get_profile("default"))]),
        ],
    )
    def test_unknown_names_list_the_valid_ones(self, name: str, valid: Sequence[str]):
        with pytest.raises(ValueError, match="expected") as failure:
            parsed(name)
        assert all(other in str(failure.value) for other in valid)

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("default[steps=2", "expected settings such as"),
            ("default[steps=2]more", "expected settings such as"),
            ("default[steps=many]", "settings of the right types, got 'steps=many'"),
            ("default[steps=none]", "settings of the right types"),
            ("default[steps=0]", "expected steps >= 1"),
            ("default[scorer=snapp]", "expected a selection method"),
            ("default[]", "expected a setting out of name, scorer"),
        ],
    )
    def test_wrong_settings(self, name: str, message: str):
        with pytest.raises(ValueError, match=message):
            parsed(name)


# --- rows and tables ----------------------------------------------------------------------------------

NAN = float("nan")


def row(
    case: str = "a",
    *,
    kind: str = "prose",
    method: str = "default",
    budget: float = 0.2,
    measure: Measure = "continuation",
    **changes: float,
) -> Row:
    numbers = {
        "kl": 0.1, "kl_p90": 0.3, "top1": 0.9, "nll_increase": 0.05, "exact": NAN, "exact_full": NAN,
        "attention_error": 0.4, "prefill_s": 2.0, "compress_s": 1.0, "pass_s": 0.5, **changes,
    }  # fmt: skip
    return Row(
        case=case, kind=kind, context_tokens=100, method=method, budget=budget, slots=20, measure=measure,
        tokens=5, **numbers,
    )  # fmt: skip


ROWS = [
    row("a", kl=0.1, prefill_s=2.0, compress_s=1.0, pass_s=0.5),
    row("a", measure="answers", kl=0.2, prefill_s=2.0, compress_s=1.0, pass_s=0.5),
    row("a", measure="needles", kl=9.0, exact=0.5, exact_full=1.0, prefill_s=2.0, compress_s=1.0, pass_s=0.5),
    row("b", kind="code", kl=0.3, top1=0.7, attention_error=0.6, prefill_s=6.0, compress_s=1.0, pass_s=1.5),
    row("f", kind="filler", measure="needles", kl=5.0, exact=0.25, exact_full=0.75, attention_error=9.0),
    row("a", method="copy", kl=0.4, attention_error=NAN),
    row("a", method="copy", budget=0.5, kl=NAN),
]


class TestRows:
    def test_round_trip(self):
        for made in (row(exact=0.5), row(attention_error=NAN)):
            values = json.loads(json.dumps(as_dict(made), allow_nan=False))
            back = from_dict(values)
            assert as_dict(back) == as_dict(made)
            assert math.isnan(back.exact) == math.isnan(made.exact)
            assert type(back) is Row

    def test_rows_of_other_settings_are_refused(self, tmp_path: Path):
        path = tmp_path / "new" / "rows.json"
        assert load_rows(None, {}) == load_rows(path, {"seed": 0}) == []
        save(path, {"seed": 0, "texts": ["books"]}, ROWS)
        assert not path.with_suffix(".part").exists()
        found = load_rows(path, {"seed": 0, "texts": ["books"]})
        assert [as_dict(each) for each in found] == [as_dict(each) for each in ROWS]
        assert len(load_rows(path, None)) == len(ROWS)
        for other in ({"seed": 1, "texts": ["books"]}, {"seed": 0}, {}):
            with pytest.raises(typer.BadParameter, match=r"holds a run of other settings: .*'seed': 0"):
                load_rows(path, other)
        save(None, {}, ROWS)

    def test_file_names_of_cases(self):
        case = Case("a b/c.txt@12", "prose", [1, 2, 3], [], [], [], [])
        assert case_id(case) == "a-b-c.txt-12-3"


class TestReport:
    def test_summaries_by_hand(self):
        first, second, third = summarise(ROWS)
        assert [(s.method, s.budget) for s in (first, second, third)] == [
            ("default", 0.2), ("copy", 0.2), ("copy", 0.5),
        ]  # fmt: skip
        assert first.kl == pytest.approx({"continuation": 0.2, "answers": 0.2, "needles": 9.0})
        assert first.top1 == pytest.approx({"continuation": 0.8, "answers": 0.9, "needles": 0.9})
        assert (first.exact, first.exact_full) == (0.5, 1.0)
        assert (first.filler_exact, first.filler_exact_full) == (0.25, 0.75)
        # Once per document, of text only.
        assert first.documents == 2
        assert first.attention_error == pytest.approx(0.5)
        assert first.compress_share == pytest.approx(2 / 8)
        assert first.pass_share == pytest.approx(2 / 8)

    def test_what_is_not_known_is_left_out(self):
        _, second, third = summarise(ROWS)
        assert second.kl["continuation"] == 0.4
        assert all(math.isnan(x) for x in (second.kl["answers"], second.attention_error, second.exact))
        assert math.isnan(third.kl["continuation"])
        (mixed,) = summarise([row("a", kl=NAN), row("b", kl=0.4), row("c", kl=0.2)])
        assert mixed.kl["continuation"] == pytest.approx(0.3)
        (free,) = summarise([row("f", kind="filler", measure="needles", exact=1.0)])
        assert (free.documents, free.filler_exact) == (0, 1.0)
        assert math.isnan(free.compress_share)

    def test_tables(self):
        summaries = summarise(ROWS)
        head, rule, *lines = markdown_table(summaries).splitlines()
        assert head == "| " + " | ".join(HEADER) + " |"
        assert rule == "|" + "---|" * len(HEADER)
        assert lines[0] == (
            "| default | 0.2 | 0.2000 | 0.300 | 0.800 | 0.050 | 0.2000 | 0.300 | 0.900 | 0.050 "
            "| 0.50 | 0.25 | 0.500 | 0.25 | 0.25 |"
        )
        assert lines[2].startswith("| copy | 0.5 | – | 0.300 |")
        assert all(len(cells(summary)) == len(HEADER) for summary in summaries)
        assert rich_table(summaries, "title").row_count == 3

    def test_plot(self, tmp_path: Path):
        plot(summarise(ROWS), tmp_path / "plot.png", "title")
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")

    def test_values_by_case(self):
        found = values_by_case(ROWS, "default", 0.2, "continuation", lambda each: each.kl)
        assert found == {("a", 100): 0.1, ("b", 100): 0.3}
        assert values_by_case(ROWS, "default", 0.2, "needles", lambda each: each.exact) == {("a", 100): 0.5}

    def test_paired_ratio_by_hand(self):
        first = {("a", 1): 1.0, ("b", 1): 2.0, ("c", 1): 6.0, ("only here", 1): 100.0}
        second = {("a", 1): 2.0, ("b", 1): 2.0, ("c", 1): 8.0, ("only there", 1): 100.0}
        ratio = paired_ratio(first, second)
        assert (ratio.ratio, ratio.documents) == (0.75, 3)
        # The extremes of all draws: three times the same document.
        assert 0.5 <= ratio.low <= ratio.ratio <= ratio.high <= 1.0
        assert (ratio.low, ratio.high) == (0.5, 1.0)
        assert str(ratio) == "0.75 (0.50–1.00)"
        assert paired_ratio(first, second) == ratio
        # Documents of two lengths are two documents.
        assert paired_ratio({("a", 1): 1.0, ("a", 2): 3.0}, {("a", 2): 2.0}).ratio == 1.5

    def test_the_interval_narrows_with_the_documents(self):
        rng = random.Random(0)
        widths = []
        for count in (5, 20, 200):
            second = {(str(i), 1): 1.0 + rng.random() for i in range(count)}
            first = {key: value * (0.5 + rng.random()) for key, value in second.items()}
            ratio = paired_ratio(first, second)
            assert ratio.low <= ratio.ratio <= ratio.high
            widths.append(ratio.high - ratio.low)
        assert widths == sorted(widths, reverse=True)

    def test_ratios_without_a_value(self):
        message = "two methods measured on common documents, got none"
        with pytest.raises(ValueError, match=message):
            paired_ratio({("a", 1): 1.0}, {("b", 1): 1.0})
        # A NaN is no value.
        with pytest.raises(ValueError, match=message):
            paired_ratio({("a", 1): NAN}, {("a", 1): 1.0})
        found = paired_ratio({("a", 1): NAN, ("b", 1): 1.0}, {("a", 1): 1.0, ("b", 1): 4.0, ("c", 1): NAN})
        assert (found.ratio, found.documents) == (0.25, 1)
        assert paired_ratio({("a", 1): 1.0}, {("a", 1): 0.0}).ratio == math.inf


# --- the host -----------------------------------------------------------------------------------------

VOCABULARY = 300
N_LAYERS, N_HEADS, N_KV_HEADS = 2, 4, 2


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama and a tokenizer of whole words."""
    folder = tmp_path_factory.mktemp("model")
    vocabulary = {f"w{i}": i for i in range(VOCABULARY - 1)} | {"<unk>": VOCABULARY - 1}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=N_LAYERS,
        num_attention_heads=N_HEADS,
        num_key_value_heads=N_KV_HEADS,
        max_position_embeddings=512,
        # Larger than usual: attention that prefers some tokens to others, and predictions that differ.
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=VOCABULARY - 2,
        pad_token_id=VOCABULARY - 3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def host(model_dir: Path) -> Host:
    return Host(model_dir)


@pytest.fixture(scope="module")
def plain(model_dir: Path) -> Any:
    """The model as transformers runs it."""
    return AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="sdpa").eval()


def drawn(n: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY - 3) for _ in range(n)]


N = 90
CONTEXT = drawn(N, 0)
SEQUENCES = [drawn(length, 10 + length) for length in (9, 2, 17, 5)]
FIRST = [1, 1, 6, 4]


@pytest.fixture(scope="module")
def prefix(host: Host) -> Prefix:
    return host.prefill(CONTEXT)


@torch.inference_mode()
def plain_log_probs(plain: Any, sequence: Sequence[int], first: int) -> Tensor:
    logits = plain(torch.tensor([[*CONTEXT, *sequence]])).logits[0]
    found: Tensor = logits.log_softmax(dim=-1)[N + first - 1 : N + len(sequence) - 1]
    return found


def assert_close(found: Sequence[Tensor], expected: Sequence[Tensor], atol: float = 1e-4) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


def quick(name: str, **changes: Any) -> Any:
    """A profile with a shorter window."""
    return replace(get_profile(name), n_window=8, **changes)


class TestHost:
    def test_the_full_cache_predicts_like_the_model(self, host: Host, prefix: Prefix, plain: Any):
        found = host.log_probs(host.full(prefix), SEQUENCES, FIRST)
        assert [tuple(table.shape) for table in found] == [
            (len(ids) - first, VOCABULARY) for ids, first in zip(SEQUENCES, FIRST, strict=True)
        ]
        expected = [plain_log_probs(plain, ids, at) for ids, at in zip(SEQUENCES, FIRST, strict=True)]
        assert_close(found, expected)
        # Something is at stake: the context decides.
        alone = plain(torch.tensor([SEQUENCES[0]])).logits[0].log_softmax(dim=-1)
        assert (alone[:-1] - expected[0]).abs().max() > 0.1

    def test_what_a_prefill_records(self, prefix: Prefix):
        assert (prefix.n_tokens, len(prefix.layers), len(prefix.queries)) == (N, N_LAYERS, N_LAYERS)
        for cached, queries in zip(prefix.layers, prefix.queries, strict=True):
            assert cached.keys.shape == cached.values.shape == (N_KV_HEADS, N, 8)
            assert queries.shape == (N, N_HEADS, 8)
        assert prefix.scales == pytest.approx([8**-0.5] * N_LAYERS)

    def test_packed_sequences_do_not_see_each_other(self, host: Host, prefix: Prefix):
        cache = host.full(prefix)
        together = host.log_probs(cache, SEQUENCES, FIRST)
        alone = [host.log_probs(cache, [ids], [at])[0] for ids, at in zip(SEQUENCES, FIRST, strict=True)]
        assert_close(together, alone, atol=1e-5)
        others = [SEQUENCES[0], drawn(30, 99), SEQUENCES[2], drawn(1, 98)]
        changed = host.log_probs(cache, others, [*FIRST[:3], 1])
        assert_close([changed[0], changed[2]], [together[0], together[2]], atol=1e-5)

    @pytest.mark.parametrize("with_end", [False, True])
    def test_greedy_answers_are_those_of_the_model(
        self, host: Host, prefix: Prefix, plain: Any, monkeypatch: pytest.MonkeyPatch, with_end: bool
    ):
        prompts, count = [ids[:4] for ids in SEQUENCES] + [drawn(11, 3)], 12
        expected = []
        for prompt in prompts:
            ids = torch.tensor([[*CONTEXT, *prompt]])
            made = plain.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
            )
            expected.append(made[0, ids.shape[1] :].tolist())
        if with_end:
            # A token of the first answer ends all answers that it comes in.
            end = expected[0][5]
            monkeypatch.setattr(host.model.generation_config, "eos_token_id", [end, VOCABULARY - 2])
            expected = [answer[: answer.index(end)] if end in answer else answer for answer in expected]
            assert len(expected[0]) <= 5
        assert host.generate(host.full(prefix), prompts, count) == expected
        assert len(set(map(tuple, expected))) > 1

    @pytest.mark.parametrize("name", ["default", "best", "paper", "release", "copy"])
    def test_keeping_everything_changes_nothing(self, host: Host, prefix: Prefix, name: str):
        full = host.log_probs(host.full(prefix), SEQUENCES, FIRST)
        kept = host.compress(prefix, quick(name), N)
        assert (kept.n_tokens, kept.error_before, kept.error_after) == (N, 0.0, 0.0)
        assert_close(host.log_probs(kept, SEQUENCES, FIRST), full, atol=1e-5)

    def test_fewer_tokens_change_something_and_keep_the_positions(self, host: Host, prefix: Prefix):
        compressed = host.compress(prefix, quick("default"), 30)
        assert compressed.n_tokens == N
        assert [tuple(cached.keys.shape) for cached in compressed.layers] == [(N_KV_HEADS, 30, 8)] * N_LAYERS
        assert all(cached.valid is None for cached in compressed.layers)
        assert 0 < compressed.error_after < compressed.error_before
        full, found = (host.log_probs(cache, SEQUENCES, FIRST) for cache in (host.full(prefix), compressed))
        assert all(table.isfinite().all() for table in found)
        assert max(float((a - b).abs().max()) for a, b in zip(full, found, strict=True)) > 1e-3

    def test_heads_of_different_length(self, host: Host, prefix: Prefix):
        compressed = host.compress(prefix, quick("copy", scorer="adakv"), 25)
        for cached in compressed.layers:
            assert cached.valid is not None
            counts = cached.valid.sum(dim=1)
            assert int(counts.sum()) == 25 * N_KV_HEADS
            assert counts.unique().numel() == 2
        found = host.log_probs(compressed, SEQUENCES, FIRST)
        assert all(table.isfinite().all() for table in found)
        # What stands in the padding does not matter.
        garbage = [
            replace_layer(cached, torch.where(cached.valid[..., None], cached.keys, 1e3))
            for cached in compressed.layers
            if cached.valid is not None
        ]
        assert_close(host.log_probs(replace(compressed, layers=garbage), SEQUENCES, FIRST), found, atol=1e-6)
        prompts = [ids[:4] for ids in SEQUENCES[::2]]
        together = host.generate(compressed, prompts, 6)
        assert together == [host.generate(compressed, [prompt], 6)[0] for prompt in prompts]

    def test_padded_heads_predict_like_the_full_ones(self, host: Host, prefix: Prefix):
        """A full cache in which one head has its tokens, the other them and padding."""
        layers = []
        for cached in prefix.layers:
            pad = torch.full((N_KV_HEADS, 5, 8), 7.0)
            valid = torch.ones(N_KV_HEADS, N + 5, dtype=torch.bool)
            valid[:, N:] = False
            keys, values = (torch.cat([tensor, pad], dim=1) for tensor in (cached.keys, cached.values))
            layers.append(LayerCache(keys, values, valid))
        full = host.log_probs(host.full(prefix), SEQUENCES, FIRST)
        assert_close(host.log_probs(Compressed(N, layers), SEQUENCES, FIRST), full, atol=1e-5)

    def test_a_count_is_so_many_tokens(self, host: Host, prefix: Prefix):
        counts = torch.tensor([1 + (s * s) % 3 for s in range(N)])
        once, repeated = [], []
        for cached in prefix.layers:
            log_counts = counts.float().log().expand(N_KV_HEADS, -1)
            once.append(LayerCache(cached.keys, cached.values, log_counts=log_counts))
            repeated.append(
                LayerCache(*(t.repeat_interleave(counts, dim=1) for t in (cached.keys, cached.values)))
            )
        found, expected = (
            host.log_probs(Compressed(N, layers), SEQUENCES, FIRST) for layers in (once, repeated)
        )
        assert_close(found, expected, atol=1e-5)
        full = host.log_probs(host.full(prefix), SEQUENCES, FIRST)
        assert (full[0] - found[0]).abs().max() > 1e-3
        prompts = [ids[:4] for ids in SEQUENCES]
        answers = [host.generate(Compressed(N, layers), prompts, 6) for layers in (once, repeated)]
        assert answers[0] == answers[1]

    def test_each_pass_is_done_once(self, host: Host, monkeypatch: pytest.MonkeyPatch):
        prefix = host.prefill(CONTEXT)
        done: list[int] = []
        forward = host._forward

        def counted(ids: Tensor, positions: Tensor, handler: Any) -> Tensor:
            done.append(ids.shape[1])
            return forward(ids, positions, handler)

        monkeypatch.setattr(host, "_forward", counted)
        kinds: tuple[Literal["span", "questions", "repetition"], ...] = ("span", "questions", "repetition")
        for kind in kinds:
            host.run_pass(prefix, kind, chunk_tokens=40, reach_tokens=20)
        assert done[:3] == [40, 40, 10]
        first = list(done)
        for kind in kinds:
            host.run_pass(prefix, kind, chunk_tokens=40, reach_tokens=20)
        assert done == first
        # Another reach is another repetition, and nothing to the others.
        results, seconds = dict(prefix.passes), dict(prefix.pass_s)
        for kind in kinds:
            host.run_pass(prefix, kind, chunk_tokens=90, reach_tokens=None)
        assert len(done) == len(first) + 1
        assert {kind for kind in kinds if prefix.passes[kind] is not results[kind]} == {"repetition"}
        assert {kind for kind in kinds if prefix.pass_s[kind] != seconds[kind]} == {"repetition"}
        # So a compression pays for what is missing only.
        host.compress(prefix, quick("best", repetition_reach_tokens=None), 40)
        assert len(done) == len(first) + 1

    def test_what_a_pass_over_the_span_counts(self, host: Host, prefix: Prefix):
        host.run_pass(prefix, "span")
        for layer in range(N_LAYERS):
            # Every token's attention over what is before it adds up to one.
            total = prefix.passes["span"].statistics(layer).total
            torch.testing.assert_close(total.sum(dim=-1), torch.full((N_KV_HEADS,), float(N)))

    def test_passes_and_their_queries_go_into_a_layer(self, host: Host, prefix: Prefix):
        profile = quick("best")
        host.compress(prefix, profile, 40)
        inputs = host.layer_inputs(prefix, 1, plan_queries(N, profile), profile)
        assert set(inputs.passes) == {"repetition", "questions"}
        assert {kind: len(queries) for kind, queries in inputs.pass_queries.items()} == {
            "repetition": 24, "questions": min(24, len(host._prompts.questions)),
        }  # fmt: skip
        assert inputs.output_projection is None
        release = quick("release")
        projection = host.layer_inputs(prefix, 1, plan_queries(N, release), release).output_projection
        assert projection is not None
        assert projection.shape == (32, 32)
        assert get_scorer(release.scorer).needs_output_projection

    def test_the_model_is_not_to_be_called_past_its_host(self, host: Host):
        with pytest.raises(RuntimeError, match="past its host"):
            host.model(torch.tensor([[1, 2, 3]]))


def replace_layer(cached: LayerCache, keys: Tensor) -> LayerCache:
    return LayerCache(keys, cached.values, cached.valid, cached.log_counts)


@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
def test_a_pool_of_another_dtype(model_dir: Path, prefix: Prefix, dtype: torch.dtype) -> None:
    """What is held is the prefill's KV rounded, and what comes of a compression can be stored."""
    host = Host(model_dir)
    host.storage = Storage(dtype, 1.0 if dtype == torch.float32 else 0.25)
    stored = host.prefill(CONTEXT)
    compressed = host.compress(stored, quick("default"), 45)
    for exact, held, layer in zip(prefix.layers, stored.layers, compressed.layers, strict=True):
        for name in ("keys", "values"):
            whole, some = getattr(held, name), getattr(layer, name)
            assert torch.equal(whole, host.storage.rounded(getattr(exact, name)))
            assert some.dtype == torch.float32
            assert torch.equal(some, host.storage.rounded(some))
            assert torch.equal(some[:, -5:], whole[:, -5:]), "the window is kept as it is"


def test_the_loss_of_narrow_pools(model_dir: Path) -> None:
    rows = kv_dtypes.measure(Host(model_dir), "made up", [*CONTEXT, *drawn(13, 4)], N, [0.5], "default")
    assert [(row.dtype, row.budget, row.slots) for row in rows] == [
        (str(dtype).removeprefix("torch."), budget, slots)
        for dtype in STORAGE_DTYPES
        for budget, slots in ((1.0, N), (0.5, 45))
    ]
    full = [row for row in rows if row.budget == 1]
    assert {(row.kl, row.quality) for row in full} == {(0.0, 1.0)}
    assert full[0].kl_float32 == 0
    # The fewer bits behind the point, the farther away.
    narrow = {row.dtype: row.kl_float32 for row in full[1:]}
    assert 0 < narrow["float16"] < narrow["bfloat16"] < narrow["float8_e4m3fn"] < narrow["float8_e5m2"]
    compressed = [row for row in rows if row.budget == 0.5]
    assert all(row.kl > 0 and 0 < row.quality < 1 for row in compressed)
    assert compressed[0].kl == compressed[0].kl_float32
    (first, *_) = kv_dtypes.means([replace(rows[1], kl=1.0), replace(rows[1], kl=2.0)])
    assert (first.document, first.kl, first.slots) == ("mean of 2", 1.5, 45)


def test_measuring_a_case(host: Host) -> None:
    case = Case(
        name="made up",
        kind="prose",
        context=CONTEXT,
        continuation=drawn(8, 1),
        questions=[drawn(4, 2), drawn(3, 3)],
        facts=[(drawn(4, 4), drawn(2, 5))],
        fact_depths=[0.5],
    )
    names = ["default[n_window=8]", "copy[n_window=8]", "adakv[n_window=8]", "stratified", "merge:cam"]
    done: list[int] = []
    budgets = (0.5, 1.0)
    runs = [(method, budget) for method in parse_methods(",".join(names), None) for budget in budgets]
    rows = measure_case(host, case, runs, answer_tokens=5, on_row=lambda: done.append(1))
    assert len(done) == len(runs) == 10
    assert [(r.method, r.budget, r.measure) for r in rows] == [
        (name, budget, measure)
        for name in names
        for budget in budgets
        for measure in ("answers", "continuation", "needles")
    ]
    for found in rows:
        assert (found.case, found.kind, found.context_tokens) == ("made up", "prose", N)
        assert found.slots == math.ceil(found.budget * N)
        # Of the continuation, the first token is not measured.
        expected = {"continuation": 7, "needles": 2}.get(found.measure, found.tokens)
        assert found.tokens == expected
        assert 0 <= found.top1 <= 1
        assert found.kl > -1e-5
        assert math.isnan(found.exact) == (found.measure != "needles")
        if found.budget == 1.0:
            assert found.kl == pytest.approx(0.0, abs=1e-5)
            assert found.top1 == 1.0
            assert found.nll_increase == pytest.approx(0.0, abs=1e-4)
    halves = {found.method: found.kl for found in rows if found.budget == 0.5}
    assert all(kl > 1e-5 for kl in halves.values())
    (summary, *_) = summarise(rows)
    assert summary.documents == 1
