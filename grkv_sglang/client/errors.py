"""What can go wrong between a client and a server."""

from __future__ import annotations


class GrkvError(Exception):
    """Base of both kinds: the server refused, or it was not reached."""


class GrkvApiError(GrkvError):
    """The server answered with an error.

    Attributes:
        status: HTTP status; inside a stream, whose status was 200, the code that the server put there.
        message: the server's own words.
        request_id: the id under which the server's log knows the request; None for requests without one
            (state, commands).
    """

    def __init__(self, status: int, message: str, request_id: str | None = None) -> None:
        self.status = status
        self.message = message
        self.request_id = request_id
        super().__init__(f"{status}: {message}" + (f" (request {request_id})" if request_id else ""))


class GrkvConnectionError(GrkvError):
    """The server was not reached, did not answer in time, or broke off."""
