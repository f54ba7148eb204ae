"""Words for keys, word lists and noise: short, common, and none of them part of another."""

from __future__ import annotations

import random
import string


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# No word is a substring of another one: the metrics look for an answer anywhere in the prediction.
ADJECTIVES = _words("""
    amber ancient autumn brave brisk broken calm careful clever cobalt copper crimson curious dusty eager
    early emerald famous fearless frozen gentle golden graceful hidden hollow honest humble ivory jolly
    lively lonely loyal lucky mellow merry mighty modest narrow noble patient polite proud purple quiet
    rapid rustic scarlet shallow silent silver sleepy smooth solemn stormy sturdy tender timid velvet violet
    wandering yellow
""")
NOUNS = _words("""
    acorn anchor badger bakery basket beacon blanket bridge bucket button cabin candle canyon carpet castle
    cavern chimney clover compass cottage cradle curtain desert dolphin dragon engine falcon feather fiddle
    flute forest fountain garden glacier hammer harbor helmet hinge island jacket jungle kettle kitchen
    ladder lantern lemon library lizard magnet marble market meadow mirror monkey mountain needle notebook
    oyster paddle pebble pencil pepper pigeon pillow pirate planet pocket prairie pumpkin puzzle quarry
    rabbit ribbon river rocket saddle sailor shovel spider squirrel statue temple thimble ticket tomato
    trumpet tunnel turtle umbrella valley village walnut whistle window winter wizard zebra
""")
NOISE = (
    "The road runs on to the north.",
    "The bread is still warm.",
    "A bell rings twice.",
    "We walk down to the water and back.",
    "The wind has turned.",
    "Then it is evening again.",
)


def draw_keys(rng: random.Random, count: int) -> list[str]:
    """So many different keys of hyphenated words, none of them part of another.

    Raises:
        ValueError: more keys than the words can make.
    """
    pairs = len(ADJECTIVES) * len(NOUNS)
    if count <= pairs:
        return [
            f"{ADJECTIVES[i // len(NOUNS)]}-{NOUNS[i % len(NOUNS)]}" for i in rng.sample(range(pairs), count)
        ]
    # All keys of one draw have the same number of words: a pair would be part of a triple.
    triples = pairs * len(ADJECTIVES)
    if count > triples:
        raise ValueError(f"the word lists make {triples} keys, not {count}")
    drawn = rng.sample(range(triples), count)
    return [
        f"{ADJECTIVES[i // pairs]}-{ADJECTIVES[i % pairs // len(NOUNS)]}-{NOUNS[i % len(NOUNS)]}"
        for i in drawn
    ]


def draw_numbers(rng: random.Random, count: int, digits: int) -> list[str]:
    """So many different numbers of so many digits, as text.

    Raises:
        ValueError: there are not so many.
    """
    low = 10 ** (digits - 1)
    if count > 9 * low:
        raise ValueError(f"there are {9 * low} numbers of {digits} digits, not {count}")
    return [str(n) for n in rng.sample(range(low, 10 * low), count)]


def draw_codes(
    rng: random.Random, count: int, letters: int, alphabet: str = string.ascii_lowercase
) -> list[str]:
    """So many different random words of so many letters."""
    codes: dict[str, None] = {}  # keeps the order in which they were drawn
    while len(codes) < count:
        codes["".join(rng.choices(alphabet, k=letters))] = None
    return list(codes)
