"""RULER-style tasks (Hsieh et al. 2024, arXiv 2404.06654), generated offline from a seed to a token length.

What is asked follows the paper's categories: retrieval of needles, tracing of variables, aggregation of
words, and question answering. The wording is ours. Two things differ on purpose, because here a context is
compressed once and then asked about several times: a context carries several questions, and the instruction
gives none of them away. Where RULER has one list or one coded text per prompt, there are three here.
"""

from __future__ import annotations

import random
import string
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tasks.base import Question, Task, choose
from benchmarks.tasks.haystack import CountTokens, Haystack, fit, insert, natural, noise, spread
from benchmarks.tasks.qa import build_qa
from benchmarks.tasks.words import ADJECTIVES, NOUNS, draw_codes, draw_keys, draw_numbers

NEEDLES_INSTRUCTION = (
    "Notes about access numbers are hidden in the text below. "
    "Remember them: you will be asked for some of them.\n\n"
)
PARTS = ("first", "second", "third")


@dataclass(frozen=True)
class Setting:
    """How long a task is and what it is drawn from.

    Raises:
        ValueError: the target is not positive.
    """

    target_tokens: int
    """Tokens of ``Task.prefix`` (instruction and context): at most these, and at least 98 % of them."""
    seed: int
    count_tokens: CountTokens
    """Tokens of a text with the model's tokenizer, without special tokens."""
    texts: Path | None = None
    """Folder of ``.txt`` files for natural text; None: the three books that ship with the demo."""

    def __post_init__(self) -> None:
        if self.target_tokens < 1:
            raise ValueError(f"target_tokens must be positive, got {self.target_tokens}")

    def rng(self, kind: str) -> random.Random:
        """Random numbers of one kind of task: two kinds do not get the same needles from one seed."""
        return random.Random(f"{kind}/{self.seed}")


def generate(kind: str, setting: Setting) -> Task:
    """One task of the named kind.

    Raises:
        ValueError: unknown kind (the message lists the valid ones), or a length that the kind cannot hit.
    """
    return choose(TASKS, kind, "task")(setting)


def niah_single_noise(setting: Setting) -> Task:
    """Single needle in repeated noise sentences: each of four questions asks for one key's only number."""
    return _single("niah_single_noise", setting, noise)


def niah_single_text(setting: Setting) -> Task:
    """Single needle in natural text: each of four questions asks for one key's only number."""
    return _single("niah_single_text", setting, lambda rng: natural(rng, setting.texts))


def niah_single_uuid(setting: Setting) -> Task:
    """As ``niah_single_text`` with a UUID for a value: many tokens, all of which must survive."""
    return _single("niah_single_uuid", setting, lambda rng: natural(rng, setting.texts), values="identifier")


def niah_multikey(setting: Setting) -> Task:
    """Multi-key: four asked needles among twelve others of the same form, in natural text."""
    kind = "niah_multikey"
    rng = setting.rng(kind)
    keys, values = draw_keys(rng, 16), draw_numbers(rng, 16, digits=7)
    needles = [(depth, _note(k, v)) for depth, k, v in zip(spread(rng, 16), keys, values, strict=True)]
    context = _hide(setting, natural(rng, setting.texts), needles)
    # One of every four neighbours, so that the asked ones lie in all parts.
    asked = [4 * part + rng.randrange(4) for part in range(4)]
    return _needle_task(kind, setting, rng, context, [_ask_one(context, keys[i], values[i]) for i in asked])


def niah_multikey_dense(setting: Setting) -> Task:
    """Multi-key without a haystack: the context is nothing but needles, of which five are asked for."""
    kind = "niah_multikey_dense"
    rng = setting.rng(kind)
    most = setting.target_tokens // 8 + 8  # a note has more tokens than that
    keys, values = draw_keys(rng, most), draw_numbers(rng, most, digits=7)
    needles = [(depth, _note(keys[i], values[i])) for i, depth in enumerate(spread(rng, 5))]
    others = (_note(keys[i], values[i]) for i in range(5, most))
    context = _hide(setting, others, needles)
    return _needle_task(
        kind, setting, rng, context, [_ask_one(context, keys[i], values[i]) for i in range(5)]
    )


