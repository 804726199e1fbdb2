"""A flipped bit in a schema that SQLite then cannot describe as text is damage like any other."""

import shutil
import sqlite3
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.support.folders import pack_all

QUESTION = "Who keeps the harbour ledger?"


@pytest.fixture
def index(run: Run, index_folder: Path) -> Path:
    run("query", "--index", index_folder, QUESTION, "--max-tokens", 2)
    return index_folder


def spoil_schema(path: Path) -> None:
    """Flip the first bit after which Python cannot decode SQLite's own message."""
    sound = path.read_bytes()
    probe = path.with_name("probe.sqlite")
    for place in range(100, 4096):
        spoiled = bytearray(sound)
        spoiled[place] ^= 0x80
        probe.write_bytes(spoiled)
        connection = sqlite3.connect(probe)
        try:
            connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        except UnicodeDecodeError:
            path.write_bytes(spoiled)
            return
        except sqlite3.DatabaseError:
            pass
        finally:
            connection.close()
            probe.unlink()
    pytest.fail("no flip makes the schema undecodable")


def test_the_catalog_is_named_repaired_and_healed(run: Run, index: Path, documents: Path) -> None:
    spoil_schema(index / "catalog.sqlite")
    for command in (["ls"], ["stats"], ["verify"], ["query", QUESTION]):
        done = run(*command, "--index", index, code=1)
        assert "catalog.sqlite is damaged" in done.err
        assert "kvrag verify --repair" in done.err
    run("verify", "--repair", "--index", index, code=1)
    run("ingest", documents, "--index", index)
    run("verify", "--index", index)


def test_the_table_of_records_is_made_anew(run: Run, index: Path) -> None:
    pack_all(index / "kv")  # as 0.2 wrote it
    spoil_schema(index / "kv" / "records.sqlite")
    run("query", "--index", index, QUESTION, "--max-tokens", 2)
    run("verify", "--repair", "--index", index)
    run("verify", "--index", index)


def test_counters_are_no_reason_to_answer_nothing(run: Run, index: Path) -> None:
    spoil_schema(index / "counters.sqlite")
    for command in (["query", QUESTION, "--max-tokens", 2], ["stats"], ["verify"]):
        run(*command, "--index", index)


def test_words_are_indexed_anew(run: Run, index: Path) -> None:
    run("search", "--sparse", "--index", index, "ledger")
    before = run("search", "--sparse", "--index", index, "ledger", "--json").json["hits"]
    words = index / "words.cache"
    copy = shutil.copyfile(words, words.with_name("copy"))
    spoil_schema(copy)
    copy.replace(words)
    assert run("search", "--sparse", "--index", index, "ledger", "--json").json["hits"] == before
