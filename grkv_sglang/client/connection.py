"""What both clients hold: address, keys, limits. Builds the HTTP request of one attempt."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from grkv_sglang.client.calls import Call
from grkv_sglang.client.retry import Attempts, RetryPolicy, Timeouts


@dataclass(frozen=True)
class Connection:
    """Where a server is and how to talk to it.

    Attributes:
        base_url: without ``/v1``.
        api_key: SGLang's ``--api-key``.
        admin_api_key: SGLang's ``--admin-api-key``, for `state` and `command`; `api_key` unless given.
    """

    base_url: str
    api_key: str | None
    admin_api_key: str | None
    timeouts: Timeouts
    retry: RetryPolicy
    headers: Mapping[str, str] = field(default_factory=dict)

    def attempts(self, call: Call) -> Attempts:
        """The attempts of one call; its total time starts now."""
        return Attempts(self.retry, self.timeouts, repeatable=call.repeatable)

    def request(self, call: Call, timeout: httpx.Timeout) -> tuple[httpx.Request, str | None]:
        """The request of one attempt, and the id it carries."""
        request_id = f"grkv-{uuid.uuid4().hex}" if call.named else None
        body: dict[str, Any] | None = None if call.body is None else dict(call.body)
        if body is not None and request_id is not None:
            body["rid"] = request_id
        headers = dict(self.headers)
        key = (self.admin_api_key or self.api_key) if call.admin else self.api_key
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        url = self.base_url.rstrip("/") + call.path
        request = httpx.Request(
            call.method, url, json=body, headers=headers, extensions={"timeout": timeout.as_dict()}
        )
        return request, request_id
