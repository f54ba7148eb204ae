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


def test_budgets_per_head_on_two_ranks_stop_the_server(tiny_model: Path, tmp_path: Path) -> None:
    spec = ServerSpec(
        model_path=tiny_model,
        engine="grkv",
        log_path=tmp_path / "log",
        max_total_tokens=512,
        grkv_config={"profile": "per_head"},
        extra_args=("--tp-size", "2"),
    )
    with pytest.raises(ServerError) as error, running_server(spec):
        pass
    assert (
        "profile 'per_head' lets KV heads keep different numbers of tokens, which this server does not hold "
        "(each tensor-parallel rank would share out its own heads' budget: set --tp-size 1), or use another "
        "profile: 'default' or 'best'"
    ) in str(error.value)
