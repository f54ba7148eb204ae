"""The web application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, Field

from grkv_sglang import __version__
from grkv_sglang.services.common import STATIC_DIR as COMMON_STATIC_DIR
from grkv_sglang.services.common.web import protect
from grkv_sglang.services.rag.routes import Service, router
from grkv_sglang.services.rag.service import Parts, running
from grkv_sglang.services.rag.settings import RagSettings

_STATIC_DIR = Path(__file__).parent / "static"
_MULTIPART_BYTES = 64 * 1024
"""Of an upload's body, beside the file."""


class Health(BaseModel):
    status: str = Field(description="`ok` as soon as the service answers.")
    engine: str = Field(description="`ready` or `not reached`.")


def create_app(settings: RagSettings, parts: Parts) -> FastAPI:
    """The app; the background work starts and ends with it, and `parts` are closed at its end."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with running(settings, parts) as service:
            app.state.service = service
            yield

    app = FastAPI(
        title="grkv rag",
        description="Questions about documents, answered from compressed prefixes.",
        version=__version__,
        lifespan=lifespan,
        openapi_url="/api/v1/openapi.json",
        # FastAPI's pages of documentation load scripts from elsewhere, which the page's policy forbids.
        docs_url=None,
        redoc_url=None,
    )
    protect(app, engine_url=settings.engine_url, max_body_bytes=settings.max_upload_bytes + _MULTIPART_BYTES)
    app.include_router(router)

    @app.get("/healthz")
    async def healthz(service: Service) -> Health:
        """Whether the service is there, and whether it reaches the engine."""
        reached = await service.engine.client.health()
        return Health(status="ok", engine="ready" if reached else "not reached")

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(_STATIC_DIR / "index.html")

    app.mount("/static/common", StaticFiles(directory=COMMON_STATIC_DIR))
    app.mount("/static", StaticFiles(directory=_STATIC_DIR))
    return app