def niah_multivalue(setting: Setting) -> Task:
    """Multi-value: three keys with four scattered numbers each; a question asks for all those of one key."""
    kind = "niah_multivalue"
    rng = setting.rng(kind)
    keys, values = draw_keys(rng, 3), draw_numbers(rng, 12, digits=7)
    owners = [i % 3 for i in range(12)]
    rng.shuffle(owners)
    needles = [(d, _note(keys[o], v)) for d, o, v in zip(spread(rng, 12), owners, values, strict=True)]
    context = _hide(setting, natural(rng, setting.texts), needles)
    questions = [
        _ask_all([key], [v for o, v in zip(owners, values, strict=True) if o == i])
        for i, key in enumerate(keys)
    ]
    return _needle_task(kind, setting, rng, context, questions)


def niah_multiquery(setting: Setting) -> Task:
    """Multi-query: twelve needles; each of four questions asks for the numbers of three keys at once."""
    kind = "niah_multiquery"
    rng = setting.rng(kind)
    keys, values = draw_keys(rng, 12), draw_numbers(rng, 12, digits=7)
    needles = [(d, _note(k, v)) for d, k, v in zip(spread(rng, 12), keys, values, strict=True)]
    context = _hide(setting, natural(rng, setting.texts), needles)
    order = rng.sample(range(12), 12)
    groups = [sorted(order[i : i + 3]) for i in range(0, 12, 3)]
    questions = [_ask_all([keys[i] for i in group], [values[i] for i in group]) for group in groups]
    return _needle_task(kind, setting, rng, context, questions)


def variable_tracking(setting: Setting) -> Task:
    """Variable tracking: four chains of four hops in noise; a question asks for one value's variables."""
    kind = "variable_tracking"
    chains, hops = 4, 4
    rng = setting.rng(kind)
    names = draw_codes(rng, chains * (hops + 1), letters=5, alphabet=string.ascii_uppercase)
    values = draw_numbers(rng, chains, digits=5)
    needles: list[tuple[float, str]] = []
    questions: list[Question] = []
    for chain, value in enumerate(values):
        members = names[chain * (hops + 1) : (chain + 1) * (hops + 1)]
        sources = [value, *(f"VAR {name}" for name in members)]
        statements = [f"VAR {name} = {source}." for name, source in zip(members, sources, strict=False)]
        # Ascending depths: a variable is set before it is handed on.
        needles.extend(zip(spread(rng, hops + 1), statements, strict=True))
        questions.append(
            Question(
                f"\n\nWhich variables have the value {value}, directly or through others? Name all of them.",
                tuple(members),
                "string_match_all",
                depth=None,
                max_new_tokens=60,
                answer_prefix=f" The {hops + 1} variables with the value {value} are:",
            )
        )
    instruction = (
        "Assignments of variables are hidden in the text below. Keep track of every variable's value.\n\n"
    )
    context = _hide(setting, noise(rng), sorted(needles, key=lambda n: n[0]), instruction)
    return _task(kind, setting, rng, context, questions, instruction)


def common_words(setting: Setting) -> Task:
    """Common words extraction: three numbered lists, five words in each ten times as often as others."""
    kind = "common_words"
    common = 5
    rng = setting.rng(kind)
    pool = rng.sample([*ADJECTIVES, *NOUNS], len(ADJECTIVES) + len(NOUNS))
    # The common words of one list occur in no other one, nor does anything else tie the lists together.
    wanted = [pool[common * i : common * (i + 1)] for i in range(len(PARTS))]
    rest = pool[common * len(PARTS) :]
    seeds = [rng.random() for _ in PARTS]

    def build(entries: int) -> str:
        lists = [_word_list(w, rest, n, s) for w, n, s in zip(wanted, _shares(entries), seeds, strict=True)]
        return "\n\n".join(
            f"The {part} list:\n"
            + " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))
            for part, words in zip(PARTS, lists, strict=True)
        )

    instruction = (
        "Three numbered lists of words follow. In each, some words occur far more often than others.\n\n"
    )
    context = _fit(setting, build, instruction)
    questions = [
        Question(
            f"\n\nWhat are the {common} most common words of the {part} list?",
            tuple(words),
            "string_match_all",
            depth=_middle(context, f"The {part} list:", index),
            max_new_tokens=60,
            answer_prefix=f" The {common} most common words of the {part} list are:",
        )
        for index, (part, words) in enumerate(zip(PARTS, wanted, strict=True))
    ]
    return _task(kind, setting, rng, context, questions, instruction)


