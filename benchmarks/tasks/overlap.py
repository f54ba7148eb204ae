"""Overlap of texts: longest common subsequences, ROUGE-L in two editions, and the indel ratio."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence


def common_subsequence(
    first: Sequence[str], second: Sequence[str], *, prefer_second: bool = False
) -> list[int]:
    """Positions in ``first`` of one longest common subsequence.

    Where two subsequences are equally long, the way back through the table decides: it drops an item of
    ``first`` or, with ``prefer_second``, of ``second``. Unions of subsequences depend on that choice.
    """
    table = _subsequence_table(first, second)
    positions: list[int] = []
    i, j = len(first), len(second)
    while i > 0 and j > 0:
        if first[i - 1] == second[j - 1]:
            i, j = i - 1, j - 1
            positions.append(i)
            continue
        up, left = table[i - 1][j], table[i][j - 1]
        if up > left or (up == left and not prefer_second):
            i -= 1
        else:
            j -= 1
    return positions[::-1]


def rouge_l(prediction: str, reference: str) -> float:
    """ROUGE-L F1 as LongBench takes it: the summary-level score of the Python package ``rouge`` 1.0.1.

    Definition: ROUGE-L of Lin (2004), section 3.2, in that package's reading. Sentences end at full stops;
    words are split at spaces and keep their case and punctuation. All longest common subsequences of a
    reference sentence and a predicted one are united as sets of words; precision and recall are that set's
    size over the number of *different* words of prediction and reference.
    """
    predicted, wanted = _split_at_stops(prediction), _split_at_stops(reference)
    predicted_words = {word for sentence in predicted for word in sentence}
    wanted_words = {word for sentence in wanted for word in sentence}
    if not predicted_words or not wanted_words:
        return 0.0
    united = {
        w[position]
        for w in wanted
        for p in predicted
        for position in common_subsequence(w, p, prefer_second=True)
    }
    return _f1(len(united), len(predicted_words), len(wanted_words))


def rouge_lsum(prediction: str, reference: str) -> float:
    """ROUGE-Lsum F1 as SCBench takes it: ``rougeLsum`` of the ``evaluate`` library (package ``rouge_score``).

    Definition: the union of longest common subsequences of Lin (2004), section 3.2. Sentences are lines;
    words are runs of lower-cased letters and digits, not stemmed. For every reference sentence the positions
    in it that are part of a longest common subsequence with any predicted sentence are united; a word counts
    at most as often as it occurs on both sides.
    """
    predicted, wanted = _split_at_lines(prediction), _split_at_lines(reference)
    left_predicted = Counter(word for sentence in predicted for word in sentence)
    left_wanted = Counter(word for sentence in wanted for word in sentence)
    total_predicted, total_wanted = left_predicted.total(), left_wanted.total()
    hits = 0
    for sentence in wanted:
        united = {position for p in predicted for position in common_subsequence(sentence, p)}
        for position in sorted(united):
            word = sentence[position]
            if left_predicted[word] > 0 and left_wanted[word] > 0:
                hits += 1
                left_predicted[word] -= 1
                left_wanted[word] -= 1
    return _f1(hits, total_predicted, total_wanted)


def indel_ratio(first: str, second: str) -> float:
    """Similarity in [0, 1] by insertions and deletions: twice the common subsequence over both lengths.

    Definition: ``Levenshtein.ratio``, which ``fuzz.ratio`` is made of when python-Levenshtein is installed,
    and ``rapidfuzz.fuzz.ratio``. Without it, fuzzywuzzy falls back to difflib, whose matching blocks give
    less.
    """
    if not first and not second:
        return 1.0
    row = [0] * (len(second) + 1)
    for a in first:
        diagonal = 0
        for j, b in enumerate(second, start=1):
            above = row[j]
            row[j] = diagonal + 1 if a == b else max(above, row[j - 1])
            diagonal = above
    return 2 * row[-1] / (len(first) + len(second))


def _subsequence_table(first: Sequence[str], second: Sequence[str]) -> list[list[int]]:
    table = [[0] * (len(second) + 1)]
    for a in first:
        above = table[-1]
        row = [0]
        for j, b in enumerate(second):
            row.append(above[j] + 1 if a == b else max(above[j + 1], row[j]))
        table.append(row)
    return table


def _split_at_stops(text: str) -> list[list[str]]:
    # The package takes whitespace behind the last full stop for a sentence of one empty word: so do we.
    return [sentence.split() or [""] for sentence in text.split(".") if sentence]


def _split_at_lines(text: str) -> list[list[str]]:
    return [re.findall(r"[a-z0-9]+", line.lower()) for line in text.split("\n") if line]


def _f1(common: int, predicted: int, wanted: int) -> float:
    if common == 0:
        return 0.0
    precision, recall = common / predicted, common / wanted
    return 2 * precision * recall / (precision + recall)
