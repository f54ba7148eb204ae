"""Passwords, tokens and the limit on wrong guesses."""

from __future__ import annotations

from grkv_sglang.services.chat.passwords import (
    NOBODY,
    GuessLimit,
    check_password,
    hash_password,
    new_token,
    token_sha256,
)


def test_a_password_is_kept_as_a_salted_hash():
    kept = hash_password("pässword 1")
    assert "pässword 1" not in kept
    assert kept.startswith("scrypt$16384$8$5$")
    assert hash_password("pässword 1") != kept
    assert check_password("pässword 1", kept)
    assert not check_password("pässword 2", kept)
    assert not check_password("", NOBODY)


def test_tokens_are_random_and_kept_hashed():
    token = new_token()
    assert len(token) >= 43
    assert token != new_token()
    assert token not in token_sha256(token)


def test_too_many_failures_have_to_wait_until_the_oldest_is_old():
    now = [0.0]
    limit = GuessLimit(2, 60.0, clock=lambda: now[0])
    limit.failed("ada")
    assert limit.wait_s("ada") == 0.0
    now[0] = 10.0
    limit.failed("ada")
    assert limit.wait_s("ada") == 50.0
    assert limit.wait_s("bob") == 0.0
    now[0] = 60.0
    assert limit.wait_s("ada") == 0.0
    limit.failed("ada")
    assert limit.wait_s("ada") == 10.0
    limit.succeeded("ada")
    assert limit.wait_s("ada") == 0.0


def test_the_limit_forgets_old_failures_of_many_names():
    now = [0.0]
    limit = GuessLimit(2, 60.0, clock=lambda: now[0])
    for number in range(10_001):
        limit.failed(str(number))
    now[0] = 100.0
    limit.failed("late")
    assert list(limit._failures) == ["late"]
