"""A document at which something fails is one refusal; a store or model that fails ends the run."""

import functools
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvrag.chunk import Chunk, Document
from kvrag.errors import DocumentError, ParameterError, StoreError
from kvrag.ingest import files, plan
from kvrag.ingest.chunker import Cutter
from kvrag.ingest.embedding import HashingEmbedding, Vectors
from kvrag.ingest.encoders import Encoders
from kvrag.ingest.index import Index
from kvrag.ingest.limits import ParseLimits
from kvrag.ingest.report import IngestReport
from kvrag.kvcache import ChunkKV
from tests.ingest.test_loaders import PageContent

Add = Callable[..., IngestReport]

GOOD = Document("good", "Ines keeps the harbour ledger.")
BAD = Document("bad", "The fox jumps over the dog.")


def reasons(report: IngestReport) -> dict[str, str]:
    return {Path(failed.source).name: failed.reason for failed in report.failed}


@pytest.fixture(params=["here", "on Ray"])
def add(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Add]:
    """Add documents to an index: in this process's loop, or through the stages of Ray."""
    if request.param == "on Ray":
        pytest.importorskip("pyarrow", reason="kvrag[ray] is not installed")
        from kvrag.ingest.ray.packets import forget
        from tests.ingest.ray.here import here as runner
    else:
        runner, forget = None, lambda: None
    settings: Any = {"embedding": "hashing", "chunk_tokens": 64}
    with Index.create(tmp_path / "index", model="kvrag-tiny", **settings) as index:
        yield functools.partial(index.add, runner=runner)
    forget()


# -- what happens to a document after it was parsed -------------------------------------------


class PanicException(BaseException):
    pass


