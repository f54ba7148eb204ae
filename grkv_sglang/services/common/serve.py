"""Running a service with uvicorn."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import FastAPI

GRACE_S = 5
"""How long open answers may take to end once a stop was asked for; an app's own clean-up comes after."""


def run(
    app: FastAPI, *, host: str, port: int, trusted_proxies: str = "127.0.0.1", log_level: str = "info"
) -> None:
    """Serve `app` until SIGINT or SIGTERM; then no new connections, `GRACE_S` for the open ones, and the
    app's clean-up.

    Args:
        trusted_proxies: addresses, separated by commas, whose ``X-Forwarded-*`` headers are believed.

    Raises:
        SystemExit: the port cannot be used; uvicorn has logged why.
    """
    import uvicorn

    uvicorn.run(
        app,
        host=host,
        port=port,
        forwarded_allow_ips=trusted_proxies,
        log_level=log_level,
        timeout_graceful_shutdown=GRACE_S,
        server_header=False,
    )


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine reach a server that listens on `host`."""
    import ipaddress

    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
