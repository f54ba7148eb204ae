from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grkv_sglang.core import slots_for_budget


@pytest.mark.parametrize(
    ("n_tokens", "share", "page_size", "expected"),
    [
        (1000, 0.1, 1, 100),
        (30, 0.1, 1, 3),
        (100, 0.07, 1, 7),  # 0.07 * 100 is 7.000000000000001
        (31, 0.1, 1, 4),
        (7, 0.3, 1, 3),
        (100, 0.29, 1, 29),
        (100, 1.0, 1, 100),
        (1000, 0.1, 16, 112),
        (1000, 0.1, 64, 128),
        (1, 0.001, 1, 1),
        (100, 0.95, 64, 100),
    ],
)
def test_share(n_tokens: int, share: float, page_size: int, expected: int) -> None:
    assert slots_for_budget(n_tokens, share=share, tokens=None, page_size=page_size) == expected


@pytest.mark.parametrize(
    ("n_tokens", "tokens", "page_size", "expected"),
    [(1000, 100, 1, 100), (1000, 100, 16, 112), (64, 100, 16, 64), (50, 50, 1, 50), (50, 1, 4, 4)],
)
def test_tokens(n_tokens: int, tokens: int, page_size: int, expected: int) -> None:
    assert slots_for_budget(n_tokens, share=None, tokens=tokens, page_size=page_size) == expected


@given(st.integers(1, 100_000), st.integers(1, 1000), st.sampled_from([1, 2, 16, 64]))
def test_share_is_the_smallest_page_multiple_that_suffices(
    n_tokens: int, thousandths: int, page: int
) -> None:
    slots = slots_for_budget(n_tokens, share=thousandths / 1000, tokens=None, page_size=page)
    wanted = Fraction(thousandths, 1000) * n_tokens
    if slots == n_tokens:
        assert wanted > (n_tokens - 1) // page * page
    else:
        assert slots % page == 0
        assert slots - page < wanted <= slots


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_tokens": 10, "share": None, "tokens": None}, "exactly one of share and tokens"),
        ({"n_tokens": 10, "share": 0.5, "tokens": 5}, "exactly one of share and tokens"),
        ({"n_tokens": 10, "share": 0.0, "tokens": None}, "share above 0"),
        ({"n_tokens": 10, "share": 1.5, "tokens": None}, "got 1.5"),
        ({"n_tokens": 10, "share": float("nan"), "tokens": None}, "got nan"),
        ({"n_tokens": 10, "share": None, "tokens": 0}, "tokens=0"),
        ({"n_tokens": 0, "share": 0.5, "tokens": None}, "n_tokens=0"),
        ({"n_tokens": 10, "share": 0.5, "tokens": None, "page_size": 0}, "page_size >= 1"),
    ],
)
def test_errors(arguments: dict[str, float | None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        slots_for_budget(**arguments)  # type: ignore[arg-type]
