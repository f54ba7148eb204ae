"""The tree's rule machine for long: ``python -m benchmarks.tree_life --steps 100000 --seed 0 --json OUT``.

The same machine as in ``tests/cache/test_tree_stateful.py``: SGLang's own requests, pools and allocator,
our cache, and a table of what every KV slot holds. Every step checks books, owners and lineage.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import hypothesis.core
import typer
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from rich.progress import Progress

from tests.cache.test_tree_stateful import CacheLife

LIVES_PER_SEED = 100
STEPS_PER_LIFE = 80


def main(
    steps: Annotated[int, typer.Option(help="Steps of the machine, over all lives.")] = 100_000,
    seed: Annotated[int, typer.Option(help="First seed; every hundred lives take the next one.")] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Where the result goes.")] = None,
) -> None:
    """Run until so many steps were taken; a failing step ends the run with the shortest life that fails."""
    logging.getLogger("grkv_sglang").setLevel(logging.CRITICAL)  # its failures are injected
    events: Counter[str] = Counter()
    progress = Progress()
    bar = progress.add_task("steps", total=steps)

    class CountedLife(CacheLife):
        def check_invariants(self, *args: Any, **kwargs: Any) -> None:
            super().check_invariants(*args, **kwargs)
            events["steps"] += 1
            progress.advance(bar)

        def teardown(self) -> None:
            super().teardown()
            events["lives"] += 1
            if hasattr(self, "h"):
                _count(events, self.h.cache.counters.as_dict())

    progress.start()
    started = time.perf_counter()
    while events["steps"] < steps:
        vars(hypothesis.core)["global_force_seed"] = seed + events["lives"] // LIVES_PER_SEED
        run_state_machine_as_test(
            CountedLife,
            settings=settings(
                max_examples=LIVES_PER_SEED,
                stateful_step_count=STEPS_PER_LIFE,
                deadline=None,
                database=None,
                phases=(Phase.generate, Phase.shrink),
                suppress_health_check=list(HealthCheck),
            ),
        )
    progress.stop()
    result = {
        "seed": seed,
        "seconds": round(time.perf_counter() - started, 1),
        **dict(sorted(events.items())),
    }
    print(json.dumps(result, indent=2))
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=2) + "\n")


def _count(events: Counter[str], counters: dict[str, object]) -> None:
    for name, value in counters.items():
        if isinstance(value, dict):
            for key, count in value.items():
                events[f"{name}.{key}"] += count
        elif isinstance(value, int):
            events[name] += value


if __name__ == "__main__":
    typer.run(main)