def frequent_words(setting: Setting) -> Task:
    """Frequent words extraction: three coded texts with Zipf frequencies (exponent 2) of six-letter words.

    As in RULER the most frequent item is noise (dots), and the three words after it are asked for.
    """
    kind = "frequent_words"
    wanted = 3
    rng = setting.rng(kind)
    vocabulary = max(setting.target_tokens // 50, 20)
    codes = draw_codes(rng, vocabulary * len(PARTS), letters=6)
    ranked = [["...", *codes[vocabulary * i : vocabulary * (i + 1)]] for i in range(len(PARTS))]
    seeds = [rng.random() for _ in PARTS]

    def build(size: int) -> str:
        texts = [_zipf_text(r, n, s) for r, n, s in zip(ranked, _shares(size), seeds, strict=True)]
        return "\n\n".join(f"The {part} text:\n{text}" for part, text in zip(PARTS, texts, strict=True))

    instruction = "Three coded texts follow. Keep track of how often each coded word occurs in each text.\n\n"
    context = _fit(setting, build, instruction)
    for words in ranked:
        counts = [context.count(word) for word in words[1 : wanted + 2]]
        if counts[wanted - 1] <= counts[wanted]:
            raise ValueError(
                f"{setting.target_tokens} tokens are too few for a {wanted}rd most frequent word"
            )
    questions = [
        Question(
            f"\n\nLeave out the dots. What are the {wanted} most frequent coded words of the {part} text?",
            tuple(words[1 : wanted + 1]),
            "string_match_all",
            depth=_middle(context, f"The {part} text:", index),
            max_new_tokens=50,
            answer_prefix=f" The {wanted} most frequent coded words of the {part} text are:",
        )
        for index, (part, words) in enumerate(zip(PARTS, ranked, strict=True))
    ]
    return _task(kind, setting, rng, context, questions, instruction)


def qa_texts(setting: Setting) -> Task:
    """Questions about the shipped texts, for which answers ship as well; see ``questions/``.

    A context longer than all texts together is filled up with noise between the paragraphs.
    """
    kind = "qa_texts"
    rng = setting.rng(kind)
    instruction = "Read the following texts. You will be asked questions about them.\n\n"
    context, questions = build_qa(
        rng, setting.texts, lambda build: _fit(setting, build, instruction), most_questions=6
    )
    return _task(kind, setting, rng, context, questions, instruction)


TASKS: dict[str, Callable[[Setting], Task]] = {
    "niah_single_noise": niah_single_noise,
    "niah_single_text": niah_single_text,
    "niah_single_uuid": niah_single_uuid,
    "niah_multikey": niah_multikey,
    "niah_multikey_dense": niah_multikey_dense,
    "niah_multivalue": niah_multivalue,
    "niah_multiquery": niah_multiquery,
    "variable_tracking": variable_tracking,
    "common_words": common_words,
    "frequent_words": frequent_words,
    "qa_texts": qa_texts,
}


def _single(
    kind: str, setting: Setting, source: Callable[[random.Random], Iterator[str]], values: str = "number"
) -> Task:
    rng = setting.rng(kind)
    keys = draw_keys(rng, 4)
    if values == "number":
        drawn = draw_numbers(rng, 4, digits=7)
    else:
        drawn = [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in keys]
    needles = [(d, _note(k, v)) for d, k, v in zip(spread(rng, 4), keys, drawn, strict=True)]
    context = _hide(setting, source(rng), needles)
    questions = [_ask_one(context, k, v) for k, v in zip(keys, drawn, strict=True)]
    return _needle_task(kind, setting, rng, context, questions)


def _note(key: str, value: str) -> str:
    return f"Note: the access number of the {key} is {value}."


def _ask_one(context: str, key: str, value: str) -> Question:
    return Question(
        f"\n\nWhat is the access number of the {key} in the notes above?",
        (value,),
        "string_match_all",
        depth=context.index(_note(key, value)) / len(context),
        max_new_tokens=32 if len(value) < 16 else 64,
        answer_prefix=f" The access number of the {key} is",
    )


def _ask_all(keys: Sequence[str], values: Sequence[str]) -> Question:
    named = keys[0] if len(keys) == 1 else f"{', the '.join(keys[:-1])} and the {keys[-1]}"
    return Question(
        f"\n\nWhat are all access numbers of the {named} in the notes above?",
        tuple(values),
        "string_match_all",
        depth=None,
        max_new_tokens=96,
        answer_prefix=f" The access numbers of the {named} are",
    )


def _hide(
    setting: Setting,
    sentences: Iterator[str],
    needles: Sequence[tuple[float, str]],
    instruction: str = NEEDLES_INSTRUCTION,
) -> str:
    haystack = Haystack(sentences)
    return _fit(setting, lambda words: insert(haystack.take(words), needles), instruction)


def _fit(setting: Setting, build: Callable[[int], str], instruction: str) -> str:
    prefix = fit(lambda size: instruction + build(size), setting.count_tokens, setting.target_tokens)
    return prefix[len(instruction) :]


def _needle_task(
    kind: str, setting: Setting, rng: random.Random, context: str, questions: Sequence[Question]
) -> Task:
    return _task(kind, setting, rng, context, questions, NEEDLES_INSTRUCTION)


def _task(
    kind: str,
    setting: Setting,
    rng: random.Random,
    context: str,
    questions: Sequence[Question],
    instruction: str,
) -> Task:
    # Written in no order of depth: a question's position must not tell its depth.
    shuffled = tuple(rng.sample(questions, len(questions)))
    name = f"{kind}/{setting.target_tokens}/{setting.seed}"
    return Task(name, kind, context, shuffled, instruction)


def _shares(size: int) -> list[int]:
    """A size split into as many parts as there are lists, to one unit."""
    return [(size + index) // len(PARTS) for index in range(len(PARTS))]


def _middle(context: str, heading: str, index: int) -> float:
    """Depth of the middle of the part under a heading."""
    start = context.index(heading)
    following = [f"The {part} {heading.split()[-1]}" for part in PARTS[index + 1 : index + 2]]
    end = context.index(following[0]) if following else len(context)
    return (start + end) / 2 / len(context)


def _word_list(common: Sequence[str], others: Sequence[str], entries: int, seed: float) -> list[str]:
    """So many words: two fifths common ones, the others about ten times rarer each, shuffled."""
    rng = random.Random(seed)
    often = max(2 * entries // (5 * len(common)), 2)
    seldom = max(round(often / 10), 1)
    words = [word for word in common for _ in range(often)]
    rare = [word for word in rng.sample(others, len(others)) for _ in range(seldom)]
    if len(words) + len(rare) < entries:  # cannot happen with the lists that ship
        raise ValueError(f"the word lists are too short for {entries} entries")
    words = (words + rare)[:entries]
    rng.shuffle(words)
    return words


def _zipf_text(ranked: Sequence[str], size: int, seed: float) -> str:
    """Words whose counts fall with the square of their rank, shuffled."""
    weights = [1 / rank**2 for rank in range(1, len(ranked) + 1)]
    total = sum(weights)
    words = [word for word, w in zip(ranked, weights, strict=True) for _ in range(int(size * w / total))]
    random.Random(seed).shuffle(words)
    return " ".join(words)
