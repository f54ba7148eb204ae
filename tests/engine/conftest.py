"""One real server for the module: grkv, fp32 on the CPU, all memory checks and our census on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grkv_sglang.serving import ServerSpec, running_server
from tests.engine.client import Client

TEST_PLUGIN = Path(__file__).parent / "test_plugin"


@pytest.fixture(scope="module")
def server_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def client(model_path: Path, tokenizer: Any, server_dir: Path) -> Iterator[Client]:
    with pytest.MonkeyPatch.context() as patch:
        path = os.pathsep.join(filter(None, [str(TEST_PLUGIN), os.environ.get("PYTHONPATH")]))
        patch.setenv("PYTHONPATH", path)
        patch.setenv("TEST_GRKV_DIR", str(server_dir))
        spec = ServerSpec(
            model_path=model_path,
            engine="grkv",
            log_path=server_dir / "server.log",
            max_total_tokens=6000,
            context_length=4096,
            chunked_prefill_size=512,
            grkv_config={"allow_forced": True, "min_span_tokens": 200, "budget": 0.2},
            memory_checks=True,
        )
        with running_server(spec) as server:
            yield Client(server.base_url, tokenizer, server_dir)
