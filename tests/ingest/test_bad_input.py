"""What can be wrong with files, folders, disks and indexes: clear messages, nothing lost."""

import contextlib
import copy
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvrag.chunk import Document
from kvrag.errors import (
    IndexFormatError,
    IndexLockedError,
    IndexMismatchError,
    IndexNotFoundError,
    ModelLoadError,
    ParameterError,
    StoreError,
)
from kvrag.ingest.contexts import filler_ids
from kvrag.ingest.index import Index
from kvrag.models.kv_model import KVModel
from kvrag.regularfile import checksum
from kvrag.store.file import FileStore
from tests.ingest.conftest import MakeIndex
from tests.support.models import make_model, make_tokenizer
from tests.support.rag import save_model

# -- files -----------------------------------------------------------------------------------


def test_files_that_cannot_be_read_are_reported_and_the_others_ingested(
    index: Index, docs: Path
) -> None:
    (docs / "latin.txt").write_bytes("Zürich".encode("latin-1"))
    (docs / "broken.pdf").write_bytes(b"%PDF-1.7 nothing")
    report = index.add(docs)
    assert len(report.added) == 3
    assert not report.ok
    pdf, text = (failed.reason for failed in report.failed)
    assert "broken.pdf: a damaged PDF" in pdf
    assert "latin.txt: not valid utf-8" in text


def test_a_file_that_became_unreadable_keeps_its_last_version(index: Index, docs: Path) -> None:
    index.add(docs)
    (docs / "ledger.txt").write_bytes(b"\xff\xfe\xff")
    report = index.add(docs)
    (failed,) = report.failed
    assert failed.reason.endswith("; the version indexed before stays")
    assert not report.removed
    assert "ledger" in index.search("harbour ledger", 1)[0].chunk.text
    (docs / "ledger.txt").write_text("A new ledger.")
    assert len(index.add(docs).changed) == 1


def test_documents_without_text_are_reported(index: Index) -> None:
    report = index.add([Document("a", "\n "), Document("b", "half \ud800"), Document("c", "text")])
    assert report.added == ("c",)
    assert [failed.source for failed in report.failed] == ["a", "b"]
    assert not any("stays" in failed.reason for failed in report.failed)
    again = index.add([Document("c", " "), Document("d", "half \ud800")])
    assert [
        failed.reason.endswith("the version indexed before stays") for failed in again.failed
    ] == [True, False]
    assert index.search("text", 1)[0].chunk.source == "c"


def test_names_that_are_no_unicode_are_reported_and_the_others_ingested(
    index: Index, docs: Path
) -> None:
    name = os.fsdecode(b"caf\xe9.txt")
    try:
        (docs / name).write_text("Coffee in Varn.")
    except OSError:
        pytest.skip("the file system takes no such names")
    report = index.add([docs, docs / name, Document("a\udce9", "text"), Document("b", "text")])
    assert len(report.added) == 4
    assert sorted(Path(failed.source).name for failed in report.failed) == [
        "a\\udce9",
        "caf\\udce9.txt",
        "caf\\udce9.txt",
    ]
    assert all("not valid UTF-8; rename it" in one.reason for one in report.failed)
    str(report.to_dict()).encode()
    assert index.delete(sources=["a\udce9", "b"], chunk_ids=["\udce9"]) == 1
    folder = docs / os.fsdecode(b"\xe9")
    folder.mkdir()
    (folder / "x.txt").write_text("text")
    assert index.add(folder).failed[0].source.endswith("\\udce9")
    assert index.add(docs).failed[-1].source.endswith("\\udce9/x.txt")


