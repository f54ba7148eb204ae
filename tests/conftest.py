"""Fixtures shared by all tests: the real model and its tokenizer, unpacked once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--engine-url",
        help="A running server with the plugin for the tests of services and examples, instead of their own.",
    )


SERVERS = {
    "tests/engine/test_engine.py": "small server",
    "tests/engine/test_commands.py": "small server",
    "tests/engine/": None,
    "tests/benchmarks/test_serving_benchmarks.py": None,
    "tests/services/": "engine_url",
    "tests/examples/": "engine_url",
}
"""Files and folders whose tests start servers -> which one they share, if any."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Servers first, so that processes that share the tests (pytest -n) end at about the same time."""
    items.sort(key=lambda item: not item.nodeid.startswith(tuple(SERVERS)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file goes to one process as a whole, and all that share a server to the same one."""
    from xdist.scheduler import LoadScopeScheduling

    class ByServer(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            shared = next((name for start, name in SERVERS.items() if nodeid.startswith(start)), None)
            return shared or nodeid.partition("::")[0]

    return ByServer(config, log)


@pytest.fixture(scope="session")
def model_path() -> Path:
    from grkv_sglang.model import ensure_model

    return ensure_model()


@pytest.fixture(scope="session")
def tokenizer(model_path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path)


@pytest.fixture(scope="session")
def engine_url(
    request: pytest.FixtureRequest,
    model_path: Path,
    tokenizer: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    """One server with the plugin for the tests of services and examples, all memory checks on; or that which
    ``--engine-url`` names."""
    given = request.config.getoption("--engine-url")
    if given:
        yield given
        return
    from tests.engine.conftest import engine

    with engine(
        model_path,
        tokenizer,
        tmp_path_factory.mktemp("engine"),
        grkv_config={"min_span_tokens": 200, "budget": 0.2},
        max_total_tokens=24576,
        context_length=4096,
        chunked_prefill_size=512,
    ) as client:
        yield str(client.http.base_url)
