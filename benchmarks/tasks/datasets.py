"""Loaders of LongBench, RULER and SCBench: published records as tasks with the benchmarks' metrics.

Records that share a context become one task with several questions. Nothing is cut: LongBench's code removes
the middle of a prompt that exceeds the model's length, and leaves out the chat template for the few-shot and
code sets (TREC, TriviaQA, SAMSum, LSHT, LCC, RepoBench-P); who asks for comparable figures has to do the
same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from benchmarks.tasks import prompts
from benchmarks.tasks.base import Question, Task, choose, locate
from benchmarks.tasks.metrics import UnsupportedMetricError, check_metric
from benchmarks.tasks.records import Record, find_file, load_records, read_archive


@dataclass(frozen=True)
class Subset:
    """How a subset is scored, and how many tokens its answers may have."""

    metric: str
    max_new_tokens: int


LONGBENCH: dict[str, Subset] = {
    "narrativeqa": Subset("qa_f1_score", 128),
    "qasper": Subset("qa_f1_score", 128),
    "multifieldqa_en": Subset("qa_f1_score", 64),
    "multifieldqa_zh": Subset("qa_f1_zh_score", 64),
    "hotpotqa": Subset("qa_f1_score", 32),
    "2wikimqa": Subset("qa_f1_score", 32),
    "musique": Subset("qa_f1_score", 32),
    "dureader": Subset("rouge_zh_score", 128),
    "gov_report": Subset("rouge_score", 512),
    "qmsum": Subset("rouge_score", 512),
    "multi_news": Subset("rouge_score", 512),
    "vcsum": Subset("rouge_zh_score", 512),
    "trec": Subset("classification_score/first_line", 64),
    "triviaqa": Subset("qa_f1_score/first_line", 32),
    "samsum": Subset("rouge_score/first_line", 128),
    "lsht": Subset("classification_score/first_line", 64),
    "passage_count": Subset("count_score", 32),
    "passage_retrieval_en": Subset("retrieval_score", 32),
    "passage_retrieval_zh": Subset("retrieval_zh_score", 32),
    "lcc": Subset("code_sim_score", 64),
    "repobench-p": Subset("code_sim_score", 64),
}
"""LongBench's subsets; metrics after its ``eval.py``, lengths after its ``dataset2maxlen.json``."""

LONGBENCH_E = (
    "qasper multifieldqa_en hotpotqa 2wikimqa gov_report multi_news trec triviaqa samsum passage_count "
    "passage_retrieval_en lcc repobench-p"
)
"""Subsets that also exist with even lengths, under the name with ``_e``."""

RULER: dict[str, Subset] = {
    **{
        f"niah_{name}_{i}": Subset("string_match_all", 128)
        for name in ("single", "multikey")
        for i in (1, 2, 3)
    },
    "niah_multivalue": Subset("string_match_all", 128),
    "niah_multiquery": Subset("string_match_all", 128),
    "vt": Subset("string_match_all", 30),
    "cwe": Subset("string_match_all", 120),
    "fwe": Subset("string_match_all", 50),
    "qa_1": Subset("string_match_part", 32),
    "qa_2": Subset("string_match_part", 32),
}
"""RULER's 13 tasks; metrics and lengths after its ``constants.py``."""

SCBENCH: dict[str, Subset] = {
    "scbench_kv": Subset("kv_retrieval", 150),
    "scbench_prefix_suffix": Subset("kv_retrieval", 150),
    "scbench_vt": Subset("string_match_all", 30),
    "scbench_repoqa": Subset("repoqa_pass_at_1", 1024),
    "scbench_qa_eng": Subset("longdialogue_qa_eng", 40),
    "scbench_qa_chn": Subset("longbook_qa_chn", 40),
    "scbench_choice_eng": Subset("longbook_choice_eng", 40),
    "scbench_many_shot": Subset("longdialogue_qa_eng", 10),
    "scbench_mf": Subset("math_find", 5),
    "scbench_summary": Subset("longbook_sum_eng", 200),
}
"""SCBench's subsets of one kind; after its ``compute_scores.py`` and ``eval_utils.py``."""

