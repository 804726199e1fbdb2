"""Real passages and real file formats, with the embedding people will use."""

import json
import random
from pathlib import Path

import pytest
import torch

from kvrag.chunk import Document, normalise_text
from kvrag.codec.container import RecordReader
from kvrag.engine.engine import KVEngine
from kvrag.errors import DocumentError
from kvrag.ingest.index import Index
from kvrag.ingest.loaders import load_bytes
from kvrag.models.kv_model import KVModel
from kvrag.models.loading import has_bfloat16
from kvrag.native.kernels import instruction_set, use_instruction_set
from tests.ingest.conftest import MakeIndex
from tests.support.models import make_model, make_tokenizer
from tests.support.properties import trials

MUSIQUE = Path(__file__).parents[2] / "../shared/data/musique/musique_75.json"
PASSAGE = (
    "The lighthouse of Varn was built in 1871 by the engineer Oda Klein. Its lamp burns whale oil."
)


@pytest.mark.skipif(not MUSIQUE.exists(), reason="the MuSiQue passages are not beside this folder")
def test_every_musique_passage_is_retrievable(make_index: MakeIndex) -> None:
    num_passages = trials(250, 6)
    items = json.loads(MUSIQUE.read_text())
    passages = [passage["text"] for item in items for passage in item["ctxs"]][:num_passages]
    assert len(passages) == num_passages
    # One layer: this is about passages, not about the model.
    model = KVModel.load(
        make_model("llama", num_hidden_layers=1, max_position_embeddings=8192),
        tokenizer=make_tokenizer(),
    )
    index = make_index(model=model, embedding="minilm", chunk_tokens=4096)
    report = index.add([Document(f"p{i}", text) for i, text in enumerate(passages)])
    assert len(report.added) == num_passages
    assert not report.failed
    assert report.num_chunks == num_passages
    # Every passage is the nearest to the vectors of its windows. Passages of this set overlap: a
    # window, or a whole passage, may be the same words in several.
    read = index.catalog.vectors(index.embedding.dim)
    rows, vectors = read.rows, read.vectors
    chunks = index.catalog.chunks_at(rows.tolist())
    texts = {normalise_text(text) for text in passages}
    for row, vector in zip(rows.tolist(), vectors, strict=True):
        hits = index.search_by_vector(vector, 10)
        nearest = {hit.chunk.text for hit in hits if hit.score >= hits[0].score - 1e-5}
        assert chunks[row].text in nearest
        texts.discard(chunks[row].text)
    assert not texts

    # Every passage is found in a prompt, and its KV can be read.
    for i, text in enumerate(passages):
        (match,) = index.matcher.find(f"Passage {i}:\n\n{text}\n\nQuestion: who?")
        (chunk,) = index.get_chunks([match.chunk_id])
        assert chunk.text == normalise_text(text)
        record = index.open_kv(match.chunk_id)
        assert record.num_tokens == len(chunk.token_ids)

    # A sentence of a passage leads to it.
    asked = random.Random(0).sample(passages, min(num_passages, 20))
    found = [
        any(" ".join(text.split()[20:50]) in hit.chunk.text for hit in index.search(query, 10))
        for text, query in ((text, " ".join(text.split()[20:50])) for text in asked)
    ]
    assert sum(found) >= 0.9 * len(found)
    assert index.upkeep.verify().ok


def make_pdf(path: Path, password: str | None = None) -> None:
    fpdf = pytest.importorskip("fpdf")
    pdf = fpdf.FPDF()
    pdf.set_title("Varn by the sea")
    for text in ("The first page tells of ships.", PASSAGE):
        pdf.add_page()
        pdf.set_font("helvetica", size=12)
        pdf.multi_cell(0, 8, text)
    if password:
        pdf.set_encryption(owner_password=password, user_password=password)
    pdf.output(str(path))


def test_pages_of_a_pdf_are_separate(tmp_path: Path) -> None:
    make_pdf(tmp_path / "a.pdf")
    (pdf,) = load_bytes("/a.pdf", (tmp_path / "a.pdf").read_bytes())
    first, second = pdf.text.split("\f")
    assert "tells of ships" in first
    assert "Oda Klein" in second
    assert pdf.metadata == {"title": "Varn by the sea"}


def test_pdfs_that_hide_their_text_are_refused(tmp_path: Path) -> None:
    fpdf = pytest.importorskip("fpdf")
    blank = fpdf.FPDF()
    blank.add_page()
    blank.output(str(tmp_path / "blank.pdf"))
    with pytest.raises(DocumentError, match="1 pages but no text layer; run OCR"):
        next(load_bytes("/blank.pdf", (tmp_path / "blank.pdf").read_bytes()))
    make_pdf(tmp_path / "locked.pdf", password="secret")
    with pytest.raises(DocumentError, match=r"encrypted; remove its password"):
        next(load_bytes("/locked.pdf", (tmp_path / "locked.pdf").read_bytes()))


def test_an_index_holds_the_checkpoints_16_bits_on_every_processor(
    make_index: MakeIndex, docs: Path, tmp_path: Path
) -> None:
    keys, used = [], instruction_set()
    hf = make_model("llama", num_hidden_layers=2, dtype=torch.bfloat16)
    try:
        for name in dict.fromkeys(("scalar", used)):  # "scalar" does not multiply bfloat16
            use_instruction_set(name)
            folder = tmp_path / f"model-{name}"
            hf.save_pretrained(folder)
            make_tokenizer().save_pretrained(folder)
            index = make_index(f"index-{name}", model=folder, tenant_salt=b"the same")
            index.add(docs)
            assert has_bfloat16() or index.model.spec.dtype == torch.float32
            assert name != "scalar" or not has_bfloat16()
            assert index.config.dtype == "bfloat16"
            keys.append(sorted(index.store.keys()))
            for key in keys[-1]:
                record = index.store.open(key)
                assert RecordReader(record, key).header.spec.dtype == torch.bfloat16
            (hit,) = index.search("clock", 1)
            prompt = f"{hit.chunk.text} Who repairs it?"
            reports = [
                KVEngine(index, policy="none").generate(prompt, max_tokens=2).report
                for index in (index, Index.open(tmp_path / "index-scalar", model=folder))
            ]
            assert reports[0].num_cached == reports[1].num_cached > 0
    finally:
        use_instruction_set(used)
    assert keys[0] == keys[-1]