def test_a_file_without_text_any_more_leaves_the_index(index: Index, docs: Path) -> None:
    rows = docs / "rows.jsonl"
    rows.write_text('{"text": "one"}\n{"text": "two"}')
    index.add(docs)
    (docs / "ledger.txt").write_text("")
    (docs / "clock.md").write_text(" \n")
    rows.write_text('{"text": ""}')
    foretold = index.add(docs, dry_run=True)
    assert len(index.documents()) == 5
    report = index.add(docs)
    assert report.removed == foretold.removed
    assert {Path(source).name for source in report.removed} == {
        "ledger.txt",
        "clock.md",
        "rows.jsonl#1",
        "rows.jsonl#2",
    }
    assert len(report.failed) == 3
    assert not any("stays" in failed.reason for failed in report.failed)
    assert [Path(row.source).name for row in index.documents()] == ["fox.txt"]
    assert not index.add(docs).removed
    (docs / "ledger.txt").write_text("Ines is back.")
    assert len(index.add(docs).added) == 1


# -- settings --------------------------------------------------------------------------------


def test_chunks_longer_than_the_context_are_refused(make_index: MakeIndex) -> None:
    model = KVModel.load(
        make_model("llama", max_position_embeddings=100), tokenizer=make_tokenizer()
    )
    with pytest.raises(ParameterError, match=r"exceeds the model's context of 100.*at most 91"):
        make_index("a", model=model, chunk_tokens=100)
    index = make_index("b", model=model, chunk_tokens=91)
    index.add(Document("d", "the keeper of the northern light " * 40))
    assert max(len(hit.chunk.token_ids) for hit in index.search("light", 99)) <= 91


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chunk_tokens": 4}, "from 16 to"),
        ({"compression": "drop:0.5"}, "Compression by drop, anchors and kvzip left kvrag"),
        ({"control_tokens": "ignore"}, "keep, neutralise, refuse"),
        ({"device": 5}, "device 5: expected a name"),
        ({"tenant_salt": b""}, "1 to 64 bytes"),
        ({"tenant_salt": b"x" * 65}, "1 to 64 bytes"),
        ({"codec": "zip"}, "no codec 'zip'"),
        ({"embedding": "zip"}, "no embedding 'zip'"),
        ({"device": "abacus"}, "device 'abacus' cannot be used"),
        ({"device": "cuda:99"}, "device 'cuda:99' cannot be used"),
        ({"device": "meta"}, "device 'meta' cannot be used"),
        ({"dtype": "float16"}, "float16 was asked for, but the model given is loaded in float32"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_made(
    make_index: MakeIndex, tmp_path: Path, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ParameterError, match=message):
        make_index(**settings)
    assert not (tmp_path / "index").exists()


# -- missing and foreign indexes -------------------------------------------------------------


def test_a_missing_index(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for name in ("absent", "empty", "file"):
        with pytest.raises(IndexNotFoundError, match=f"no index in .*{name}.*kvrag ingest"):
            Index.open(tmp_path / name)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("{", "", "not JSON"),
        ('"kvrag index"', '"other"', "'kind' is not"),
        ('"format_version": 5', '"format_version": 1', "version 5 expected, found 1"),
        ('"format_version": 5', '"format_version": 6', r"newer kvrag.*found 6\. Upgrade kvrag"),
        ('"profile": ""', '"profile": "../x"', "'profile' is '../x'"),
        ('"chunk_tokens": 64', '"chunk_tokens": "64"', "'chunk_tokens' is '64'"),
        ('"context": "none"', '"context": "later"', "'context' is 'later'"),
        ('"context_tokens": 0', '"context_tokens": -1', "'context_tokens' is -1"),
        ('"num_layers": 2', '"num_layers": -2', "'num_layers' is -2"),
        ('"compression": "none"', '"compression": "drop:0.5"', "'drop:0.5'. Compression by drop"),
        ('"float32"', '"float8"', "'dtype' is 'float8'"),
        ('"tenant_salt": "', '"tenant_salt": "zz', "'tenant_salt' is 'zz"),
        ('"num_layers": 2', '"num_layers": 3', r"index\.json was altered or damaged"),
        ('"prefix_ids": [', '"prefix_ids": [7, ', r"index\.json was altered or damaged"),
        ('"tenant_salt": "', '"tenant_salt": "00', r"index\.json was altered or damaged"),
        ('"checksum": "', '"checksum": "0', "Put back the file as it was"),
        ('"checksum"', '"other"', r"checksum is None"),
        ('"kind"', '"more": 1, "kind"', r"index\.json was altered or damaged"),
    ],
)
def test_a_foreign_index(index: Index, old: str, new: str, message: str) -> None:
    path = index.path / "index.json"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(IndexFormatError, match=message):
        Index.open(index.path)