SCBENCH_MIXED: dict[str, dict[str, Subset]] = {
    "scbench_summary_with_needles": {
        "scbench_summary": Subset("longbook_sum_eng", 800),
        "scbench_passkey": Subset("passkey", 15),
    },
    "scbench_repoqa_and_kv": {
        "scbench_repoqa": Subset("repoqa_pass_at_1", 1024),
        "scbench_kv": Subset("kv_retrieval", 80),
    },
}
"""SCBench's subsets whose turns are of two kinds, named in each turn."""

# Where the question begins in RULER's own records, which are one text; of several places the last one.
_RULER_QUESTIONS = {
    "niah": r"What (?:is|are all) the special magic",
    "vt": r"Question: Find all variables",
    "cwe": r"Question: What are the 10 most common words",
    "fwe": r"Question: Do not provide any explanation",
    "qa": r"Answer the question based on the given documents",
}
_RULER_ANSWERS = {"niah": r"\s*The special magic", "qa": r"\s*Answer:"}

_LETTERS = "ABCD"


def load_longbench(path_or_repo: str | Path, subset: str, *, templates: Path | None = None) -> list[Task]:
    """A subset of LongBench (``THUDM/LongBench``), with ``_e`` behind its name of LongBench-E.

    Args:
        path_or_repo: a file, a folder with ``SUBSET.jsonl`` or LongBench's ``data.zip`` somewhere in it, or a
            data set on the hub.
        subset: one of ``LONGBENCH``.
        templates: LongBench's ``config/dataset2prompt.json``; None: our own wordings, see ``prompts``.

    Raises:
        FileNotFoundError: there is no such path, or no file of the subset in it.
        ImportError: a package for Parquet files or for the hub is missing; the message names it.
        RecordError: a record is malformed; the message names file and line.
        UnsupportedMetricError: the subset's metric is not supported (Chinese sets that need jieba).
        ValueError: unknown subset; the message lists the valid ones.
    """
    known = LONGBENCH | {f"{name}_e": LONGBENCH[name] for name in LONGBENCH_E.split()}
    settings = choose(known, subset, "subset of LongBench")
    check_metric(settings.metric)
    base = subset.removesuffix("_e")
    wordings = prompts.LONGBENCH if templates is None else prompts.load_templates(templates)
    template = choose(wordings, base, "template")
    asked: list[_Asked] = []
    for record in _longbench_records(path_or_repo, subset):
        context, answers = record.text("context"), record.texts("answers")
        instruction, text = prompts.cut(template, input=record.text("input"))
        classes: tuple[str, ...] = ()
        if settings.metric.startswith("classification_score"):
            classes = record.texts("all_classes")
        question = _question(record, text, answers, settings, locate(context, answers), classes=classes)
        asked.append(_Asked(instruction, context, question))
    return _group(asked, f"longbench/{subset}")


def load_ruler(path_or_repo: str | Path, task: str | None = None, *, length: int | None = None) -> list[Task]:
    """RULER's data, as its own code writes it (``input``, ``outputs``) or as ``simonjegou/ruler`` has it.

    Args:
        path_or_repo: a file, a folder or a data set on the hub. Where records do not name their task, their
            folder (``niah_single_1/validation.jsonl``) or their file (``niah_single_1.jsonl``) has to.
        task: one of ``RULER``; None: all of them.
        length: only files in a folder of that name (4096, 8192, ...), which stands for the length in tokens;
            None: all files, whatever their lengths.

    Raises:
        FileNotFoundError: there is no such path, or no matching file in it.
        ImportError: a package for Parquet files or for the hub is missing; the message names it.
        RecordError: a record is malformed or of an unknown task; the message names file and line.
        ValueError: unknown task (the message lists the valid ones), or no record of it.
    """
    if task is not None:
        choose(RULER, task, "task of RULER")
    folder = "" if length is None else f"{length}/"
    # JSON last: repositories have files of that kind that hold no records.
    ends = ("*.jsonl", "*.parquet", "*.json")
    patterns = [f"{start}{folder}{end}" for end in ends for start in ("", "*/")]
    asked: dict[str, list[_Asked]] = {}
    for record in load_records(path_or_repo, patterns):
        kind = _ruler_kind(record)
        if task in (None, kind):
            asked.setdefault(kind, []).append(_ruler_question(record, kind))
    if not asked:
        raise ValueError(f"{path_or_repo} has no record{'' if task is None else f' of task {task}'}")
    return [built for kind in sorted(asked) for built in _group(asked[kind], f"ruler/{kind}")]


