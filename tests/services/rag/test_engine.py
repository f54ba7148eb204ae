"""The service on the real engine: what is compressed, shared, kept apart, lost and made again."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from grkv_sglang.client import GrkvClient
from grkv_sglang.client.state import namespace_name
from grkv_sglang.services.rag.prompts import prompt_messages, section_message
from grkv_sglang.services.rag.settings import RagSettings
from grkv_sglang.serving import free_port
from tests.services.rag.files import QUESTIONS, TOPICS, long_text, pdf
from tests.services.rag.serving import serving

pytestmark = pytest.mark.engine


@pytest.fixture
def engine(engine_url):
    with GrkvClient(engine_url) as client:
        yield client


@pytest.fixture
def rag(start_rag, engine_url):
    return start_rag(engine_url=engine_url)


def salt_of(rag, tenant_key=None):
    return rag.store.tenant_of_key(tenant_key or rag.key).cache_salt


def spans(engine, cache_salt):
    """Of one namespace, by position."""
    namespace = namespace_name(cache_salt)
    found = [span for span in engine.state().spans if span.namespace == namespace]
    return sorted(found, key=lambda span: span.start_tokens)


def test_a_document_is_compressed_once_and_every_question_is_served_from_it(rag, engine):
    tenant = rag.tenant()
    document = tenant.add("bread.txt", long_text("bread", 4))
    assert (document["num_sections"], document["num_finished"]) == (1, 1)
    assert 0 < document["prefix_slots"] < document["prefix_tokens"] / 2
    assert 0.0 < document["quality"] < 1.0
    (span,) = spans(engine, salt_of(rag))
    assert span.end_tokens == document["prefix_tokens"]
    for question in (QUESTIONS["bread"], "1 or 2 hours?"):
        answer = tenant.ask(question)
        served = answer["served"]
        assert served["span_tokens"] == span.tokens
        assert served["span_slots"] == span.slots
        assert answer["usage"]["cached_tokens"] >= document["prefix_tokens"]
        assert answer["usage"]["completion_tokens"] <= 4
        assert 0.0 < answer["ttft_s"] <= answer["total_s"]
    assert len(spans(engine, salt_of(rag))) == 1
    # Whoever sends the very same prompt is served from it with the tenant's salt only.
    section = section_message(1, "bread.txt", None, long_text("bread", 4))
    messages = prompt_messages(RagSettings().instructions, [section], "Question: when?")
    assert engine.chat(messages, max_tokens=1, cache_salt=salt_of(rag)).grkv.span_tokens == span.tokens
    assert engine.chat(messages, max_tokens=1, cache_salt="rag-test-other").usage.cached_tokens == 0
    engine.command("delete", cache_salt="rag-test-other")


def test_a_streamed_answer_and_its_sources(rag):
    tenant = rag.tenant()
    text = "# Kitchen\n\n" + TOPICS["bread"]
    tenant.add("bread.md", text)
    events = tenant.events(QUESTIONS["bread"], max_tokens=6)
    names = [name for name, _ in events]
    assert names == ["sources", *["text"] * (len(names) - 2), "done"]
    (source,) = events[0][1]["sources"]
    assert (source["number"], source["document"], source["heading"]) == (1, "bread.md", "Kitchen")
    assert source["passages"][0]["text"] == text
    done = events[-1][1]
    assert "".join(data["text"] for _, data in events[1:-1]).strip() == done["text"]
    assert done["html"].startswith("<p>")
    assert done["usage"]["completion_tokens"] <= 6


def test_tenants_share_no_documents_and_no_cache(rag, engine):
    one, other_key = rag.tenant(), rag.store.add_tenant("other")
    other = rag.tenant(other_key)
    text = long_text("sailing", 4)
    one.add("mine.txt", text)
    one.ask(QUESTIONS["sailing"])
    other.add("theirs.txt", TOPICS["bread"])
    # The other tenant's only document is about something else, and it is all that it gets.
    answer = other.ask(QUESTIONS["sailing"])
    assert [source["document"] for source in answer["sources"]] == ["theirs.txt"]
    # With the same document, warm-up and the first question find nothing of the first tenant's KV.
    hits = sum(span.hits for span in spans(engine, salt_of(rag)))
    document = other.add("theirs-too.txt", text)
    assert sum(span.hits for span in spans(engine, salt_of(rag))) == hits
    answer = other.ask(QUESTIONS["sailing"], document_ids=[document["id"]])
    assert sum(span.hits for span in spans(engine, salt_of(rag))) == hits
    assert [source["document"] for source in answer["sources"]] == ["theirs-too.txt"]
    own = spans(engine, salt_of(rag, other_key))
    assert answer["served"]["span_tokens"] in {span.tokens for span in own}


def test_a_document_in_several_sections(start_rag, engine_url):
    rag = start_rag(engine_url=engine_url, section_tokens=400, answer_tokens=32)
    tenant = rag.tenant()
    # Cut and searched as a whole; three sections are enough to see them compressed.
    pages = [long_text("beekeeping", 4), long_text("sailing", 4), long_text("bread", 4)]
    document = tenant.add("three-topics.pdf", pdf(pages))
    assert document["num_pages"] == 3
    assert document["num_sections"] == len(document["sections"]) >= 3
    assert max(section["tokens"] for section in document["sections"]) <= 400
    assert {section["status"] for section in document["sections"]} == {"ready"}
    for page, topic in enumerate(QUESTIONS, start=1):
        answer = tenant.ask(QUESTIONS[topic])
        (source,) = answer["sources"]
        best = source["passages"][0]
        assert best["first_page"] <= page <= best["last_page"]
        assert answer["served"]["span_tokens"] > 200


def test_a_document_longer_than_the_context(start_rag, engine_url):
    rag = start_rag(engine_url=engine_url, section_tokens=400, answer_tokens=32)
    tenant = rag.tenant()
    text = "\n\n".join([long_text("sailing", 30), TOPICS["bread"], long_text("beekeeping", 30)])
    document_id = tenant.upload("long.txt", text).json()["id"]
    document = tenant.wait(document_id, "compressing")  # it can be asked about from now on
    assert document["tokens"] > 4096
    assert max(section["tokens"] for section in document["sections"]) <= 400
    answer = tenant.ask(QUESTIONS["bread"])
    (source,) = answer["sources"]
    assert "The loaf is baked" in source["passages"][0]["text"]
    assert answer["usage"]["prompt_tokens"] < 700
    # Its deletion ends the compression of what is left.
    assert tenant.http.delete(f"/documents/{document_id}").status_code == 200
    assert tenant.http.get(f"/documents/{document_id}").status_code == 404


def test_two_sections_in_an_answer_share_the_first_ones_span(start_rag, engine_url, engine):
    rag = start_rag(engine_url=engine_url, sections_per_answer=2)
    tenant = rag.tenant()
    topics = {tenant.add(f"{t}.txt", long_text(t, 4))["id"]: t for t in TOPICS}
    first, second, third = sorted(topics)  # sections come in the order of documents
    warm = {span.tokens_sha256 for span in spans(engine, salt_of(rag))}
    assert len(warm) == 3

    def ask(*document_ids):
        question = f"{QUESTIONS[topics[document_ids[0]]]} {QUESTIONS[topics[document_ids[1]]]}"
        answer = tenant.ask(question, document_ids=list(document_ids))
        assert [source["document_id"] for source in answer["sources"]] == sorted(document_ids)
        assert [source["number"] for source in answer["sources"]] == [1, 2]
        return answer

    once = ask(second, first)
    assert once["served"]["spans"] == 1
    assert once["served"]["span_tokens"] > 200
    # The combination was marked: its second section now has a span behind the first one's.
    (made,) = wait_for_spans(engine, salt_of(rag), warm, 1)
    again = ask(first, second)
    assert again["served"]["spans"] == 2
    assert again["served"]["span_tokens"] == once["served"]["span_tokens"] + made.tokens
    # Another second section: the first one's span still serves.
    assert ask(first, third)["served"]["span_tokens"] == once["served"]["span_tokens"]
    # Deleting the second document takes its KV behind the first one along.
    deleted = tenant.http.delete(f"/documents/{second}").json()
    assert deleted["spans_deleted"] >= 2
    left = {span.tokens_sha256 for span in spans(engine, salt_of(rag))}
    assert made.tokens_sha256 not in left


def wait_for_spans(engine, cache_salt, known, number):
    for _ in range(600):
        new = [span for span in spans(engine, cache_salt) if span.tokens_sha256 not in known]
        if len(new) >= number:
            return new
        time.sleep(0.1)
    raise AssertionError(f"no further span: {spans(engine, cache_salt)}")


def test_deletion_takes_the_span_and_the_vectors(rag, engine):
    tenant = rag.tenant()
    document = tenant.add("bread.txt", long_text("bread", 4))
    assert len(spans(engine, salt_of(rag))) == 1
    deleted = tenant.http.delete(f"/documents/{document['id']}")
    assert deleted.json() == {"id": document["id"], "spans_deleted": 1}
    assert spans(engine, salt_of(rag)) == []
    response = tenant.http.post("/questions", json={"question": QUESTIONS["bread"]})
    assert response.json()["error"]["code"] == "no_documents"


def test_a_span_that_the_engine_lost_is_made_again(rag, engine):
    tenant = rag.tenant()
    document = tenant.add("bread.txt", long_text("bread", 4))
    (span,) = spans(engine, salt_of(rag))
    engine.command("delete", tokens_sha256=span.tokens_sha256, cache_salt=salt_of(rag))
    answer = tenant.ask(QUESTIONS["bread"])
    assert answer["served"]["span_tokens"] == 0
    tenant.wait(document["id"], "ready")
    assert tenant.ask(QUESTIONS["bread"])["served"]["span_tokens"] == span.tokens


def test_a_short_document_stays_exact(rag, engine):
    tenant = rag.tenant()
    document = tenant.add("short.txt", "The kettle holds two litres.")
    (section,) = document["sections"]
    assert section["status"] == "exact"
    assert document["quality"] is None
    assert tenant.ask("How much does the kettle hold?")["served"]["span_tokens"] == 0
    assert spans(engine, salt_of(rag)) == []


def test_an_engine_that_is_down_and_comes_back(start_rag, proxy):
    proxy.break_off()
    rag = start_rag(engine_url=proxy.url)
    tenant = rag.tenant()
    document_id = tenant.upload("bread.txt", long_text("bread", 4)).json()["id"]
    assert tenant.document(document_id)["status"] in ("waiting", "indexing")
    proxy.mend()
    assert tenant.wait(document_id, "ready")["problem"] is None
    assert tenant.ask(QUESTIONS["bread"])["served"]["span_tokens"] > 200
    proxy.break_off()
    response = tenant.http.post("/questions", json={"question": QUESTIONS["bread"]})
    assert response.status_code in (502, 503)
    error = response.json()["error"]
    assert error["code"] in ("engine_down", "engine_broke_off")
    assert "your documents are kept" in error["message"]
    assert httpx.get(f"{rag.url}/healthz").json() == {"status": "ok", "engine": "not reached"}
    proxy.mend()
    assert tenant.ask(QUESTIONS["bread"])["served"]["span_tokens"] > 200


def test_an_engine_that_breaks_off_an_answer(start_rag, proxy):
    tenant = start_rag(engine_url=proxy.url).tenant()
    tenant.add("short.txt", "The kettle holds two litres.")
    proxy.hold_back(3)  # no answer is over before it breaks off
    with tenant.http.stream(
        "POST", "/questions", json={"question": "Tell all about kettles.", "max_tokens": 200}
    ) as response:
        seen = ""
        for text in response.iter_text():
            seen += text
            if "event: text" in seen:
                proxy.break_off()
    assert "event: error" in seen
    assert '"code": "engine_broke_off"' in seen
    assert "event: done" not in seen


def test_work_goes_on_after_a_restart_of_the_service(start_rag, engine_url, tmp_path, embedder):
    down = RagSettings(port=free_port(), data_dir=tmp_path / "again", engine_url="http://127.0.0.1:1")
    with serving(down, embedder) as rag:
        document_id = rag.tenant().upload("short.txt", "The kettle holds two litres.").json()["id"]
    with serving(down.model_copy(update={"engine_url": engine_url}), embedder) as rag:
        assert rag.tenant().wait(document_id, "ready")["name"] == "short.txt"


def test_fifty_questions_of_eight_users(rag, engine):
    tenant = rag.tenant()
    tenant.add("bread.txt", long_text("bread", 4))
    (span,) = spans(engine, salt_of(rag))

    def ask(number):
        question = f"{QUESTIONS['bread']} And what comes {number} minutes later?"
        return rag.tenant().ask(question, max_tokens=4)

    with ThreadPoolExecutor(8) as users:
        answers = list(users.map(ask, range(50)))
    assert [answer["served"]["span_tokens"] for answer in answers] == [span.tokens] * 50
    (after,) = spans(engine, salt_of(rag))  # one compression, and it is the one from before
    assert after.tokens_sha256 == span.tokens_sha256
    assert after.hits - span.hits == 50


def test_too_many_questions_at_once(start_rag, engine_url):
    rag = start_rag(engine_url=engine_url, concurrency=1, queue=1)
    tenant = rag.tenant()
    tenant.add("short.txt", "The kettle holds two litres.")

    def ask(_):
        body = {"question": "How much?", "stream": False, "max_tokens": 8}
        return rag.tenant().http.post("/questions", json=body)

    with ThreadPoolExecutor(6) as users:
        responses = list(users.map(ask, range(6)))
    statuses = [response.status_code for response in responses]
    assert set(statuses) == {200, 503}
    assert statuses.count(200) >= 2
    refused = next(response for response in responses if response.status_code == 503)
    assert refused.json()["error"]["code"] == "busy"
    assert refused.headers["Retry-After"] == "5"


def test_a_question_that_does_not_fit(start_rag, engine_url):
    rag = start_rag(engine_url=engine_url, section_tokens=3200, max_question_characters=20_000)
    tenant = rag.tenant()
    tenant.add("short.txt", "The kettle holds two litres.")
    body = {"question": "why? " * 3900}
    error = tenant.http.post("/questions", json=body)
    assert error.status_code == 413
    assert error.json()["error"]["code"] == "context_full"
