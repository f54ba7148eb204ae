"""Commands of an operator: over HTTP, through SGLang's request, down to the cache."""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.managers.io_struct import SetInternalStateReq, msgpack_decode, msgpack_encode
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.utils.auth import add_api_key_middleware

from grkv_sglang import admin, plugin
from grkv_sglang.cache.retention import CommandError, namespace_of, parse_command
from tests.cache.harness import Harness

DOC = [1, 2, 3, 1, 1, 2, 2, 3, 3, 1, 2, 1]
END = len(DOC)
SLOTS = 5
"""Of a span over the document: ceil(0.34 * 12)."""
FIELDS = "valid fields are action, tokens_sha256, cache_salt, extra_key"


class Manager:
    """The tokenizer manager's two calls, answered by one scheduler without a process between them."""

    def __init__(self, cache: Any) -> None:
        self.scheduler = SimpleNamespace(tree_cache=cache)

    async def get_internal_state(self) -> list[dict[str, Any]]:
        answer = SimpleNamespace(internal_state={})
        plugin._add_state(answer, self.scheduler)
        return [answer.internal_state]

    async def set_internal_state(self, request: SetInternalStateReq) -> list[bool]:
        arrived = msgpack_decode(msgpack_encode(request))
        return [plugin._command(self.refuse, self.scheduler, arrived).updated]

    @staticmethod
    def refuse(*_: Any) -> Any:
        raise AssertionError("taken for one of SGLang's own requests")


def digest(tokens: list[int]) -> str:
    """As the state lists it: of the tokens as 64-bit integers."""
    return sha256(b"".join(token.to_bytes(8, "little") for token in tokens)).hexdigest()


def compressed(*, cache_salt: str | None = None, **settings: Any) -> Harness:
    """A cache with one span over the document."""
    h = Harness(**settings)
    h.run([*DOC, 7, 8], {"prefix_end_tokens": END}, cache_salt=cache_salt)
    assert [span.num_slots for span in h.cache.spans()] == [SLOTS]
    return h


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts an app into this process as SGLang's, and the routes to a cache into the app."""

    def serve(cache: Any, **keys: str | None) -> TestClient:
        app = FastAPI()
        if keys:
            add_api_key_middleware(app, **{"api_key": None, "admin_api_key": None, **keys})
        monkeypatch.setitem(sys.modules, admin.HTTP_SERVER_MODULE, SimpleNamespace(app=app))
        admin.add_routes(Manager(cache))
        return TestClient(app)

    return serve


@pytest.mark.parametrize(
    "command",
    [
        {"action": "pin", "tokens_sha256": "ab" * 32},
        {"action": "delete", "cache_salt": 'a "quoted": grkv: salt', "extra_key": "ключ"},
        {"action": "unpin", "tokens_sha256": "", "cache_salt": None},
    ],
)
def test_a_command_survives_sglangs_request(command):
    encoded = admin.encode_command(command)
    assert list(encoded.values()) == [1]
    arrived = msgpack_decode(msgpack_encode(SetInternalStateReq(server_args=encoded)))
    assert admin.command_in(arrived.server_args) == command


@pytest.mark.parametrize(
    "arguments", [{}, {"pp_max_micro_batch_size": 2}, {"grkv": 1}, {"speculative_accept_threshold_acc": 0.5}]
)
def test_sglangs_own_requests_hold_no_command(arguments):
    assert admin.command_in(arguments) is None


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"action": "drop", "cache_salt": "s"}, "action: Input should be 'delete', 'pin' or 'unpin'"),
        ({"tokens_sha256": "ab"}, "action: Field required"),
        ({"action": "pin", "sha": "ab", "tokens_sha256": "ab"}, f"unknown field 'sha'; {FIELDS}"),
        ({"action": "pin", "tokens_sha256": 5}, "tokens_sha256: Input should be a valid string"),
        ({"action": "delete"}, "give tokens_sha256 of a span, or for delete a namespace"),
        ({"action": "pin", "cache_salt": "s"}, "give tokens_sha256 of a span, or for delete a namespace"),
        ({"action": "unpin", "extra_key": "k"}, "give tokens_sha256 of a span, or for delete a namespace"),
        ({}, "action: Field required"),
    ],
)
def test_wrong_commands_are_refused(raw, message):
    with pytest.raises(CommandError, match=message):
        parse_command(raw)


def test_run_says_whether_it_was_done():
    h = compressed()
    assert admin.run(h.cache, {"action": "pin", "tokens_sha256": digest(DOC)}).updated is True
    assert admin.run(h.cache, {"action": "pin", "tokens_sha256": digest(DOC[:-1])}).updated is False
    assert admin.run(h.cache, {"action": "no such action"}).updated is False
    stock = RadixCache.create_simulated()
    assert admin.run(stock, {"action": "delete", "cache_salt": "s"}).updated is False


