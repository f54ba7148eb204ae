"""Ranges of positions, against sets of positions."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grkv_sglang.policy.ranges import Ranges, covers, joined, parse_ranges, size, within

pairs = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 12)).map(lambda pair: (pair[0], sum(pair))), max_size=7
)


def positions(ranges: list[tuple[int, int]] | Ranges) -> set[int]:
    return {at for start, end in ranges for at in range(start, end)}


@pytest.mark.parametrize(
    ("text", "ranges"),
    [
        ("0-120,800-830", ((0, 120), (800, 830))),
        ("800-830,0-120", ((0, 120), (800, 830))),
        ("5-6", ((5, 6),)),
        (" 5 - 6 , 8-9 ", ((5, 6), (8, 9))),
        ("0-5,5-9", ((0, 9),)),  # they touch
        ("0-5,6-9", ((0, 5), (6, 9))),
        ("0-9,2-3,4-12", ((0, 12),)),
        ("3-4,3-4", ((3, 4),)),
        ("007-8", ((7, 8),)),
    ],
)
def test_parse(text: str, ranges: Ranges) -> None:
    assert parse_ranges(text) == ranges


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "''"),
        ("5", "'5'"),
        ("5-", "'5-'"),
        ("-5", "'-5'"),
        ("0-4,", "''"),
        ("0-4;6-9", "'0-4;6-9'"),
        ("0-4,6:9", "'6:9'"),
        ("0-4-6", "'0-4-6'"),
        ("1.5-2", "'1.5-2'"),
        ("a-b", "'a-b'"),
    ],
)
def test_what_is_no_range_is_named(text: str, part: str) -> None:
    with pytest.raises(ValueError, match=f"expected ranges such as '0-120,800-830', got {part}"):
        parse_ranges(text)


@pytest.mark.parametrize("text", ["4-4", "5-4", "0-9,7-2"])
def test_an_empty_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"end lies behind its start, got '{text.split(',')[-1]}'"):
        parse_ranges(text)


@given(pairs)
def test_joining_keeps_the_positions(given_pairs: list[tuple[int, int]]) -> None:
    found = joined(given_pairs)
    assert positions(found) == positions(given_pairs)
    assert size(found) == len(positions(given_pairs))
    assert all(start < end for start, end in found)
    assert all(before[1] < after[0] for before, after in pairwise(found))
    assert joined(found) == found
    if found:
        assert parse_ranges(",".join(f"{start}-{end}" for start, end in given_pairs)) == found


@given(pairs, st.integers(0, 60), st.integers(0, 60))
def test_within_is_the_intersection(given_pairs: list[tuple[int, int]], start: int, end: int) -> None:
    found = within(joined(given_pairs), start, end)
    assert positions(found) == positions(given_pairs) & set(range(start, end))
    assert joined(found) == found


@given(pairs, pairs)
def test_covering_is_being_a_superset(outer: list[tuple[int, int]], inner: list[tuple[int, int]]) -> None:
    assert covers(joined(outer), joined(inner)) is (positions(outer) >= positions(inner))
    assert covers(joined(outer + inner), joined(inner))
    assert covers(joined(outer), ())
