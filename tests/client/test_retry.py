"""The retry schedule, without a clock of its own to wait for."""

from __future__ import annotations

import random
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grkv_sglang.client import GrkvApiError, GrkvConnectionError, RetryPolicy, Timeouts
from grkv_sglang.client.retry import Attempts

REQUEST = httpx.Request("POST", "http://here/v1/chat/completions")


def answer(status: int, **headers: str) -> httpx.Response:
    return httpx.Response(status, request=REQUEST, headers=headers)


def attempts(policy: RetryPolicy, total_s: float | None = None, **fields: Any) -> Attempts:
    return Attempts(policy, Timeouts(total_s=total_s), **fields)


def test_delays_double_up_to_a_limit():
    policy = RetryPolicy(base_delay_s=0.5, max_delay_s=3.0, jitter=0.0)
    assert [policy.delay_s(n, 0.9) for n in (1, 2, 3, 4, 500)] == [0.5, 1.0, 2.0, 3.0, 3.0]


@given(st.integers(1, 2000), st.floats(0, 1, exclude_max=True), st.floats(0, 1), st.floats(0, 1e6))
def test_delays_stay_within_their_bounds(failures, draw, jitter, asked_s):
    policy = RetryPolicy(jitter=jitter)
    delay_s = policy.delay_s(failures, draw, asked_s)
    backoff = policy.delay_s(failures, 0.0)
    assert min(backoff * (1 - jitter), policy.max_delay_s) <= delay_s <= policy.max_delay_s
    assert delay_s >= min(asked_s, policy.max_delay_s)


def test_two_clients_do_not_return_together():
    policy = RetryPolicy(base_delay_s=1.0)
    delays = {
        attempts(policy, draw=random.Random(seed)).delay_after_answer(answer(503), None) for seed in range(20)
    }
    assert len(delays) == 20
    assert all(0.5 < delay <= 1.0 for delay in delays)


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_busy_servers_are_asked_again_and_then_given_up(status: int):
    tried = attempts(RetryPolicy(attempts=3))
    tried.delay_after_answer(answer(status), "a")
    tried.delay_after_answer(answer(status), "b")
    with pytest.raises(GrkvApiError) as error:
        tried.delay_after_answer(answer(status), "c")
    assert (error.value.status, error.value.request_id) == (status, "c")


@pytest.mark.parametrize("status", [400, 401, 404, 422, 500, 501])
def test_other_statuses_are_final(status: int):
    with pytest.raises(GrkvApiError):
        attempts(RetryPolicy()).delay_after_answer(answer(status), None)


@pytest.mark.parametrize(
    ("header", "delay_s"), [("7", 7.0), ("900", 20.0), ("Wed, 21 Oct 2026 07:28:00 GMT", 0.5), ("-1", 0.5)]
)
def test_the_server_may_ask_for_a_longer_wait(header: str, delay_s: float):
    tried = attempts(RetryPolicy(jitter=0.0))
    assert tried.delay_after_answer(answer(429, **{"Retry-After": header}), None) == delay_s


NOTHING_SENT = [httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout]
BROKEN_OFF = [httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError]


@pytest.mark.parametrize("kind", NOTHING_SENT + BROKEN_OFF)
def test_broken_connections_are_tried_again(kind: type[httpx.TransportError]):
    tried = attempts(RetryPolicy(attempts=2))
    assert tried.delay_after_error(kind("x", request=REQUEST)) > 0
    with pytest.raises(GrkvConnectionError, match=r"POST http://here/.*after 2 attempts: x") as error:
        tried.delay_after_error(kind("x", request=REQUEST))
    assert isinstance(error.value.__cause__, kind)


@pytest.mark.parametrize("kind", BROKEN_OFF)
def test_what_the_server_may_have_done_is_not_repeated_unless_it_may_be(kind: type[httpx.TransportError]):
    with pytest.raises(GrkvConnectionError):
        attempts(RetryPolicy(), repeatable=False).delay_after_error(kind("x", request=REQUEST))
    for harmless in NOTHING_SENT:
        assert attempts(RetryPolicy(), repeatable=False).delay_after_error(harmless("x", request=REQUEST)) > 0


def test_a_server_that_is_still_working_is_not_asked_twice():
    with pytest.raises(GrkvConnectionError, match="ReadTimeout"):
        attempts(RetryPolicy()).delay_after_error(httpx.ReadTimeout("", request=REQUEST))


def test_no_wait_goes_beyond_the_total_time():
    tried = attempts(RetryPolicy(base_delay_s=5.0, jitter=0.0), total_s=4.0)
    with pytest.raises(GrkvApiError):
        tried.delay_after_answer(answer(503), None)


def test_time_outs_shrink_with_what_is_left():
    limits = attempts(RetryPolicy(), total_s=5.0).timeout()
    assert limits.read is not None
    assert limits.connect is not None
    assert 4.0 < limits.read <= 5.0
    assert 4.0 < limits.connect <= 5.0
    plain = Attempts(RetryPolicy(), Timeouts(connect_s=3.0, read_s=50.0)).timeout()
    assert (plain.connect, plain.read) == (3.0, 50.0)


def test_the_total_time_ends_everything():
    tried = attempts(RetryPolicy(), total_s=0.0)
    for step in (tried.timeout, tried.check_total):
        with pytest.raises(GrkvConnectionError, match="within 0 s in all"):
            step()


@pytest.mark.parametrize("wrong", [{"attempts": 0}, {"jitter": 1.5}, {"jitter": -0.1}])
def test_wrong_policies(wrong: dict[str, Any]):
    with pytest.raises(ValueError, match="must be"):
        RetryPolicy(**wrong)
