"""The built-in embedding model, loaded once, and services on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from grkv_sglang.services.rag.embedding import Embedder
from grkv_sglang.services.rag.settings import BUILT_IN_EMBEDDING, RagSettings
from grkv_sglang.serving import free_port
from tests.services.rag.serving import RunningRag, serving

StartRag = Callable[..., RunningRag]


@pytest.fixture(scope="session")
def embedder() -> Embedder:
    return Embedder(BUILT_IN_EMBEDDING)


@pytest.fixture
def start_rag(embedder: Embedder, tmp_path: Path) -> Iterator[StartRag]:
    """Starts a service with the given settings; all of them end with the test."""
    with ExitStack() as stack:

        def start(**settings: Any) -> RunningRag:
            defaults = {"port": free_port(), "data_dir": tmp_path / "data", "retry_s": 0.5}
            # Prefixes of 300 tokens are enough, but not at a tenth: the engine always keeps 32 of them.
            defaults |= {"budget": 0.2, "min_compressed_tokens": 200}
            return stack.enter_context(serving(RagSettings(**{**defaults, **settings}), embedder))

        yield start


@pytest.fixture
def rag_without_engine(start_rag: StartRag) -> RunningRag:
    """A service whose engine is down: uploads wait, everything else works."""
    return start_rag(engine_url=f"http://127.0.0.1:{free_port()}")