def load_scbench(path_or_repo: str | Path, subset: str, *, skip_unsupported: bool = False) -> list[Task]:
    """A subset of SCBench (``microsoft/SCBench``), every turn as a question about the same context.

    SCBench puts the first turn of ``scbench_mf`` in front of the context; here the context stands alone, for
    it is compressed before any question is known. Repeated turns carry no earlier answers (its multi-request
    mode).

    Args:
        path_or_repo: a file, a folder with ``SUBSET.jsonl`` or ``SUBSET/*.parquet`` in it, or a data set on
            the hub.
        subset: one of ``SCBENCH`` or ``SCBENCH_MIXED``.
        skip_unsupported: leave out turns whose metric is not supported, instead of refusing.

    Raises:
        FileNotFoundError: there is no such path, or no file of the subset in it.
        ImportError: a package for Parquet files or for the hub is missing; the message names it.
        RecordError: a record is malformed; the message names file and line.
        UnsupportedMetricError: a turn's metric is not supported, or with ``skip_unsupported`` every turn's.
        ValueError: unknown subset; the message lists the valid ones.
    """
    kinds = choose({**{n: {n: s} for n, s in SCBENCH.items()}, **SCBENCH_MIXED}, subset, "subset of SCBench")
    supported = {name for name, s in kinds.items() if _supported(s.metric)}
    if not supported or (len(supported) < len(kinds) and not skip_unsupported):
        for settings in kinds.values():
            check_metric(settings.metric)
    tasks: list[Task] = []
    for record in load_records(path_or_repo, _patterns(subset)):
        context = _scbench_context(record)
        instruction = prompts.cut(prompts.SCBENCH.get(subset, prompts.SCBENCH_OTHER))[0]
        questions: list[Question] = []
        for turn in record.parts("multi_turns"):
            kind = subset if subset in SCBENCH else turn.text("task")
            if kind not in kinds:
                raise turn.error(f"turn of task {kind!r}; valid: {', '.join(sorted(kinds))}")
            if kind in supported:
                questions.append(_scbench_question(turn, subset, kind, kinds[kind], context))
        if questions:
            name = f"scbench/{subset}/{len(tasks)}"
            tasks.append(Task(name, f"scbench/{subset}", context, tuple(questions), instruction))
    return tasks


@dataclass(frozen=True)
class _Asked:
    """A question with what stands before it."""

    instruction: str
    context: str
    question: Question


def _group(asked: Iterable[_Asked], kind: str) -> list[Task]:
    """One task per context, in order of first appearance."""
    groups: dict[tuple[str, str], list[Question]] = {}
    for item in asked:
        groups.setdefault((item.instruction, item.context), []).append(item.question)
    return [
        Task(f"{kind}/{number}", kind, context, tuple(questions), instruction)
        for number, ((instruction, context), questions) in enumerate(groups.items())
    ]


def _question(
    record: Record,
    text: str,
    answers: tuple[str, ...],
    settings: Subset,
    depth: float | None,
    *,
    answer_prefix: str = "",
    classes: tuple[str, ...] = (),
) -> Question:
    try:
        return Question(
            text, answers, settings.metric, depth, settings.max_new_tokens, answer_prefix, classes
        )
    except ValueError as error:
        raise record.error(str(error)) from error


