"""Data movement on the KV pool, tensors in and out; knows neither SGLang nor the compression algorithm.

Each operation is a launcher that validates shapes and a torch reference. The references are what runs on
every device today; device kernels take their place behind the same launchers.
"""

from grkv_kernels.slots import copy_slots, write_slots

__all__ = ["copy_slots", "write_slots"]
