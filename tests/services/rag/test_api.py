"""The API without an engine: keys, uploads, refusals. Uploads wait for the engine and are kept."""

from __future__ import annotations

import time

import httpx
import pytest

from tests.services.rag.files import TOPICS, pdf


@pytest.fixture
def tenant(rag_without_engine):
    return rag_without_engine.tenant()


def error_of(response):
    error = response.json()["error"]
    return response.status_code, error["code"], error["message"]


@pytest.mark.parametrize("path", ["/me", "/documents", "/documents/x"])
@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({}, "Send a key: Authorization: Bearer KEY."),
        ({"Authorization": "Bearer wrong"}, "This key is not valid."),
        ({"Authorization": "Basic abc"}, "Send a key: Authorization: Bearer KEY."),
    ],
)
def test_no_entry_without_a_key(rag_without_engine, path, headers, message):
    response = httpx.get(f"{rag_without_engine.url}/api/v1{path}", headers=headers)
    assert error_of(response) == (401, "not_signed_in", message)
    assert response.headers["WWW-Authenticate"] == "Bearer"


def test_writes_need_a_key_too(rag_without_engine):
    url = f"{rag_without_engine.url}/api/v1"
    for method, path in (
        ("POST", "/documents"),
        ("DELETE", "/documents/x"),
        ("POST", "/documents/x/warm"),
        ("POST", "/questions"),
    ):
        assert httpx.request(method, url + path).status_code == 401


def test_a_revoked_key_is_worthless_at_once(rag_without_engine, tenant):
    store = rag_without_engine.store
    key = store.add_key("default")
    other = rag_without_engine.tenant(key)
    assert other.http.get("/me").json()["tenant"] == "default"
    store.revoke_key(store.list_tenants()[0][2][-1].id)
    assert other.http.get("/me").status_code == 401
    assert tenant.http.get("/me").status_code == 200


def test_the_salt_is_never_shown(rag_without_engine, tenant):
    salt = rag_without_engine.store.tenant_of_key(rag_without_engine.key).cache_salt
    document = tenant.upload("a.txt", TOPICS["bread"]).json()
    for path in ("/me", "/documents", f"/documents/{document['id']}"):
        assert salt not in tenant.http.get(path).text


def test_an_upload_waits_for_the_engine_and_says_so(tenant):
    response = tenant.upload("bread.txt", TOPICS["bread"])
    assert response.status_code == 201
    view = response.json()
    assert (view["name"], view["kind"], view["num_characters"]) == ("bread.txt", "txt", len(TOPICS["bread"]))
    deadline = time.monotonic() + 20
    while (view := tenant.document(view["id"]))["problem"] is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert view["status"] in ("waiting", "indexing")
    assert "does not answer; the document is kept" in view["problem"]


def test_the_same_upload_twice_is_one_document(tenant):
    first = tenant.upload("bread.txt", TOPICS["bread"])
    again = tenant.upload("copy.txt", TOPICS["bread"])
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["id"] == again.json()["id"]
    assert len(tenant.http.get("/documents").json()["documents"]) == 1


@pytest.mark.parametrize(
    ("name", "data", "status", "code"),
    [
        ("a.txt", b"", 422, "empty_document"),
        ("a.txt", b"  \n ", 422, "empty_document"),
        ("a.txt", b"\xe9t\xe9", 422, "unreadable_document"),
        ("a.txt", b"a\0\1\2", 415, "unknown_kind"),
        ("a.exe", b"text", 415, "unknown_kind"),
        ("a.pdf", b"%PDF-1.4 broken", 422, "unreadable_document"),
        ("a.pdf", pdf(["secret"], password="word"), 422, "unreadable_document"),
        ("a.pdf", pdf([""]), 422, "empty_document"),
        ("a.html", b"<script>1</script>", 422, "empty_document"),
    ],
)
def test_uploads_that_are_refused(tenant, name, data, status, code):
    got = error_of(tenant.upload(name, data))
    assert got[:2] == (status, code)
    assert got[2][0].isupper()
    assert got[2].endswith(".")
    assert tenant.http.get("/documents").json()["documents"] == []


