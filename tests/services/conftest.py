"""One real engine and one real browser for all tests of the services."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import engine

CONTEXT_LENGTH = 4096


@pytest.fixture(scope="session")
def engine_url(
    request: pytest.FixtureRequest,
    model_path: Path,
    tokenizer: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    """A server with the plugin, all memory checks on; or the one that ``--engine-url`` names."""
    given = request.config.getoption("--engine-url")
    if given:
        yield given
        return
    with engine(
        model_path,
        tokenizer,
        tmp_path_factory.mktemp("services-engine"),
        grkv_config={"min_span_tokens": 200, "budget": 0.2},
        max_total_tokens=24576,
        context_length=CONTEXT_LENGTH,
        chunked_prefill_size=512,
    ) as client:
        yield str(client.http.base_url)


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of the browser; its absence fails rather than skips, so that CI cannot lose these tests."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    assert path, "browser tests need Chromium: `apt-get install chromium`"
    return path
