"""Passwords and sign-in tokens: how they are made, kept and checked. The limit on wrong guesses."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import deque
from collections.abc import Callable

_N, _R, _P = 2**14, 8, 5  # OWASP's scrypt figures for 16 MiB of memory per check
_MAX_MEMORY = 64 * 2**20

MIN_PASSWORD_CHARACTERS = 8
MAX_PASSWORD_CHARACTERS = 256


def hash_password(password: str) -> str:
    """``scrypt$n$r$p$salt$hash``, hexadecimal."""
    salt = secrets.token_bytes(16)
    return f"scrypt${_N}${_R}${_P}${salt.hex()}${_scrypt(password, salt, _N, _R, _P).hex()}"


def check_password(password: str, kept: str) -> bool:
    """Whether `password` is the one that `kept` was made of; takes as long either way."""
    _, n, r, p, salt, expected = kept.split("$")
    found = _scrypt(password, bytes.fromhex(salt), int(n), int(r), int(p))
    return hmac.compare_digest(found, bytes.fromhex(expected))


def _scrypt(password: str, salt: bytes, n: int, r: int, p: int) -> bytes:
    return hashlib.scrypt(password.encode(), salt=salt, n=n, r=r, p=p, maxmem=_MAX_MEMORY, dklen=32)


NOBODY = hash_password(secrets.token_hex())
"""Checked where there is no such user, so that the time of an answer does not tell who has an account."""


def new_token() -> str:
    """256 random bits, for a cookie."""
    return secrets.token_urlsafe(32)


def token_sha256(token: str) -> str:
    """What is kept of a token. It is random, so a plain hash cannot be guessed back."""
    return hashlib.sha256(token.encode()).hexdigest()


class GuessLimit:
    """Counts failures by key; a key with too many of them has to wait.

    In memory: a restart forgets, and a server of several processes would count in each.

    Args:
        most: failures within `window_s` seconds after which a key waits.
        clock: seconds; monotonic.
    """

    def __init__(self, most: int, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._window_s, self._clock = most, window_s, clock
        self._failures: dict[str, deque[float]] = {}

    def wait_s(self, key: str) -> float:
        """Seconds that `key` has to wait; 0 where it may try now."""
        failures = self._recent(key)
        return 0.0 if len(failures) < self._most else failures[0] + self._window_s - self._clock()

    def failed(self, key: str) -> None:
        if len(self._failures) > 10_000:
            self._failures = {k: times for k in list(self._failures) if (times := self._recent(k))}
        self._failures.setdefault(key, deque(maxlen=self._most)).append(self._clock())

    def succeeded(self, key: str) -> None:
        self._failures.pop(key, None)

    def _recent(self, key: str) -> deque[float]:
        failures = self._failures.get(key, deque())
        while failures and failures[0] <= self._clock() - self._window_s:
            failures.popleft()
        return failures
