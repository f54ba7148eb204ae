"""Real servers, as few as there are kinds: grkv, fp32 on the CPU, all memory checks and our census on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from grkv_sglang.serving import ServerSpec, running_server
from tests.engine.client import Client
from tests.engine.tiny_model import ensure_tiny_adapter, ensure_tiny_model

TEST_PLUGIN = Path(__file__).parent / "test_plugin"


@contextmanager
def engine(
    model: Path,
    tokenizer: Any,
    folder: Path,
    *,
    grkv_config: Mapping[str, Any],
    extra_args: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
    **sizes: Any,
) -> Iterator[Client]:
    """A server with the test plugin, which injects faults and fills freed slots with NaN."""
    with pytest.MonkeyPatch.context() as patch:
        path = os.pathsep.join(filter(None, [str(TEST_PLUGIN), os.environ.get("PYTHONPATH")]))
        patch.setenv("PYTHONPATH", path)
        patch.setenv("TEST_GRKV_DIR", str(folder))
        for name, value in (environment or {}).items():
            patch.setenv(name, value)
        spec = ServerSpec(
            model_path=model,
            engine="grkv",
            log_path=folder / "server.log",
            grkv_config=grkv_config,
            extra_args=extra_args,
            memory_checks=True,
            **sizes,
        )
        with running_server(spec) as server:
            yield Client(server.base_url, tokenizer, folder)


@pytest.fixture(scope="session")
def small_server(
    model_path: Path, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    """The real model and a pool that a few documents fill."""
    with engine(
        model_path,
        tokenizer,
        tmp_path_factory.mktemp("small-server"),
        grkv_config={
            "allow_forced": True, "min_span_tokens": 200, "budget": 0.2, "triggers": "explicit,reuse"
        },
        max_total_tokens=6000,
        context_length=4096,
        chunked_prefill_size=512,
    ) as client:  # fmt: skip
        yield client


@pytest.fixture(scope="session")
def tiny_model(model_path: Path) -> Path:
    return ensure_tiny_model(model_path.parent / "tiny-model-seed-0", model_path, seed=0)


@pytest.fixture(scope="session")
def adapters(tiny_model: Path) -> dict[str, Path]:
    folder = tiny_model.parent
    return {
        name: ensure_tiny_adapter(folder / f"tiny-adapter-seed-{seed}", tiny_model, seed=seed)
        for name, seed in (("a", 1), ("b", 2))
    }


@pytest.fixture(scope="module")
def server_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")
