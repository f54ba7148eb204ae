"""The cache's numbers on SGLang's own ``/metrics`` endpoint, under SGLang's labels and naming.

Counters are kept in `Counters`; this module publishes what has been added since the last time. SGLang's
processes share Prometheus's multiprocess folder, in which a gauge needs to say whose value counts: the
scheduler that wrote last, of which there is one per set of labels.
"""

from __future__ import annotations

import time
from collections import Counter as Counts
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from grkv_sglang.cache.counters import Counters
from grkv_sglang.cache.span import SpanNode

PUBLISH_EVERY_S = 1.0
SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
QUALITY = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.99)

# Field of `Counters` -> metric, its label beside SGLang's (None: a plain number), what it counts.
_COUNTED: dict[str, tuple[str, str | None, str]] = {
    "compressions_started": ("compressions_started", None, "Compression jobs begun."),
    "compressions_failed": ("compressions_failed", "reason", "Compression jobs that failed."),
    "compressions_skipped": ("compressions_skipped", "reason", "Compression jobs with nothing to do."),
    "spans_made": ("spans_made", "trigger", "Spans made, by what made them."),
    "span_hits": ("span_hits", "mode", "Requests served from at least one span."),
    "span_tokens_served": ("span_tokens_served", None, "Prompt tokens served from spans."),
    "reprefilled_tokens": ("reprefilled_tokens", None, "Prompt tokens prefilled though a span held them."),
    "twins_freed": ("twins_freed", None, "Exact copies of spans freed."),
    "spans_superseded": ("spans_superseded", None, "Spans replaced by better ones."),
    "spans_expired": ("spans_expired", None, "Spans dropped for their time to live."),
    "spans_outdated": ("spans_outdated", None, "Spans made unreachable by a weight update."),
    "pins_refused": ("pins_refused", None, "Pins beyond the server's limit."),
    "deleted_slots": ("deleted_slots", None, "KV slots of deleted prefixes."),
}


class CacheMetrics:
    """Prometheus metrics of one scheduler's cache."""

    def __init__(self, labels: dict[str, Any]) -> None:
        self._labels = labels
        names = list(labels)
        self._counters = {
            field: Counter(
                f"sglang:grkv_{metric}_total", text, [*names, label] if label is not None else names
            )
            for field, (metric, label, text) in _COUNTED.items()
        }
        self._seconds = Histogram(
            "sglang:grkv_compression_seconds", "Work of one span, waiting excluded.", names, buckets=SECONDS
        )
        self._quality = Histogram(
            "sglang:grkv_span_quality", "Measured quality of new spans.", names, buckets=QUALITY
        )
        self._gauges = {
            name: Gauge(f"sglang:grkv_{name}", text, names, multiprocess_mode="mostrecent")
            for name, text in {
                "spans": "Spans in the tree.",
                "span_slots": "KV slots that spans hold.",
                "saved_slots": "KV slots that the spans' tokens would hold beyond that at full size.",
                "pinned_slots": "KV slots of pinned spans.",
                "jobs_waiting": "Compression jobs waiting or in flight.",
            }.items()
        }
        self._published: Counts[tuple[str, str]] = Counts()
        self._next_s = 0.0

    def span_made(self, span: SpanNode) -> None:
        self._seconds.labels(**self._labels).observe(span.origin.compress_s)
        self._quality.labels(**self._labels).observe(span.origin.quality)

    def due(self) -> bool:
        """Whether it is time to publish again; true at most once a second."""
        now = time.monotonic()
        if now < self._next_s:
            return False
        self._next_s = now + PUBLISH_EVERY_S
        return True

    def publish(self, counters: Counters, gauges: dict[str, int]) -> None:
        """Bring the endpoint up to date."""
        totals = counters.as_dict()
        for field, (_, label, _) in _COUNTED.items():
            value = totals[field]
            for key, total in value.items() if isinstance(value, dict) else (("", value),):
                added = total - self._published[field, key]
                if added or not key:  # plain counters show from the start, also at 0
                    extra = {label: key} if label is not None else {}
                    self._counters[field].labels(**self._labels, **extra).inc(added)
                    self._published[field, key] = total
        for name, gauge in self._gauges.items():
            gauge.labels(**self._labels).set(gauges[name])
