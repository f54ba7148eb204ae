"""Who computes: a Triton kernel or its torch reference. And what a launcher accepts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INDICES = (torch.int32, torch.int64)
MAX_HEAD_DIM = 128
"""The tiles in ``configs.py`` are made for it: a larger head would not fit a card's registers."""

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether Triton interprets the kernels of this process on the CPU (``TRITON_INTERPRET=1``). Triton decides
it where a kernel is decorated, so it holds for the life of the process."""


def runs_reference(device: torch.device) -> bool:
    """The one rule: CPU tensors are for the torch reference, unless this process interprets kernels."""
    return device.type == "cpu" and not INTERPRETED


def has_kernels(device: torch.device, *head_dims: int) -> bool:
    """Whether the launchers run kernels on tensors of a device with heads of these sizes: for callers with an
    expression of their own for anything else. NVIDIA cards from capability 8.0 on, and the interpreter."""
    if max(head_dims, default=1) > MAX_HEAD_DIM:
        return False
    if device.type == "cpu":
        return INTERPRETED
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device) >= (8, 0)


def check(
    name: str,
    tensor: Tensor,
    shape: Sequence[int | str],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    *,
    contiguous: bool = True,
) -> None:
    """Raise ValueError unless a tensor is what a kernel counts on.

    Args:
        name: what the message calls it.
        tensor: the argument.
        shape: sizes that are known, names of those that are free.
        dtypes: any of these.
        device: where all arguments are.
        contiguous: the whole tensor has to be; otherwise its last dimension.
    """
    fits = tensor.ndim == len(shape) and all(
        isinstance(size, str) or size == actual for size, actual in zip(shape, tensor.shape, strict=True)
    )
    if not fits or tensor.dtype not in dtypes or tensor.device != device:
        raise ValueError(
            f"expected {name} [{', '.join(map(str, shape))}] {' or '.join(map(str, dtypes))} on {device}, "
            f"got {list(tensor.shape)} {tensor.dtype} on {tensor.device}"
        )
    dense = tensor.is_contiguous() if contiguous else tensor.shape[-1] <= 1 or tensor.stride(-1) == 1
    if tensor.numel() and not dense:
        what = "contiguous" if contiguous else "contiguous in its last dimension"
        raise ValueError(f"expected {name} {what}, got strides {tensor.stride()}")


def check_head_dim(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless the last dimension is a head size that the kernels have tiles for."""
    if not 1 <= tensor.shape[-1] <= MAX_HEAD_DIM:
        raise ValueError(f"expected {name} with a head size of 1 to {MAX_HEAD_DIM}, got {tensor.shape[-1]}")


def block_dim(head_dim: int) -> int:
    """The power of two that a head is padded to in registers; a matrix product needs 16 or more."""
    return max(16, triton.next_power_of_2(head_dim))


def dot_precision(*inputs: Tensor) -> str:
    """How matrix products of these inputs, converted to float32, use tensor cores.

    A TF32 number holds every fp16 and bf16 number, so one pass is exact in inputs of 16 bits. Of float32
    inputs it would drop 13 bits; three passes keep nearly all of them.
    """
    return "tf32" if all(tensor.element_size() == 2 for tensor in inputs) else "tf32x3"