def break_at(monkeypatch: pytest.MonkeyPatch, stage: str, error: BaseException) -> None:
    """Let a stage fail at texts of a fox."""

    def breaking(function: Callable[..., Any], texts: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if "fox" in str(texts(*arguments)):
                raise error
            return function(*arguments)

        return call

    if stage == "cut":
        monkeypatch.setattr(Cutter, "cut", breaking(Cutter.cut, lambda _, document: document))
    elif stage == "prefill":
        monkeypatch.setattr(Encoders, "prefill", breaking(Encoders.prefill, lambda _, chunk: chunk))
    else:
        embed = HashingEmbedding.embed
        monkeypatch.setattr(HashingEmbedding, "embed", breaking(embed, lambda _, texts: texts))


@pytest.mark.parametrize("stage", ["cut", "prefill", "embed"])
@pytest.mark.parametrize("error", [PanicException("odd"), MemoryError("odd")])
def test_a_document_that_fails_later_is_refused(
    add: Add, monkeypatch: pytest.MonkeyPatch, stage: str, error: BaseException
) -> None:
    break_at(monkeypatch, stage, error)
    report = add([BAD, GOOD])
    assert report.added == ("good",)
    assert f"{type(error).__name__}: odd" in reasons(report)["bad"]
    monkeypatch.undo()
    assert add([BAD, GOOD]).added == ("bad",)


@pytest.mark.parametrize("stage", ["cut", "prefill"])
def test_a_store_that_fails_meanwhile_ends_the_run(
    index: Index, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    break_at(monkeypatch, stage, StoreError("the disk is gone"))
    with pytest.raises(StoreError, match="the disk is gone"):
        index.add([BAD, GOOD])


def test_a_model_that_fails_at_everything_ends_the_run(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: the device is lost")

    with monkeypatch.context() as patch:
        patch.setattr(Encoders, "prefill", fail)
        with pytest.raises(RuntimeError, match="device is lost"):
            index.add([BAD, GOOD])
    monkeypatch.setattr(HashingEmbedding, "embed", fail)
    with pytest.raises(RuntimeError, match="device is lost"):
        index.add([BAD, GOOD])


def test_vectors_that_are_not_finite_are_refused(add: Add, monkeypatch: pytest.MonkeyPatch) -> None:
    embed = HashingEmbedding.embed

    def embed_nan(self: HashingEmbedding, texts: list[str]) -> Vectors:
        vectors = embed(self, texts)
        vectors[["fox" in text for text in texts]] = np.nan
        return vectors

    monkeypatch.setattr(HashingEmbedding, "embed", embed_nan)
    report = add([BAD, GOOD])
    assert report.added == ("good",)
    assert "its vector is not finite" in reasons(report)["bad"]


def break_kv(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Let the KV of texts with `text` in them be NaN."""
    prefill = Encoders.prefill

    def prefill_broken(self: Encoders, chunk: Chunk) -> ChunkKV:
        kv = prefill(self, chunk)
        return ChunkKV(kv.keys * torch.nan, kv.values) if text in chunk.text else kv

    monkeypatch.setattr(Encoders, "prefill", prefill_broken)


def test_kv_that_is_not_finite_is_refused(add: Add, monkeypatch: pytest.MonkeyPatch) -> None:
    break_kv(monkeypatch, "fox")
    report = add([BAD, GOOD])
    assert report.added == ("good",)
    assert "bad: its KV cannot be encoded (the keys of layer 0" in reasons(report)["bad"]


def test_a_codec_is_fitted_without_the_kv_that_is_not_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = " ".join(f"Ines notes ship {number}." for number in range(200))
    texts = {"good": ledger, "bad": "The fox jumps. " * 9}
    documents = [Document(source, text) for source, text in texts.items()]
    bad = Document("long", "The fox jumps. " * 400)
    settings: Any = {"embedding": "hashing", "codec": "lossless", "chunk_tokens": 64}
    with Index.create(tmp_path / "index", model="kvrag-tiny", **settings) as index:
        with monkeypatch.context() as patch:
            break_kv(patch, "")
            with pytest.raises(ParameterError, match="NaN or infinity"):
                index.add(documents)
        break_kv(monkeypatch, "fox")
        # What is left is too little for a profile.
        assert set(reasons(index.add([Document("short", "An owl sleeps."), bad]))) == {"long"}
        assert not index.config.profile
        report = index.add(documents)
        assert (report.added, set(reasons(report))) == (("good",), {"bad"})
        assert index.config.profile


def test_a_model_whose_kv_is_never_finite_ends_the_run(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_kv(monkeypatch, "")
    # The thread that encodes is a few chunks behind.
    with pytest.raises(ParameterError, match="NaN or infinity; load the model in a wider dtype"):
        index.add([Document(str(number), f"Fox number {number}.") for number in range(12)])


def test_a_file_of_which_a_document_failed_is_read_again(
    add: Add, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('"The fox."\n"The dog."\n"The cat."')
    with monkeypatch.context() as patch:
        break_at(patch, "prefill", RuntimeError("odd"))
        report = add(rows)
        assert set(reasons(report)) == {"rows.jsonl#1"}
        assert len(report.added) == 2
    report = add(rows)
    assert report.added == (f"{rows}#1",)
    assert len(report.unchanged) == 2


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda path: path.unlink(), "cannot be read"),
        (lambda path: path.write_text('{"text": '), "not JSON"),
        (lambda path: path.write_text('"other"\n"texts"'), "changed while it was being ingested"),
        (lambda path: path.write_bytes(b"x" * 2_000_001), "at most 2,000,000 are read"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "a pipe"),
    ],
)
def test_a_file_that_breaks_before_it_is_read_again_is_refused(
    add: Add,
    docs: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Path], object],
    reason: str,
) -> None:
    rows = docs / "rows.jsonl"
    rows.write_text('"The fox."\n"The dog."')
    monkeypatch.setattr(plan, "_MAX_KEPT_TOKENS", 0)

    def read_spoilt(path: str, max_bytes: int) -> bytes:
        if path == str(rows):
            spoil(rows)
        return files.read_file(path, max_bytes)

    with monkeypatch.context() as patch:
        patch.setattr("kvrag.ingest.stages.read_file", read_spoilt)
        report = add(docs, limits=ParseLimits(max_file_bytes=2_000_000))
    assert len(report.added) == 3
    assert set(reasons(report)) == {"rows.jsonl#1", "rows.jsonl#2"}
    assert all(reason in failed.reason for failed in report.failed)
    rows.unlink(missing_ok=True)
    rows.write_text('"The fox."')
    assert add(rows).added == (f"{rows}#1",)


# -- objects ----------------------------------------------------------------------------------


class _Raising:
    def __str__(self) -> str:
        raise RuntimeError("no text for you")


def _cycle() -> dict[str, Any]:
    cycle: dict[str, Any] = {}
    cycle["self"] = cycle
    return cycle


def _laughs() -> list[Any]:
    """A few lists that stand for 10 ** 20 values."""
    value: list[Any] = []
    for _ in range(20):
        value = [value] * 10
    return value


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        (_cycle(), "nested more than 32 levels"),
        ({"x": _laughs()}, "more than 100,000 values"),
        ({"x": "y" * 2_000_000}, "more than 1,048,576 characters"),
        ({"x": _Raising()}, "RuntimeError: no text for you"),
        ("text", "the metadata is a value of type str: expected a mapping"),
    ],
)
def test_objects_with_metadata_that_cannot_be_kept_are_refused(
    index: Index, metadata: Any, reason: str
) -> None:
    bad = PageContent("text", metadata, "bad")
    assert reason in reasons(index.add([bad, Document("bad", "text", metadata), GOOD]))["bad"]
    assert [row.source for row in index.documents()] == ["good"]


@pytest.mark.parametrize("text", [None, float("nan"), b"bytes", ["a", "list"], 3])
def test_texts_that_are_none_are_refused(index: Index, text: Any) -> None:
    found = reasons(index.add([Document("bad", text), GOOD]))
    assert found == {
        "bad": f"bad: its text is a value of type {type(text).__name__}: expected a text"
    }
    assert [row.source for row in index.documents()] == ["good"]


def test_sources_and_metadata_that_are_none_are_refused(index: Index) -> None:
    odd: Any = None
    report = index.add([GOOD, Document(odd, "abc"), Document("bad", "abc", odd), Document("", " ")])
    assert report.added == ("good",)
    assert [failed.source for failed in report.failed] == [
        "input 2 (Document)",
        "bad",
        "input 4 (Document)",
    ]
    assert "the source of a document is a value of type NoneType" in report.failed[0].reason
    assert "the metadata is a value of type NoneType" in report.failed[1].reason


def test_of_two_documents_of_one_source_the_earlier_is_refused(index: Index) -> None:
    report = index.add([Document("dup", "one"), Document("dup", "two"), GOOD, GOOD])
    assert report.added == ("dup", "good")
    (failed,) = report.failed
    assert failed.source == "dup"
    assert "a later document in this call has the same source" in failed.reason
    (again,) = index.add([Document("dup", "one"), Document("dup", "three")]).failed
    assert "stays" not in again.reason
    assert "three" in {hit.chunk.text for hit in index.search("x", 9)}


def test_questions_have_a_limit(index: Index) -> None:
    assert index.search("a" * 100_000) == []
    for search in (index.search, index.search_words):
        with pytest.raises(ParameterError, match=r"100,001 characters: expected at most 100,000"):
            search("a" * 100_001)


def test_metadata_that_each_of_many_chunks_would_repeat_is_refused(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "MAX_REPEATED_CHARACTERS", 10_000)
    long = Document("bad", "word " * 2000, {"note": "n" * 5_000})
    report = index.add([long, GOOD])
    assert "metadata of 5,0" in reasons(report)["bad"]
    assert report.added == ("good",)


def test_a_list_that_holds_itself_is_refused(index: Index) -> None:
    given: list[Any] = []
    given.append(given)
    with pytest.raises(ParameterError, match="nested more than 100 deep"):
        index.add(given)


# -- paths ------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs devices")
def test_only_regular_files_are_read(index: Index, docs: Path) -> None:
    os.mkfifo(docs / "pipe.txt")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(docs / "socket.txt"))
    (docs / "zero.txt").symlink_to("/dev/zero")
    (docs / "loop.txt").symlink_to(docs / "loop.txt")
    with listener:
        named = [docs / name for name in ("pipe.txt", "socket.txt", "zero.txt")]
        report = index.add([docs, "/dev/zero", *named])
    assert len(report.added) == 3
    found = sorted(failed.reason.rpartition("but ")[2] for failed in report.failed)
    expected = ["a device", "a device", "a pipe", "a socket"]
    assert [text.partition(";")[0] for text in found] == expected


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("loop", "cannot be read|symlink|Symlink"),
        ("x" * 5000, "name too long"),
        ("a\0b", "null byte"),
        ("gone", "there is no such file"),
        ("~no-such-user-here/x", "home directory"),
        ("", "an empty path"),  # not the working directory
    ],
)
def test_paths_that_lead_nowhere_are_named(
    index: Index, tmp_path: Path, name: str, reason: str
) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    given = name if name[:1] in "~" else str(tmp_path) + "/" + name
    with pytest.raises(DocumentError, match=reason):
        index.add(given)


def test_large_files_are_refused_unread(index: Index, docs: Path) -> None:
    with (docs / "sparse.txt").open("wb") as file:
        file.truncate(1 << 40)
    (docs / "large.txt").write_text("x" * 101)
    (docs / "full.txt").write_text("x" * 100)
    report = index.add(docs, limits=ParseLimits(max_file_bytes=100))
    assert set(reasons(report)) == {"sparse.txt", "large.txt"}
    assert "101 bytes or more, and at most 100 are read" in reasons(report)["large.txt"]


def test_a_folder_that_cannot_be_listed_keeps_what_was_under_it(
    index: Index, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.add(docs)
    (docs / "new.txt").write_text("A new file.")
    (docs / "ledger.txt").unlink()
    real = os.scandir

    def refuse(path: str) -> Any:
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr("kvrag.ingest.files.os.scandir", refuse)
    monkeypatch.setattr(Path, "exists", lambda _: False)
    report = index.add(docs)
    assert [Path(source).name for source in report.added] == ["new.txt"]
    assert [Path(source).name for source in report.removed] == ["ledger.txt"]
    assert "Permission denied" in reasons(report)["deep"]
