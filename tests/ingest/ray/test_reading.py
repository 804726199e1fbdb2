"""Tasks read buckets and Parquet; a damaged file costs itself and nothing else."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="kvrag[ray] is not installed")

import pyarrow as pa
import pyarrow.parquet as pq

from kvrag.errors import ParameterError
from kvrag.ingest.limits import ParseLimits
from kvrag.ingest.ray.packets import Packet, forget, listed_row, plan_rows, unpack
from kvrag.ingest.ray.reading import _opened, list_places
from tests.ingest.ray.here import job_of, table, tiny_index
from tests.support.servers import S3Server


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Tasks keep a parser for the next one, which here is another test."""
    yield
    forget()


def write_rows(path: Path, rows: Sequence[dict[str, Any]], group: int = 1000) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=group)
    return path


def planned(folder: Path, *places: Path | str, max_bytes: int = 1 << 20) -> Packet:
    """Return what tasks find at some places."""
    with tiny_index(folder) as index:
        job = replace(job_of(index), limits=ParseLimits(max_file_bytes=max_bytes))
        rows = [listed_row(one) for one in list_places([*map(str, places)], [".md", ".jsonl"])]
        whole = Packet()
        for made in plan_rows(table(rows), job):
            for packet in unpack(made):
                whole.plan.documents += packet.plan.documents
                whole.plan.failed += packet.plan.failed
    return whole


def names(packet: Packet) -> list[str]:
    return [one.source for one in packet.plan.documents]


def test_a_damaged_file_is_one_failure(tmp_path: Path) -> None:
    files = [
        write_rows(tmp_path / f"{n}.parquet", [{"text": f"Text {n}.", "id": f"r{n}"}])
        for n in range(4)
    ]
    content = files[2].read_bytes()
    files[2].write_bytes(content[:-30])
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "Row."}\n{"text": broken\n')
    found = planned(tmp_path, *files, f"file://{broken}")
    assert names(found) == ["r0", "r1", "r3"]
    (footer, line) = ((one.source, one.reason) for one in found.plan.failed)
    assert footer[0] == str(files[2])
    assert "2.parquet: cannot be read (" in footer[1]
    assert line[0] == str(broken)
    assert "broken.jsonl, line 2: not JSON" in line[1]


def test_of_parquet_that_is_damaged_inside_the_other_groups_are_read(tmp_path: Path) -> None:
    rows = [{"text": f"Text {n}.", "id": f"r{n}"} for n in range(6)]
    file = write_rows(tmp_path / "rows.parquet", rows, group=2)
    begin = pq.ParquetFile(file).metadata.row_group(1).column(0).data_page_offset
    content = bytearray(file.read_bytes())
    content[begin : begin + 8] = b"\xff" * 8
    file.write_bytes(content)
    found = planned(tmp_path, file)
    assert names(found) == ["r0", "r1", "r4", "r5"]
    ((source, reason),) = ((one.source, one.reason) for one in found.plan.failed)
    assert source == str(file)
    assert "rows.parquet, rows 3 to 4: cannot be read (" in reason


def test_a_row_that_python_cannot_hold_costs_itself(tmp_path: Path) -> None:
    latin = pa.array([b"One.", b"caf\xe9", b"Three."], pa.binary())
    texts = pa.Array.from_buffers(pa.string(), 3, latin.buffers())
    times = pa.array([0, 0, 4 * 10**17], pa.timestamp("us"))
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"text": texts, "id": ["a", "b", "c"], "when": times}), file)
    found = planned(tmp_path, file)
    assert names(found) == ["a"]
    reasons = [one.reason for one in found.plan.failed]
    assert "row 2: cannot be read ('utf-8'" in reasons[0]
    assert "row 3: cannot" in reasons[1]
    with tiny_index(tmp_path / "dataset") as index:
        packets = [
            one for made in plan_rows(pq.read_table(file), job_of(index)) for one in unpack(made)
        ]
    assert [name for one in packets for name in names(one)] == ["a"]
    reasons = [failed.reason for one in packets for failed in one.plan.failed]
    assert len(reasons) == 2
    assert all(one.startswith("a row with the columns text, id, when: cannot") for one in reasons)


def test_equal_rows_are_one_document_whatever_their_file_is_called(tmp_path: Path) -> None:
    row = {"text": "A row.", "year": 1}
    files = [write_rows(tmp_path / f"part-{n}.parquet", [row, row]) for n in range(2)]
    found = planned(tmp_path / "equal", *files)
    assert (len(found.plan.documents), found.plan.failed) == (1, [])
    assert found.plan.documents[0].metadata == {"year": 1}
    write_rows(files[0], [{**row, "id": "r"}])
    write_rows(files[1], [{**row, "id": "r"}])
    found = planned(tmp_path / "named", *files)
    assert found.plan.documents[0].metadata["path"] == str(files[0])
    assert [one.source for one in found.plan.failed] == ["r"]


