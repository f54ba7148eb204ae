"""Fixtures shared by all tests: the real model and its tokenizer, unpacked once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--engine-url",
        help="A running server with the plugin for the tests of the services, instead of one of their own.",
    )


@pytest.fixture(scope="session")
def model_path() -> Path:
    from grkv_sglang.model import ensure_model

    return ensure_model()


@pytest.fixture(scope="session")
def tokenizer(model_path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path)
