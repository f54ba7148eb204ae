"""A server that would serve wrongly does not start, and says why."""

from __future__ import annotations

import pytest

from grkv_sglang.serving import ServerError, ServerSpec, running_server

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"attention_backend": "torch_native"},
            "the prefill attention backend 'torch_native' would read sentinel slots as KV: "
            "set --attention-backend grkv_torch",
        ),
        ({"grkv_config": {"profile": "bst"}}, "bst"),
    ],
)
def test_refuses_to_start(model_path, tmp_path, changes, message):
    spec = ServerSpec(
        model_path=model_path, engine="grkv", log_path=tmp_path / "log", max_total_tokens=512, **changes
    )
    with pytest.raises(ServerError) as error, running_server(spec):
        pass
    assert message in (tmp_path / "log").read_text()
    assert message in str(error.value)