def test_a_file_of_two_places_is_read_once(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.parquet", [{"text": "A row."}])
    listed = list_places([f"file://{tmp_path}", str(file), f"file://{file}"], [])
    assert [(one.place, one.path) for one in listed] == [(f"file://{tmp_path}", str(file))]


def test_a_long_damaged_file_is_one_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.parquet"
    file.write_bytes(b"PAR1" + b"?" * 1000)
    monkeypatch.setattr("kvrag.ingest.ray.reading._PART_BYTES", 100)
    assert [one.source for one in planned(tmp_path, file).plan.failed] == [str(file)]


def test_a_long_parquet_file_is_read_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[dict[str, Any]] = [{"text": f"Text {n}.", "id": f"r{n}"} for n in range(7)]
    rows[5]["text"] = None
    file = write_rows(tmp_path / "rows.parquet", rows, group=2)
    monkeypatch.setattr("kvrag.ingest.ray.reading._PART_BYTES", file.stat().st_size // 2)
    assert len(list_places([str(file)], [])) == 3
    monkeypatch.setattr("kvrag.ingest.ray.reading._PART_BYTES", 10)
    assert len(list_places([str(file)], [])) == 4
    found = planned(tmp_path, file)
    assert names(found) == [f"r{n}" for n in range(7) if n != 5]
    assert "rows.parquet, row 6: expected an object with its text" in found.plan.failed[0].reason


def test_what_holds_no_row_or_too_much_says_so(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "none.parquet")
    write_rows(tmp_path / "wrong.parquet", [{"words": "a"}])
    (tmp_path / "big.md").write_text("x" * 5000)
    found = planned(tmp_path, f"file://{tmp_path}", max_bytes=4000)
    assert names(found) == []
    big, none, wrong = (one.reason for one in found.plan.failed)
    assert "big.md: has 5,000 bytes" in big
    assert "none.parquet: holds no rows" in none
    assert "wrong.parquet, row 1: expected" in wrong


@pytest.mark.parametrize(
    ("place", "wanted"),
    [
        ("az://container/docs", "abfss://CONTAINER@ACCOUNT"),
        ("foo://bucket/docs", "foo:// cannot be read"),
        ("file:///nowhere/at/all", "no such file"),
        ("nowhere.parquet", "no such file"),
    ],
)
def test_places_that_cannot_be_listed_are_refused_by_name(place: str, wanted: str) -> None:
    with pytest.raises(ParameterError, match=f"{place}.*{wanted}"):
        list_places([place], [".md"])


@pytest.mark.parametrize(
    "place",
    [
        "https://user:SECRET@host/x",
        "s3://AKIA:ab/cdSECRET@bucket/x",
        "s3://AKIA:SECRET@bucket/x?nothing=1",
        "gs://bucket/x?client_secret=SECRET&nothing=1",
        "gs://bucket/x?sv=1&sig=SECRET&nothing=1",
    ],
)
def test_a_message_shows_no_secret(place: str) -> None:
    with pytest.raises(ParameterError, match="cannot be read") as raised:
        list_places([place], [])
    assert "***" in str(raised.value)
    assert "SECRET" not in str(raised.value)


def test_a_bucket_of_google_that_does_not_answer_is_given_up_soon() -> None:
    for query, seconds in (("", 30), ("?retry_limit_seconds=9", 9)):
        system, path = _opened(f"gs://anonymous@bucket/x{query}")
        (options,) = system.__reduce__()[1]
        assert (path, options["retry_time_limit"]) == ("bucket/x", timedelta(seconds=seconds))


def test_a_bucket_is_listed_and_read(
    tmp_path: Path, s3_server: S3Server, s3_credentials: None
) -> None:
    rows = write_rows(tmp_path / "rows.parquet", [{"text": "A row.", "id": "r"}])
    lines = "\n".join(json.dumps({"text": f"Line {n}."}) for n in range(2))
    query = f"?endpoint_override=127.0.0.1:{s3_server.port}&scheme=http&region=us-east-1"
    files, _ = pa.fs.FileSystem.from_uri(f"s3://listed/{query}&allow_bucket_creation=true")
    files.create_dir("listed")
    for name, content in {
        "docs/a.md": b"# A page",
        "docs/b/lines.jsonl": lines.encode(),
        "docs/b/rows.parquet": rows.read_bytes(),
        "docs/image.png": b"?",
        "docs/.hidden/x.md": b"Hidden.",
        "other/x.md": b"Elsewhere.",
    }.items():
        with files.open_output_stream(f"listed/{name}") as stream:
            stream.write(content)
    # As kvrag's stores spell it.
    query = f"?endpoint=http://127.0.0.1:{s3_server.port}&region=us-east-1"
    found = planned(tmp_path, f"S3://listed/docs{query}")
    assert found.plan.failed == []
    lines = "listed/docs/b/lines.jsonl"
    assert names(found) == ["listed/docs/a.md", f"{lines}#1", f"{lines}#2", "r"]
