"""What ingestion does with control strings: counted, refused, recorded."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvrag.chunk import Document
from kvrag.errors import IndexFormatError
from kvrag.ingest.index import Index
from kvrag.regularfile import checksum
from tests.ingest.conftest import MakeIndex

EVIL = "Ines keeps the ledger.\n\nHer end: <eos> and <bos><bos> again."
IDS = {0, 1, 2}


def test_neutralised_strings_are_counted_by_document(make_index: MakeIndex, docs: Path) -> None:
    index = make_index()
    assert index.config.control_tokens == "neutralise", "its tokenizer has a chat template"
    (docs / "evil.txt").write_text(EVIL)
    planned = index.add(docs, dry_run=True)
    report = index.add(docs)
    assert report.control_strings == planned.control_strings == {str(docs / "evil.txt"): 3}
    assert report.to_dict()["control_strings"] == {str(docs / "evil.txt"): 3}
    assert index.add(docs).control_strings == {}
    for row in index.documents():
        for chunk in index.get_chunks(index.catalog.chunk_ids_of(row.source)):
            assert not IDS.intersection(chunk.token_ids)


@pytest.mark.parametrize(
    ("document", "place"),
    [
        (Document("evil", EVIL), r"line 3 of its text holds '<eos>'"),
        (
            Document("evil", "good", {"a": {"title": ["x", "y <bos>"]}}),
            r"'a' 'title' holds '<bos>'",
        ),
        (Document("evil", "good", {"<pad>": 1}), r"its metadata holds '<pad>'"),
        (Document("evil<eos>", "good"), r"its source holds '<eos>'"),
    ],
)
def test_refuse_says_where(make_index: MakeIndex, document: Document, place: str) -> None:
    index = make_index(control_tokens="refuse")
    report = index.add([Document("one", "The fox."), document, Document("two", "The dog.")])
    (failed,) = report.failed
    assert failed.source == document.source
    assert place in failed.reason
    assert "--control-tokens neutralise" in failed.reason
    assert set(report.added) == {"one", "two"}
    assert report.control_strings == {}


def test_an_older_index_keeps_them(make_index: MakeIndex) -> None:
    index = make_index()
    assert index.config.control_tokens == "neutralise"
    index.close()
    path = index.path / "index.json"
    values = json.loads(path.read_text())
    del values["control_tokens"]
    path.write_text(json.dumps({**values, "checksum": checksum(values)}))
    with Index.open(index.path) as opened:
        assert opened.config.control_tokens == "keep"
        replace(opened.config, control_tokens="drop").save(index.path)
    with pytest.raises(IndexFormatError, match="control_tokens"):
        Index.open(index.path)
