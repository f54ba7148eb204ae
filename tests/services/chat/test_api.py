"""The routes, on a server whose engine is not there."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from grkv_sglang.services.chat.app import GUESSES_PER_NAME, create_app
from grkv_sglang.services.chat.settings import ChatSettings
from tests.services.chat.conftest import PASSWORD, register


def events(answer: Any) -> list[tuple[str, Any]]:
    """The events of a stream that was read to its end."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in answer.text.split("\n\n")[:-1]:
        if not block.startswith(":"):
            name, data = block.split("\n")
            found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def new_conversation(client: TestClient) -> str:
    answer = client.post("/api/conversations")
    assert answer.status_code == 201
    return answer.json()["id"]


# -- accounts --------------------------------------------------------------------------------------


def test_registering_signs_in_and_the_cookie_is_for_the_server_only(client: TestClient):
    assert client.get("/api/session").json()["user"] is None
    answer = client.post("/api/register", json={"name": " Ada ", "password": PASSWORD})
    cookie = answer.headers["set-cookie"]
    assert answer.json() == {"user": "Ada"}
    assert "HttpOnly" in cookie
    assert "samesite=lax" in cookie.lower()
    assert "secure" not in cookie.lower()
    assert client.get("/api/session").json()["user"] == "Ada"


def test_the_cookie_is_secure_behind_https(settings: ChatSettings):
    with TestClient(create_app(settings), base_url="https://chat.example") as client:
        answer = client.post("/api/register", json={"name": "Ada", "password": PASSWORD})
    assert "secure" in answer.headers["set-cookie"].lower()


def test_signing_out_ends_the_sign_in_and_not_only_the_cookie(client: TestClient):
    register(client, "Ada")
    cookies = dict(client.cookies)
    assert client.post("/api/sign-out").status_code == 204
    assert client.get("/api/conversations").status_code == 401
    client.cookies.update(cookies)
    assert client.get("/api/conversations").status_code == 401
    answer = client.post("/api/sign-in", json={"name": "ada", "password": PASSWORD})
    assert answer.json() == {"user": "Ada"}
    assert client.get("/api/conversations").json() == []


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"name": "Ada", "password": "short"}, "password: must have at least 8 characters"),
        ({"name": " ", "password": PASSWORD}, "name: String should have at least 1 character"),
        ({"name": "a\u0000b", "password": PASSWORD}, "name: must not hold control characters"),
        ({"name": "x" * 65, "password": PASSWORD}, "name: String should have at most 64 characters"),
        ({"name": "Ada", "password": "x" * 257}, "password: String should have at most 256 characters"),
        ({"name": "Ada"}, "password: Field required"),
        ({"name": "Ada", "password": PASSWORD, "admin": True}, "admin: Extra inputs are not permitted"),
    ],
)
def test_bad_accounts_are_refused_in_words(client: TestClient, body: dict[str, Any], words: str):
    answer = client.post("/api/register", json=body)
    assert answer.status_code == 422
    assert answer.json()["error"] == {"code": "invalid", "message": words}


def test_a_taken_name_is_refused(client: TestClient):
    register(client, "Ada")
    answer = client.post("/api/register", json={"name": "ADA", "password": PASSWORD})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "name_taken")


def test_closed_registration(settings: ChatSettings):
    with TestClient(create_app(settings.model_copy(update={"registration": "closed"}))) as client:
        assert client.get("/api/session").json()["registration_open"] is False
        answer = client.post("/api/register", json={"name": "Ada", "password": PASSWORD})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "registration_closed")


def test_wrong_guesses_have_to_wait(client: TestClient):
    register(client, "Ada")
    wrong = {"name": "Ada", "password": "wrong horse"}
    for _ in range(GUESSES_PER_NAME):
        answer = client.post("/api/sign-in", json=wrong)
        assert (answer.status_code, answer.json()["error"]["message"]) == (401, "Name or password is wrong.")
    for password in ("wrong horse", PASSWORD):
        answer = client.post("/api/sign-in", json={"name": "aDa", "password": password})
        assert answer.status_code == 429
        assert 0 < int(answer.headers["retry-after"]) <= 301
    # Others, and whoever is signed in already, are not locked out.
    assert client.post("/api/sign-in", json={"name": "Bob", "password": "x"}).status_code == 401
    assert client.get("/api/conversations").status_code == 200


# -- conversations ---------------------------------------------------------------------------------


def test_everything_needs_a_sign_in(client: TestClient):
    for method, path in (
        *(("GET", "/api/conversations"), ("POST", "/api/conversations"), ("GET", "/api/conversations/x")),
        *(("PATCH", "/api/conversations/x"), ("DELETE", "/api/conversations/x")),
        *(("POST", "/api/conversations/x/messages"), ("POST", "/api/conversations/x/retry")),
        *(("POST", "/api/conversations/x/stop"), ("GET", "/api/conversations/x/stream")),
    ):
        answer = client.request(method, path, json={"text": "x", "title": "x"} if method != "GET" else None)
        assert (answer.status_code, answer.json()["error"]["code"]) in (
            (401, "not_signed_in"),
            (422, "invalid"),
        )
    for path, body in (("messages", {"text": "x"}), ("retry", None), ("stop", None)):
        assert client.post(f"/api/conversations/x/{path}", json=body).status_code == 401


