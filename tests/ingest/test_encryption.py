"""An index with a key: nothing of the documents is readable without it."""

import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

from kvrag.errors import IndexFormatError, IndexMismatchError, ParameterError
from kvrag.ingest.index import Index
from kvrag.models.kv_model import KVModel
from kvrag.store.memory import MemoryStore
from kvrag.store.registry import open_store
from kvrag.store.tiered import TieredStore
from tests.ingest.conftest import MakeIndex
from tests.support.folders import key_file

pytest.importorskip("sqlcipher3")

WORDS = (b"harbour", b"Tomas", b"ledger.txt", b"quick brown", b"heading", b"northern")


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return key_file(tmp_path / "tenant.key", "ab")


def readable(folder: Path) -> set[bytes]:
    """Return the words of the documents that stand in an index's files."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {word for word in WORDS for path in files if word in path.read_bytes()}


@pytest.fixture
def encrypted(make_index: MakeIndex, docs: Path, key: Path, tmp_path: Path) -> Index:
    index = make_index(store=f"file:{tmp_path / 'kv'}?key_file={key}")
    index.add(docs)
    index.search("ledger", 3)
    return index


def test_nothing_of_the_documents_is_readable(
    encrypted: Index, model: KVModel, docs: Path, make_index: MakeIndex
) -> None:
    plain = make_index("plain")
    plain.add(docs)
    plain.close()
    assert {b"harbour", b"Tomas", b"ledger.txt", b"quick brown"} <= readable(plain.path)
    assert not readable(encrypted.path)  # while it is open, its log included
    encrypted.close()
    assert not readable(encrypted.path)
    assert not (encrypted.path / "vectors.cache").exists()
    with pytest.raises(sqlite3.DatabaseError, match="not a database"):
        sqlite3.connect(encrypted.path / "catalog.sqlite").execute("SELECT * FROM chunks")
    with Index.open(encrypted.path, model=model) as again:
        assert again.upkeep.verify().ok
        assert "ledger" in again.search("harbour ledger", 1)[0].chunk.text
        (docs / "ledger.txt").write_text("A new ledger.")
        assert len(again.add(docs).changed) == 1
        assert again.upkeep.verify().ok


def test_a_missing_or_wrong_key_is_told_from_damage(
    encrypted: Index, model: KVModel, key: Path, tmp_path: Path
) -> None:
    encrypted.close()
    with pytest.raises(IndexMismatchError, match=r"is encrypted, and no key was given: .*key_file"):
        Index.open(encrypted.path, store=f"file:{tmp_path / 'kv'}")
    key_file(key, "cd")
    with pytest.raises(IndexMismatchError, match=r"wrong key: .* Nothing is damaged"):
        Index.open(encrypted.path)
    key_file(key, "ab")
    path = encrypted.path / "catalog.sqlite"
    content = bytearray(path.read_bytes())
    path.write_bytes(b"x" * 5000)
    with pytest.raises(IndexFormatError, match="damaged"):
        Index.open(encrypted.path)
    content[4096 * 3 + 100] ^= 1
    path.write_bytes(content)
    with Index.open(encrypted.path, model=model) as index:
        index.search("ledger", 3)
        assert not index.upkeep.verify().ok
        index.upkeep.verify(repair=True)
        assert index.upkeep.verify().ok


def test_an_empty_catalog_is_made_again_encrypted_as_it_was(
    encrypted: Index, model: KVModel, docs: Path
) -> None:
    encrypted.close()
    (encrypted.path / "catalog.sqlite").write_bytes(b"")
    with Index.open(encrypted.path, model=model, mend=True) as again:
        assert again.add(docs).ok
        assert again.upkeep.verify().ok
    assert not readable(encrypted.path)


def test_keys_of_one_store_give_their_tenants_salts_of_their_own(
    encrypted: Index, make_index: MakeIndex, docs: Path, tmp_path: Path
) -> None:
    key = key_file(tmp_path / "other.key", "cd")
    other = make_index("other", store=f"file:{tmp_path / 'kv'}?key_file={key}")
    other.add(docs)
    for index in (encrypted, other):
        assert index.upkeep.verify().ok


def test_a_catalog_that_is_encrypted_or_not_against_index_json_is_refused(
    encrypted: Index, make_index: MakeIndex, model: KVModel, docs: Path
) -> None:
    plain = make_index("plain")
    plain.add(docs)
    for one in (encrypted, plain):
        one.close()
    catalogs = {one: (one.path / "catalog.sqlite").read_bytes() for one in (encrypted, plain)}
    for one, other, said in (
        (encrypted, plain, r"is not encrypted, and index\.json beside it says that the index is:"),
        (plain, encrypted, r"is encrypted, and index\.json beside it says that the index is not:"),
    ):
        path = one.path / "catalog.sqlite"
        path.write_bytes(catalogs[other])
        for mend in (False, True):
            with pytest.raises(IndexMismatchError, match=said):
                Index.open(one.path, model=model, mend=mend)
        assert path.read_bytes() == catalogs[other]
        path.write_bytes(catalogs[one])
        with Index.open(one.path, model=model) as again:
            assert again.upkeep.verify().ok


def test_a_key_for_a_plain_index_is_refused(
    make_index: MakeIndex, model: KVModel, docs: Path, key: Path, tmp_path: Path
) -> None:
    index = make_index(store=f"file:{tmp_path / 'kv'}")
    index.add(docs)
    index.search("ledger", 1)
    assert readable(index.path)
    url = f"file:{tmp_path / 'kv'}?key_file={key}"
    said = r"is not encrypted, and .* has a key: .*Leave the key out, or .*--move"
    with closing(open_store(url)) as store, pytest.raises(IndexMismatchError, match=said):
        index.store = store
    index.close()
    for one in (url, f"tiered:memory:|{url}"):
        with pytest.raises(IndexMismatchError, match=said):
            Index.open(index.path, model=model, store=one)
    with Index.open(index.path, model=model) as again:
        again.search("ledger", 1)  # it has the index of words open
        again.upkeep.move(url)
        assert not readable(index.path)
        assert again.upkeep.verify().ok
    assert not readable(index.path)


def test_a_store_without_the_key_is_refused(
    encrypted: Index, docs: Path, key: Path, tmp_path: Path
) -> None:
    own = encrypted.store
    with pytest.raises(IndexMismatchError, match="is encrypted, and no key was given"):
        encrypted.store = MemoryStore()
    other = key_file(tmp_path / "other.key", "cd")
    with (
        closing(open_store(f"file:{tmp_path / 'kv'}?key_file={other}")) as store,
        pytest.raises(IndexMismatchError, match="wrong key"),
    ):
        encrypted.store = store
    assert encrypted.store is own
    # Measurements read through one tier at a time.
    memory = MemoryStore()
    encrypted.store = TieredStore([memory, own])
    tiers = encrypted.store
    encrypted.store = memory
    encrypted.store = tiers
    assert encrypted.upkeep.verify().ok


def test_without_the_library_it_is_refused(
    encrypted: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    encrypted.close()
    monkeypatch.setitem(sys.modules, "sqlcipher3.dbapi2", None)
    with pytest.raises(ParameterError, match=r"sqlcipher3.*pip install 'kvrag\[encryption\]'"):
        Index.open(encrypted.path)


@pytest.mark.parametrize("other", ["", "cd"])
def test_a_move_takes_the_catalog_along(
    encrypted: Index, model: KVModel, tmp_path: Path, other: str
) -> None:
    url = f"file:{tmp_path / 'elsewhere'}"
    if other:
        url += f"?key_file={key_file(tmp_path / 'other.key', other)}"
    encrypted.upkeep.move(url)
    assert encrypted.search("ledger", 1)
    encrypted.close()
    assert bool(readable(encrypted.path)) == (not other)
    with Index.open(encrypted.path, model=model) as index:
        assert index.upkeep.verify().ok


def test_a_move_that_was_killed_is_completed(
    encrypted: Index, model: KVModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvrag.ingest import catalogfile

    def die(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(catalogfile, "put_in_place", die)
        url = f"file:{tmp_path / 'elsewhere'}?key_file={key_file(tmp_path / 'other.key', 'cd')}"
        with pytest.raises(KeyboardInterrupt):
            encrypted.upkeep.move(url)
    with Index.open(encrypted.path, model=model) as index:
        assert index.upkeep.verify().ok
        assert len(index.search("ledger", 3)) == 3