def test_state(served):
    h = compressed(cache_salt="secret salt", triggers="explicit,insert")
    answer = served(h.cache).get("/grkv/state")
    assert answer.status_code == 200
    (state,) = answer.json()
    assert state["config"]["triggers"] == ["explicit", "insert"]
    assert state["pool"] == {
        "total_slots": 120, "free_slots": 120 - SLOTS - 2, "exact_slots": 2, "span_slots": SLOTS,
        "in_work_slots": 0, "pinned_slots": 0,
    }  # fmt: skip
    assert state["counters"]["spans_made"] == {"explicit": 1}
    (span,) = state["spans"]
    assert (span["tokens"], span["slots"], span["tokens_sha256"]) == (END, SLOTS, digest(DOC))
    assert (span["pinned"], span["ttl_s"]) == (False, None)
    assert len(span["namespace"]) == 12
    assert "secret" not in answer.text


def test_pin_and_unpin(served):
    h = compressed()
    (span,) = h.cache.spans()
    client = served(h.cache)
    answer = client.post("/grkv/command", json={"action": "pin", "tokens_sha256": digest(DOC)})
    assert answer.status_code == 200
    (state,) = answer.json()
    assert state["spans"][0]["pinned"] is True
    assert (state["pool"]["pinned_slots"], state["counters"]["pins_refused"]) == (SLOTS, 0)
    assert span.pinned
    (state,) = client.post("/grkv/command", json={"action": "unpin", "tokens_sha256": digest(DOC)}).json()
    assert (state["spans"][0]["pinned"], state["pool"]["pinned_slots"]) == (False, 0)


@pytest.mark.parametrize(("pin_share", "pinned"), [(5 / 120, True), (4 / 120, False), (0.0, False)])
def test_pins_keep_to_the_servers_limit(served, pin_share, pinned):
    h = compressed(pin_share=pin_share)
    answer = served(h.cache).post("/grkv/command", json={"action": "pin", "tokens_sha256": digest(DOC)})
    assert answer.status_code == (200 if pinned else 409)
    state = h.cache.state()
    assert state["spans"][0]["pinned"] is pinned
    assert state["counters"]["pins_refused"] == (not pinned)


def test_a_requests_own_pin_and_time_to_live():
    h = Harness()
    h.run([*DOC, 7, 8], {"prefix_end_tokens": END, "pin": True, "ttl_s": 30.0})
    (listed,) = h.cache.state()["spans"]
    assert (listed["pinned"], listed["ttl_s"]) == (True, 30.0)
    h.clock.time_s += 30.0
    h.cache.flush_pending_backups()
    assert h.cache.state()["num_spans"] == 1
    h.clock.time_s += 0.5
    h.cache.flush_pending_backups()
    assert h.cache.state()["num_spans"] == 0
    assert h.cache.counters.spans_expired == 1
    h.check()


def test_delete(served):
    h = compressed()
    answer = served(h.cache).post("/grkv/command", json={"action": "delete", "tokens_sha256": digest(DOC)})
    assert answer.status_code == 200
    (state,) = answer.json()
    assert (state["spans"], state["counters"]["deleted_slots"]) == ([], SLOTS + 2)
    assert state["pool"]["free_slots"] == 120
    h.check()
    assert h.submit([*DOC, 9, 9]).prefix_len == 0


def test_delete_takes_the_exact_copy_too(served):
    h = compressed(free_exact_twin="under_pressure")
    assert h.cache.total_size() == SLOTS + END + 2
    served(h.cache).post("/grkv/command", json={"action": "delete", "tokens_sha256": digest(DOC)})
    assert h.cache.total_size() == 0
    assert h.cache.counters.deleted_slots == SLOTS + END + 2
    h.check()


def test_delete_under_a_running_request(served):
    h = compressed()
    reader = h.submit([*DOC, 9, 9])
    client = served(h.cache)
    command = {"action": "delete", "tokens_sha256": digest(DOC)}
    (state,) = client.post("/grkv/command", json=command).json()
    # Out of reach at once, held until the request is done.
    assert (state["spans"], state["counters"]["detached_nodes"]) == ([], 1)
    assert state["pool"]["free_slots"] == 120 - SLOTS - 2 - 2  # the first question is detached with it
    assert client.post("/grkv/command", json=command).status_code == 404
    later = h.submit([*DOC, 9, 9])
    assert (reader.prefix_len, later.prefix_len) == (END, 0)
    h.check()
    for req in (reader, later):
        h.finish_prefill(req)
        h.finish(req)
    h.check()
    (state,) = client.get("/grkv/state").json()
    assert (state["pool"]["span_slots"], state["counters"]["detached_nodes"]) == (0, 0)
    # What the later request left: its document and question, exact.
    assert state["pool"]["free_slots"] == 120 - END - 2


