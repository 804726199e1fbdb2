"""Chunks of the formats stay what they are: stored KV is found by a chunk's tokens."""

import hashlib
from pathlib import Path

import pytest

from kvrag.ingest.chunker import chunk_document
from kvrag.ingest.loaders import load_bytes
from tests.ingest.hostile import make_pdf
from tests.support.documents import docx_bytes
from tests.support.models import make_tokenizer

HANDBOOK = sorted((Path(__file__).parents[2] / "examples" / "handbook").glob("*.md"))
_PAGE = (
    "<title>Varn</title><h1>Clock</h1><p>It <b>ticks</b>, every day of the year.</p><h2>Maker</h2>"
    "<ul><li>one<li>two</ul><table><tr><td>a<td>b</table><pre>def f():\n    # no\n    y</pre>"
)
_PROSE = "One\n===\n\nThe clock. It ticks!\n\fOdd: 1.5\n```\n# no\n```\n" + "the old bridge " * 60
CONTENTS = {
    "a.txt": _PROSE.encode(),
    "a.md": _PROSE.encode(),
    "a.html": _PAGE.encode(),
    "a.jsonl": b'{"text": "# One\\n\\nIt ticks. ' + b"It ticks. " * 40 + b'"}\n"two"\n',
    "a.csv": b'ship,day\n"Ria, old",3\nVega,4,late\n',
    "a.pdf": make_pdf(b"BT /F1 12 Tf 72 700 Td (The clock of Varn ticks.) Tj ET"),
    "a.docx": docx_bytes(),
}
# Of the chunks' texts, tokens and offsets.
GOLDEN = {
    "a.txt": "ced649b4f235fe4b",
    "a.md": "ced649b4f235fe4b",
    "a.html": "f5a02ea3cc4affe5",
    "a.jsonl": "4d11bc26db02cfdb",
    "a.csv": "976a0112c3d48b5b",
    "a.pdf": "91f2f684f68e2450",
    "a.docx": "57d54df6f2839081",
    "handbook": "dd4efc6ace803159",
}


def digest(name: str, content: bytes) -> str:
    found = hashlib.blake2b(digest_size=8)
    for document in load_bytes(f"/{name}", content):
        for chunk in chunk_document(document, make_tokenizer(), 24):
            place = (chunk.ordinal, chunk.metadata.get("start"), chunk.metadata.get("heading"))
            found.update(repr((chunk.text, chunk.token_ids, chunk.token_starts, place)).encode())
    return found.hexdigest()


@pytest.mark.parametrize("name", CONTENTS)
def test_chunks_are_what_they_were(name: str) -> None:
    assert digest(name, CONTENTS[name]) == GOLDEN[name]


def test_chunks_of_the_handbook_are_what_they_were() -> None:
    assert HANDBOOK
    whole = "".join(digest(path.name, path.read_bytes()) for path in HANDBOOK)
    assert hashlib.blake2b(whole.encode(), digest_size=8).hexdigest() == GOLDEN["handbook"]
