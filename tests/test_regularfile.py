"""Pipes, devices and huge files in place of a file: an error at once, whoever reads it."""

import contextlib
import errno
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvrag.cli import demo
from kvrag.errors import KVRagError
from kvrag.ingest.config import IndexConfig
from kvrag.ingest.embedding import get_embedding
from kvrag.ingest.index import Index
from kvrag.ingest.maintenance import KEPT_FOLDER as KEPT
from kvrag.ingest.maintenance import kept_keys
from kvrag.ingest.profiles import read_profile
from kvrag.ingest.upkeep import CALIBRATION_NAME as CALIBRATION
from kvrag.models.kv_model import KVModel
from kvrag.models.loading import load_tokenizer
from kvrag.pml.schema import read_elements
from kvrag.regularfile import MAX_BYTES, read_regular, require_regular_files
from kvrag.store.encrypted import read_key
from kvrag.store.registry import open_store
from kvrag.tune.stores import read_prices
from kvrag.weights.sources import find_gguf
from kvrag_bench.exact import _read as read_exact
from kvrag_bench.judge import datasets
from kvrag_bench.quality.results import Results
from tests.support.models import make_model, make_tokenizer


class Hung(BaseException):
    """Nothing takes it for a refusal, unlike TimeoutError, which is an OSError."""


@pytest.fixture(autouse=True)
def no_hanging() -> Iterator[None]:
    """End a test that waits for a pipe or reads a device without end."""

    def late(*_: object) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


MAKERS = {"pipe": make_pipe, "device": make_device, "socket": make_socket}
kinds = pytest.mark.parametrize("kind", ["pipe", "device"])


@pytest.mark.parametrize("kind", list(MAKERS))
def test_what_is_no_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path has few characters
    path = Path("it")
    MAKERS[kind](path)
    for act in (read_regular, lambda one: require_regular_files(one.parent)):
        with pytest.raises(OSError, match=f"not a regular file but a {kind}"):
            act(path)


def test_a_file_that_becomes_a_pipe_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    status = (tmp_path / "file").stat()
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr("os.stat", lambda _: status)
    with pytest.raises(OSError, match="a pipe"):
        read_regular(tmp_path / "pipe")


def test_a_huge_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "it"
    path.write_bytes(b"x" * 10)
    assert read_regular(path, 10) == b"x" * 10
    with path.open("r+b") as file:
        file.truncate(MAX_BYTES + 1)  # a hole
    with pytest.raises(OSError, match="at most 67,108,864 are read") as failure:
        read_regular(path)
    assert failure.value.errno == errno.EFBIG


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "key": ("key", read_key),
    "store": ("key", lambda path: open_store(f"memory:?key_file={path}")),
    "token": ("token", lambda path: open_store(f"http://127.0.0.1:1?token_file={path}")),
    "certificates": ("ca.pem", lambda path: open_store(f"https://127.0.0.1:1?ca={path}")),
    "index": ("index.json", lambda path: IndexConfig.load(path.parent)),
    "profile": ("it.safetensors", read_profile),
    "prices": ("prices.toml", read_prices),
    "questions": ("questions.json", demo.read_questions),
    "data": ("data.json", lambda path: datasets.read_questions(str(path))),
    "markup": ("schema.xml", read_elements),
    "GGUF": ("model.gguf", find_gguf),
    "GGUF in a folder": ("model.gguf", lambda path: find_gguf(path.parent)),
    "exact": ("data.txt", read_exact),
    "judgements": ("out.jsonl", lambda path: Results(path, {})),
}


@kinds
@pytest.mark.parametrize("name", list(READERS))
def test_no_reader_waits_for_a_pipe(tmp_path: Path, name: str, kind: str) -> None:
    file, read = READERS[name]
    MAKERS[kind](tmp_path / file)
    with pytest.raises(KVRagError, match=f"a {kind}|no data set at .*data.json"):
        read(tmp_path / file)


@kinds
def test_models_and_embeddings(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "model"
    make_model("llama").save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    for name in ("config.json", "tokenizer.json", "model.safetensors", "added_tokens.json"):
        kept = (folder / name).read_bytes() if (folder / name).exists() else None
        (folder / name).unlink(missing_ok=True)
        MAKERS[kind](folder / name)
        for load in (KVModel.load, load_tokenizer):
            with pytest.raises(KVRagError, match=f"not a regular file but a {kind}"):
                load(folder)
        (folder / name).unlink()
        if kept is not None:
            (folder / name).write_bytes(kept)
    (folder / "1_Pooling").mkdir()
    MAKERS[kind](folder / "1_Pooling" / "config.json")
    with pytest.raises(KVRagError, match=f"not a regular file but a {kind}"):
        get_embedding(folder)


@kinds
def test_every_file_of_an_index(tmp_path: Path, kind: str) -> None:
    """Reading, checking and writing end with an answer or an error of kvrag's."""
    model = KVModel.load(make_model("llama"), tokenizer=make_tokenizer())
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "a.txt").write_text("Ines keeps the harbour ledger of Varn.")
    folder = tmp_path / "index"
    with Index.create(folder, model=model, embedding="hashing", chunk_tokens=64) as index:
        index.add(docs)
        index.search("ledger", 1)
        index.search_words("ledger", 1)
    found = [path for path in folder.rglob("*") if path.is_file()]
    assert len(found) >= 7
    for path in (*found, folder / CALIBRATION, folder / KEPT / "x.json"):
        path.parent.mkdir(exist_ok=True)
        kept = path.rename(tmp_path / "kept") if path.exists() else None
        MAKERS[kind](path)
        for act in (
            lambda index: index.search("ledger", 1),
            lambda index: index.search_words("ledger", 1),
            lambda index: index.calibration,
            lambda index: kept_keys(index.path),
            lambda index: index.upkeep.verify(),
            lambda index: index.upkeep.gc(),
            lambda index: index.add(docs),
            lambda index: index.stats(),
        ):
            with contextlib.suppress(KVRagError), Index.open(folder, model=model) as index:
                act(index)
        path.unlink()
        if kept is not None:
            kept.rename(path)
    with Index.open(folder, model=model) as index:
        assert index.upkeep.verify().ok
