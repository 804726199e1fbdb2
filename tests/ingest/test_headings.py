"""A chunk keeps the path of headings under which it begins, wherever it is looked at."""

import contextlib
import io
import sqlite3
from pathlib import Path

import pytest

from kvrag.chunk import Document
from kvrag.ingest.index import Index

FILLER = "The old bridge of Varn crosses the river. " * 12


def word_bytes() -> bytes:
    docx = pytest.importorskip("docx")
    document = docx.Document()
    for level, title in ((1, "Guide"), (2, "Fares"), (3, "Refunds")):
        document.add_heading(title, level)
        document.add_paragraph(FILLER)
    packed = io.BytesIO()
    document.save(packed)
    return packed.getvalue()


@pytest.fixture
def guides(index: Index, tmp_path: Path) -> Index:
    folder = tmp_path / "guides"
    folder.mkdir()
    (folder / "a.md").write_text(
        f"# Guide\n\n{FILLER}\n\n## Fares\n\n{FILLER}\n\n### Refunds\n\n{FILLER}"
    )
    (folder / "b.html").write_text(
        f"<h1>Guide</h1><p>{FILLER}</p><h2>Fares</h2><p>{FILLER}</p><h3>Refunds</h3><p>{FILLER}</p>"
    )
    (folder / "c.docx").write_bytes(word_bytes())
    assert index.add(folder).ok
    return index


def test_headings_of_every_format_lead_to_a_chunk(guides: Index) -> None:
    for name in ("a.md", "b.html", "c.docx"):
        hits = guides.search("bridge", 50, filter={"headings": "Guide"})
        paths = {
            tuple(hit.chunk.metadata["headings"])
            for hit in hits
            if Path(hit.chunk.source).name == name
        }
        assert paths == {("Guide",), ("Guide", "Fares"), ("Guide", "Fares", "Refunds")}, name
        assert all(
            hit.chunk.metadata["headings"][-1] == hit.chunk.metadata["heading"] for hit in hits
        )
    hits = guides.search("bridge", 50, filter={"headings": "Fares"})
    assert {hit.chunk.metadata["heading"] for hit in hits} == {"Fares", "Refunds"}


def test_frameworks_see_the_path_and_models_do_not(guides: Index) -> None:
    pytest.importorskip("langchain_core")
    schema = pytest.importorskip("llama_index.core.schema")
    from kvrag.retrievers import langchain, llamaindex

    for document in langchain.KVRagRetriever(index=guides, k=9).invoke("bridge"):
        assert document.metadata["headings"][0] == "Guide"
    for found in llamaindex.KVRagRetriever(guides, k=9).retrieve("bridge"):
        assert found.node.metadata["headings"][0] == "Guide"
        (chunk,) = guides.get_chunks([found.node.node_id])
        assert found.node.get_content(schema.MetadataMode.LLM) == chunk.text


def test_a_lost_document_gets_only_its_own_metadata_back(index: Index) -> None:
    index.add(Document("guide", f"# Guide\n\n{FILLER}", {"lang": "en"}))
    with contextlib.closing(sqlite3.connect(index.path / "catalog.sqlite")) as connection:
        connection.execute("DELETE FROM documents")
        connection.commit()
    with Index.open(index.path, model=index.model) as opened:
        opened.upkeep.verify(repair=True)
        (row,) = opened.documents()
        assert row.metadata == {"lang": "en"}