@pytest.mark.parametrize(
    ("version", "message"),
    [(1, r"expected schema 3, found .* schema 1"), (4, r"newer kvrag.*Upgrade kvrag")],
)
def test_a_catalog_of_another_version_is_left_as_it_is(
    index: Index, docs: Path, version: int, message: str
) -> None:
    index.add(docs)
    index.close()
    path = index.path / "catalog.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    before = path.read_bytes()
    with pytest.raises(IndexFormatError, match=message):
        Index.open(index.path, mend=True)
    assert path.read_bytes() == before


def test_an_index_is_not_made_over_something_else(index: Index, docs: Path, model: KVModel) -> None:
    with pytest.raises(ParameterError, match="there is an index in"):
        Index.create(index.path, model=model, embedding="hashing")
    with pytest.raises(ParameterError, match="is not empty"):
        Index.create(docs, model=model, embedding="hashing")
    with pytest.raises(ParameterError, match="not a folder"):
        Index.create(docs / "ledger.txt", model=model, embedding="hashing")


def test_what_a_killed_create_left_is_replaced(tmp_path: Path, docs: Path, model: KVModel) -> None:
    folder = tmp_path / "index"
    folder.mkdir()
    (folder / "catalog.sqlite").write_bytes(b"half")
    (folder / "writer.lock").touch()
    with Index.create(folder, model=model, embedding="hashing") as index:
        assert index.add(docs).ok


# -- another model ---------------------------------------------------------------------------


def test_another_model_by_path_is_refused_when_it_is_loaded(tmp_path: Path, docs: Path) -> None:
    save_model(tmp_path / "one")
    save_model(tmp_path / "two", seed=1)
    Index.create(tmp_path / "i", model=tmp_path / "one", embedding="hashing").close()

    def refused(name: str | None, act: Callable[[Index], object], match: str) -> None:
        with Index.open(tmp_path / "i", model=name and tmp_path / name) as index:
            with pytest.raises((IndexMismatchError, ModelLoadError), match=match):
                act(index)
            assert index.stats().num_documents == 0

    refused("two", lambda index: index.add(docs), r"one.*two.*ingest into a new folder")
    tokenizer = copy.deepcopy(make_tokenizer())
    tokenizer.add_tokens(["<one-more>"])
    tokenizer.save_pretrained(tmp_path / "two")
    refused("two", lambda index: index.tokenizer, "with the tokenizer of")
    save_model(tmp_path / "one", seed=1)
    refused(None, lambda index: index.add(docs), r"reads more of them.*: ingest into a new folder")
    shutil.rmtree(tmp_path / "one")
    refused(None, lambda index: index.tokenizer, "one")


def test_a_model_made_in_memory_is_asked_for_again(index: Index, docs: Path) -> None:
    with Index.open(index.path) as opened, pytest.raises(ModelLoadError, match="pass it"):
        opened.add(docs)
    other = KVModel.load(
        make_model("llama", num_hidden_layers=2, seed=5), tokenizer=make_tokenizer()
    )
    with pytest.raises(IndexMismatchError, match=other.fingerprint):
        Index.open(index.path, model=other)


# -- disks and permissions -------------------------------------------------------------------


def test_too_small_a_disk_is_told_before_anything_is_written(
    index: Index, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10_000))
    with pytest.raises(StoreError, match=r"needs about .* MB in .*, and 0 MB are free"):
        index.add(docs)
    monkeypatch.undo()
    assert index.stats().num_records == 0
    assert index.add(docs).ok


