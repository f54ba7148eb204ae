"""What the services share: markdown, events, errors, and the protection of writes."""

from __future__ import annotations

import json

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from starlette.datastructures import Headers

from grkv_sglang.client import GrkvApiError, GrkvConnectionError, GrkvError
from grkv_sglang.client.retry import connection_error
from grkv_sglang.services.common.engine import problem_of
from grkv_sglang.services.common.events import event
from grkv_sglang.services.common.markdown import render
from grkv_sglang.services.common.web import is_same_origin, protect

URL = "http://engine:1"


# -- markdown --------------------------------------------------------------------------------------


def test_markdown_becomes_html():
    html = render("# Title\n\n- *a*\n- **b** `c`\n\n| x | y |\n|---|---|\n| 1 | 2 |\n\n~~old~~")
    for part in ("<h1>Title</h1>", "<li><em>a</em></li>", "<strong>b</strong> <code>c</code>", "<s>old</s>"):
        assert part in html
    assert "<td>1</td>" in html


def test_code_blocks_keep_their_text():
    assert render("```python\nif a < b & c:\n```") == "<pre><code>if a &lt; b &amp; c:\n</code></pre>\n"
    assert render("```\nunfinished") == "<pre><code>unfinished</code></pre>\n"


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "[click](javascript:alert(1))",
        "[click](JaVaScRiPt:alert(1))",
        "[click](&#106;avascript:alert(1))",
        "[click](data:text/html;base64,PHNjcmlwdD4=)",
        "[click](vbscript:x)",
        "<a href='javascript:alert(1)'>x</a>",
        "![picture](https://elsewhere.example/track.png)",
        "<iframe src=https://elsewhere.example></iframe>",
        "<style>body { display: none }</style>",
        "<form action=/api/sign-out method=post><button>x</button></form>",
        "```html\n</code></pre><script>alert(1)</script>\n```",
        '[a](https://x.example "\\"><script>alert(1)</script>")',
        "<svg><a xlink:href='javascript:alert(1)'>x</a></svg>",
        "[a][r]\n\n[r]: javascript:alert(1)",
    ],
)
def test_nothing_runs_and_nothing_is_fetched(text: str):
    from html.parser import HTMLParser

    found: list[tuple[str, dict[str, str | None]]] = []

    class Tags(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.append((tag, dict(attrs)))

    Tags().feed(render(text))
    allowed = {"p", "pre", "code", "a", "em", "strong"}
    assert {tag for tag, _ in found} <= allowed
    for _, attributes in found:
        assert set(attributes) <= {"href", "title", "rel", "target"}
        assert (attributes.get("href") or "https://").startswith(("https://", "http://"))


def test_links_leave_the_page_without_telling_where_from():
    assert render("[x](https://a.example)") == (
        '<p><a href="https://a.example" target="_blank" rel="noopener noreferrer nofollow">x</a></p>\n'
    )
    assert "href" not in render("[x](/api/sign-out)")


# -- events ----------------------------------------------------------------------------------------


def test_an_event_is_one_block():
    data = event("answer", {"html": "a\n\nb\r\nü"})
    assert data.startswith(b"event: answer\ndata: ")
    assert data.endswith(b"\n\n")
    assert data.count(b"\n") == 3
    assert json.loads(data.split(b"data: ")[1]) == {"html": "a\n\nb\r\nü"}


@pytest.mark.parametrize("name", ["", "a\nb", "a\rb"])
def test_an_event_has_a_name_of_one_line(name: str):
    with pytest.raises(ValueError, match="one line"):
        event(name, {})


# -- errors of the engine --------------------------------------------------------------------------


def from_transport(error: httpx.TransportError) -> GrkvError:
    try:
        raise connection_error(error) from error
    except GrkvError as raised:
        return raised


@pytest.mark.parametrize(
    ("error", "status", "code", "words"),
    [
        (
            from_transport(httpx.ConnectError("refused")),
            503,
            "engine_down",
            "does not answer; your message is",
        ),
        (from_transport(httpx.ConnectTimeout("slow")), 503, "engine_down", "does not answer"),
        (from_transport(httpx.ReadTimeout("")), 504, "engine_timeout", "took too long"),
        (GrkvConnectionError("no answer within 5 s in all"), 504, "engine_timeout", "took too long"),
        (
            GrkvConnectionError("the stream broke off after 3 characters"),
            502,
            "engine_broke_off",
            "broke off",
        ),
        (from_transport(httpx.RemoteProtocolError("cut")), 502, "engine_broke_off", "broke off"),
        (GrkvApiError(400, "budget: too small"), 400, "engine_refused", "budget: too small"),
        (GrkvApiError(400, "longer than the model's context length"), 413, "context_full", "longer than"),
        (GrkvApiError(401, "Unauthorized"), 502, "engine_refused", "API key"),
        (GrkvApiError(503, "queue is full"), 503, "engine_down", "queue is full"),
        (GrkvApiError(500, "boom"), 502, "engine_error", "boom"),
    ],
)
def test_errors_of_the_engine_in_words(error: GrkvError, status: int, code: str, words: str):
    problem = problem_of(error, URL)
    assert (problem.status, problem.code) == (status, code)
    assert words in problem.message


# -- protection ------------------------------------------------------------------------------------


@pytest.fixture
def protected() -> TestClient:
    app = FastAPI()

    @app.post("/write")
    async def write(request: Request) -> int:
        return len(await request.body())

    @app.get("/engine")
    def engine() -> None:
        raise GrkvApiError(400, "no such option")

    @app.get("/number")
    def number(value: int) -> int:
        return value

    protect(app, engine_url=URL, max_body_bytes=100)
    return TestClient(app)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, True),
        ({"sec-fetch-site": "same-origin", "origin": "https://chat.example", "host": "chat.example"}, True),
        ({"sec-fetch-site": "none"}, True),
        ({"sec-fetch-site": "cross-site"}, False),
        ({"sec-fetch-site": "same-site"}, False),
        ({"origin": "http://chat.example:8100", "host": "chat.example:8100"}, True),
        ({"origin": "https://evil.example", "host": "chat.example"}, False),
        ({"origin": "http://chat.example:81", "host": "chat.example:80"}, False),
        ({"origin": "null", "host": "chat.example"}, False),
    ],
)
def test_writes_come_from_the_same_origin(headers: dict[str, str], expected: bool):
    assert is_same_origin(Headers(headers)) is expected


def test_a_write_of_another_site_is_refused(protected: TestClient):
    answer = protected.post("/write", content=b"x", headers={"origin": "https://evil.example"})
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "cross_site"
    assert protected.post("/write", content=b"x").json() == 1


def test_large_bodies_are_refused_with_and_without_a_length(protected: TestClient):
    assert protected.post("/write", content=b"x" * 100).json() == 100

    def chunks():
        yield b"x" * 60
        yield b"x" * 60

    for content in (b"x" * 101, chunks()):
        answer = protected.post("/write", content=content)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "too_large"


def test_errors_have_one_form(protected: TestClient):
    assert protected.get("/nowhere").json() == {"error": {"code": "not_found", "message": "Not Found"}}
    wrong = protected.get("/number", params={"value": "x"})
    assert wrong.status_code == 422
    assert wrong.json()["error"]["message"].startswith("value: Input should be a valid integer")
    refused = protected.get("/engine")
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "The model server refused the request: no such option."


def test_every_answer_has_the_security_headers(protected: TestClient):
    for answer in (protected.get("/nowhere"), protected.post("/write", headers={"origin": "http://evil"})):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
