"""What an operator asks over HTTP: list what is held, pin, unpin, delete.

``GET /grkv/state`` and ``POST /grkv/command`` are added to SGLang's own app, protected as its other
administrative routes are. A command travels to all ranks as SGLang's ``SetInternalStateReq``, whose keys are
free text and whose values are numbers: the command is one key.

Written against SGLang 0.5.23: ``managers/io_struct.py: SetInternalStateReq``,
``entrypoints/http_server.py: app``, ``utils/auth.py: auth_level``.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from typing import Any

from grkv_sglang.cache.grkv_cache import GrkvRadixCache
from grkv_sglang.cache.retention import CommandError, parse_command
from grkv_sglang.policy.options import OPTIONS_KEY

logger = logging.getLogger(__name__)

COMMAND_PREFIX = "grkv:"
HTTP_SERVER_MODULE = "sglang.srt.entrypoints.http_server"


def encode_command(command: Mapping[str, Any]) -> dict[str, int]:
    """A command as ``SetInternalStateReq.server_args``."""
    return {COMMAND_PREFIX + json.dumps(dict(command)): 1}


def command_in(server_args: Mapping[str, Any]) -> dict[str, Any] | None:
    """The command that `encode_command` put there; None for SGLang's own requests."""
    for key in server_args:
        if key.startswith(COMMAND_PREFIX):
            command: dict[str, Any] = json.loads(key.removeprefix(COMMAND_PREFIX))
            return command
    return None


def run(cache: Any, raw: Mapping[str, Any]) -> Any:
    """Do a command in the scheduler; returns SGLang's reply, ``updated`` telling whether it was done."""
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    if not isinstance(cache, GrkvRadixCache):
        return SetInternalStateReqOutput(updated=False)
    try:
        cache.command(raw)
    except CommandError as error:
        logger.warning("%s", error)
        return SetInternalStateReqOutput(updated=False)
    return SetInternalStateReqOutput(updated=True)


def add_routes(manager: Any) -> None:
    """Add the routes to the app of this process; without one (an offline engine) there is nothing to do."""
    server = sys.modules.get(HTTP_SERVER_MODULE)
    if server is None:
        return
    from fastapi import Request
    from fastapi.responses import JSONResponse
    from sglang.srt.managers.io_struct import SetInternalStateReq
    from sglang.srt.utils.auth import AuthLevel, auth_level

    async def states() -> list[Any]:
        return [state[OPTIONS_KEY] for state in await manager.get_internal_state()]

    def pins_refused(held: list[Any]) -> int:
        return sum(state["counters"]["pins_refused"] for state in held)

    def refusal(status: int, message: str) -> Any:
        return JSONResponse({"error": {"message": message}}, status_code=status)

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def state() -> Any:
        """Settings, pool, counters and spans, one entry per data-parallel rank."""
        return JSONResponse(await states())

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def command(request: Request) -> Any:
        """Do one command on all ranks; answers with the state afterwards."""
        try:
            raw = await request.json()
            if not isinstance(raw, dict):
                raise CommandError("grkv command: expected an object")
            parse_command(raw)
        except (CommandError, ValueError, RecursionError) as error:  # the body may be anything
            return refusal(400, str(error))
        before = pins_refused(await states())
        done = await manager.set_internal_state(SetInternalStateReq(server_args=encode_command(raw)))
        held = await states()
        if all(done):
            return JSONResponse(held)
        if pins_refused(held) > before:
            return refusal(409, "grkv command: the limit for pinned spans (pin_share) is reached")
        return refusal(404, f"grkv command: no span has tokens_sha256 {raw.get('tokens_sha256')}")

    # By name in the module's namespace, which annotations as text need.
    command.__annotations__["request"] = Request
    server.app.add_api_route("/grkv/state", state, methods=["GET"])
    server.app.add_api_route("/grkv/command", command, methods=["POST"])
