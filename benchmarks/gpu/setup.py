"""What a run is about: device, sizes, seed and time."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from grkv_kernels.dispatch import INTERPRETED


@dataclass(frozen=True)
class Sizes:
    """One layer of a model, the spans that are looked at, and how often something is timed.

    Attributes:
        heads, kv_heads, head_dim, hidden, intermediate, layers: of the model.
        spans: tokens of the prefixes, ascending.
        compression_span: tokens of the span whose compression is timed.
        pool_dtypes: what the KV pool holds; the first one is what is timed.
        batches: requests that decode together.
        shares: kept shares of a prefix; 1 is the whole of it.
        repeats, warmups: of each measurement.
        copy_bytes: of the buffer whose copy gives the bandwidth; many times a card's L2.
    """

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    layers: int
    spans: tuple[int, ...]
    compression_span: int
    pool_dtypes: tuple[torch.dtype, ...]
    batches: tuple[int, ...]
    shares: tuple[float, ...]
    repeats: int
    warmups: int
    copy_bytes: int

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def scale(self) -> float:
        """The factor on the logits."""
        return self.head_dim**-0.5


LLAMA_31_8B = Sizes(
    heads=32,
    kv_heads=8,
    head_dim=128,
    hidden=4096,
    intermediate=14336,
    layers=32,
    spans=(16384, 32768, 131072),
    compression_span=32768,
    pool_dtypes=(torch.bfloat16, torch.float16),
    batches=(1, 8, 32),
    shares=(1.0, 0.2, 0.1),
    repeats=20,
    warmups=3,
    copy_bytes=2**30,
)

QUICK = replace(
    LLAMA_31_8B,
    spans=(16384,),
    compression_span=16384,
    batches=(1, 8),
    shares=(1.0, 0.1),
    repeats=5,
    warmups=2,
)

# float32 in place of bfloat16, with which Triton's interpreter computes garbage. The span is the shortest
# whose tenth holds the tokens that are always kept.
TINY = Sizes(
    heads=4,
    kv_heads=2,
    head_dim=32,
    hidden=64,
    intermediate=96,
    layers=2,
    spans=(70, 130),
    compression_span=400,
    pool_dtypes=(torch.float32, torch.float16),
    batches=(1, 2),
    shares=(1.0, 0.1),
    repeats=2,
    warmups=1,
    copy_bytes=2**16,
)


@dataclass(frozen=True)
class Setup:
    """One run.

    Attributes:
        device: where everything is computed.
        sizes: how large.
        seed: of all random numbers.
        deadline_s: on the clock of `time.monotonic`; benchmarks that would begin later are skipped.
    """

    device: torch.device
    sizes: Sizes
    seed: int
    deadline_s: float

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def kernels(self) -> str:
        """Who computes where a kernel is called."""
        if self.on_gpu:
            return "compiled"
        return "interpreted" if INTERPRETED else "torch references"

    def out_of_time(self) -> bool:
        return time.monotonic() > self.deadline_s

    def free_bytes(self) -> int | None:
        """Of the device's memory, counting what torch keeps for reuse; None where nobody counts."""
        if not self.on_gpu:
            return None
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        free: int = torch.cuda.mem_get_info(self.device)[0]
        return free + cached

    def generator(self, salt: int = 0) -> torch.Generator:
        """Random numbers on the device, the same in every run with this seed."""
        return torch.Generator(self.device).manual_seed(self.seed + salt)

    def synchronize(self) -> None:
        """Wait for the device.

        Raises:
            RuntimeError: a kernel failed before.
        """
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
