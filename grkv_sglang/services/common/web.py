"""What protects a service and how it answers errors: always JSON, ``{"error": {"code", "message"}}``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from grkv_sglang.client import GrkvError
from grkv_sglang.services.common.engine import Problem, problem_of

_READING = frozenset({"GET", "HEAD", "OPTIONS"})

_SECURITY_HEADERS = {
    # Everything comes from this server, as files: no inline scripts, no foreign pictures or fonts.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; font-src 'self'; "
        "connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}

_CROSS_SITE = Problem(403, "cross_site", "This request came from another site and was not carried out.")

_CODES = {
    401: "not_signed_in",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    409: "conflict",
    413: "too_large",
}


class ServiceError(Exception):
    """A route's refusal; `add_error_handlers` answers it."""

    def __init__(
        self, status: int, code: str, message: str, *, headers: dict[str, str] | None = None
    ) -> None:
        self.problem = Problem(status, code, message)
        self.headers = headers
        super().__init__(message)


def protect(app: FastAPI, *, engine_url: str, max_body_bytes: int) -> None:
    """All of this module for one app: error handlers, bodies up to `max_body_bytes`, same-origin writes and
    security headers."""
    add_error_handlers(app, engine_url)
    # Added last, runs first: the headers are on the refusals of the other two as well.
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    app.add_middleware(SameOriginWrites)
    app.add_middleware(SecurityHeaders)


def error_response(problem: Problem, headers: dict[str, str] | None = None) -> JSONResponse:
    body = {"error": {"code": problem.code, "message": problem.message}}
    return JSONResponse(body, problem.status, headers=headers)


def add_error_handlers(app: FastAPI, engine_url: str) -> None:
    """Errors of routes, of validation, of the framework and of the engine's client in one form of JSON."""

    async def service_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, ServiceError)
        return error_response(error.problem, error.headers)

    async def validation_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(Problem(422, "invalid", describe_invalid(error.errors())))

    async def http_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = _CODES.get(error.status_code, "error")
        headers = dict(error.headers) if error.headers else None
        return error_response(Problem(error.status_code, code, str(error.detail)), headers)

    async def engine_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, GrkvError)
        return error_response(problem_of(error, engine_url, kept="nothing was changed"))

    app.add_exception_handler(ServiceError, service_error)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(GrkvError, engine_error)


def describe_invalid(errors: Iterable[Any]) -> str:
    """pydantic's errors as one line: which field, and what is wrong with it."""
    parts = []
    for item in errors:
        # The first part says where FastAPI found it (body, query, path).
        where = ".".join(str(part) for part in item["loc"][1:] if not isinstance(part, int))
        words = item["msg"].removeprefix("Value error, ")
        parts.append(f"{where}: {words}" if where else words)
    return "; ".join(parts)


async def _refuse(problem: Problem, scope: Scope, receive: Receive, send: Send) -> None:
    await error_response(problem)(scope, receive, send)


class BodyLimit:
    """Refuses bodies of more than `max_bytes` with 413, also those that do not say their length.

    Args:
        exempt: paths with a limit of their own, by their beginning.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, exempt: Sequence[str] = ()) -> None:
        self._app, self._max_bytes, self._exempt = app, max_bytes, tuple(exempt)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (self._exempt and scope["path"].startswith(self._exempt)):
            await self._app(scope, receive, send)
            return
        too_large = Problem(
            413, "too_large", f"The request is too large: at most {self._max_bytes} bytes are taken."
        )
        length = Headers(scope=scope).get("content-length", "0")
        if not length.isdecimal() or int(length) > self._max_bytes:
            await _refuse(too_large, scope, receive, send)
            return
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            if message["type"] == "http.request":
                read += len(message.get("body", b""))
                if read > self._max_bytes:
                    # FastAPI passes this one on; others become "error parsing the body".
                    raise HTTPException(too_large.status, too_large.message)
            return message

        await self._app(scope, counted, send)


class SameOriginWrites:
    """Refuses what another site's page sends with the user's cookies: 403.

    Browsers say where a write comes from (``Sec-Fetch-Site``, ``Origin``); programs, which have no cookies to
    be abused, say nothing and pass.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in _READING:
            headers = Headers(scope=scope)
            if not is_same_origin(headers):
                await _refuse(_CROSS_SITE, scope, receive, send)
                return
        await self._app(scope, receive, send)


def is_same_origin(headers: Headers) -> bool:
    """Whether a write comes from a page of this server, or from no page at all."""
    site = headers.get("sec-fetch-site")
    if site is not None and site not in ("same-origin", "none"):
        return False
    origin = headers.get("origin")
    if origin is None:
        return True
    return bool(urlsplit(origin).netloc) and urlsplit(origin).netloc == headers.get("host")


class SecurityHeaders:
    """Puts a strict Content-Security-Policy and its companions on every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
                # Pages and answers are one user's; files carry a validator and are asked for again.
                headers.setdefault("Cache-Control", "no-cache" if "etag" in headers else "no-store")
            await send(message)

        await self._app(scope, receive, with_headers if scope["type"] == "http" else send)
