from __future__ import annotations

from pathlib import Path

import pytest

from kvrag.errors import ParameterError, StoreError
from kvrag.store.file import FileStore
from kvrag.store.memory import MemoryStore
from kvrag.store.registry import open_store
from tests.contracts.store_contract import key_number


def test_a_folder(tmp_path: Path) -> None:
    for url in (f"file:{tmp_path}", f"file://{tmp_path}", f"file:////{tmp_path}"):
        store = open_store(url)
        assert isinstance(store, FileStore)
        assert store.url == f"file:{tmp_path}"
    store.put(key_number(0), b"record")
    assert open_store(store.url).contains(key_number(0))


def test_a_relative_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store("file:a b/c%20d")
    monkeypatch.chdir("/")
    store.put(key_number(0), b"record")
    assert store.url == f"file:{tmp_path}/a b/c%20d"
    assert len(list((tmp_path / "a b" / "c%20d").rglob("*.seg"))) == 1


def test_memory() -> None:
    store = open_store("memory:")
    assert isinstance(store, MemoryStore)
    assert store.url == "memory:"
    store.put(key_number(0), b"record")
    assert not open_store("memory:").contains(key_number(0))


@pytest.mark.parametrize(
    "url",
    ["", "file", "file:", "file://host/x", "memory", "memory:x", "/tmp/x", "s3://bucket", ":"],
)
def test_other_urls(url: str) -> None:
    with pytest.raises(ParameterError, match="file:PATH, file:///PATH or memory:; found"):
        open_store(url)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="not a folder; a file is where a folder should be"):
        open_store(f"file:{tmp_path / 'file'}")
