"""How many KV slots a span gets."""

from __future__ import annotations

import math
from fractions import Fraction


def slots_for_budget(n_tokens: int, *, share: float | None, tokens: int | None, page_size: int = 1) -> int:
    """Number of slots for a span of `n_tokens`, from a share of its tokens or from a fixed number.

    Args:
        n_tokens: length of the span in tokens, at least 1.
        share: the share of the tokens to keep, above 0 and at most 1.
        tokens: the number of tokens to keep, at least 1.
        page_size: slots per page of the KV pool.

    Returns:
        The budget rounded up to a whole number of pages, but never more than `n_tokens` (a span
        whose length is no page multiple can therefore get exactly its own length: keep everything).

    Raises:
        ValueError: not exactly one of `share` and `tokens` is given, or a value is out of range.
    """
    if n_tokens < 1:
        raise ValueError(f"expected a span of at least 1 token, got n_tokens={n_tokens}")
    if page_size < 1:
        raise ValueError(f"expected page_size >= 1, got {page_size}")
    if (share is None) == (tokens is None):
        raise ValueError(f"expected exactly one of share and tokens, got share={share} and tokens={tokens}")
    if share is not None:
        if not 0 < share <= 1:
            raise ValueError(f"expected a share above 0 and at most 1, got {share}")
        # The decimal that was written is meant, not its binary neighbour: 0.1 of 30 tokens is 3, not 4.
        wanted = math.ceil(Fraction(str(float(share))) * n_tokens)
    elif tokens is not None and tokens >= 1:
        wanted = tokens
    else:
        raise ValueError(f"expected a budget of at least 1 token, got tokens={tokens}")
    return min(math.ceil(wanted / page_size) * page_size, n_tokens)
