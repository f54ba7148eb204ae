"""The real vector database with the real embedding model."""

from __future__ import annotations

import uuid

import numpy as np
import pytest

from grkv_sglang.services.rag.index import IndexedPassage, PassageIndex
from grkv_sglang.settings import ConfigError
from tests.services.rag.files import QUESTIONS, TOPICS


@pytest.fixture
def index(tmp_path, embedder):
    index = PassageIndex("test", embedder.dimensions, path=tmp_path / "qdrant")
    yield index
    index.close()


def add(index, embedder, tenant_id, topics=TOPICS):
    """One passage per topic; document ids by topic."""
    passages = {
        topic: IndexedPassage(tenant_id, uuid.uuid4().hex, uuid.uuid4().hex, 0, len(text))
        for topic, text in topics.items()
    }
    index.add(list(passages.values()), embedder.embed(list(topics.values())))
    return {topic: passage.document_id for topic, passage in passages.items()}


def search(index, embedder, tenant_id, question, **kwargs):
    return index.search(tenant_id, embedder.embed([question])[0], 10, **kwargs)


def test_vectors_have_length_one(embedder):
    vectors = embedder.embed(list(TOPICS.values()))
    assert vectors.shape == (3, 384)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    assert embedder.embed([]).shape == (0, 384)


@pytest.mark.parametrize("topic", TOPICS)
def test_the_right_topic_comes_first(index, embedder, topic):
    documents = add(index, embedder, "t")
    hits = search(index, embedder, "t", QUESTIONS[topic])
    assert [hit.passage.document_id for hit in hits[:1]] == [documents[topic]]
    assert 1.0 >= hits[0].score > hits[1].score + 0.1


def test_a_search_sees_one_tenant(index, embedder):
    add(index, embedder, "one", {"bread": TOPICS["bread"]})
    documents = add(index, embedder, "two", {"sailing": TOPICS["sailing"]})
    hits = search(index, embedder, "two", QUESTIONS["bread"])
    assert [hit.passage.document_id for hit in hits] == [documents["sailing"]]
    assert {hit.passage.tenant_id for hit in hits} == {"two"}
    assert search(index, embedder, "three", QUESTIONS["bread"]) == []


def test_a_search_in_some_documents(index, embedder):
    documents = add(index, embedder, "t")
    hits = search(index, embedder, "t", QUESTIONS["bread"], document_ids=[documents["sailing"]])
    assert [hit.passage.document_id for hit in hits] == [documents["sailing"]]


def test_one_tenant_cannot_delete_for_another(index, embedder):
    documents = add(index, embedder, "one")
    index.delete_document("two", documents["bread"])
    assert index.count() == 3
    index.delete_document("one", documents["bread"])
    assert index.count() == 2
    hits = search(index, embedder, "one", QUESTIONS["bread"])
    assert documents["bread"] not in {hit.passage.document_id for hit in hits}


def test_the_same_passage_twice_is_one(index, embedder):
    passage = IndexedPassage("t", uuid.uuid4().hex, uuid.uuid4().hex, 0, 10)
    vectors = embedder.embed(["text"])
    index.add([passage], vectors)
    index.add([passage], vectors)
    assert index.count() == 1


def test_the_index_survives_a_restart(tmp_path, embedder):
    index = PassageIndex("test", embedder.dimensions, path=tmp_path / "qdrant")
    documents = add(index, embedder, "t")
    index.close()
    again = PassageIndex("test", embedder.dimensions, path=tmp_path / "qdrant")
    assert search(again, embedder, "t", QUESTIONS["bread"])[0].passage.document_id == documents["bread"]
    again.close()


def test_vectors_of_another_model_are_refused(tmp_path):
    PassageIndex("test", 384, path=tmp_path / "qdrant").close()
    with pytest.raises(ConfigError, match="holds vectors of 384 dimensions, the embedding model makes 768"):
        PassageIndex("test", 768, path=tmp_path / "qdrant")


def test_a_folder_in_use_is_refused(tmp_path, index):
    with pytest.raises(ConfigError, match=r"cannot be opened.*already accessed"):
        PassageIndex("test", 384, path=tmp_path / "qdrant")


def test_a_server_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"the Qdrant server at http://127.0.0.1:1 cannot be opened"):
        PassageIndex("test", 384, url="http://127.0.0.1:1")