def test_an_upload_without_a_file(tenant):
    assert error_of(tenant.http.post("/documents"))[:2] == (422, "invalid")


def test_an_upload_that_is_too_large(start_rag):
    rag = start_rag(engine_url="http://127.0.0.1:1", max_upload_mb=0.1)
    tenant = rag.tenant()
    assert error_of(tenant.upload("a.txt", b"a" * 100_001))[:2] == (413, "document_too_large")
    assert error_of(tenant.upload("a.txt", b"a" * 400_000))[:2] == (413, "too_large")
    assert tenant.upload("a.txt", b"a" * 100_000).status_code == 201


def test_too_many_documents(start_rag):
    tenant = start_rag(engine_url="http://127.0.0.1:1", max_documents=1).tenant()
    assert tenant.upload("a.txt", "one").status_code == 201
    assert error_of(tenant.upload("b.txt", "two")) == (
        409,
        "too_many_documents",
        "There are 1 documents already; delete one first.",
    )
    assert tenant.upload("a.txt", "one").status_code == 200


def test_another_tenants_document_is_not_there(rag_without_engine, tenant):
    document_id = tenant.upload("a.txt", "mine").json()["id"]
    other = rag_without_engine.tenant(rag_without_engine.store.add_tenant("other"))
    assert other.http.get("/documents").json() == {"documents": []}
    never = error_of(other.http.get("/documents/never-was"))
    assert never == (404, "not_found", "There is no such document.")
    for response in (
        other.http.get(f"/documents/{document_id}"),
        other.http.delete(f"/documents/{document_id}"),
        other.http.post(f"/documents/{document_id}/warm"),
        other.http.post("/questions", json={"question": "what?", "document_ids": [document_id]}),
    ):
        assert error_of(response) == never
    assert tenant.document(document_id)["name"] == "a.txt"


def test_deletion_without_the_engine(tenant):
    document_id = tenant.upload("a.txt", "mine").json()["id"]
    deleted = tenant.http.delete(f"/documents/{document_id}")
    assert deleted.json() == {"id": document_id, "spans_deleted": None}
    assert tenant.http.get(f"/documents/{document_id}").status_code == 404
    assert tenant.upload("a.txt", "mine").status_code == 201


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "question: Field required"),
        ({"question": ""}, "question: String should have at least 1 character"),
        ({"question": "  "}, "The question is empty."),
        ({"question": "x" * 2001}, "The question has more than 2,000 characters."),
        ({"question": "x", "sections": 0}, "sections: Input should be greater than or equal to 1"),
        ({"question": "x", "max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
        ({"question": "x", "cache_salt": "other"}, "cache_salt: Extra inputs are not permitted"),
    ],
)
def test_wrong_questions(tenant, body, words):
    assert error_of(tenant.http.post("/questions", json=body)) == (422, "invalid", words)


def test_questions_before_there_is_a_document(tenant):
    assert error_of(tenant.http.post("/questions", json={"question": "x"}))[:2] == (409, "no_documents")
    document_id = tenant.upload("a.txt", "text").json()["id"]
    body = {"question": "x", "document_ids": [document_id]}
    assert error_of(tenant.http.post("/questions", json=body)) == (
        409,
        "not_indexed",
        "a.txt is not indexed yet. Try again in a moment.",
    )


def test_the_page_and_its_policy(rag_without_engine):
    page = httpx.get(f"{rag_without_engine.url}/")
    assert page.status_code == 200
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert "unsafe-inline" not in page.headers["content-security-policy"]
    for path in ("/static/app.js", "/static/rag.css", "/static/common/base.css", "/static/icon.svg"):
        assert httpx.get(rag_without_engine.url + path).status_code == 200


def test_health_and_openapi(rag_without_engine):
    assert httpx.get(f"{rag_without_engine.url}/healthz").json() == {"status": "ok", "engine": "not reached"}
    paths = httpx.get(f"{rag_without_engine.url}/api/v1/openapi.json").json()["paths"]
    assert set(paths) == {
        "/healthz",
        "/api/v1/me",
        "/api/v1/documents",
        "/api/v1/documents/{document_id}",
        "/api/v1/documents/{document_id}/warm",
        "/api/v1/questions",
    }
