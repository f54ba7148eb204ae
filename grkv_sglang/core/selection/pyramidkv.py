"""PyramidKV: SnapKV with more slots in lower layers."""

from __future__ import annotations

from fractions import Fraction
from math import floor

from grkv_sglang.core.selection.snapkv import SnapKV

# How steep: the topmost layer gets 1 / BETA of the average. The published code's value.
BETA = 20


class PyramidKV(SnapKV):
    """SnapKV's choice, with budgets that fall linearly with depth and have the same total.

    Counting only slots beyond the always-kept tokens, with s of them per head on average: the topmost layer
    gets `s / 20`, the lowest `2 s - s / 20`, and those between lie on the line. Where the lowest would get
    more tokens than there are, it gets them all and the topmost the rest of 2 s; no layer gets less than 1.
    Fractions are cut off, and the slots that this leaves go to the lowest layers that lost any.

    Source: PyramidKV, arXiv 2406.02069, with beta = 20 as in the code published with it. Deviation: there,
    rounding changes the total a little, and a short prompt falls back to even budgets.
    """

    name = "pyramidkv"
    storage = "per_layer"

    def layer_slots(
        self, layer: int, n_layers: int, *, n_tokens: int, n_slots: int, n_always_kept: int
    ) -> int:
        mean = n_slots - n_always_kept
        top = max(Fraction(1), Fraction(mean, BETA))
        bottom = min(2 * mean - top, Fraction(n_tokens - n_always_kept))
        top = 2 * mean - bottom
        if n_layers == 1:
            return n_slots
        shares = [bottom - (bottom - top) * at / (n_layers - 1) for at in range(n_layers)]
        whole = [floor(share) for share in shares]
        left = n_layers * mean - sum(whole)
        cut = [at for at, share in enumerate(shares) if share > whole[at]]
        return n_always_kept + whole[layer] + (layer in cut[:left])
