"""Hostile documents: each is indexed or refused with a reason, within its limits."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrag.chunk import Chunk, Document
from kvrag.ingest.encoders import Encoders
from kvrag.ingest.index import Index
from kvrag.ingest.limits import ParseLimits
from kvrag.ingest.parsing import Parser
from kvrag.kvcache import ChunkKV
from tests.ingest.conftest import MakeIndex
from tests.ingest.hostile import make_files, make_known
from tests.support.properties import IS_EXHAUSTIVE, trials

LIMITS = ParseLimits(max_file_bytes=2_000_000, seconds=10, memory_bytes=256 << 20)


@pytest.fixture
def quick_index(make_index: MakeIndex, monkeypatch: pytest.MonkeyPatch) -> Index:
    """An index whose KV costs nothing, so that time goes to the documents."""

    def prefill(encoders: Encoders, chunk: Chunk) -> ChunkKV:
        spec = encoders.model.chunk_spec
        shape = (spec.num_layers, spec.num_kv_heads, len(chunk.token_ids), spec.head_dim)
        return ChunkKV(torch.zeros(shape), torch.zeros(shape))

    monkeypatch.setattr(Encoders, "prefill", prefill)
    return make_index(chunk_tokens=512)


class Watch:
    """Notes what parsing took, and what came of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds: dict[str, float] = {}
        self.num_characters: dict[str, int] = {}
        self.peak_bytes = 0
        parse = Parser.parse

        def watched(parser: Parser, path: str, content: bytes) -> list[Document]:
            started = time.perf_counter()
            try:
                documents = parse(parser, path, content)
                self.num_characters[path] = sum(len(one.text) for one in documents)
                return documents
            finally:
                self.seconds[path] = time.perf_counter() - started
                if parser._process is not None:
                    self._look_at(parser._process._process.pid)

        monkeypatch.setattr(Parser, "parse", watched)

    def _look_at(self, pid: int) -> None:
        status = Path(f"/proc/{pid}/status")
        if status.exists():
            fields: dict[str, Any] = dict(
                line.split(":", 1) for line in status.read_text().splitlines()
            )
            if "VmHWM" in fields:
                self.peak_bytes = max(self.peak_bytes, 1024 * int(fields["VmHWM"].split()[0]))


def check(index: Index, folder: Path, watch: Watch) -> tuple[int, int]:
    """Ingest a folder; return how many files were indexed and refused."""
    names = {str(path) for path in folder.iterdir()}
    report = index.add(folder, limits=LIMITS)
    indexed = {source.partition("#")[0] for source in report.added}
    refused = {failed.source for failed in report.failed}
    assert indexed | refused == names
    assert not indexed & refused
    assert all(len(failed.reason) > 20 for failed in report.failed)
    assert {row.source.partition("#")[0] for row in index.documents()} == indexed
    # Twice where what files before it left behind might be to blame.
    assert max(watch.seconds.values()) < 2 * LIMITS.seconds + 5
    assert max(watch.num_characters.values()) <= LIMITS.max_file_bytes
    assert watch.peak_bytes < LIMITS.memory_bytes + (100 << 20)
    return len(indexed), len(refused)


def write(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)


def test_hostile_documents(
    quick_index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(monkeypatch)
    files = make_known(1.0 if IS_EXHAUSTIVE else 0.02) | dict(make_files(trials(5_000, 10)))
    write(tmp_path / "files", files)
    num_indexed, num_refused = check(quick_index, tmp_path / "files", watch)
    assert num_indexed + num_refused == len(files)
    # A fifth or so: Hypothesis draws other files after some changes.
    assert num_indexed > len(files) // 10
    assert num_refused > len(files) // 5
