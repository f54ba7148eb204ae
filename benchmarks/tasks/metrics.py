"""Scores of answers, written from the published definitions of RULER, LongBench and SCBench.

Every metric takes a prediction, the question's answers, and the classes of a classification task, and gives a
score in [0, 1] of this one question; a benchmark's figure is the mean times 100. The names are those of the
benchmarks' own code, so that results can be compared by name.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from benchmarks.tasks.base import Question, choose
from benchmarks.tasks.overlap import indel_ratio, rouge_l, rouge_lsum

Metric = Callable[[str, Sequence[str], Sequence[str]], float]

CHINESE_PUNCTUATION = frozenset(
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)


class UnsupportedMetricError(ValueError):
    """A metric that is known by name and not supported here."""


def score(question: Question, prediction: str) -> float:
    """Score in [0, 1] of one answer by the question's own metric.

    Raises:
        UnsupportedMetricError: the metric is known, but needs what is not a dependency of this project.
        ValueError: unknown metric; the message lists the valid ones.
    """
    return check_metric(question.metric)(prediction, question.answers, question.classes)


def check_metric(name: str) -> Metric:
    """The metric of that name.

    Raises:
        UnsupportedMetricError: the metric is known, but needs what is not a dependency of this project.
        ValueError: unknown metric; the message lists the valid ones.
    """
    if name in UNSUPPORTED:
        raise UnsupportedMetricError(f"metric {name!r} is not supported: it needs {UNSUPPORTED[name]}")
    return choose(METRICS, name, "metric")


# RULER


def string_match_all(prediction: str, answers: Sequence[str]) -> float:
    """Share of the answers that occur in the prediction, whatever their case.

    Source: RULER (arXiv 2404.06654), metric of all tasks but question answering. SCBench uses the same for
    variable tracking, rounded to two decimals per question; it is not rounded here.
    """
    lowered = prediction.lower()
    return sum(answer.lower() in lowered for answer in answers) / len(answers)


def string_match_part(prediction: str, answers: Sequence[str]) -> float:
    """1 if any answer occurs in the prediction, whatever its case, else 0.

    Source: RULER (arXiv 2404.06654), metric of question answering.
    """
    lowered = prediction.lower()
    return float(any(answer.lower() in lowered for answer in answers))


# LongBench


def normalize_answer(text: str) -> str:
    """Lower case without ASCII punctuation, articles and surplus whitespace.

    Source: SQuAD's evaluation (arXiv 1606.05250), as LongBench uses it.
    """
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", kept).split())


def token_f1(predicted: Sequence[str], wanted: Sequence[str]) -> float:
    """Harmonic mean of precision and recall over the common items, counted with repetition."""
    common = (Counter(predicted) & Counter(wanted)).total()
    if common == 0:
        return 0.0
    precision, recall = common / len(predicted), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def qa_f1_score(prediction: str, answer: str) -> float:
    """F1 of the normalized words of prediction and answer.

    Source: LongBench (arXiv 2308.14508), metric of the English question answering sets.
    """
    return token_f1(normalize_answer(prediction).split(), normalize_answer(answer).split())


def rouge_score(prediction: str, answer: str) -> float:
    """ROUGE-L F1; see ``overlap.rouge_l``.

    Source: LongBench (arXiv 2308.14508), metric of the English summarization sets.
    """
    return rouge_l(prediction, answer)


def classification_score(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """One over the number of classes named in the prediction if the answer is among them, else 0.

    A class that is only part of the answer's name does not count. LongBench takes such classes out of the
    list while it walks over it, so that the class behind one that was taken out is never looked at; the same
    is done here, for the published numbers have it. Its fallback to the most similar class is never reached
    there, and left out.

    Source: LongBench (arXiv 2308.14508), metric of TREC and LSHT.
    """
    named = [name for name in classes if name in prediction]
    index = 0
    while index < len(named):
        if named[index] in answer and named[index] != answer:
            named.remove(named[index])
        index += 1
    return 1.0 / len(named) if answer in named else 0.0


def retrieval_score(prediction: str, answer: str) -> float:
    """Share of the prediction's numbers that are the number of the answer ("Paragraph 7").

    Source: LongBench (arXiv 2308.14508), metric of PassageRetrieval-en.

    Raises:
        ValueError: the answer names no paragraph.
    """
    return _numbered(prediction, answer, r"Paragraph (\d+)")


def retrieval_zh_score(prediction: str, answer: str) -> float:
    """Share of the prediction's numbers that are the number of the answer ("段落7").

    Source: LongBench (arXiv 2308.14508), metric of PassageRetrieval-zh.

    Raises:
        ValueError: the answer names no paragraph.
    """
    return _numbered(prediction, answer, r"段落(\d+)")


def count_score(prediction: str, answer: str) -> float:
    """Share of the prediction's numbers that are the answer.

    Source: LongBench (arXiv 2308.14508), metric of PassageCount.
    """
    numbers = re.findall(r"\d+", prediction)
    return sum(number == answer for number in numbers) / len(numbers) if numbers else 0.0


def code_sim_score(prediction: str, answer: str) -> float:
    """Edit similarity of the prediction's first line of code and the answer, rounded to whole percents.

    The first line of code is the first one without a backtick, ``#`` or ``//``; leading line ends do not
    count. The similarity is ``fuzz.ratio``; see ``overlap.indel_ratio``.

    Source: LongBench (arXiv 2308.14508), metric of LCC and RepoBench-P.
    """
    lines = prediction.lstrip("\n").split("\n")
    code = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * indel_ratio(code, answer)) / 100


# SCBench


def kv_retrieval(prediction: str, answer: str) -> float:
    """1 if the answer occurs in the prediction with its case, else 0.

    Source: SCBench (arXiv 2412.10319), metric of key-value, prefix-suffix and hash retrieval.
    """
    return float(answer in prediction)


def passkey(prediction: str, answer: str) -> float:
    """1 if the first run of digits in the prediction is the answer, else 0.

    Source: SCBench (arXiv 2412.10319), metric of the needles between summaries.
    """
    first = re.search(r"[0-9]+", prediction)
    return float(first is not None and first.group() == answer)


def longdialogue_qa_eng(prediction: str, answers: Sequence[str]) -> float:
    """1 if any answer occurs in the prediction, whatever its case, else 0.

    Source: SCBench (arXiv 2412.10319), metric of English question answering and of many-shot learning. For
    the latter SCBench's code hands over a string and thereby looks for any single character of it; here the
    whole answer is looked for, so that the figures are not comparable with published ones.
    """
    upper = prediction.upper()
    return float(any(answer.upper() in upper for answer in answers))


def longbook_choice_eng(prediction: str, answers: Sequence[str]) -> float:
    """1 if the prediction chooses a right option, else 0.

    A first letter A to D decides; else the prediction as a whole; else what follows one of the phrases
    "answer is:", "answer:", "answer is", "option is", of which the first in this order that occurs is taken;
    else the first word that is an option letter. Answers are the option's text and its letter.

    Source: SCBench (arXiv 2412.10319), metric of English multiple choice, after InfiniteBench.
    """
    text = prediction.strip()
    if not text:
        return 0.0
    if text[0] in "ABCD":
        return float(text[0] in answers)
    if text in answers:
        return 1.0
    text = re.sub(" {2,}", " ", re.sub("[\n\"'.,?!{}]", " ", text))
    for phrase in ("answer is:", "answer:", "answer is", "option is"):
        if phrase in text:
            behind = text[text.index(phrase) + len(phrase) + 1 :]  # one more for the space
            return float(any(behind.startswith(answer) for answer in answers))
    letters = [word for word in text.split() if word in "ABCD"]
    return float(bool(letters) and letters[0] in answers)


def math_find(prediction: str, answer: str) -> float:
    """1 if the first number of the prediction equals the answer, else 0; a whole answer ignores decimals.

    Source: SCBench (arXiv 2412.10319), metric of finding in arrays, after InfiniteBench (arXiv 2402.13718).

    Raises:
        ValueError: the answer is not a number.
    """
    found = re.search(r"\d+\.\d+|\d+", prediction)
    if found is None:
        return 0.0
    if re.fullmatch(r"-?\d+", answer):
        return float(int(float(found.group())) == int(answer))
    return float(float(found.group()) == float(answer))


def longbook_qa_chn(prediction: str, answer: str) -> float:
    """F1 over the characters that are left without punctuation and whitespace; needs no word segmentation.

    Source: SCBench (arXiv 2412.10319), metric of Chinese question answering, after InfiniteBench.
    """
    return token_f1(_chinese_characters(prediction), _chinese_characters(answer))


def longbook_sum_eng(prediction: str, answer: str) -> float:
    """ROUGE-Lsum F1; see ``overlap.rouge_lsum``.

    Source: SCBench (arXiv 2412.10319), metric of summaries.
    """
    return rouge_lsum(prediction, answer)


def _numbered(prediction: str, answer: str, pattern: str) -> float:
    wanted = re.search(pattern, answer)
    if wanted is None:
        raise ValueError(f"answer {answer!r} does not match {pattern!r}")
    return count_score(prediction, wanted.group(1))


def _chinese_characters(text: str) -> list[str]:
    dropped = CHINESE_PUNCTUATION.union(string.punctuation)
    return [c for c in text.lower() if c not in dropped and not c.isspace()]


def _best(metric: Callable[[str, str], float]) -> Metric:
    """The best score over all answers."""
    return lambda prediction, answers, classes: max(metric(prediction, answer) for answer in answers)


def _joint(metric: Callable[[str, Sequence[str]], float]) -> Metric:
    """A metric that looks at all answers at once."""
    return lambda prediction, answers, classes: metric(prediction, answers)


def _first_line(metric: Metric) -> Metric:
    """Only the first line counts, after leading line ends: LongBench's rule for its few-shot sets."""
    return lambda prediction, answers, classes: metric(
        prediction.lstrip("\n").split("\n")[0], answers, classes
    )


