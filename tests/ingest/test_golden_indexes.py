"""Indexes as kvrag wrote them in each format, kept as files: opened and used, or refused.

Each holds one document in kvrag-tiny's KV, with the codec ``raw``. Its name begins with the format
version. Two kinds of stores and two states of version 5 have files of their own. Those in `shared`
are indexes at URLs, named by the release that wrote them.
"""

import zipfile
from pathlib import Path

import pytest

from kvrag.chunk import Document
from kvrag.engine.engine import KVEngine
from kvrag.errors import IndexFormatError
from kvrag.ingest.config import FORMAT_VERSION
from kvrag.ingest.index import Index
from kvrag.ingest.schema import Checksums

GOLDEN = Path(__file__).parent / "golden"
FILES = sorted(path.stem for path in GOLDEN.glob("*.zip"))
SHARED = sorted(path.stem for path in (GOLDEN / "shared").glob("*.zip"))
TEXT = "Ines keeps the ledger of Varn."


def unpacked(name: str, folder: Path) -> Path:
    with zipfile.ZipFile(GOLDEN / f"{name}.zip") as archive:
        archive.extractall(folder)
    return folder / "index"


def version_of(name: str) -> int:
    return int(name.partition("-")[0])


@pytest.mark.parametrize(
    ("name", "row", "expected"),
    [
        ("state", (3, 1, b"d", 2, b"f"), "1c06c5d8d1ed91dc7494a130f7d03006"),
        ("file", ("p", "d", 5, 6, 7, 8), "534b36d90bc6b570398e4ac055de4084"),
        ("document", ("s", "f", "d", "{}", 1, b"c"), "a6076404c9877b924fda4180e50c1fb4"),
        ("document", ("s", None, "d", "{}", 1, b"c"), "c5bcbcc1445dcf126b0a9564efc2d144"),
        (
            "chunk",
            (1, "id", "s", 0, "text", b"ids", b"starts", 1, "{}", b""),
            "b0025e458386134a8e5147b7156acac3",
        ),
        ("vector", (1, "id", b"vector"), "dcd87657b95eaf506f88a036d8b1329d"),
    ],
)
def test_checksums_of_rows_stay(name: str, row: tuple[object, ...], expected: str) -> None:
    assert Checksums(b"key").of(name, row).hex() == expected


def test_there_is_a_file_of_each_format_version() -> None:
    assert {version_of(name) for name in FILES} == set(range(1, FORMAT_VERSION + 1))


@pytest.mark.parametrize("name", [one for one in FILES if version_of(one) == FORMAT_VERSION])
def test_an_index_of_an_earlier_release_is_used(name: str, tmp_path: Path) -> None:
    path = unpacked(name, tmp_path)
    for _ in range(2):  # as it was found, and as that left it
        with Index.open(path) as index:
            assert index.upkeep.verify().ok
            assert index.search("who keeps the ledger", 1)[0].chunk.text == TEXT
            engine = KVEngine(index)
            prompt = f"{TEXT}\n\nQuestion: Who keeps the ledger of Varn?\nAnswer:"
            answer = engine.generate(prompt, policy="none", max_tokens=4)
            # Newer indexes expect a template before the chunk, so it is not exact here.
            assert answer.report.num_exact + answer.report.num_reused == 13
            assert answer.text == engine.generate(prompt, reuse=False, max_tokens=4).text
    with Index.open(path) as index:
        report = index.add([Document("ledger.txt", TEXT), Document("ferry.txt", "It leaves.")])
        assert (report.unchanged, report.added) == (("ledger.txt",), ("ferry.txt",))
        assert index.upkeep.verify().ok


@pytest.mark.parametrize("release", SHARED)
def test_a_shared_index_of_an_earlier_release_is_used(
    release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = unpacked(f"shared/{release}", tmp_path)
    url = f"file://{path}"
    for machine in ("one", "other"):  # as it was found, and as another machine left it
        monkeypatch.setenv("KVRAG_VIEWS", str(tmp_path / machine))
        with Index.open(url) as index:
            assert index.upkeep.verify().ok
            assert index.search("who keeps the ledger", 1)[0].chunk.text == TEXT
            index.add([Document(f"{machine}.txt", "It leaves.")])
            index.upkeep.gc(grace_seconds=0)
            assert index.upkeep.verify().ok
    with Index.open(url) as index:
        found = {row.source for row in index.documents()}
    assert found == {"ledger.txt", "mill.txt", "one.txt", "other.txt"}


@pytest.mark.parametrize("name", [one for one in FILES if version_of(one) < FORMAT_VERSION])
def test_an_index_that_is_too_old_is_refused_and_left_as_it_is(name: str, tmp_path: Path) -> None:
    path = unpacked(name, tmp_path)
    before = {one: one.read_bytes() for one in path.rglob("*") if one.is_file()}
    with pytest.raises(IndexFormatError, match=f"found {version_of(name)}[;.].*ingest again"):
        Index.open(path)
    assert {one: one.read_bytes() for one in path.rglob("*") if one.is_file()} == before
