"""Indexes whose KV is kept elsewhere: other folders, tiers, Redis, several tenants."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvrag.chunk import Document
from kvrag.engine.engine import KVEngine
from kvrag.errors import ParameterError, RecordError, StoreError
from kvrag.fusion.slices import MISS_DAMAGED, MISS_UNREADABLE
from kvrag.ingest.index import Index
from kvrag.models.kv_model import KVModel
from kvrag.store.file import FileStore
from kvrag.store.registry import REMOTE
from tests.ingest.conftest import MakeIndex
from tests.store.test_registered import LAKE
from tests.support import folders
from tests.support.distributions import installed
from tests.support.models import HEAD
from tests.support.servers import PASSWORD, RedisServer
from tests.support.waiting import wait_until

TEXTS = [
    f"{name} of Varn keeps the {thing}. {name} has done so for {years} years, in the old tower "
    "by the harbour, and tells whoever asks about it."
    for name, thing, years in (("Ines", "ledger", 12), ("Tomas", "clock", 7), ("Mara", "boats", 3))
]
PROMPT = HEAD + "\n\n".join([*TEXTS, "Question: who keeps the clock?\nAnswer:"])


def documents() -> list[Document]:
    return [Document(f"doc-{number}", text) for number, text in enumerate(TEXTS)]


@pytest.fixture
def filled(make_index: MakeIndex, tmp_path: Path) -> Callable[..., Index]:
    def fill(url: str, name: str = "index", **settings: object) -> Index:
        index = make_index(name, store=url, chunk_tokens=128, **settings)
        index.add(documents())
        return index

    return fill


@pytest.fixture
def redis_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisServer]:
    monkeypatch.setenv("KVRAG_REDIS_PASSWORD", PASSWORD)
    folder = tmp_path / "redis"
    folder.mkdir()
    server = RedisServer(folder)
    yield server
    server.kill()


def answers(index: Index) -> tuple[str, dict[str, int]]:
    """The answer at ratio 1, which equals full prefill's whatever the store does; and misses."""
    answer = KVEngine(index, max_tokens=6).generate(PROMPT, ratio=1.0)
    return answer.text, dict(answer.report.misses)


def test_tiers_before_an_index_at_query_time(
    filled: Callable[..., Index], tmp_path: Path, model: KVModel
) -> None:
    home = f"file:{tmp_path / 'home'}"
    index = filled(home)
    expected = answers(index)
    index.close()
    url = f"tiered:memory:?limit=50MB|file:{tmp_path / 'near'}?limit=50MB|{home}"
    with Index.open(index.path, model=model, store=url) as near:
        assert answers(near) == expected
        assert answers(near) == expected
        memory, _, _ = near.store.counts()
        assert memory.hits == 3
        assert near.pin(["doc-0", "unknown"]) == 1
    assert len(list(FileStore(tmp_path / "near").keys())) == 3


def test_a_damaged_copy_is_replaced_from_home(
    filled: Callable[..., Index], tmp_path: Path, model: KVModel
) -> None:
    home = f"file:{tmp_path / 'home'}"
    index = filled(home)
    expected = answers(index)
    index.close()
    near = tmp_path / "near"
    url = f"tiered:file:{near}|{home}"
    for text in ("whole", "damaged"):
        with Index.open(index.path, model=model, store=url) as opened:
            if text == "damaged":
                # At ratio 1 only the first chunk's record is read: that chunk is exact.
                for key in list(opened.store.keys()):
                    folders.damage(near, key, -100)
                assert answers(opened) == (expected[0], {MISS_DAMAGED: 1})
                assert opened.store.counts()[0].misses["damaged"] == 1
            assert answers(opened) == expected


def test_gc_leaves_alone_what_others_keep(filled: Callable[..., Index], tmp_path: Path) -> None:
    url = f"file:{tmp_path / 'shared'}"
    one = filled(url, "one", tenant_salt=b"one")
    other = filled(url, "other", tenant_salt=b"other")
    assert len(list(one.store.keys())) == 6
    assert one.stats().num_records == 3
    one.delete(sources=["doc-0"])
    assert one.upkeep.gc().num_records == 0
    assert other.upkeep.verify().ok
    assert one.upkeep.gc(delete_shared=True).num_records == 4
    assert one.upkeep.verify().ok
    assert not other.upkeep.verify().ok


def test_a_tenant_cannot_name_anothers_chunks(
    filled: Callable[..., Index], make_index: MakeIndex, tmp_path: Path
) -> None:
    url = f"file:{tmp_path / 'shared'}"
    mine = filled(url, "mine", tenant_salt=b"mine" * 8)
    theirs = make_index("theirs", store=url, tenant_salt=b"theirs" * 8)
    had = [hit.chunk for hit in mine.search("Varn", 3)]
    for chunk in had:
        assert mine.store.contains(mine.key_of(chunk))
        assert not theirs.store.contains(theirs.key_of(chunk))
        assert theirs.store.open(theirs.key_of(chunk)) is None
        assert mine.key_of(chunk) != theirs.key_of(chunk)