def test_a_disk_that_fills_up_loses_nothing(
    index: Index, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.add(docs / "ledger.txt")
    put = FileStore.put
    full = StoreError("cannot write: No space left on device; the disk is full")
    outcomes = iter([None, full])

    def fill_up(self: FileStore, *record: object) -> None:
        if error := next(outcomes):
            raise error
        put(self, *record)

    with monkeypatch.context() as patch:
        patch.setattr(FileStore, "put", fill_up)
        with pytest.raises(StoreError, match="disk is full"):
            index.add(docs)
    assert index.stats().num_documents == 1
    assert index.upkeep.verify().ok
    report = index.add(docs)
    assert (len(report.added), report.num_records) == (2, 1)
    assert index.upkeep.verify().ok


def test_a_full_disk_under_the_catalog_loses_nothing(index: Index, docs: Path) -> None:
    index.add(docs)
    connection = index.catalog._connection
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    given = [Document(f"d{i}", f"{i} {word} " * 30) for i, word in enumerate(("light", "Varn"))]
    with pytest.raises(StoreError, match="full; free some space and ingest again"):
        index.add(given)
    assert index.stats().num_documents == 3
    assert index.upkeep.verify().ok
    connection.execute("PRAGMA max_page_count = 1000000")
    assert index.add(given).num_tokens_computed == 0  # the records were there already
    assert index.stats().num_documents == 5


@contextlib.contextmanager
def read_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make a folder refuse writing as the system would, which lets the superuser write."""
    system_open = os.open

    def refuse(path: object, flags: int, *args: object, **named: object) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR) and str(path).startswith(str(folder)):
            raise PermissionError(13, "Permission denied", str(path))
        return system_open(path, flags, *args, **named)  # type: ignore[call-overload]

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        yield


def test_a_read_only_index_answers_and_refuses_to_be_written(
    index: Index, docs: Path, model: KVModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.add(docs)
    index.close()
    with read_only(index.path, monkeypatch), Index.open(index.path, model=model) as opened:
        (hit, *_) = opened.search("clock", 1)
        assert opened.open_kv(hit.chunk.chunk_id) is not None
        assert opened.upkeep.verify().ok
        assert opened.add(docs, dry_run=True).unchanged
        for write in (
            lambda: opened.add(docs),
            opened.upkeep.gc,
            lambda: opened.delete(sources=["x"]),
        ):
            with pytest.raises(StoreError, match=r"cannot write to the index .*Permission denied"):
                write()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder nobody can write to")
def test_a_folder_that_cannot_be_made(model: KVModel) -> None:
    with pytest.raises(StoreError, match="cannot make the folder /proc/kvrag"):
        Index.create("/proc/kvrag", model=model, embedding="hashing")


# -- two at once -----------------------------------------------------------------------------


def test_another_process_holds_the_lock(index: Index, docs: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from kvrag.ingest.config import writer_lock\n"
        "with writer_lock(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", code, str(index.path)], stdin=pipe, stdout=pipe
    ) as holder:
        assert holder.stdout.readline() == b"held\n"
        repair = partial(index.upkeep.verify, repair=True)
        for write in (partial(index.add, docs), index.upkeep.gc, repair):
            with pytest.raises(IndexLockedError, match=f"written to by process {holder.pid};"):
                write()
        assert index.add(docs, dry_run=True).added
        holder.kill()
    assert index.add(docs).ok


def test_two_ingests_at_once_in_one_process(index: Index, docs: Path, model: KVModel) -> None:
    refused: list[object] = []
    with Index.open(index.path, model=model) as second:

        def try_the_second(_: object) -> None:
            with pytest.raises(IndexLockedError, match=f"by process {os.getpid()};"):
                refused.append(second.add(docs))
            refused.append(None)

        assert index.add(docs, on_progress=try_the_second).ok
        assert set(refused) == {None}
        assert len(second.add(docs).unchanged) == 3


# -- what older kvrag made, and files that changed unnoticed ---------------------------------------


def test_an_index_of_context_corpus_goes_on_with_the_filler(
    index: Index, model: KVModel, docs: Path
) -> None:
    index.close()
    path = index.path / "index.json"
    old = {"context": "corpus", "context_tokens": 8, "corpus_filler": "Read by the harbour."}
    values = json.loads(path.read_text()) | old
    path.write_text(json.dumps(values | {"checksum": checksum(values)}))
    with Index.open(index.path, model=model) as again:
        report = again.add(docs)
        assert (len(report.added), report.num_context_tokens) == (3, 8)
        chunks = again.get_chunks([hit.chunk.chunk_id for hit in again.search("ledger", 3)])
        assert {one.contexts for one in chunks} == {(filler_ids(model.tokenizer)[-8:], ())}
        assert again.upkeep.verify().ok


def change_unnoticed(path: Path, old: str, new: str) -> None:
    """Change a file's bytes, and set back its size and times."""
    status = path.stat()
    text = path.read_text().replace(old, new)
    path.write_text(text)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size


def test_a_file_changed_under_its_size_and_time_is_read_again(index: Index, docs: Path) -> None:
    path = docs / "ledger.txt"
    index.add(docs)
    time.sleep(0.1)
    index.add(docs)  # its state is old enough now to be believed
    state = index.catalog.documents.file(str(path))
    assert state.ctime_ns
    assert len(index.add(docs).unchanged) == 3
    change_unnoticed(path, "Ines", "Vera")
    assert index.add(docs).changed == (str(path),)
    assert "Vera" in index.search("ledger", 1)[0].chunk.text


def test_a_young_change_is_not_missed(index: Index, docs: Path) -> None:
    path = docs / "ledger.txt"
    for name in ("Vera", "Ines") * 2:
        path.write_text(f"{name} keeps the harbour ledger of Varn.")
        os.utime(path, ns=(10**18, 10**18))
        index.add(docs)
        assert name in index.search("ledger", 1)[0].chunk.text


@pytest.mark.parametrize("damage", ["missing", "empty", "foreign", "short"])
def test_a_catalog_that_cannot_be_opened_is_set_aside(
    index: Index, docs: Path, model: KVModel, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    index.add(docs)
    index.close()
    path = index.path / "catalog.sqlite"
    path.unlink()
    is_aside = damage in ("foreign", "short")
    if damage != "missing":
        path.write_bytes(b"x" * {"empty": 0, "foreign": 5000, "short": 10}[damage])
    said = "damaged" if is_aside else f"is {damage}: the index in .* has lost .*'kvrag ingest PATH"
    with pytest.raises(IndexFormatError, match=said):
        Index.open(index.path, model=model)
    with Index.open(index.path, model=model, mend=True) as again:
        verified = again.upkeep.verify(repair=True)
        assert not verified.ok
        assert verified.to_dict()["not_healed"] == (
            "all documents are lost; ingest all of them again",
        )
        what = "is set aside as catalog.sqlite.damaged" if is_aside else "was missing or empty"
        assert what in verified.catalog_problems[0]
        assert "verify --repair" not in caplog.text
        assert ("set aside" in caplog.text) == is_aside
        report = again.add(docs)
        assert "all documents were lost; ingest all the others again" in report.note
        assert not again.add(docs).note
        assert (len(report.added), report.num_records) == (3, 0)
        assert again.upkeep.verify().ok
    assert path.with_name("catalog.sqlite.damaged").exists() == (damage != "missing")


def test_a_second_catalog_set_aside_leaves_the_first(index: Index, model: KVModel) -> None:
    index.close()
    path = index.path / "catalog.sqlite"
    for content in (b"first", b"second"):
        path.write_bytes(content)
        Index.open(index.path, model=model, mend=True).close()
    assert path.with_name("catalog.sqlite.damaged").read_bytes() == b"first"
    assert path.with_name("catalog.sqlite.damaged.2").read_bytes() == b"second"


def test_force_parses_with_a_loader_that_is_new(index: Index, docs: Path) -> None:
    index.add(docs)
    loaders = {".txt": "tests.ingest.bad_loaders:shout"}
    assert not index.add(docs, loaders=loaders).changed
    report = index.add(docs, loaders=loaders, force=True)
    assert len(report.changed) == 2
    assert len(report.unchanged) == 1
