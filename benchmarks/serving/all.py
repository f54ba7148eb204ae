"""All serving benchmarks, by name."""

from __future__ import annotations

from typing import Any

from benchmarks.serving import bench_serving, capacity, decode_latency, multi_turn, shared_documents
from benchmarks.serving.options import Benchmark

BENCHMARKS: dict[str, Benchmark[Any]] = {
    module.BENCHMARK.name: module.BENCHMARK
    for module in (shared_documents, multi_turn, capacity, decode_latency, bench_serving)
}
