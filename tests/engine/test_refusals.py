"""A server that would serve wrongly does not start, and says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from grkv_sglang.serving import ServerError, ServerSpec, running_server

pytestmark = pytest.mark.engine


def test_a_foreign_attention_backend_stops_the_server(model_path: Path, tmp_path: Path) -> None:
    spec = ServerSpec(
        model_path=model_path,
        engine="grkv",
        log_path=tmp_path / "log",
        max_total_tokens=512,
        extra_args=("--attention-backend", "torch_native"),
    )
    with pytest.raises(ServerError) as error, running_server(spec):
        pass
    for phase in ("prefill", "decode"):
        message = (
            f"the {phase} attention backend 'torch_native' would read sentinel slots as KV: "
            "set --attention-backend grkv_torch"
        )
        assert message in str(error.value)
