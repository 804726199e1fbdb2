"""The views of shared indexes: how they are made and removed, and what lies beside them."""

import json
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

from kvrag.chunk import Document
from kvrag.errors import IndexFormatError, ParameterError
from kvrag.ingest.index import Index
from kvrag.ingest.shared import log as opening
from kvrag.ingest.shared import manifest
from kvrag.ingest.shared.log import SharedLog
from kvrag.ingest.shared.manifest import File, Log
from kvrag.ingest.shared.place import read_place, remove_view
from kvrag.models.kv_model import KVModel
from kvrag.server.documents import uploads_path
from tests.ingest.conftest import Machine, MakeIndex
from tests.ingest.test_shared import page, sources
from tests.support.waiting import wait_until


def test_uploads_beside_a_view_stay(
    machine: Machine, folder_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = machine("one", folder_url, context="none")
    upload = uploads_path(index.path) / "contract.txt"
    upload.parent.mkdir()
    upload.write_text("The only copy of the contract. " * 100)
    index.close()
    monkeypatch.setenv("KVRAG_VIEWS_BYTES", "1kB")
    machine("one", f"{folder_url}-of-others", context="none").close()
    machine("one", f"{folder_url}-of-others")
    assert not index.path.exists()
    assert upload.exists()


def test_a_view_that_is_being_made_stays(
    machine: Machine, folder_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = machine("one", folder_url, context="none")
    index.add([page(0)])
    machine("other", f"{folder_url}-of-others", context="none").close()
    build = manifest.build

    def slowly(folder: Path, *args: Any) -> None:
        monkeypatch.setattr(manifest, "build", build)
        build(folder, *args)
        with monkeypatch.context() as beside:
            beside.setenv("KVRAG_VIEWS_BYTES", "1B")
            machine("other", f"{folder_url}-of-others")

    monkeypatch.setattr(manifest, "build", slowly)
    assert sources(machine("other", folder_url)) == {"d0"}


def test_a_view_that_is_removed_while_it_is_opened_is_made_again(
    machine: Machine, folder_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = machine("one", folder_url, context="none")
    index.add([page(0)])
    index.close()
    read = opening._config

    def removed(*args: Any) -> Any:
        config = read(*args)
        assert remove_view(index.path)  # by a process that makes room
        return config

    monkeypatch.setattr(opening, "_config", removed)
    assert sources(machine("one", folder_url)) == {"d0"}


def test_a_manifest_that_no_reader_would_take_is_not_written(
    machine: Machine, folder_url: str
) -> None:
    machine("one", folder_url, context="none")
    log = Log(read_place(folder_url).bucket("log"))
    first = log.read(0)
    with pytest.raises(IndexFormatError, match="a file in it is named 'x'"):
        log.create(first.follow(None, config=File("x", first.config.parts)))
    assert log.versions() == [0]


def test_what_a_killed_process_left_in_a_view_goes(machine: Machine, folder_url: str) -> None:
    index = machine("one", folder_url, context="none")
    copy, file = index.path / ".killed.tmp", index.path / ".index.json.killed.tmp"
    copy.mkdir()
    (copy / "catalog.sqlite").write_bytes(bytes(1000))
    file.touch()
    machine("one", folder_url).close()
    assert copy.exists()
    assert file.exists()  # another process that has the view open may be using them
    index.close()
    machine("one", folder_url)
    assert not copy.exists()
    assert not file.exists()


def test_the_first_version_has_the_profile_that_it_names(
    machine: Machine, folder_url: str, make_index: MakeIndex
) -> None:
    local = make_index(context="none", codec="cachegen")
    texts = [" ".join(f"word{number * one % 17}" for one in range(60)) for number in range(12)]
    local.add([Document(f"d{number}", text) for number, text in enumerate(texts)])
    profile = local._storage.profiles.get(local.config.profile)
    machine("one", folder_url, context="none", codec="cachegen", profile=profile)
    first = Path(folder_url.removeprefix("file://")) / "log" / "000000000000.json"
    assert [one["name"] for one in json.loads(first.read_bytes())["profiles"]] == [profile.hash]
    other = machine("other", folder_url)
    assert other._storage.profiles.get(profile.hash).content == profile.content
    other.add([page(0)])
    assert other.upkeep.verify().ok


def test_two_create_an_index_at_once(
    machine: Machine, folder_url: str, model: KVModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, lock_path = opening.make_index, opening.lock_path
    came, errors = threading.Barrier(2, timeout=30), []

    def create() -> None:
        try:
            Index.create(folder_url, model=model, embedding="hashing")
        except ParameterError as error:
            errors.append(str(error))

    second = threading.Thread(target=create)

    def slowly(*args: Any) -> Any:
        second.start()
        came.wait()
        return make(*args)

    def about_to_wait(view: Path) -> Path:
        if threading.current_thread() is second:
            came.wait()
        return lock_path(view)

    monkeypatch.setattr(opening, "make_index", slowly)
    monkeypatch.setattr(opening, "lock_path", about_to_wait)
    machine("one", folder_url, context="none")
    second.join()
    assert len(errors) == 1
    assert "there is an index at" in errors[0]


def test_following_goes_on_after_an_error_of_the_system(
    machine: Machine, folder_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = machine("writer", folder_url, context="none")
    reader = machine("reader", folder_url)
    failed = threading.Event()
    refresh = SharedLog.refresh

    def full(log: SharedLog) -> int:
        if failed.is_set():
            return refresh(log)
        failed.set()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SharedLog, "refresh", full)
    reader.follow(0.02)
    assert failed.wait(30)
    writer.add([page(0)])
    wait_until(lambda: sources(reader))
    assert sources(reader) == {"d0"}


def test_adapters_are_pickled_with_the_url(machine: Machine, folder_url: str) -> None:
    pytest.importorskip("langchain_core")
    pytest.importorskip("llama_index.core")
    from kvrag.llms.langchain import ChatKVRag
    from kvrag.retrievers.langchain import KVRagRetriever, KVRagVectorStore
    from kvrag.retrievers.llamaindex import KVRagRetriever as LlamaIndexRetriever

    index = machine("one", folder_url, context="none")
    index.add([page(0)])
    store = pickle.loads(pickle.dumps(KVRagVectorStore(index)))
    with store.index as opened:
        assert opened.url == folder_url
        assert store.similarity_search("keeper", k=1)
        assert pickle.loads(pickle.dumps(KVRagRetriever(index=index))).invoke("keeper")
        assert pickle.loads(pickle.dumps(LlamaIndexRetriever(index))).retrieve("keeper")
        assert pickle.loads(pickle.dumps(ChatKVRag(index=index))).index == folder_url
