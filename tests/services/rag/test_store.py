"""Tenants, keys, documents and sections in the database; what comes back in which order."""

from __future__ import annotations

import pytest

from grkv_sglang.services.rag.indexing import clean_name, new_document
from grkv_sglang.services.rag.parsing import ParsedDocument
from grkv_sglang.services.rag.store import NewSection, Store, StoreError


@pytest.fixture
def store(tmp_path):
    store = Store(f"sqlite:///{tmp_path / 'rag.sqlite3'}")
    yield store
    store.close()


def add_tenant(store, name):
    tenant = store.tenant_of_key(store.add_tenant(name))
    assert tenant is not None
    return tenant


def add_document(store, tenant, text="text", sections=2):
    row = new_document(tenant.id, "a.txt", text.encode(), ParsedDocument("txt", text))
    document, is_new = store.add_document(row, most=10)
    assert is_new
    new = [NewSection(n, n + 1, f"{text} {n}", None, 10) for n in range(sections)]
    rows = store.add_sections(document, new)
    store.set_document_status(document.id, "indexed")
    return document, rows


def test_a_key_opens_its_tenant_until_it_is_revoked(store):
    one, two = add_tenant(store, "one"), add_tenant(store, "two")
    key = store.add_key("one")
    assert store.tenant_of_key(key).id == one.id != two.id
    assert store.tenant_of_key(key + "x") is None
    [(tenant, num_documents, keys), _] = store.list_tenants()
    assert (tenant.name, num_documents, len(keys)) == ("one", 0, 2)
    assert key.startswith(keys[1].hint)
    assert len(keys[1].hint) < 20
    store.revoke_key(keys[1].id)
    assert store.tenant_of_key(key) is None
    with pytest.raises(StoreError, match="no working key"):
        store.revoke_key(keys[1].id)


def test_keys_are_not_in_the_database(store, tmp_path):
    key = store.add_tenant("one")
    store.close()
    for file in tmp_path.iterdir():
        assert key.encode() not in file.read_bytes()


def test_every_tenant_has_a_salt_of_its_own(store):
    salts = {add_tenant(store, name).cache_salt for name in ("one", "two", "three")}
    assert len(salts) == 3
    assert min(map(len, salts)) >= 40


def test_wrong_tenants(store):
    store.add_tenant("one")
    with pytest.raises(StoreError, match="there is a tenant 'one' already"):
        store.add_tenant("one")
    with pytest.raises(StoreError, match="needs a name"):
        store.add_tenant(" ")
    with pytest.raises(StoreError, match="no tenant 'none'"):
        store.add_key("none")


def test_the_same_upload_is_one_document_per_tenant(store):
    one, two = add_tenant(store, "one"), add_tenant(store, "two")
    document, _ = add_document(store, one)
    again = new_document(one.id, "other-name.txt", b"text", ParsedDocument("txt", "text"))
    found, is_new = store.add_document(again, most=10)
    assert (found.id, is_new) == (document.id, False)
    others, _ = add_document(store, two)
    assert others.id != document.id


def test_too_many_documents(store):
    tenant = add_tenant(store, "one")
    add_document(store, tenant)
    row = new_document(tenant.id, "b.txt", b"other", ParsedDocument("txt", "other"))
    with pytest.raises(StoreError, match="there are 1 documents already"):
        store.add_document(row, most=1)


def test_another_tenants_documents_are_not_there(store):
    one, two = add_tenant(store, "one"), add_tenant(store, "two")
    document, sections = add_document(store, one)
    ids = [section.id for section in sections]
    assert len(store.sections(one.id, ids)) == 2
    assert store.sections(two.id, ids) == []
    assert store.document(two.id, document.id) is None
    assert store.list_documents(two.id) == []
    assert not store.warm_again(two.id, document.id)
    assert store.delete_document(two.id, document.id) == []
    assert store.document(one.id, document.id) is not None


def test_sections_come_in_the_order_of_documents_and_places(store):
    tenant = add_tenant(store, "one")
    rows = [row for text in ("a", "b", "c") for row in add_document(store, tenant, text, 3)[1]]
    by_place = sorted(rows, key=lambda row: (row.document_id, row.number))
    for asked in (rows, rows[::-1], by_place[::2] + by_place[1::2]):
        found = store.sections(tenant.id, [row.id for row in asked])
        assert [section.id for _, section, _ in found] == [row.id for row in by_place]
        assert all(text.endswith(str(section.number)) for _, section, text in found)


def test_deletion_takes_sections_and_names_the_prefixes(store):
    tenant = add_tenant(store, "one")
    first, sections = add_document(store, tenant, "a")
    second, _ = add_document(store, tenant, "b")
    store.mark_prefix(tenant.id, "first", [first.id])
    store.mark_prefix(tenant.id, "both", [second.id, first.id])
    store.mark_prefix(tenant.id, "second", [second.id])
    assert sorted(store.delete_document(tenant.id, first.id)) == ["both", "first"]
    assert store.sections(tenant.id, [section.id for section in sections]) == []
    assert store.delete_document(tenant.id, second.id) == ["second"]


def test_sections_are_taken_once_and_again_after_a_restart(store):
    tenant = add_tenant(store, "one")
    _, sections = add_document(store, tenant)
    jobs = [store.take_section(), store.take_section()]
    assert [job.section_id for job in jobs] == [section.id for section in sections]
    assert [(job.tries, job.cache_salt) for job in jobs] == [(1, tenant.cache_salt)] * 2
    assert store.take_section() is None
    store.set_section(sections[0].id, "ready", prefix_tokens=100, prefix_slots=10, quality=0.9)
    store.resume()
    again = store.take_section()
    assert again is not None
    assert (again.section_id, again.tries) == (sections[1].id, 2)
    assert store.take_section() is None


def test_sections_that_were_not_tried_come_first(store):
    tenant = add_tenant(store, "one")
    _, sections = add_document(store, tenant)
    assert store.take_section().section_id == sections[0].id
    store.set_section(sections[0].id, "queued")
    assert store.take_section().section_id == sections[1].id
    assert store.take_section().section_id == sections[0].id


def test_documents_are_taken_once_and_again_after_a_restart(store):
    tenant = add_tenant(store, "one")
    row = new_document(tenant.id, "a.txt", b"text", ParsedDocument("txt", "text"))
    document, _ = store.add_document(row, most=10)
    assert store.take_document().id == document.id
    assert store.take_document() is None
    store.resume()
    assert store.take_document().id == document.id


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("../../etc/passwd", "passwd"),
        ("C:\\files\\a.txt", "a.txt"),
        ("a\n[2] b.txt", "a[2] b.txt"),
        ("\x00", "document"),
        ("", "document"),
        ("x" * 300 + ".txt", "x" * 196 + ".txt"),
    ],
)
def test_names_are_one_short_line(name, clean):
    assert clean_name(name) == clean
