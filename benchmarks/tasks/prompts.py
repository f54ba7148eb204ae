"""How the published data sets are asked: the text before the context, and the text after it.

These are short wordings of our own that ask for the same and end the same way; the benchmarks' own templates
are not shipped. For figures to compare with published ones, give ``load_longbench`` LongBench's own file of
templates.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

_QA = "Answer the question with as few words as you can, without an explanation."
_PASSAGES = f"{_QA}\n\nPassages:\n{{context}}\n\n{_QA}\n\nQuestion: {{input}}\nAnswer:"
_SUMMARY = "Write a summary of one page.\n\n{context}\n\nWrite a summary of one page.\n\nSummary:"
_UNANSWERABLE = (
    f'{_QA} Write "yes" or "no" if that is the answer, and "unanswerable" if the article does not tell.'
)

LONGBENCH: dict[str, str] = {
    "narrativeqa": f"{_QA}\n\nStory: {{context}}\n\n{_QA}\n\nQuestion: {{input}}\n\nAnswer:",
    "qasper": f"{_UNANSWERABLE}\n\nArticle: {{context}}\n\n{_UNANSWERABLE}\n\nQuestion: {{input}}\n\nAnswer:",
    "multifieldqa_en": f"Read this text.\n\n{{context}}\n\n{_QA}\n\nQuestion: {{input}}\nAnswer:",
    "hotpotqa": _PASSAGES,
    "2wikimqa": _PASSAGES,
    "musique": _PASSAGES,
    "gov_report": _SUMMARY,
    "multi_news": _SUMMARY,
    "qmsum": (
        "Read this transcript of a meeting.\n\n{context}\n\n"
        "Answer the query about the meeting in one or more sentences.\n\nQuery: {input}\nAnswer:"
    ),
    "trec": "Say of which type the last question is. These are examples.\n\n{context}\n{input}",
    "triviaqa": f"{_QA} These are examples.\n\n{{context}}\n\n{{input}}",
    "samsum": "Summarize the last dialogue in few sentences. These are examples.\n\n{context}\n\n{input}",
    "lsht": "请说出最后一条新闻的类别。以下是例子。\n\n{context}\n{input}",
    "passage_count": (
        "Some of these paragraphs occur more than once. Count the different ones.\n\n{context}\n\n"
        "How many different paragraphs are there? Give only the number.\n\nThe number is: "
    ),
    "passage_retrieval_en": (
        "These are numbered paragraphs.\n\n{context}\n\nThis is a summary of one of them.\n\n{input}\n\n"
        'Which paragraph is it? Answer in the form "Paragraph 1", "Paragraph 2".\n\nThe answer is: '
    ),
    "passage_retrieval_zh": (
        "以下是编号的段落。\n\n{context}\n\n以下是其中一段的摘要。\n\n{input}\n\n"
        "这是哪一段的摘要？请用“段落1”“段落2”的格式回答。\n\n答案是："
    ),
    "lcc": "Continue this code.\n{context}Next line of code:\n",
    "repobench-p": "Continue this code.\n{context}{input}Next line of code:\n",
}

SCBENCH: dict[str, str] = {
    "scbench_kv": "Look up values by their keys in this JSON object.\n\n{context}\n\n{input}",
    "scbench_choice_eng": (
        "Read this book.\n\n{context}\n\nQuestion: {input}\n{options}\n\nThe correct answer is"
    ),
    "scbench_qa_eng": "Read this book. Answer concisely.\n\n{context}\n\nQuestion: {input}\nAnswer:",
    "scbench_qa_chn": "请阅读这本书。\n\n{context}\n\n问题：{input}\n答案：",
    "scbench_repoqa": (
        "From this code, find the functions that are described, and repeat each in a block of ```.\n\n"
        "{context}\n\n{input}"
    ),
}
SCBENCH_OTHER = "{context}\n\n{input}"


def load_templates(path: Path) -> dict[str, str]:
    """Templates by subset from a JSON file such as LongBench's ``config/dataset2prompt.json``.

    Raises:
        ValueError: the file is not an object of strings that have ``{context}`` once each.
    """
    try:
        templates = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(templates, dict):
        raise ValueError(f"{path}: not an object of templates")
    for name, template in templates.items():
        if not isinstance(template, str) or template.count("{context}") != 1:
            raise ValueError(f"{path}: the template of {name!r} does not have {{context}} once")
    return templates


def cut(template: str, **values: str) -> tuple[str, str]:
    """The text before the context, and the text after it with the values filled in.

    Plain replacement, not ``str.format``: questions and code may hold braces.
    """
    before, after = template.split("{context}")
    # One pass, so that a value that happens to hold a placeholder stays as it is.
    return before, re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), after)