def test_delete_a_namespace(served):
    h = compressed(cache_salt="a")
    h.run([*DOC, 7, 8], {"prefix_end_tokens": END}, cache_salt="b")
    h.run([*DOC[::-1], 7, 8], cache_salt="a")  # exact only
    names = {namespace_of(span) for span in h.cache.spans()}
    assert len(names) == 2
    (state,) = served(h.cache).post("/grkv/command", json={"action": "delete", "cache_salt": "a"}).json()
    assert [span["tokens_sha256"] for span in state["spans"]] == [digest(DOC)]
    assert state["counters"]["deleted_slots"] == SLOTS + 2 + END + 2
    assert (state["pool"]["exact_slots"], state["pool"]["span_slots"]) == (2, SLOTS)
    h.check()
    assert h.submit([*DOC, 9], cache_salt="b").prefix_len == END
    assert h.submit([*DOC, 9], cache_salt="a").prefix_len == 0


def test_a_span_is_named_within_a_namespace(served):
    h = compressed(cache_salt="a")
    h.run([*DOC, 7, 8], {"prefix_end_tokens": END}, cache_salt="b")
    client = served(h.cache)
    pin = {"action": "pin", "tokens_sha256": digest(DOC), "cache_salt": "b"}
    assert client.post("/grkv/command", json=pin).status_code == 200
    assert {span.key.cache_salt: span.pinned for span in h.cache.spans()} == {"a": False, "b": True}
    assert client.post("/grkv/command", json={**pin, "cache_salt": "c"}).status_code == 404
    # Without a namespace it is every span of these tokens.
    assert client.post("/grkv/command", json={**pin, "cache_salt": None}).status_code == 200
    assert all(span.pinned for span in h.cache.spans())


def test_wrong_requests_are_answered_with_what_is_valid(served):
    h = compressed()
    client = served(h.cache)
    for body, message in [
        ('{"action": "pin", "sha": "ab", "tokens_sha256": "ab"}', f"unknown field 'sha'; {FIELDS}"),
        ('{"action": "pin"}', "give tokens_sha256 of a span"),
        ("[]", "grkv command: expected an object"),
        ('"pin"', "grkv command: expected an object"),
        ("{", "Expecting property name"),
        ("", "Expecting value"),
    ]:
        answer = client.post("/grkv/command", content=body)
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]
    assert h.cache.state()["num_spans"] == 1


def test_an_unknown_span_is_not_found(served):
    h = compressed()
    command = {"action": "delete", "tokens_sha256": "0" * 64}
    answer = served(h.cache).post("/grkv/command", json=command)
    assert answer.status_code == 404
    assert "0" * 64 in answer.json()["error"]["message"]
    assert [span.num_slots for span in h.cache.spans()] == [SLOTS]


def test_routes_have_one_method_each(served):
    client = served(compressed().cache)
    assert client.post("/grkv/state").status_code == 405
    assert client.get("/grkv/command").status_code == 405


@pytest.mark.parametrize(
    ("keys", "given", "status"),
    [
        ({"admin_api_key": "admin"}, None, 401),
        ({"admin_api_key": "admin"}, "admin", 200),
        ({"api_key": "user", "admin_api_key": "admin"}, "user", 401),
        ({"api_key": "user", "admin_api_key": "admin"}, "admin", 200),
        ({"api_key": "user"}, "user", 200),
        ({"api_key": "user"}, None, 401),
    ],
)
def test_routes_are_protected_as_sglangs_own(served, keys, given, status):
    h = compressed()
    client = served(h.cache, **keys)
    headers = {} if given is None else {"Authorization": f"Bearer {given}"}
    assert client.get("/grkv/state", headers=headers).status_code == status
    pin = {"action": "pin", "tokens_sha256": digest(DOC)}
    assert client.post("/grkv/command", json=pin, headers=headers).status_code == status
    assert [span.pinned for span in h.cache.spans()] == [status == 200]


def test_nothing_is_added_without_a_server(monkeypatch):
    """As in an offline engine."""
    monkeypatch.delitem(sys.modules, admin.HTTP_SERVER_MODULE, raising=False)
    admin.add_routes(Manager(None))
    assert admin.HTTP_SERVER_MODULE not in sys.modules


def test_the_state_is_plain_data():
    h = compressed()
    state = h.cache.state()
    assert json.loads(json.dumps(state)) == {
        **state,
        "config": {**state["config"], "triggers": ["explicit", "reuse"]},
    }