def test_an_index_in_a_folder_that_no_url_can_name(make_index: MakeIndex, model: KVModel) -> None:
    index = make_index("who?key=1/index")
    index.add(Document("a", "Ines keeps the harbour ledger of Varn."))
    index.close()
    with Index.open(index.path, model=model) as again:
        assert again.upkeep.verify().num_records == 1


def test_a_limit_below_one_chunk(make_index: MakeIndex, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"holds no chunk of 64 tokens.*raise its limit"):
        make_index(store=f"file:{tmp_path / 'kv'}?limit=10kB")


def test_a_folder_that_cannot_be_written_is_refused_before_there_is_an_index(
    make_index: MakeIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "place"
    for name, answer, message in (
        ("statvfs", SimpleNamespace(f_flag=os.ST_RDONLY), "mounted read-only"),
        ("access", False, "permission is missing"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, lambda *_, answer=answer: answer)
            with pytest.raises(StoreError, match=message):
                make_index(store=f"file:{place}/kv")
    place.write_text("x")
    with pytest.raises(StoreError, match="a file is where a folder should be"):
        make_index(store=f"file:{place}/kv")
    assert not (tmp_path / "index").exists()


def test_a_store_that_refuses_says_so_when_it_is_opened(
    make_index: MakeIndex,
    tmp_path: Path,
    redis_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ParameterError, match="a store is file:PATH"):
        make_index("bad", store="nowhere")
    monkeypatch.setenv("KVRAG_REDIS_PASSWORD", "wrong")
    with pytest.raises(StoreError, match="refuses the password"):
        make_index("worse", store=redis_server.url)
    assert not (tmp_path / "worse").exists()


@pytest.mark.slow
def test_redis_killed_and_started_again_under_32_queries(
    filled: Callable[..., Index], redis_server: RedisServer, model: KVModel
) -> None:
    index = filled(f"{redis_server.url}?timeout=1")
    assert PASSWORD not in (index.path / "index.json").read_text()
    expected, misses = answers(index)
    assert misses == {}
    wrong: list[object] = []
    seen: set[str] = set()
    num_done = [0]
    stop = threading.Event()
    # Each query reads the store, instead of taking an earlier one's KV.
    engine = KVEngine(index, max_tokens=6, session_bytes=0)

    def work() -> None:
        while not stop.is_set():
            try:
                answer = engine.generate(PROMPT, ratio=1.0)
            except Exception as error:
                wrong.append(error)
                return
            num_done[0] += 1
            seen.update(answer.report.misses)
            if answer.text != expected:
                wrong.append(answer.text)

    threads = [threading.Thread(target=work) for _ in range(32)]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    redis_server.kill()
    time.sleep(2.0)
    redis_server.start()
    time.sleep(2.0)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert num_done[0] > 32
    assert seen == {MISS_UNREADABLE}
    wait_until(lambda: answers(index) == (expected, {}))
    redis_server.kill()
    index.close()
    with Index.open(index.path, model=model) as opened:  # not there at all: no error either
        assert answers(opened) == (expected, {MISS_UNREADABLE: 3})
        with pytest.raises(StoreError, match="not answer"):
            opened.add([Document("more", "One more text about Varn.")])


def test_a_record_of_another_format_version(filled: Callable[..., Index], tmp_path: Path) -> None:
    index = filled(f"file:{tmp_path / 'kv'}")
    expected, _ = answers(index)
    key = min(index.store.keys())
    record = bytearray(folders.peek(tmp_path / "kv", key))
    record[8] = 9
    index.store.replace(key, bytes(record))
    with pytest.raises(RecordError, match="format version: expected 2, found 9"):
        index.coding.open(key, index.store.open(key), index.config.spec)  # type: ignore[arg-type]
    assert answers(index) == (expected, {MISS_DAMAGED: 1})


def test_another_distributions_store_that_raises_errors_of_the_system(
    filled: Callable[..., Index], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ConnectionError("the lake has dried up")

    monkeypatch.setattr("kvrag.store.remote.FIRST_PAUSE_SECONDS", 1e-6)
    with installed(tmp_path, "lake_kv", LAKE, {"kvrag.stores: lake": "lake_kv:LakeStore"}):
        index = filled("lake://north")
        expected = answers(index)
        assert expected[1] == {}
        more = [Document("more", "Lena of Varn paints the old harbour wall in blue.")]
        for method in ("contains", "put"):
            with monkeypatch.context() as broken:
                broken.setattr(REMOTE["lake"], method, fail)
                with pytest.raises(StoreError, match="ConnectionError: the lake has dried up"):
                    index.add(more)
        assert index.stats().num_chunks == 3
        monkeypatch.setattr(REMOTE["lake"], "open", fail)
        assert answers(index) == (expected[0], {MISS_UNREADABLE: 3})
        index.close()