def test_two_users_do_not_see_each_other(client: TestClient, settings: ChatSettings):
    register(client, "Ada")
    mine = new_conversation(client)
    with TestClient(client.app) as other:
        register(other, "Bob")
        path = f"/api/conversations/{mine}"
        for answer in (
            other.get(path),
            other.patch(path, json={"title": "x"}),
            other.delete(path),
            other.post(f"{path}/messages", json={"text": "x"}),
            other.post(f"{path}/retry"),
            other.post(f"{path}/stop"),
            other.get(f"{path}/stream"),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
        assert other.get("/api/conversations").json() == []
    assert client.get(f"/api/conversations/{mine}").json()["title"] == "New conversation"


def test_renaming_and_deleting(client: TestClient):
    register(client, "Ada")
    mine = new_conversation(client)
    path = f"/api/conversations/{mine}"
    assert client.patch(path, json={"title": " Clocks "}).json()["title"] == "Clocks"
    for title in ("", " ", "x" * 201, "a\nb"):
        assert client.patch(path, json={"title": title}).status_code == 422
    assert [c["title"] for c in client.get("/api/conversations").json()] == ["Clocks"]
    assert client.delete(path).status_code == 204
    assert client.get(path).status_code == 404
    assert client.get("/api/conversations").json() == []


def test_a_message_is_kept_while_the_engine_is_down(client: TestClient, settings: ChatSettings):
    register(client, "Ada")
    mine = new_conversation(client)
    streamed = events(client.post(f"/api/conversations/{mine}/messages", json={"text": "Hello?"}))
    assert [name for name, _ in streamed] == ["turn", "end"]
    assert streamed[0][1] == {"position": 1, "question": "Hello?"}
    turn = client.get(f"/api/conversations/{mine}").json()["turns"][0]
    assert turn == streamed[1][1]["turns"][0]
    assert (turn["question"], turn["state"], turn["answer"]) == ("Hello?", "failed", "")
    assert turn["problem"]["code"] == "engine_down"
    assert (
        f"The model server at {settings.engine_url} does not answer; your message is kept"
        in (turn["problem"]["message"])
    )
    again = events(client.post(f"/api/conversations/{mine}/retry"))
    assert [len(data["turns"]) for name, data in again if name == "end"] == [1]
    assert client.get(f"/api/conversations/{mine}/stream").status_code == 204


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        ("", 422, "The message is empty."),
        (" \n", 422, "The message is empty."),
        ("x" * 1001, 413, "The message has 1,001 characters; at most 1,000 are taken."),
        ("a\u0000b", 422, "text: must not hold NUL characters"),
        ("x" * 20_000, 413, "The request is too large: at most 16096 bytes are taken."),
    ],
)
def test_bad_messages_are_refused_and_not_kept(client: TestClient, text: str, status: int, words: str):
    register(client, "Ada")
    mine = new_conversation(client)
    answer = client.post(f"/api/conversations/{mine}/messages", json={"text": text})
    assert (answer.status_code, answer.json()["error"]["message"]) == (status, words)
    assert client.get(f"/api/conversations/{mine}").json()["turns"] == []


def test_nobody_sees_a_salt(client: TestClient):
    register(client, "Ada")
    mine = new_conversation(client)
    streamed = client.post(f"/api/conversations/{mine}/messages", json={"text": "Hello?"}).text
    with client.app.state.chat.store._session() as session:  # type: ignore[attr-defined]
        from sqlalchemy import select

        from grkv_sglang.services.chat.database import User

        salt = session.scalars(select(User.cache_salt)).one()
    shown = [client.get(p).text for p in ("/api/session", "/api/conversations", f"/api/conversations/{mine}")]
    assert all(salt not in text for text in [streamed, *shown])


def test_a_write_of_another_site_changes_nothing(client: TestClient):
    register(client, "Ada")
    mine = new_conversation(client)
    for headers in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}):
        assert client.delete(f"/api/conversations/{mine}", headers=headers).status_code == 403
        assert client.post("/api/sign-out", headers=headers).status_code == 403
    assert client.get(f"/api/conversations/{mine}").status_code == 200


# -- page and health -------------------------------------------------------------------------------


def test_health_tells_what_is_down(client: TestClient):
    answer = client.get("/healthz")
    assert (answer.status_code, answer.json()) == (503, {"database": "ok", "engine": "down"})


def test_the_page_and_its_files_are_served_under_a_strict_policy(client: TestClient):
    import re

    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert page.headers["cache-control"] == "no-cache"
    files = re.findall(r'(?:href|src)="(/static/[^"]+)"', page.text)
    assert len(files) == 4
    for file in [*files, "/static/api.js", "/static/turns.js"]:
        assert client.get(file).status_code == 200, file
    # What the policy would block must not be there: inline scripts, handlers and styles.
    assert not re.search(r"<script(?![^>]*src=)|\son\w+=|\sstyle=|<style", page.text)
    assert client.get("/static/../app.py").status_code == 404
