"""A small random model on disk, a corpus, and a way to run commands."""

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvrag.cli.main import app
from tests.support.instructions import torch_threads
from tests.support.models import make_model, make_tokenizer

TEXTS = {
    "harbour.txt": "Ines keeps the harbour ledger. She writes down every boat.\n\n"
    "Tomas repairs the tall clock of Varn.\n",
    "river.md": "# The river\n\nThe old river bank was built by the keeper of the light.\n",
    "notes/fox.txt": "The quick brown fox jumps over the lazy dog.\n",
}


@dataclass(frozen=True)
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Ran]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Keep the tiny models on one thread: more only wait for one another."""
    with torch_threads(1):
        yield


def run_command(
    *args: object, stdin: str | bytes | None = None, code: int | tuple[int, ...] = 0
) -> Ran:
    """Return what a command did that ended with this code, or with one of these."""
    loggers = [logging.getLogger(name) for name in ("", "kvrag")]
    before = [(one.handlers[:], one.level, one.propagate) for one in loggers]
    result = CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)
    # The log that `serve` begins would go on into a stream that is closed now.
    for one, (handlers, level, propagate) in zip(loggers, before, strict=True):
        one.handlers[:], one.propagate = handlers, propagate
        one.setLevel(level)
    expected = code if isinstance(code, tuple) else (code,)
    assert result.exit_code in expected, result.output
    return Ran(result.exit_code, result.stdout, result.stderr)


@pytest.fixture
def run() -> Run:
    return run_command


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model("llama").save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def write_documents(folder: Path) -> Path:
    for name, text in TEXTS.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture(scope="session")
def whole_index(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """Return an index that no test changes, made by the command line."""
    folder = tmp_path_factory.mktemp("whole")
    made = ("ingest", write_documents(folder / "documents"), "--index", folder / "index")
    run_command(*made, "--model", model_folder, "--embedding", "hashing")
    return folder / "index"


@pytest.fixture
def documents(whole_index: Path) -> Path:
    """Return the documents of `whole_index`, as they were; a test may change them."""
    folder = whole_index.with_name("documents")
    shutil.rmtree(folder)
    return write_documents(folder)


@pytest.fixture
def index_folder(tmp_path: Path, whole_index: Path) -> Path:
    """Return an index of one's own."""
    # What others have searched for is in none of them.
    apart = shutil.ignore_patterns("*.cache", "counters.*")
    return Path(shutil.copytree(whole_index, tmp_path / "index", ignore=apart))
