"""Checks and measurements of the kernels and the core on one GPU: ``python -m benchmarks.gpu --help``.

Needs torch, Triton and the standard library, nothing else: neither SGLang nor any other dependency of the
package. Only ``server`` (``python -m benchmarks.gpu.server``) runs a whole server and needs everything.
"""