def _classification(prediction: str, answers: Sequence[str], classes: Sequence[str]) -> float:
    return max(classification_score(prediction, answer, classes) for answer in answers)


METRICS: dict[str, Metric] = {
    "string_match_all": _joint(string_match_all),
    "string_match_part": _joint(string_match_part),
    "qa_f1_score": _best(qa_f1_score),
    "qa_f1_score/first_line": _first_line(_best(qa_f1_score)),
    "rouge_score": _best(rouge_score),
    "rouge_score/first_line": _first_line(_best(rouge_score)),
    "classification_score/first_line": _first_line(_classification),
    "retrieval_score": _best(retrieval_score),
    "retrieval_zh_score": _best(retrieval_zh_score),
    "count_score": _best(count_score),
    "code_sim_score": _best(code_sim_score),
    "kv_retrieval": _best(kv_retrieval),
    "passkey": _best(passkey),
    "longdialogue_qa_eng": _joint(longdialogue_qa_eng),
    "longbook_choice_eng": _joint(longbook_choice_eng),
    "math_find": _best(math_find),
    "longbook_qa_chn": _best(longbook_qa_chn),
    "longbook_sum_eng": _best(longbook_sum_eng),
}
"""All metrics by name."""

UNSUPPORTED: dict[str, str] = {
    "qa_f1_zh_score": "Chinese word segmentation with jieba",
    "rouge_zh_score": "Chinese word segmentation with jieba",
    "repoqa_pass_at_1": "tree-sitter grammars to cut out functions, and NLTK's smoothed BLEU",
}
"""Metrics that published sets use and that are not supported, with what they need."""
