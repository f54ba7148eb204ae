"""Tensor work on the KV pool and for its compression; knows neither SGLang nor ``grkv_sglang``.

Each operation is a launcher that validates its arguments, a Triton kernel, and a torch reference beside it
(``*_reference``), which is what runs on a CPU. The kernels have been compiled for GPUs and run in Triton's
interpreter; they have not been run on a GPU.

Numbers are float32, float16 or bfloat16 where they are stored; a kernel converts them to float32 before any
arithmetic and sums in float32. Nothing here waits for the device, so that a launch can be captured.
Launches go to the current CUDA device and stream.
"""

from grkv_kernels.compaction import LayerBuffers, gather_tokens, scatter_tokens
from grkv_kernels.gram import ridged_gram, transposed_product
from grkv_kernels.key_step import key_jvp, key_vjp
from grkv_kernels.merge import merge_splits, merge_states
from grkv_kernels.ragged_attention import ragged_attention
from grkv_kernels.scoring import window_attention, window_scores
from grkv_kernels.slots import bits, copy_slots, read_slots, write_slots

__all__ = [
    "LayerBuffers",
    "bits",
    "copy_slots",
    "gather_tokens",
    "key_jvp",
    "key_vjp",
    "merge_splits",
    "merge_states",
    "ragged_attention",
    "read_slots",
    "ridged_gram",
    "scatter_tokens",
    "transposed_product",
    "window_attention",
    "window_scores",
    "write_slots",
]
