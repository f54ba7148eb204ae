"""The dashboard and the alerts name metrics and labels that the cache exports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from grkv_sglang.cache import metrics

DEPLOY = Path(__file__).parents[1] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "grkv.json"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
SGLANG_LABELS = {"model_name": "m", "tp_rank": 0}
OF_SGLANG = {"sglang:cache_hit_rate"}
"""Shown beside ours; `tests/engine/test_life.py` reads it from a server."""


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """Name of every series, and its labels."""
    registry = CollectorRegistry()
    for kind in ("Counter", "Gauge", "Histogram"):
        original = getattr(metrics, kind)
        monkeypatch.setattr(metrics, kind, lambda *a, _of=original, **k: _of(*a, registry=registry, **k))
    made = metrics.CacheMetrics(SGLANG_LABELS)
    for name, (_, label, _) in metrics._COUNTED.items():
        if label is not None:
            made._counters[name].labels(**SGLANG_LABELS, **{label: "x"}).inc()
    for histogram in (made._seconds, made._quality):
        histogram.labels(**SGLANG_LABELS).observe(1)
    for gauge in made._gauges.values():
        gauge.labels(**SGLANG_LABELS).set(1)
    for name, (_, label, _) in metrics._COUNTED.items():
        if label is None:
            made._counters[name].labels(**SGLANG_LABELS).inc()
    found: dict[str, set[str]] = {}
    for family in registry.collect():
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def expressions() -> list[str]:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    shown = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    return [*shown, *(rule["expr"] for rule in rules)]


def test_every_metric_and_label_is_exported(exported: dict[str, set[str]]):
    used: set[str] = set()
    for expression in expressions():
        for name, matchers in re.findall(r"(sglang:\w+)(\{[^}]*\})?", expression):
            used.add(name)
            if name in OF_SGLANG:
                continue
            assert name in exported, expression
            labels = set(re.findall(r"(\w+)=", matchers))
            labels |= {
                label.strip()
                for group in re.findall(r"by \(([^)]*)\)", expression)
                for label in group.split(",")
                if name.endswith("_bucket") or "le" not in group
            }
            assert labels <= exported[name], expression
    # Everything that is exported is shown.
    series = {name for name in exported if not name.endswith(("_created", "_count", "_sum"))}
    assert used - OF_SGLANG == series


def test_the_dashboard_loads_as_grafana_expects_it():
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    assert dashboard["uid"] == "grkv-sglang"
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert not cells & taken, f"{panel['title']} overlaps"
        taken |= cells


def test_alerts_say_what_to_do():
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
            assert rule["annotations"]["summary"]
            assert rule["annotations"]["description"]
            assert rule["expr"].count("(") == rule["expr"].count(")")