def _patterns(subset: str) -> list[str]:
    ends = (".jsonl", ".json", "/*.jsonl", "/*.parquet", ".parquet")
    return [f"{start}{subset}{end}" for end in ends for start in ("", "*/")]


def _longbench_records(path_or_repo: str | Path, subset: str) -> list[Record]:
    if Path(path_or_repo).suffix == ".zip":
        return read_archive(Path(path_or_repo), f"data/{subset}.jsonl")
    try:
        return load_records(path_or_repo, _patterns(subset))
    except FileNotFoundError:
        # The hub has all subsets in one archive.
        archive = find_file(path_or_repo, "*data.zip")
        if archive is None:
            raise
        return read_archive(archive, f"data/{subset}.jsonl")


def _ruler_kind(record: Record) -> str:
    source = PurePosixPath(record.source)
    named = (record.text("task"),) if "task" in record.fields else (source.parent.name, source.stem)
    for name in named:
        if name in RULER:
            return name
    raise record.error(f"task {' or '.join(named)} is unknown; valid: {', '.join(sorted(RULER))}")


def _ruler_question(record: Record, kind: str) -> _Asked:
    settings = RULER[kind]
    if "context" in record.fields:
        context, text = record.text("context"), record.text("question")
        prefix = record.text("answer_prefix") if "answer_prefix" in record.fields else ""
        answers = record.texts("answer")
        if "max_new_tokens" in record.fields:
            settings = Subset(settings.metric, int(record.texts("max_new_tokens")[0]))
    else:
        context, text, prefix = _split_ruler(record, kind)
        answers = record.texts("outputs")
    question = _question(record, text, answers, settings, locate(context, answers), answer_prefix=prefix)
    return _Asked("", context, question)


def _split_ruler(record: Record, kind: str) -> tuple[str, str, str]:
    """Context, question and answer prefix of a record that is one text."""
    family = kind.split("_")[0]
    whole = record.text("input")
    starts = [match.start() for match in re.finditer(_RULER_QUESTIONS[family], whole)]
    if not starts:
        raise record.error(f"field 'input' has no question of {kind} in it")
    context, text = whole[: starts[-1]], whole[starts[-1] :]
    if "answer_prefix" in record.fields:
        return context, text, record.text("answer_prefix")
    answer = re.search(_RULER_ANSWERS.get(family, r"\s*Answer:"), text)
    end = len(text) if answer is None else answer.start()
    return context, text[:end], text[end:]


def _scbench_question(turn: Record, subset: str, kind: str, settings: Subset, context: str) -> Question:
    asked, answers = turn.text("input"), turn.texts("answer")
    values = {"input": asked}
    if kind == "scbench_choice_eng":
        options = turn.texts("options")
        if answers[0] not in options or len(options) != len(_LETTERS):
            raise turn.error(f"the answer {answers[0]!r} is not one of {len(_LETTERS)} options")
        answers = (answers[0], _LETTERS[options.index(answers[0])])
        lines = [f"{letter}. {option}" for letter, option in zip(_LETTERS, options, strict=True)]
        values["options"] = "\n".join(lines)
    elif kind == "scbench_mf" and (target := re.search(r"The (.+) is", asked)):
        values["input"] = f"What is the {target.group(1).lower()}?\n\n{asked}"
    _, text = prompts.cut(prompts.SCBENCH.get(subset, prompts.SCBENCH_OTHER), **values)
    return _question(turn, text, answers, settings, locate(context, answers))


def _scbench_context(record: Record) -> str:
    name = "context" if "context" in record.fields else "input"
    if isinstance(record.value(name), str):
        return record.text(name)
    # An array of numbers, which SCBench writes as Python does.
    return f"[{', '.join(record.texts(name))}]"


def _supported(metric: str) -> bool:
    try:
        check_metric(metric)
    except UnsupportedMetricError:
        return False
    return True
