"""An index at a URL, which several machines share. A machine here is a folder of views."""

import json
import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvrag.chunk import Document
from kvrag.errors import (
    IndexFormatError,
    IndexMismatchError,
    IndexNotFoundError,
    ParameterError,
    StoreError,
)
from kvrag.ingest.index import Index
from kvrag.ingest.shared import log as logs
from kvrag.ingest.shared import manifest
from kvrag.ingest.shared.manifest import Log, Manifest
from kvrag.ingest.shared.place import read_place
from kvrag.regularfile import checksum
from tests.ingest.conftest import Machine
from tests.support.proxy import FaultyProxy
from tests.support.servers import S3Server, free_port
from tests.support.threads import together

BUCKET = "kvrag-shared"


def page(number: int) -> Document:
    text = f"Page {number}. The keeper of the northern light wrote the book. " * 3
    return Document(f"d{number}", text, {"number": number})


@pytest.fixture(params=["folder", "bucket"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield f"file://{tmp_path}/bucket/index"
        return
    server: S3Server = request.getfixturevalue("s3_server")
    request.getfixturevalue("s3_credentials")
    with server.bucket(BUCKET):
        yield f"s3://{BUCKET}/indexes/one?endpoint={server.endpoint}"


def sources(index: Index) -> set[str]:
    return {row.source for row in index.documents()}


def test_what_one_machine_writes_others_read(machine: Machine, url: str) -> None:
    one = machine("one", url, context="none")
    one.add([page(number) for number in range(5)])
    other = machine("other", url)
    assert sources(other) == sources(one) == {f"d{number}" for number in range(5)}
    assert other.catalog.version() == one.catalog.version()
    assert other.name == one.name == url.partition("?")[0].rpartition("/")[2]
    (hit,) = other.search("page 3", 1)
    assert hit.chunk.source == "d3"
    record = other.open_kv(hit.chunk.chunk_id)
    assert record is not None
    other.add([page(7)])
    assert "d7" not in sources(one)
    one.refresh()
    assert "d7" in sources(one)
    assert one.search("page 7", 1)[0].chunk.source == "d7"
    assert one.upkeep.verify().ok
    assert other.upkeep.verify().ok


def test_documents_and_chunks_go_everywhere(machine: Machine, url: str) -> None:
    one = machine("one", url, context="document:32")
    long = Document("long", " ".join(f"Word {number} of a longer text." for number in range(60)))
    one.add([page(0), page(1), long])
    other = machine("other", url)
    assert one.delete(sources=["d0"]) == len(other.catalog.chunk_ids_of("d0"))
    ids = other.catalog.chunk_ids_of("long")
    assert len(ids) > 2
    assert other.delete(chunk_ids=[ids[0], "none of them"]) == 1
    one.refresh()
    assert sources(one) == {"d1", "long"}
    assert one.catalog.chunk_ids_of("long") == ids[1:]
    assert one.catalog.version() == other.catalog.version()
    assert not one.upkeep.verify().catalog_problems


def test_writers_at_once_lose_nothing(machine: Machine, url: str) -> None:
    machine("creator", url, context="none")
    writers = [machine(f"machine{number}", url) for number in range(3)]

    def write(index: Index, first: int) -> None:
        for number in range(first, first + 6):
            index.add([page(number)])

    together(*(partial(write, index, 10 * number) for number, index in enumerate(writers)))
    expected = {f"d{10 * writer + number}" for writer in range(3) for number in range(6)}
    versions = {(index.refresh(), index.catalog.version()) for index in writers}
    assert len(versions) == 1
    assert versions.pop()[0] == 18
    for index in writers:
        assert sources(index) == expected
        assert index.upkeep.verify().ok


def test_a_reader_goes_through_a_compaction_and_a_gc(machine: Machine, url: str) -> None:
    writer = machine("writer", url, context="none")
    writer.add([page(number) for number in range(4)])
    reader = machine("reader", url)
    (hit,) = reader.search("page 2", 1)
    writer.delete(sources=["d2"])
    first = writer.upkeep.gc(grace_seconds=3600)  # compacts, and only lists the garbage
    assert (first.num_records, first.num_temporary_files) == (0, 0)
    # The reader's version holds d2; its record is still there.
    record = reader.open_kv(hit.chunk.chunk_id)
    assert record is not None
    reader.refresh()
    assert sources(reader) == {"d0", "d1", "d3"}
    writer.add([page(9)])
    report = writer.upkeep.gc(grace_seconds=0)
    assert report.num_records == 1
    assert report.num_temporary_files > 0
    # One that slept through both, and one that comes now.
    reader.refresh()
    newcomer = machine("newcomer", url)
    for index in (reader, newcomer, writer):
        assert sources(index) == {"d0", "d1", "d3", "d9"}
        assert index.catalog.version() == writer.catalog.version()
        assert index.upkeep.verify().ok


def test_the_time_of_grace_begins_again_with_each_use(machine: Machine, folder_url: str) -> None:
    index = machine("one", folder_url, context="none")
    index.add([page(0), page(1)])
    index.delete(sources=["d1"])
    grace = 3600.0
    index.upkeep.gc(grace_seconds=grace)
    listed = _log_folder(folder_url) / "garbage.json"

    def let_time_pass() -> None:
        times = json.loads(listed.read_text())
        earlier = {name: value - 2 * grace for name, value in times.items() if "record" in name}
        assert earlier
        listed.write_text(json.dumps({**times, **earlier}))

    let_time_pass()
    index.add([page(1)])
    reader = machine("reader", folder_url)
    (hit,) = reader.search("page 1", 1)
    log = index._storage.log
    for number in range(2, 4):  # whole catalogs take the place of what put the record again
        index.add([page(number)])
        log.compact(is_forced=True)
    index.delete(sources=["d1"])
    assert index.upkeep.gc(grace_seconds=grace).num_records == 0
    assert reader.open_kv(hit.chunk.chunk_id) is not None
    let_time_pass()
    assert index.upkeep.gc(grace_seconds=grace).num_records == 1


@pytest.mark.parametrize("moment", ["before", "during"])
def test_a_gc_between_finding_a_record_and_the_commit(
    machine: Machine, folder_url: str, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    writer, other = machine("one", folder_url, context="none"), machine("two", folder_url)
    writer.add([page(0), page(1)])
    writer.delete(sources=["d1"])
    removed = []
    if moment == "before":  # the commit: a whole run
        commit = logs.SharedLog.commit

        def late(log: logs.SharedLog, change: Any) -> None:
            removed.append(other.upkeep.gc(grace_seconds=0).num_records)
            commit(log, change)

        monkeypatch.setattr(logs.SharedLog, "commit", late)
        writer.add([page(1)])
    else:  # the removal: the writer has found the record, and commits before it goes
        needed = other.upkeep._needed_keys

        def early() -> set[str]:
            digests = needed()
            if len(writer.documents()) == 1:
                writer.add([page(1)])
            return digests

        monkeypatch.setattr(other.upkeep, "_needed_keys", early)
        removed.append(other.upkeep.gc(grace_seconds=0).num_records)
    assert removed == [1]
    for index in (writer, other):
        index.refresh()
        assert sources(index) == {"d0", "d1"}
        assert index.upkeep.verify().ok


@pytest.mark.parametrize("action", ["add", "save", "save after gc"])
def test_a_writer_that_sleeps_while_versions_are_removed(
    machine: Machine, folder_url: str, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    sleeper, other = machine("one", folder_url, context="none"), machine("two", folder_url)
    sleeper.add([page(0)])
    if action == "save after gc":  # which has no whole catalog to publish
        sleeper.upkeep.gc()
    monkeypatch.setattr(manifest, "VERSIONS_SECONDS", 0.0)
    create = Log.create
    left = [1]

    def late(log: Log, manifest: Manifest) -> Any:
        if left and log is sleeper._storage.log._log:  # type: ignore[union-attr]
            left.clear()
            if action != "save after gc":
                other.add([page(5)])
                other.add([page(6)])
            other.upkeep.gc(grace_seconds=0)
        return create(log, manifest)

    monkeypatch.setattr(Log, "create", late)
    expected = {"d0"} if action == "save after gc" else {"d0", "d5", "d6"}
    if action == "add":
        assert sleeper.add([page(1)]).added == ("d1",)
        expected.add("d1")
    else:
        sleeper._storage.save_config({"codec": "lossless"})
    assert not left
    newcomer = machine("newcomer", folder_url)
    for index in (sleeper, other, newcomer):
        index.refresh()
        assert sources(index) == expected
        assert index.upkeep.verify().ok
    assert (newcomer.config.codec == "lossless") == (action != "add")


def test_a_new_base_is_published_when_many_changes_lie_behind_it(
    machine: Machine, folder_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MOST_DELTAS", 3)
    index = machine("one", folder_url, context="none")
    for number in range(6):
        index.add([page(number)])
    bases = [_newest(folder_url)["base"]["version"]]
    assert bases[0] > 0
    newcomer = machine("newcomer", folder_url)
    assert newcomer.catalog.version() == index.catalog.version()
    assert {"vectors.cache", "words.cache"} <= {path.name for path in newcomer.path.iterdir()}


def _log_folder(url: str) -> Path:
    return Path(url.removeprefix("file://")) / "log"


def _newest(url: str) -> dict[str, Any]:
    newest = sorted(_log_folder(url).glob("0*.json"))[-1]
    found: dict[str, Any] = json.loads(newest.read_text())
    return found


def test_a_manifest_of_a_newer_kvrag_asks_for_an_upgrade(machine: Machine, folder_url: str) -> None:
    index = machine("one", folder_url, context="none")
    index.add([page(0)])
    path = _log_folder(folder_url) / f"{index.refresh():012d}.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "format": values["format"] + 1}))
    with pytest.raises(IndexFormatError, match=rf"{path.name} was written by a newer.*--upgrade"):
        machine("newcomer", folder_url)


def test_a_damaged_manifest_is_named(machine: Machine, folder_url: str) -> None:
    index = machine("one", folder_url, context="none")
    index.add([page(0)])
    reader = machine("reader", folder_url)
    index.add([page(1)])
    path = _log_folder(folder_url) / f"{index.refresh():012d}.json"
    whole = path.read_text()
    for damaged in ("", whole[: len(whole) // 2], whole.replace('"version"', '"versiom"'), "[]"):
        path.write_text(damaged)
        with pytest.raises(IndexFormatError, match=rf"{path.name} is damaged.*copy of the bucket"):
            reader.refresh()
        with pytest.raises(IndexFormatError, match=path.name):
            machine("newcomer", folder_url)
    assert sources(reader) == {"d0"}  # and answers at the version before
    path.write_text(whole)
    reader.refresh()
    assert sources(reader) == {"d0", "d1"}


def test_a_manifest_names_no_file_of_its_own_choice(
    machine: Machine, folder_url: str, tmp_path: Path
) -> None:
    with machine("one", folder_url, context="none", codec="cachegen") as index:
        text = "the keeper of the light wrote it " * 30
        index.add([Document(f"d{number}", f"{number} {text}") for number in range(8)])
        index.upkeep.gc()
        index.add([page(1)])
    path = sorted(_log_folder(folder_url).glob("0*.json"))[-1]
    whole = path.read_text()
    for name in ("../../evil", f"{tmp_path}/evil", "lock", "0" * 39, "0" * 41):
        for place in ("profiles", "base", "content", "config", "key"):
            values = json.loads(whole)
            file = {
                "profiles": values["profiles"][0],
                "base": values["base"]["files"][-1],
                "content": values["deltas"][-1]["content"],
                "config": values["config"],
                "key": values["config"]["parts"][0],
            }[place]
            file["key" if place == "key" else "name"] = name
            values["checksum"] = checksum(values)
            path.write_text(json.dumps(values))
            with pytest.raises(IndexFormatError, match=r"(a file|a segment) in it is"):
                machine("newcomer", folder_url)
    assert not [one for one in tmp_path.rglob("*") if one.name.startswith("evil")]
    path.write_text(whole)
    assert machine("newcomer", folder_url).upkeep.verify().ok


def _put_back(url: str, version: int) -> None:
    """Go back to the version before one, as the message about a damaged manifest says."""
    for path in [*_log_folder(url).glob("0*.json"), _log_folder(url) / "garbage.json"]:
        if path.name == "garbage.json" or int(path.stem) >= version:
            path.unlink(missing_ok=True)


@pytest.mark.parametrize("writer", ["ahead", "behind", "none"])
def test_a_log_that_was_put_back_makes_the_views_again(
    machine: Machine, folder_url: str, writer: str
) -> None:
    one = machine("one", folder_url, context="none")
    other = machine("other", folder_url)
    for number in range(3):
        one.add([page(number)])
    other.refresh()
    for index in (one, other):  # each reads its caches
        assert index.search("page 2", 1)[0].chunk.source == "d2"
    _put_back(folder_url, 3)
    expected = {"d0", "d1"}
    if writer == "ahead":  # its view is ahead of the log
        assert one.add([page(7)]).added == ("d7",)
        expected.add("d7")
    elif writer == "behind":  # the number that the views have is written anew
        machine("third", folder_url).add([page(8)])
        expected.add("d8")
    one.upkeep.gc(grace_seconds=0)
    indexes = [one, other, machine("newcomer", folder_url)]
    for index in indexes:
        index.refresh()
        assert sources(index) == expected
        assert {hit.chunk.source for hit in index.search("page 2 7 8", 9)} == expected
        assert index.upkeep.verify().ok
    assert len({index.catalog.version() for index in indexes}) == 1
    other.close()
    assert sources(machine("other", folder_url)) == expected
    one.add([page(2)])
    other = machine("other", folder_url)
    assert sources(other) == {*expected, "d2"}
    assert other.upkeep.verify().ok


def test_a_refresh_asks_little(machine: Machine, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    index = machine("one", url, context="none")
    index.add([page(0)])
    index.refresh()
    monkeypatch.setattr(Log, "versions", None)  # lists nothing
    assert index.refresh() == 1


def test_a_log_of_a_kvrag_that_names_no_manifest_before(
    machine: Machine, folder_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow = Manifest.follow

    def as_before(manifest: Manifest, *args: Any) -> Manifest:
        made = follow(manifest, *args)
        return replace(made, deltas=tuple(replace(one, previous="") for one in made.deltas))

    one = machine("one", folder_url, context="none")
    reader = machine("reader", folder_url)
    with monkeypatch.context() as older:
        older.setattr(Manifest, "follow", as_before)
        for number in range(4):
            one.add([page(number)])
            if number == 1:
                reader.refresh()
                one.upkeep.gc()
    monkeypatch.setattr(logs.SharedLog, "_build", None)  # no view is made a second time
    newcomer = machine("newcomer", folder_url)
    reader.refresh()
    newcomer.add([page(4)])
    reader.refresh()
    one.refresh()
    for index in (one, reader, newcomer):
        assert sources(index) == {f"d{number}" for number in range(5)}
        assert index.upkeep.verify().ok


def test_a_damaged_segment_is_named_and_published_again(machine: Machine, folder_url: str) -> None:
    index = machine("one", folder_url, context="none")
    index.add([page(0)])
    kept = list((Path(folder_url.removeprefix("file://")) / "segments").glob("*/*.kv"))
    assert kept
    for segment in kept:
        content = bytearray(segment.read_bytes())
        content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
        segment.write_bytes(content)
    with pytest.raises(IndexFormatError, match=r"segment [0-9a-f]{40} of .* is damaged"):
        machine("newcomer", folder_url)
    report = index.upkeep.verify()
    assert not report.ok
    assert any("segment" in line for line in report.store_problems)
    assert index.upkeep.verify(repair=True).ok
    assert index.upkeep.verify().ok
    newcomer = machine("newcomer", folder_url)
    assert newcomer.catalog.version() == index.catalog.version()


def test_a_damaged_view_is_made_again(machine: Machine, url: str) -> None:
    index = machine("one", url, context="none")
    index.add([page(number) for number in range(3)])
    catalog = index.path / "catalog.sqlite"
    with sqlite3.connect(catalog) as connection:
        connection.execute("UPDATE chunks SET text = 'another text' WHERE source = 'd1'")
        connection.execute("UPDATE chunks SET embedding = zeroblob(4) WHERE source = 'd2'")
    connection.close()
    assert {hit.chunk.source for hit in index.search_dense("page 2", 9)} == {"d0"}
    assert not index.upkeep.verify().ok
    assert index.upkeep.verify(repair=True).is_healed
    assert index.upkeep.verify().ok
    assert {hit.chunk.source for hit in index.search_dense("page 2", 9)} == {"d0", "d1", "d2"}
    index.close()
    catalog.write_bytes(b"nothing that SQLite knows" * 500)
    again = machine("one", url)
    assert sources(again) == {"d0", "d1", "d2"}
    assert again.upkeep.verify().ok
    again.close()
    catalog.unlink()
    assert sources(machine("one", url)) == {"d0", "d1", "d2"}


def test_an_encrypted_index_leaves_no_text_in_the_bucket(
    machine: Machine, tmp_path: Path, folder_url: str
) -> None:
    pytest.importorskip("sqlcipher3")
    key, wrong = tmp_path / "key", tmp_path / "wrong"
    for number, path in enumerate((key, wrong)):
        path.write_text(f"{number:064x}")
        path.chmod(0o600)
    url = f"{folder_url}?key_file={key}"
    index = machine("one", url, context="none")
    index.add([Document("secret-source", "The treasure lies under the old oak. " * 5)])
    index.upkeep.gc()
    bucket = Path(folder_url.removeprefix("file://"))
    salt = index.config.tenant_salt
    for path in bucket.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            for word in (b"treasure", b"secret-source", salt.encode(), bytes.fromhex(salt)):
                assert word not in content, path
    other = machine("other", url)
    assert other.search_words("treasure", 1)
    assert other.upkeep.verify().ok
    assert b"treasure" not in b"".join(
        path.read_bytes() for path in other.path.rglob("*") if path.is_file()
    )
    with pytest.raises(IndexMismatchError, match="no key was given"):
        machine("other", folder_url)
    with pytest.raises(IndexMismatchError, match="wrong key"):
        machine("third", f"{folder_url}?key_file={wrong}")
    machine("one", f"{folder_url}-plain", context="none")
    with pytest.raises(IndexMismatchError, match=r"leave \?key_file= out"):
        machine("two", f"{folder_url}-plain?key_file={key}")


def test_a_settings_change_goes_everywhere(machine: Machine, url: str) -> None:
    one = machine("one", url, context="none")
    other = machine("other", url)
    one.add([page(number) for number in range(8)])
    one.upkeep.recode("lossless")
    other.refresh()
    assert other.config.codec == one.config.codec == "lossless"
    assert other.upkeep.verify().ok
    assert machine("third", url).upkeep.verify().ok


def test_what_cannot_be_opened(
    machine: Machine, folder_url: str, s3_server: S3Server, s3_credentials: None
) -> None:
    with pytest.raises(IndexNotFoundError, match="there is no index at file:///"):
        machine("one", folder_url)
    machine("one", folder_url, context="none")
    with pytest.raises(ParameterError, match="there is an index at"):
        machine("two", folder_url, context="none")
    for wrong in ("s3://", "s3:///", "file://relative/path", f"{folder_url}?unknown=1"):
        with pytest.raises(ParameterError):
            machine("one", wrong)
    nobody = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(StoreError, match="check the endpoint"):
        machine("one", f"s3://bucket/index?endpoint={nobody}&timeout=0.5")
    with pytest.raises(StoreError, match="there is no such bucket"):
        machine("one", f"s3://nobody-made-it/index?endpoint={s3_server.endpoint}")


def test_a_view_is_no_index_of_its_own(machine: Machine, folder_url: str) -> None:
    index = machine("one", folder_url, context="none")
    with pytest.raises(ParameterError, match="view of a shared index: open that by its URL"):
        Index.open(index.path)
    with pytest.raises(ParameterError, match="is shared"):
        index.upkeep.move("memory:")


def test_views_that_nobody_uses_make_room(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = f"file://{tmp_path}/bucket"
    first = machine("one", f"{bucket}/first", context="none")
    second = machine("one", f"{bucket}/second", context="none")
    first.close()
    monkeypatch.setenv("KVRAG_VIEWS_BYTES", "1kB")
    third = machine("one", f"{bucket}/second")
    assert not first.path.exists()
    assert second.path == third.path
    assert second.path.exists()  # in use
    monkeypatch.setenv("KVRAG_VIEWS_BYTES", "much")
    with pytest.raises(ParameterError, match="KVRAG_VIEWS_BYTES"):
        machine("one", f"{bucket}/second")


def test_a_bucket_that_does_not_answer_leaves_the_version(
    machine: Machine, s3_server: S3Server, s3_credentials: None
) -> None:
    with s3_server.bucket("leaves"), FaultyProxy(s3_server.port) as proxy:
        url = f"s3://leaves/index?endpoint=http://127.0.0.1:{proxy.port}&timeout=0.5"
        index = machine("one", url, context="none")
        index.add([page(0)])
        proxy.mode = "dead"
        proxy.cut()
        with pytest.raises(StoreError, match="check the endpoint"):
            index.refresh()
        with pytest.raises(StoreError):
            index.add([page(1)])
    assert sources(index) == {"d0"}
    assert index.search_words("keeper", 1)


@pytest.mark.parametrize(
    "url", ["s4://bucket/index", "S3://bucket/index", "redis://here/0", "s3:/bucket/index"]
)
def test_a_url_of_another_scheme_is_no_folder(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    expected = r"a shared index is s3://BUCKET/PREFIX.*found"
    with pytest.raises(ParameterError, match=expected):
        Index.open(url)
    with pytest.raises(ParameterError, match=expected):
        Index.create(url, model="kvrag-tiny")
    with pytest.raises(ParameterError, match=expected):
        Index.open(Path("s3://bucket/index"))
    assert list(tmp_path.iterdir()) == []


def test_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVRAG_VIEWS", str(tmp_path))
    place = read_place("s3://bucket/a/b/?endpoint=http://x:9000&timeout=2")
    assert str(place) == "s3://bucket/a/b"
    assert place.store_url("kv") == "s3://bucket/a/b/kv?endpoint=http://x:9000&timeout=2"
    assert place.view.name.startswith("b-")
    assert place.view == read_place("s3://bucket/a/b?endpoint=http://x:9000/").view
    assert place.view != read_place("s3://bucket/a/c?endpoint=http://x:9000").view
    assert place.view != read_place("s3://bucket/a/b?endpoint=http://y:9000").view
    for scheme, names in {
        "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
        "gs": ("GOOGLE_BASE_URL",),
        "az": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    }.items():
        here = read_place(f"{scheme}://bucket/a/b")
        views = {here.view}
        for name in names:
            with monkeypatch.context() as context:
                context.setenv(name, "http://x:9000")
                views.add(here.view)
                views.add(read_place(f"{scheme}://bucket/a/b?endpoint=http://y:1").view)
        assert len(views) > 2, scheme


def test_an_index_made_anew_at_its_url(machine: Machine, tmp_path: Path, folder_url: str) -> None:
    old = machine("one", folder_url, context="none")
    old.add([page(0)])
    shutil.rmtree(tmp_path / "bucket")
    with pytest.raises((IndexNotFoundError, StoreError)):
        old.add([page(1)])
    with pytest.raises(IndexMismatchError, match="end it, or set KVRAG_VIEWS"):
        machine("one", folder_url, context="none")
    new = machine("two", folder_url, context="none")
    new.add([page(5)])
    with pytest.raises(IndexMismatchError, match="another index has taken the place"):
        old.delete(sources=["d0"])
    with pytest.raises(IndexMismatchError, match="end it, or set KVRAG_VIEWS"):
        machine("one", folder_url)
    # A view in use is never removed.
    assert old.search("page 0", 1)[0].chunk.source == "d0"
    new.refresh()
    assert sources(new) == {"d5"}
    old.close()
    assert sources(machine("one", folder_url)) == {"d5"}


@pytest.mark.parametrize("meanwhile", ["another fits too", "another codec is chosen"])
def test_two_writers_and_their_profiles(
    machine: Machine, folder_url: str, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    machine("creator", folder_url, context="none", codec="cachegen")
    one, other = machine("one", folder_url), machine("other", folder_url)
    words = [f"word{number}" for number in range(14)]

    def pages(name: str, first: int) -> list[Document]:
        texts = [" ".join(words[first + n % 5 : first + 9] * 8) for n in range(12)]
        return [Document(f"{name}{n}", f"{name} {n} {text}") for n, text in enumerate(texts)]

    create, left = Log.create, [1]
    is_fitted = meanwhile == "another fits too"

    def late(log: Log, manifest: Manifest) -> Any:
        if left and manifest.profiles:  # `one` is about to record its profile
            left.clear()
            other.add(pages("b", 5)) if is_fitted else other.upkeep.recode("raw")
        return create(log, manifest)

    monkeypatch.setattr(Log, "create", late)
    one.add(pages("a", 0))
    assert not left
    newcomer = machine("newcomer", folder_url)
    if is_fitted:
        assert len(_newest(folder_url)["profiles"]) == 2
    else:
        for index in (one, newcomer):
            assert index.config.codec == index._storage.coding.codec.name == "raw"
        assert newcomer.config.profile == one.config.profile == other.config.profile
    assert len(sources(newcomer)) == 12 + 12 * is_fitted
    assert newcomer.upkeep.verify().ok
