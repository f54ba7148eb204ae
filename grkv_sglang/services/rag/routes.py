"""The routes under /api/v1."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends, File, Request, Response, UploadFile
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from grkv_sglang.services.common.web import ServiceError
from grkv_sglang.services.rag.answering import RunningAnswer
from grkv_sglang.services.rag.parsing import SUFFIXES
from grkv_sglang.services.rag.service import RagService
from grkv_sglang.services.rag.store import Tenant
from grkv_sglang.services.rag.streaming import EventResponse
from grkv_sglang.services.rag.views import (
    Answer,
    Deleted,
    DocumentList,
    DocumentView,
    Me,
    QuestionIn,
    document_view,
)

router = APIRouter(prefix="/api/v1")
_bearer = HTTPBearer(auto_error=False, description="A key of a tenant.")


def service_of(request: Request) -> RagService:
    service: RagService = request.app.state.service
    return service


Service = Annotated[RagService, Depends(service_of)]


def tenant_of(
    service: Service, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> Tenant:
    """The tenant whose key the request carries. Raises ServiceError 401."""
    tenant = None if credentials is None else service.store.tenant_of_key(credentials.credentials)
    if tenant is None:
        message = "This key is not valid." if credentials else "Send a key: Authorization: Bearer KEY."
        raise ServiceError(401, "not_signed_in", message, headers={"WWW-Authenticate": "Bearer"})
    return tenant


SignedIn = Annotated[Tenant, Depends(tenant_of)]


@router.get("/me")
def me(service: Service, tenant: SignedIn) -> Me:
    """Whose key this is, and what may be uploaded and asked."""
    settings = service.settings
    return Me(
        tenant=tenant.name,
        accepted=sorted(SUFFIXES),
        max_upload_bytes=settings.max_upload_bytes,
        max_question_characters=settings.max_question_characters,
        sections_per_answer=settings.sections_per_answer,
    )


@router.get("/documents")
def list_documents(service: Service, tenant: SignedIn) -> DocumentList:
    """The tenant's documents, newest first."""
    rows = service.store.list_documents(tenant.id)
    return DocumentList(documents=[document_view(document, sections) for document, sections in rows])


@router.post("/documents", status_code=201, responses={200: {"description": "It is there already."}})
async def upload_document(
    service: Service,
    tenant: SignedIn,
    response: Response,
    file: Annotated[UploadFile, File(description="txt, md, html or pdf")],
) -> DocumentView:
    """Upload a document. It is read at once, then indexed and compressed in the background."""
    if file.size is not None and file.size > service.settings.max_upload_bytes:
        raise ServiceError(
            413, "document_too_large", f"The file is larger than {service.settings.max_upload_mb:g} MB."
        )
    document, is_new = await service.add_document(tenant, file.filename or "", await file.read())
    response.status_code = 201 if is_new else 200
    return await asyncio.to_thread(_view, service, tenant, document.id)


@router.get("/documents/{document_id}")
def get_document(service: Service, tenant: SignedIn, document_id: str) -> DocumentView:
    """One document with its sections."""
    return _view(service, tenant, document_id)


@router.delete("/documents/{document_id}")
async def delete_document(service: Service, tenant: SignedIn, document_id: str) -> Deleted:
    """Delete a document: its text, its vectors, and its spans in the engine."""
    deleted = await service.delete_document(tenant, document_id)
    if deleted is None:
        raise _no_document()
    return deleted


@router.post("/documents/{document_id}/warm", status_code=202)
async def warm_document(service: Service, tenant: SignedIn, document_id: str) -> DocumentView:
    """Compress a document again: after a failure, or after the engine was started anew."""
    if not await service.warm_again(tenant, document_id):
        raise _no_document()
    return await asyncio.to_thread(_view, service, tenant, document_id)


@router.post(
    "/questions",
    response_model=Answer,
    responses={200: {"content": {"text/event-stream": {}}, "description": "Events, or one `Answer`."}},
)
async def ask(service: Service, tenant: SignedIn, question: QuestionIn) -> Response:
    """Ask a question.

    Streamed as server-sent events: `sources`, `text` for each piece, and `done` with the rest of the answer,
    or `error`.
    """
    most = service.settings.max_question_characters
    if not question.question.strip():
        raise ServiceError(422, "invalid", "The question is empty.")
    if len(question.question) > most:
        raise ServiceError(422, "invalid", f"The question has more than {most:,} characters.")
    for document_id in question.document_ids:
        view = await asyncio.to_thread(_view, service, tenant, document_id)
        if view.status in ("waiting", "indexing"):
            raise ServiceError(409, "not_indexed", f"{view.name} is not indexed yet. Try again in a moment.")
    answer = await service.answerer.ask(tenant, question)
    if question.stream:
        return EventResponse(answer.events(), answer.close)
    try:
        return await _whole(answer)
    finally:
        await answer.close()


async def _whole(answer: RunningAnswer) -> Response:
    async for name, data in answer.events():
        if name == "error":
            raise ServiceError(502, str(data["code"]), str(data["message"]))
        if name == "done":
            return JSONResponse({**data, "sources": [source.model_dump() for source in answer.sources]})
    raise AssertionError("an answer ends with done or error")


def _view(service: RagService, tenant: Tenant, document_id: str) -> DocumentView:
    found = service.store.document(tenant.id, document_id)
    if found is None:
        raise _no_document()
    return document_view(*found, detailed=True)


def _no_document() -> ServiceError:
    # The same words for one that never was and for another tenant's.
    return ServiceError(404, "not_found", "There is no such document.")
