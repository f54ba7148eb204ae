"""How keys and values are stored: a dtype, and for narrow ones a scale that the stored numbers are multiplied
by. Everything is computed in float32; what a pool cannot hold has to be known before a change is judged."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STORAGE_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


@dataclass(frozen=True)
class Storage:
    """A dtype and a positive scale: the number `x` is stored as `x / scale`.

    What was loaded is stored again bit for bit: the two roundings of float32 are far below half a step of
    every narrower dtype (as long as float32 holds `x` itself). float32 with a scale may lose its last bit.

    Raises:
        ValueError: a dtype that is not in `STORAGE_DTYPES`, or a scale that is not finite and positive.
    """

    dtype: torch.dtype
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.dtype not in STORAGE_DTYPES:
            raise ValueError(
                f"expected a storage dtype out of {', '.join(map(str, STORAGE_DTYPES))}, got {self.dtype}"
            )
        if not 0 < self.scale < float("inf"):
            raise ValueError(f"expected a finite scale > 0, got {self.scale}")

    def load(self, stored: Tensor) -> Tensor:
        """The float32 numbers that `stored`, in this dtype, stands for."""
        exact = stored.float()
        return exact if self.scale == 1 else exact * self.scale

    def store(self, exact: Tensor) -> Tensor:
        """Round to the nearest number that can be stored; any float dtype in, this dtype out.

        Eight bits saturate at their largest number, as SGLang's own kernels do (a cast overflows to infinity,
        or to NaN, depending on format and release of torch). What is not finite becomes NaN there, since
        float8_e4m3fn has no infinity. Wider dtypes overflow to infinity.
        """
        if self.scale != 1:
            exact = exact / self.scale
        if self.dtype.itemsize == 1:
            largest = torch.finfo(self.dtype).max
            exact = torch.where(exact.isfinite(), exact.clamp(-largest, largest), torch.nan)
        return exact.to(self.dtype)

    def rounded(self, exact: Tensor) -> Tensor:
        """`exact` as it will be read back, in its own dtype."""
        return self.load(self.store(exact)).to(exact.dtype)
