"""The models of the state, against what a cache without an engine says."""

from __future__ import annotations

import pytest

from grkv_sglang.cache.retention import namespace_of
from grkv_sglang.client.state import GrkvState, namespace_name, spans_of
from tests.cache.harness import Harness

DOC = [1, 2, 3, 1, 1, 2, 2, 3, 3, 1, 2, 1]


def test_the_models_hold_what_the_cache_says():
    h = Harness()
    h.run([*DOC, 7, 8], {"prefix_end_tokens": 12, "pin": True, "ttl_s": 9.0}, cache_salt="a")
    said = h.cache.state()
    state = GrkvState.model_validate(said)
    for part in ("pool", "census"):
        for name, value in getattr(state, part).model_dump().items():
            assert said[part][name] == value
    assert state.counters.model_dump().items() <= said["counters"].items()
    assert state.spans[0].model_dump().items() <= {**said["spans"][0], "age_s": state.spans[0].age_s}.items()
    assert (state.spans[0].pinned, state.spans[0].ttl_s, state.num_spans) == (True, 9.0, 1)
    assert spans_of(state, [*DOC, 5]) == state.spans
    assert spans_of(state, DOC[:-1]) == []


@pytest.mark.parametrize("salt", [None, "a", "a 'quoted' salt", "ключ"])
def test_namespaces_are_named_as_the_cache_names_them(salt: str | None):
    h = Harness()
    h.run([*DOC, 7, 8], {"prefix_end_tokens": 12}, cache_salt=salt)
    (span,) = h.cache.spans()
    assert namespace_of(span) == namespace_name(salt)
    assert namespace_name(salt, "k") != namespace_name(salt)
