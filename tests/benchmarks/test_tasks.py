"""The task benchmark: generators, metrics, loaders, and the loop that a model is plugged into."""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.tasks import metrics, prompts, records, words
from benchmarks.tasks.base import Question, Task, index_orders, locate, question_orders
from benchmarks.tasks.datasets import LONGBENCH, load_longbench, load_ruler, load_scbench
from benchmarks.tasks.haystack import DEFAULT_TEXTS, Haystack, fit, insert, split_sentences, spread
from benchmarks.tasks.metrics import METRICS, UNSUPPORTED, UnsupportedMetricError, score
from benchmarks.tasks.overlap import common_subsequence, indel_ratio, rouge_l, rouge_lsum
from benchmarks.tasks.qa import NEAR, load_questions
from benchmarks.tasks.records import RecordError
from benchmarks.tasks.ruler import TASKS, Setting, generate
from benchmarks.tasks.run import Scored, aggregate, evaluate, format_table, tercile
from benchmarks.tasks.words import ADJECTIVES, NOUNS, draw_keys

NEEDLE_KINDS = [kind for kind in TASKS if kind.startswith("niah")]
TARGET = 2500


def count_tokens(text: str) -> int:
    """Words and punctuation marks: near enough to a tokenizer, and without a model."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def setting(target: int = TARGET, seed: int = 0, texts: Path | None = None) -> Setting:
    return Setting(target, seed, count_tokens, texts)


def question(
    text: str = "\n\nWhy?", *, metric: str = "string_match_all", depth: float | None = None
) -> Question:
    return Question(text, ("because",), metric, depth, max_new_tokens=8)


def task(count: int, *, kind: str = "kind", depths: tuple[float | None, ...] = (None,)) -> Task:
    asked = zip(range(count), itertools.cycle(depths), strict=False)
    return Task("t", kind, "context", tuple(question(f"\n\n{i}?", depth=d) for i, d in asked), "")


@pytest.fixture(scope="module")
def generated() -> dict[str, Task]:
    return {kind: generate(kind, setting()) for kind in TASKS}


class TestBase:
    def test_prompt_is_prefix_and_question(self):
        asked = question("\n\nWhy?")
        made = Task("t", "k", "the text", (asked,), "Read. ")
        assert made.prefix == "Read. the text"
        assert made.prompt(asked) == "Read. the text\n\nWhy?"

    def test_orders_are_latin_and_begin_as_written(self):
        orders = index_orders(5, 10, seed=3)
        assert orders[0] == (0, 1, 2, 3, 4)
        for block in (orders[:5], orders[5:]):
            assert all(sorted(order) == list(range(5)) for order in block)
            assert all(sorted(column) == list(range(5)) for column in zip(*block, strict=True))

    def test_orders_follow_the_seed(self):
        made = task(6)
        assert question_orders(made, 4, seed=1) == question_orders(made, 4, seed=1)
        assert question_orders(made, 4, seed=1) != question_orders(made, 4, seed=2)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"text": " "}, "needs a text"),
            ({"answers": ()}, "no answer"),
            ({"depth": 1.5}, "fraction"),
            ({"max_new_tokens": 0}, "positive"),
        ],
    )
    def test_impossible_questions_are_rejected(self, arguments, message):
        valid = {"text": "?", "answers": ("a",), "metric": "kv_retrieval", "depth": None, "max_new_tokens": 1}
        with pytest.raises(ValueError, match=message):
            Question(**(valid | arguments))

    def test_task_without_questions_and_empty_orders_are_rejected(self):
        with pytest.raises(ValueError, match="no question"):
            Task("t", "k", "c", (), "")
        with pytest.raises(ValueError, match="at least one"):
            index_orders(3, 0, seed=0)

    def test_locate_needs_one_answer_once(self):
        assert locate("xx needle", ["needle"]) == pytest.approx(3 / 9)
        assert locate("needle needle", ["needle"]) is None
        assert locate("needle thread", ["needle", "thread"]) is None
        assert locate("abc", ["abc"]) is None


class TestHaystack:
    def test_sentences(self):
        text = "One.\nTwo said: 'Go on!' Three\n\nfour?"
        assert split_sentences(text) == ["One.", "Two said: 'Go on!'", "Three four?"]

    def test_take_cuts_the_last_sentence(self):
        assert Haystack(["a b.", "c d e."]).take(4) == ["a b.", "c d"]
        assert Haystack(["a b."]).take(9) == ["a b."]
        assert Haystack(["a b."]).take(0) == []

    def test_insert_keeps_order_and_stays_before_a_cut_sentence(self):
        assert insert(["a.", "b.", "c"], [(0.0, "x."), (0.99, "y."), (0.99, "z.")]) == "x. a. b. y. z. c"
        assert insert([], [(0.5, "x.")]) == "x."

    def test_spread_is_one_per_part(self):
        assert [int(d * 7) for d in spread(random.Random(0), 7)] == list(range(7))

    @pytest.mark.parametrize("target", [10, 64, 65, 1000, 12345])
    def test_fit_ends_just_below_the_target(self, target):
        text = fit(lambda size: "w " * size, count_tokens, target)
        assert target * 0.98 <= count_tokens(text) <= target

    def test_fit_says_why_it_cannot(self):
        with pytest.raises(ValueError, match="at least 3"):
            fit(lambda size: "a b c " + "w " * size, count_tokens, 2)
        with pytest.raises(ValueError, match="does not grow"):
            fit(lambda size: "w", count_tokens, 100)
        with pytest.raises(ValueError, match="within 2%"):
            fit(lambda size: "w " * (size // 70 * 70), count_tokens, 100)


class TestWords:
    def test_no_word_is_part_of_another(self):
        pool = [*ADJECTIVES, *NOUNS]
        assert len(set(pool)) == len(pool)
        assert not [(a, b) for a, b in itertools.permutations(pool, 2) if a in b]

    def test_more_keys_than_pairs(self):
        pairs = len(ADJECTIVES) * len(NOUNS)
        for count in (10, pairs, pairs + 1):
            keys = draw_keys(random.Random(0), count)
            assert len(set(keys)) == count
            assert len({key.count("-") for key in keys}) == 1
        with pytest.raises(ValueError, match="not"):
            words.draw_numbers(random.Random(0), 100, digits=1)


class TestGenerators:
    @pytest.mark.parametrize("kind", TASKS)
    @pytest.mark.parametrize("target", [1200, TARGET, 9000])
    def test_length(self, kind, target):
        made = generate(kind, setting(target, seed=target))
        assert target * 0.98 <= count_tokens(made.prefix) <= target

    @pytest.mark.parametrize("kind", TASKS)
    def test_questions(self, kind, generated):
        made = generated[kind]
        assert made.kind == kind
        assert len(made.questions) >= 3
        assert len({q.text for q in made.questions}) == len(made.questions)
        assert all(q.metric in METRICS for q in made.questions)
        for asked in made.questions:
            assert score(asked, "They are " + ", ".join(asked.answers)) == 1.0
            assert score(asked, "No idea.") == 0.0
            assert not any(answer.lower() in asked.text.lower() for answer in asked.answers)
            assert asked.answer_prefix.startswith(" ")

    @pytest.mark.parametrize("kind", TASKS)
    def test_seed(self, kind, generated):
        assert generate(kind, setting()) == generated[kind]
        other = generate(kind, setting(seed=1))
        assert other.context != generated[kind].context
        assert other.id != generated[kind].id

    @pytest.mark.parametrize("kind", ["niah_single_noise", "niah_multikey", "common_words", "qa_texts"])
    def test_depths_reach_every_third(self, kind):
        made = [generate(kind, setting(seed=seed)) for seed in range(3)]
        thirds = Counter(tercile(q.depth) for m in made for q in m.questions)
        assert set(thirds) == {"first third", "middle third", "last third"}

    @pytest.mark.parametrize("kind", NEEDLE_KINDS)
    def test_needles_are_there_once_and_answer(self, kind, generated):
        made = generated[kind]
        found = re.findall(r"Note: the access number of the (\S+) is (\S+)\.", made.context)
        assert len(set(found)) == len(found)
        for asked in made.questions:
            keys = [
                key for key in dict.fromkeys(k for k, _ in found) if re.search(rf"the {key}\b", asked.text)
            ]
            assert keys
            values = [value for key, value in found if key in keys]
            assert sorted(values) == sorted(asked.answers)
            assert all(made.context.count(value) == 1 for value in values)
            if asked.depth is not None:
                needle = f"Note: the access number of the {keys[0]} is {values[0]}."
                assert made.context.index(needle) == pytest.approx(asked.depth * len(made.context))

    def test_natural_haystack_comes_from_the_folder(self, tmp_path):
        (tmp_path / "own.txt").write_text("Sunrise was late. Nobody minded the quiet. " * 3, encoding="utf-8")
        made = generate("niah_single_text", setting(texts=tmp_path))
        assert "Nobody minded the quiet." in made.context
        with pytest.raises(ValueError, match=r"no \.txt file"):
            generate("niah_single_text", setting(texts=tmp_path / "none"))

    def test_chains_of_variables(self, generated):
        made = generated["variable_tracking"]
        values: dict[str, str] = {}
        for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", made.context):
            assert name not in values
            values[name] = values.get(source, source)  # a source is set before it is used
        for asked in made.questions:
            value = re.search(r"value (\d+)", asked.text)
            assert value is not None
            assert sorted(asked.answers) == sorted(n for n, v in values.items() if v == value[1])
            assert len(asked.answers) == 5

    def test_common_words(self, generated):
        made = generated["common_words"]
        for asked in made.questions:
            part = re.search(r"of the (\w+) list", asked.text)
            assert part is not None
            entries = re.findall(
                r"\d+\. (\w+)", made.context.split(f"The {part[1]} list:")[1].split("\n\n")[0]
            )
            top = Counter(entries).most_common(6)
            assert {word for word, _ in top[:5]} == set(asked.answers)
            assert top[4][1] >= 4 * top[5][1]

    def test_frequent_words(self, generated):
        made = generated["frequent_words"]
        for asked in made.questions:
            part = re.search(r"of the (\w+) text", asked.text)
            assert part is not None
            coded = made.context.split(f"The {part[1]} text:\n")[1].split("\n\n")[0].split()
            top = Counter(coded).most_common(5)
            assert top[0][0] == "..."
            assert [word for word, _ in top[1:4]] == list(asked.answers)
            assert top[3][1] > top[4][1]
        with pytest.raises(ValueError, match="too few"):
            generate("frequent_words", setting(150))

    def test_qa_answers_are_in_the_context(self, generated):
        for asked in generated["qa_texts"].questions:
            assert any(answer.lower() in generated["qa_texts"].context.lower() for answer in asked.answers)

    def test_qa_beyond_the_texts_is_filled_up(self):
        made = generate("qa_texts", setting(30_000))
        assert 30_000 * 0.98 <= count_tokens(made.prefix) <= 30_000
        assert made.context.count("A bell rings twice.") > 100
        assert len(made.questions) == 6

    def test_qa_needs_a_text_with_questions(self, tmp_path):
        (tmp_path / "own.txt").write_text("Nothing known.", encoding="utf-8")
        with pytest.raises(ValueError, match=r"no questions ship for own\.txt; they do for alice\.txt"):
            generate("qa_texts", setting(texts=tmp_path))

    def test_unknown_kind_and_target(self):
        with pytest.raises(ValueError, match="unknown task 'niah'; valid: common_words, frequent_words"):
            generate("niah", setting())
        with pytest.raises(ValueError, match="positive"):
            setting(0)
        with pytest.raises(ValueError, match="too few"):
            generate("niah_multikey", setting(50))


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return {p.name: " ".join(p.read_text(encoding="utf-8").split()) for p in DEFAULT_TEXTS.glob("*.txt")}


class TestShippedQuestions:
    def test_enough_for_every_text_and_spread_over_it(self, texts):
        for name, text in texts.items():
            depths = [text.index(q.anchor) / len(text) for q in load_questions() if q.file == name]
            assert len(depths) >= 12
            assert {int(6 * depth) for depth in depths} == set(range(6))

    def test_anchors_and_answers_occur(self, texts):
        for shipped in load_questions():
            text = texts[shipped.file]
            assert text.count(shipped.anchor) == 1, shipped.anchor
            at = text.index(shipped.anchor)
            near = text[max(at - NEAR, 0) : at + len(shipped.anchor) + NEAR].lower()
            assert all(answer.lower() in near for answer in shipped.answers), shipped
            assert shipped.find(text) == at

    def test_answers_are_not_given_away(self):
        for shipped in load_questions():
            for answer in shipped.answers + shipped.aliases:
                assert answer.lower() not in f"{shipped.title} {shipped.question}".lower(), shipped

    def test_malformed_file_is_named(self, tmp_path):
        (tmp_path / "bad.json").write_text('{"file": "a.txt"}', encoding="utf-8")
        with pytest.raises(ValueError, match=r"bad\.json"):
            load_questions(tmp_path)


class TestMetrics:
    def test_string_match(self):
        assert metrics.string_match_all("It is ALPHA and beta", ["alpha", "Beta", "gamma"]) == pytest.approx(
            2 / 3
        )
        assert metrics.string_match_part("It is ALPHA", ["alpha", "gamma"]) == 1.0
        assert metrics.string_match_part("None", ["alpha"]) == 0.0

    def test_qa_f1(self):
        # "cat sat on mat" and "cat on mat": three common words, precision 3/4, recall 1
        assert metrics.qa_f1_score("The cat sat on a mat!", "cat on the mat") == pytest.approx(6 / 7)
        assert metrics.qa_f1_score("", "cat") == 0.0
        assert metrics.normalize_answer("An  apple, the\tA.N. other") == "apple other"

    def test_common_subsequence_and_its_ties(self):
        assert common_subsequence("abcbdab", "bdcaba") in (
            [1, 2, 3, 5],
            [1, 2, 5, 6],
            [1, 4, 5, 6],
            [1, 3, 5, 6],
        )
        assert common_subsequence("ab", "ba") == [0]
        assert common_subsequence("ab", "ba", prefer_second=True) == [1]

    def test_rouge_l(self):
        # united: the, cat, slept; of five different predicted words and three wanted ones
        assert rouge_l("the cat sat. it slept", "the cat slept") == pytest.approx(0.75)
        assert rouge_l("yes yes yes", "yes yes") == 1.0
        assert rouge_l("The end", "the end") == pytest.approx(0.5)
        assert rouge_l("", "x") == rouge_l("x", "..") == 0.0
        # the line end counts as a sentence of one empty word: two of three words, both wanted ones
        assert rouge_l("a b.\n", "a b") == pytest.approx(0.8)

    def test_rouge_lsum(self):
        assert rouge_lsum("The cat\nsat!", "the cat sat") == 1.0
        # the second reference line finds its word used up: one hit of two on both sides
        assert rouge_lsum("a b", "a\na") == pytest.approx(0.5)
        assert rouge_lsum("", "a") == 0.0

    def test_indel_ratio(self):
        assert indel_ratio("kitten", "sitting") == pytest.approx(8 / 13)  # common: ittn
        assert indel_ratio("tide", "diet") == indel_ratio("diet", "tide") == 0.5  # difflib: 0.25 and 0.5
        assert indel_ratio("", "") == 1.0
        assert indel_ratio("", "x") == 0.0

    def test_code_similarity_takes_the_first_line_of_code(self):
        assert metrics.code_sim_score("\n```python\n# set x\nsitting\nrest", "kitten") == 0.62
        assert metrics.code_sim_score("// only\n# comments", "x") == 0.0

    def test_classification(self):
        classes = ["Loc", "Location", "Number"]
        assert metrics.classification_score("Location", "Location", classes) == 1.0
        assert metrics.classification_score("Location or Number", "Location", classes) == 0.5
        assert metrics.classification_score("Number", "Location", classes) == 0.0
        # "ab" stands behind "a", which is taken out, and is therefore not looked at
        assert metrics.classification_score("abc", "abc", ["a", "ab", "abc"]) == 0.5

    def test_numbers(self):
        assert metrics.count_score("3 or 4, or 3", "3") == pytest.approx(2 / 3)
        assert metrics.count_score("many", "3") == 0.0
        assert metrics.retrieval_score("Paragraph 15, not 5", "Paragraph 5") == 0.5
        assert metrics.retrieval_zh_score("段落12", "段落12") == 1.0
        with pytest.raises(ValueError, match="does not match"):
            metrics.retrieval_score("1", "段落1")

    def test_scbench(self):
        assert metrics.kv_retrieval("value: aB-1.", "aB-1") == 1.0
        assert metrics.kv_retrieval("value: ab-1.", "aB-1") == 0.0
        assert metrics.passkey("It is 123, not 45.", "123") == 1.0
        assert metrics.passkey("It is 45, not 123.", "123") == 0.0
        assert metrics.longdialogue_qa_eng("MR. DARCY came", ["Mr. Darcy", "Darcy"]) == 1.0
        assert metrics.math_find("about 7.9", "7") == 1.0
        assert metrics.math_find("7.5", "7.5") == 1.0
        assert metrics.math_find("none", "7") == 0.0
        assert metrics.longbook_qa_chn("小明。", "小明") == 1.0
        assert metrics.longbook_qa_chn("小红", "小明") == 0.5

    @pytest.mark.parametrize(
        ("prediction", "expected"),
        [
            ("B. The river", 1.0),
            ("C", 0.0),
            ("The river", 1.0),
            ("I think the answer is B", 1.0),
            ("the answer is: C", 0.0),
            ("so option is The river", 1.0),
            ("it must be B or C", 1.0),
            ("", 0.0),
            ("no idea", 0.0),
        ],
    )
    def test_multiple_choice(self, prediction, expected):
        assert metrics.longbook_choice_eng(prediction, ["The river", "B"]) == expected

    def test_best_answer_and_first_line(self):
        asked = Question("?", ("red", "dark green"), "qa_f1_score", None, 8)
        assert score(asked, "dark green") == 1.0
        first = Question("?", ("red",), "qa_f1_score/first_line", None, 8)
        assert score(first, "\n\nred\nPassage: blue") == 1.0
        kinds = Question("?", ("Num",), "classification_score/first_line", None, 8, classes=("Num", "Loc"))
        assert score(kinds, "Num\nLoc") == 1.0

    def test_unknown_and_unsupported_names(self):
        with pytest.raises(
            ValueError, match=r"unknown metric 'bleu'; valid: classification_score.*string_match_all"
        ):
            score(question(metric="bleu"), "x")
        for name in UNSUPPORTED:
            with pytest.raises(UnsupportedMetricError, match=f"'{name}' is not supported"):
                score(question(metric=name), "x")


def write_jsonl(path: Path, *fields: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(f, ensure_ascii=False) + "\n" for f in fields), encoding="utf-8")
    return path


def longbench_record(context: str, asked: str, answers: list[str], **more: object) -> dict[str, object]:
    return {
        "input": asked,
        "context": context,
        "answers": answers,
        "length": 4,
        "dataset": "qasper",
        "language": "en",
        "all_classes": None,
        "_id": "0f",
    } | more


class TestLongBench:
    def test_shared_contexts_become_one_task(self, tmp_path):
        write_jsonl(
            tmp_path / "data" / "qasper.jsonl",
            longbench_record("the article {input}", "Which {model}?", ["BERT", "a BERT model"]),
            longbench_record("another", "Who?", ["Ann"]),
            longbench_record("the article {input}", "How many?", ["seventeen"]),
        )
        first, second = load_longbench(tmp_path, "qasper")
        assert first.context == "the article {input}"
        assert [q.answers for q in first.questions] == [("BERT", "a BERT model"), ("seventeen",)]
        assert first.questions[0].metric == "qa_f1_score"
        assert first.questions[0].max_new_tokens == 128
        assert first.instruction.endswith("Article: ")
        assert first.questions[0].text.endswith("\n\nQuestion: Which {model}?\n\nAnswer:")
        assert second.id == "longbench/qasper/1"

    def test_classification_carries_its_classes(self, tmp_path):
        record = longbench_record(
            "Question: a\nType: Num", "Question: b\nType:", ["Num"], all_classes=["Num", "Loc"]
        )
        (loaded,) = load_longbench(write_jsonl(tmp_path / "trec.jsonl", record), "trec")
        assert loaded.questions[0].classes == ("Num", "Loc")
        assert score(loaded.questions[0], "Num\nQuestion: c\nType: Loc") == 1.0

    def test_archive_and_even_lengths(self, tmp_path):
        line = json.dumps(longbench_record("code", "", ["x = 1"]))
        with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
            archive.writestr("data/lcc_e.jsonl", line)
        for source in (tmp_path, tmp_path / "data.zip"):
            (loaded,) = load_longbench(source, "lcc_e")
            assert loaded.questions[0].text == "Next line of code:\n"
            assert loaded.questions[0].metric == "code_sim_score"
        with pytest.raises(FileNotFoundError, match=r"data/trec\.jsonl"):
            load_longbench(tmp_path, "trec")

    def test_official_templates(self, tmp_path):
        path = tmp_path / "dataset2prompt.json"
        path.write_text('{"narrativeqa": "Story: {context}\\nQ: {input}\\nA:"}', encoding="utf-8")
        data = write_jsonl(tmp_path / "narrativeqa.jsonl", longbench_record("tale", "Who?", ["Ann"]))
        (loaded,) = load_longbench(data, "narrativeqa", templates=path)
        assert loaded.prompt(loaded.questions[0]) == "Story: tale\nQ: Who?\nA:"
        with pytest.raises(ValueError, match="unknown template 'qasper'; valid: narrativeqa"):
            load_longbench(data, "qasper", templates=path)
        for broken in ("[", "[]", '{"a": "no context"}'):
            path.write_text(broken, encoding="utf-8")
            with pytest.raises(ValueError, match=r"dataset2prompt\.json"):
                load_longbench(data, "narrativeqa", templates=path)

    def test_every_supported_subset_has_a_template(self):
        supported = {name for name, subset in LONGBENCH.items() if subset.metric in METRICS}
        assert supported == set(prompts.LONGBENCH)
        for template in prompts.LONGBENCH.values():
            before, after = prompts.cut(template, input="THE QUESTION")
            assert "{" not in before + after

    def test_unknown_and_unsupported_subsets(self, tmp_path):
        with pytest.raises(ValueError, match="unknown subset of LongBench 'squad'; valid: 2wikimqa, "):
            load_longbench(tmp_path, "squad")
        for subset in ("multifieldqa_zh", "dureader", "vcsum"):
            with pytest.raises(UnsupportedMetricError, match="jieba"):
                load_longbench(tmp_path, subset)

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("{", "not JSON"),
            ("[1]", "not an object but list"),
            ('{"input": "q", "answers": ["a"]}', "no field 'context'; the record has 'input', 'answers'"),
            ('{"input": "q", "context": "c", "answers": []}', "'answers' is an empty list"),
            ('{"input": "q", "context": 7, "answers": ["a"]}', "'context' is not a string but int"),
            ('{"input": "q", "context": "c", "answers": [null]}', "'answers' has NoneType"),
        ],
    )
    def test_malformed_record_is_named(self, tmp_path, line, message):
        good = json.dumps(longbench_record("c", "q", ["a"]))
        path = tmp_path / "hotpotqa.jsonl"
        path.write_text(f"{good}\n\n{line}\n", encoding="utf-8")
        with pytest.raises(RecordError, match=rf"hotpotqa\.jsonl:3: .*{re.escape(message)}"):
            load_longbench(tmp_path, "hotpotqa")


NIAH_INPUT = (
    "A special magic number is hidden within the following text. I will quiz you about it.\nGrass. "
    "One of the special magic numbers for calm-sea is: 8231740. Sky.\n"
    "What is the special magic number for calm-sea mentioned in the provided text?"
)
NIAH_PREFIX = " The special magic number for calm-sea mentioned in the provided text is"


class TestRuler:
    def test_own_records_are_split_at_the_question(self, tmp_path):
        folder = tmp_path / "4096" / "data"
        record = {"index": 0, "outputs": ["8231740"], "length": 100}
        write_jsonl(
            folder / "niah_single_1" / "validation.jsonl",
            record | {"input": NIAH_INPUT + NIAH_PREFIX},
            record | {"input": NIAH_INPUT, "answer_prefix": NIAH_PREFIX},
        )
        (loaded,) = load_ruler(tmp_path, "niah_single_1", length=4096)
        assert loaded.context.endswith("8231740. Sky.\n")
        first, second = loaded.questions
        assert first == second
        assert first.text.startswith("What is the special magic number")
        assert first.text.endswith("provided text?")
        assert first.answer_prefix == NIAH_PREFIX
        assert first.metric == "string_match_all"
        assert first.depth == pytest.approx(loaded.context.index("8231740") / len(loaded.context))

    def test_last_question_counts_and_qa_takes_any_answer(self, tmp_path):
        ask = "Answer the question based on the given documents. Only give me the answer."
        whole = f"{ask}\n\nDocument 1:\nText\n\n{ask}\n\nQuestion: Who? Answer:"
        path = write_jsonl(tmp_path / "qa_1.jsonl", {"input": whole, "outputs": ["Ann", "Ann Lee"]})
        (loaded,) = load_ruler(path)
        assert loaded.context == f"{ask}\n\nDocument 1:\nText\n\n"
        assert loaded.questions[0].text == f"{ask}\n\nQuestion: Who?"
        assert score(loaded.questions[0], "ann lee") == 1.0

    def test_hub_format_in_parquet(self, tmp_path):
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        rows = [
            {
                "context": context,
                "question": f"Question: Find all variables that are assigned the value {value}.",
                "answer_prefix": " Answer:",
                "answer": ["ABCDE", "FGHIJ"],
                "task": kind,
                "max_new_tokens": 30,
            }
            for context, value, kind in [("text", 1, "vt"), ("text", 2, "vt"), ("list", 3, "cwe")]
        ]
        (tmp_path / "8192").mkdir()
        parquet.write_table(
            pyarrow.Table.from_pylist(rows), tmp_path / "8192" / "test-00000-of-00001.parquet"
        )
        assert [t.kind for t in load_ruler(tmp_path, length=8192)] == ["ruler/cwe", "ruler/vt"]
        (loaded,) = load_ruler(tmp_path, "vt")
        assert len(loaded.questions) == 2
        assert loaded.questions[0].max_new_tokens == 30
        with pytest.raises(FileNotFoundError, match=r"4096/\*\.jsonl"):
            load_ruler(tmp_path, length=4096)
        with pytest.raises(ValueError, match="no record of task fwe"):
            load_ruler(tmp_path, "fwe")

    def test_parquet_without_pyarrow_names_the_install(self, tmp_path, monkeypatch):
        (tmp_path / "test.parquet").write_bytes(b"PAR1")
        monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
        with pytest.raises(ImportError, match="pip install pyarrow"):
            load_ruler(tmp_path)

    def test_broken_parquet_is_named(self, tmp_path):
        pytest.importorskip("pyarrow")
        (tmp_path / "test.parquet").write_bytes(b"nonsense")
        with pytest.raises(RecordError, match=r"test\.parquet"):
            load_ruler(tmp_path)

    def test_unknown_tasks(self, tmp_path):
        with pytest.raises(
            ValueError, match="unknown task of RULER 'niah'; valid: cwe, fwe, niah_multikey_1"
        ):
            load_ruler(tmp_path, "niah")
        write_jsonl(tmp_path / "odd" / "rows.jsonl", {"input": NIAH_INPUT, "outputs": ["1"]})
        with pytest.raises(RecordError, match=r"rows\.jsonl:1: task odd or rows is unknown; valid: cwe"):
            load_ruler(tmp_path)
        write_jsonl(tmp_path / "odd" / "rows.jsonl", {"task": "vt", "input": NIAH_INPUT, "outputs": ["1"]})
        with pytest.raises(RecordError, match=r"rows\.jsonl:1: field 'input' has no question of vt"):
            load_ruler(tmp_path)


class TestScBench:
    def test_turns_become_questions(self, tmp_path):
        turns = [
            {"input": f'Key: "{k}"', "answer": v}
            for k, v in [("k1", "v-0001"), ("k2", "v-0002"), ("k3", "v-0003")]
        ]
        record = {
            "id": 0,
            "context": '{"k1": "v-0001", "k2": "v-0002", "k3": "v-0003"}',
            "multi_turns": turns,
        }
        write_jsonl(tmp_path / "data" / "scbench_kv.jsonl", record)
        (loaded,) = load_scbench(tmp_path, "scbench_kv")
        assert loaded.kind == "scbench/scbench_kv"
        assert [q.text for q in loaded.questions] == [f"\n\n{turn['input']}" for turn in turns]
        assert [
            score(q, a) for q, a in zip(loaded.questions, ["v-0001", "v-0001", "V-0003"], strict=True)
        ] == [1, 0, 0]
        depths = [q.depth for q in loaded.questions]
        assert depths == sorted(d for d in depths if d is not None)

    def test_multiple_choice(self, tmp_path):
        turn = {
            "input": "Where?",
            "answer": "By the river",
            "options": ["At home", "By the river", "In town", "At sea"],
        }
        record = {"context": "book", "multi_turns": [turn], "id": 1}
        path = write_jsonl(tmp_path / "scbench_choice_eng.jsonl", record)
        (loaded,) = load_scbench(path, "scbench_choice_eng")
        assert loaded.questions[0].answers == ("By the river", "B")
        assert "\nA. At home\nB. By the river\nC. In town\nD. At sea\n" in loaded.questions[0].text
        write_jsonl(path, {"context": "book", "multi_turns": [turn | {"answer": "Nowhere"}]})
        with pytest.raises(RecordError, match=r"scbench_choice_eng\.jsonl:1: the answer 'Nowhere'"):
            load_scbench(path, "scbench_choice_eng")

    def test_arrays_of_numbers(self, tmp_path):
        turn = {"input": "The second largest number is", "answer": 31}
        path = tmp_path / "scbench_mf.json"
        path.write_text(
            json.dumps([{"id": 0, "context": [7, 31, 40], "multi_turns": [turn]}]), encoding="utf-8"
        )
        (loaded,) = load_scbench(path, "scbench_mf")
        assert loaded.context == "[7, 31, 40]"
        assert loaded.questions[0].text.startswith("\n\nWhat is the second largest number?\n\nThe second")
        assert score(loaded.questions[0], " 31.") == 1.0

    def test_variable_tracking_wants_all(self, tmp_path):
        record = {"context": "c", "multi_turns": [{"input": "q", "answer": ["AAAAA", "BBBBB"]}], "id": 0}
        (loaded,) = load_scbench(write_jsonl(tmp_path / "scbench_vt.jsonl", record), "scbench_vt")
        assert score(loaded.questions[0], "AAAAA") == 0.5

    def test_mixed_turns(self, tmp_path):
        turns = [
            {"input": "Summarize.", "answer": "A tale.", "task": "scbench_summary"},
            {"input": "The key?", "answer": "71432", "task": "scbench_passkey"},
        ]
        path = write_jsonl(
            tmp_path / "scbench_summary_with_needles.jsonl", {"context": "c", "multi_turns": turns}
        )
        (loaded,) = load_scbench(path, "scbench_summary_with_needles")
        assert [(q.metric, q.max_new_tokens) for q in loaded.questions] == [
            ("longbook_sum_eng", 800),
            ("passkey", 15),
        ]
        write_jsonl(path, {"context": "c", "multi_turns": [turns[0] | {"task": "scbench_kv"}]})
        with pytest.raises(
            RecordError, match=r"needles\.jsonl:1: turn of task 'scbench_kv'; valid: scbench_passkey"
        ):
            load_scbench(path, "scbench_summary_with_needles")

    def test_unsupported_turns(self, tmp_path):
        turns = [
            {"input": "Find f.", "answer": "def f(): ...", "task": "scbench_repoqa", "name": "f"},
            {"input": "Key k", "answer": "v-77", "task": "scbench_kv"},
        ]
        record = {"context": "code", "multi_turns": turns, "lang": "python", "repo": "r", "id": 0}
        path = write_jsonl(tmp_path / "scbench_repoqa_and_kv.jsonl", record)
        with pytest.raises(UnsupportedMetricError, match="tree-sitter"):
            load_scbench(path, "scbench_repoqa_and_kv")
        (loaded,) = load_scbench(path, "scbench_repoqa_and_kv", skip_unsupported=True)
        assert [q.metric for q in loaded.questions] == ["kv_retrieval"]
        with pytest.raises(UnsupportedMetricError):
            load_scbench(path, "scbench_repoqa", skip_unsupported=True)

    def test_unknown_subset_and_malformed_turns(self, tmp_path):
        with pytest.raises(ValueError, match="unknown subset of SCBench 'kv'; valid: scbench_choice_eng"):
            load_scbench(tmp_path, "kv")
        path = write_jsonl(tmp_path / "scbench_kv.jsonl", {"context": "c", "multi_turns": []})
        with pytest.raises(
            RecordError, match=r"scbench_kv\.jsonl:1: field 'multi_turns' is not a list of objects"
        ):
            load_scbench(path, "scbench_kv")


class TestSources:
    def test_missing_paths(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="no file, no folder, and no owner/name"):
            load_longbench(tmp_path / "none", "qasper")
        with pytest.raises(FileNotFoundError, match=r"qasper\.jsonl.*its files: none"):
            load_longbench(tmp_path, "qasper")
        with pytest.raises(RecordError, match=r"x\.csv: not one of"):
            list(records.read_records(tmp_path / "x.csv"))

    def test_broken_json_and_archive(self, tmp_path):
        path = tmp_path / "qasper.json"
        for content, message in (("[\n{]", "qasper.json:2: not JSON"), ("{}", "not a list of records")):
            path.write_text(content, encoding="utf-8")
            with pytest.raises(RecordError, match=message):
                load_longbench(path, "qasper")
        path.write_bytes(b'["\xff"]')
        with pytest.raises(RecordError, match="not UTF-8"):
            load_longbench(path, "qasper")
        (tmp_path / "data.zip").write_bytes(b"no archive")
        with pytest.raises(RecordError, match=r"data\.zip"):
            load_longbench(tmp_path, "trec")

    def test_hub_prefers_json_lines(self, tmp_path, monkeypatch):
        hub = pytest.importorskip("huggingface_hub")
        local = write_jsonl(
            tmp_path / "x.jsonl", {"context": "c", "multi_turns": [{"input": "q", "answer": "abcd"}]}
        )
        asked: list[str] = []

        class Api:
            def list_repo_files(self, repo: str, *, repo_type: str) -> list[str]:
                assert (repo, repo_type) == ("microsoft/SCBench", "dataset")
                return ["README.md", "data/scbench_kv.jsonl", "scbench_kv/test-00000-of-00001.parquet"]

        def download(repo: str, name: str, *, repo_type: str) -> str:
            asked.append(name)
            return str(local)

        monkeypatch.setattr(hub, "HfApi", Api)
        monkeypatch.setattr(hub, "hf_hub_download", download)
        (loaded,) = load_scbench("microsoft/SCBench", "scbench_kv")
        assert asked == ["data/scbench_kv.jsonl"]
        assert loaded.questions[0].answers == ("abcd",)

    def test_hub_without_the_package_names_the_install(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        with pytest.raises(ImportError, match="pip install huggingface_hub"):
            load_scbench("microsoft/SCBench", "scbench_kv")


class TestRun:
    def test_every_question_in_every_order(self):
        made = task(3, depths=(0.1, 0.5, None))
        calls: list[list[str]] = []

        def answer(asked_task: Task, questions: list[Question]) -> list[str]:
            assert asked_task is made
            calls.append([q.text for q in questions])
            return ["because" if position == 0 else "no" for position in range(len(questions))]

        scored = evaluate([made], answer, orders=3, seed=5)
        assert calls[0] == ["\n\n0?", "\n\n1?", "\n\n2?"]
        assert len({tuple(call) for call in calls}) == 3
        assert len(scored) == 9
        assert {s.question for s in scored if s.position == 0} == {0, 1, 2}
        assert [s.score for s in scored] == [1.0, 0.0, 0.0] * 3
        assert all(s.depth == made.questions[s.question].depth for s in scored)
        assert evaluate([made], answer, orders=3, seed=5) == scored

    def test_wrong_number_of_answers_and_unsupported_metric(self):
        with pytest.raises(ValueError, match="task t: 2 questions, 1 answers"):
            evaluate([task(2)], lambda *_: ["x"])
        unsupported = Task("t", "k", "c", (question(metric="rouge_zh_score"),), "")
        with pytest.raises(UnsupportedMetricError):
            evaluate([unsupported], lambda *_: pytest.fail("asked all the same"))

    def test_aggregate(self):
        def scored(kind: str, position: int, depth: float | None, value: float) -> Scored:
            return Scored("t", kind, 0, 0, position, depth, "m", "p", value)

        rows = aggregate([scored("a", 0, 0.0, 1.0), scored("a", 1, 1.0, 0.0), scored("b", 0, None, 0.5)])
        table = {(r.kind, r.by, r.group): (r.mean, r.count) for r in rows}
        assert table == {
            ("all", "all", "all"): (0.5, 3),
            ("all", "position", "1"): (0.75, 2),
            ("all", "position", "2"): (0.0, 1),
            ("all", "depth", "first third"): (1.0, 1),
            ("all", "depth", "last third"): (0.0, 1),
            ("a", "all", "all"): (0.5, 2),
            ("a", "position", "1"): (1.0, 1),
            ("a", "position", "2"): (0.0, 1),
            ("a", "depth", "first third"): (1.0, 1),
            ("a", "depth", "last third"): (0.0, 1),
            ("b", "all", "all"): (0.5, 1),
            ("b", "position", "1"): (0.5, 1),
        }
        assert format_table(rows).splitlines()[2] == "| all | all | all | 50.0 | 3 |"
        assert aggregate([]) == []

    @pytest.mark.parametrize(
        ("depth", "group"),
        [
            (0.0, "first third"),
            (0.34, "middle third"),
            (0.67, "last third"),
            (1.0, "last third"),
            (None, None),
        ],
    )
    def test_tercile(self, depth, group):
        assert tercile(depth) == group

    def test_generated_tasks_are_answered_by_one_who_knows(self, generated):
        def oracle(_: Task, questions: list[Question]) -> list[str]:
            return [" ".join(q.answers) for q in questions]

        scored = evaluate(generated.values(), oracle, orders=2)
        assert {s.score for s in scored} == {1.0}
        assert {r.kind for r in aggregate(scored)} == {"all", *TASKS}
