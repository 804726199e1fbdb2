"""`ls`, `stats`, `verify` and `gc`."""

import contextlib
import sqlite3
from pathlib import Path

import pytest

from tests.cli.conftest import TEXTS, Run


def test_ls(run: Run, index_folder: Path) -> None:
    rows = run("ls", "--index", index_folder, "--json").json
    assert all(row["num_chunks"] > 0 and row["num_tokens"] > 0 for row in rows)
    shown = run("ls", "--index", index_folder).out
    assert all(name in shown for name in TEXTS)


def test_stats(run: Run, index_folder: Path) -> None:
    shown = [line.split("  ")[0] for line in run("stats", "--index", index_folder).out.splitlines()]
    assert [line for line in shown if line.startswith("vectors")] == [
        *("vectors", "vectors memory", "vectors file")
    ]
    values = run("stats", "--index", index_folder, "--json").json
    assert values["num_documents"] == len(TEXTS)
    # No search has written the cache of vectors, and a search finds them all the same.
    assert not (index_folder / "vectors.cache").exists()
    assert values["num_vectors"] == values["num_chunks"]
    assert values["vectors_memory_bytes"] > 4 * 384 * values["num_vectors"]
    run("search", "river", "--index", index_folder, "--dense")
    again = run("stats", "--index", index_folder, "--json").json
    for name in ("num_vectors", "vectors_memory_bytes"):
        assert again[name] == values[name]


def test_verify_finds_a_flipped_bit(run: Run, index_folder: Path) -> None:
    segment = next((index_folder / "kv").rglob("*.kv"))
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 1
    segment.chmod(0o600)
    segment.write_bytes(content)
    done = run("verify", "--index", index_folder, "--json", code=1)
    assert done.json["ok"] is False
    told = run("verify", "--index", index_folder, code=1)
    assert told.out.count("damaged: ") == 1
    assert "--repair" in told.out
    mended = run("verify", "--index", index_folder, "--repair")
    assert "1 records computed again" in mended.out
    assert run("verify", "--index", index_folder).out.endswith("sound\n")


def test_documents_left_out_for_damage_are_no_empty_index(run: Run, index_folder: Path) -> None:
    with contextlib.closing(sqlite3.connect(index_folder / "catalog.sqlite")) as connection:
        connection.execute("UPDATE chunks SET metadata = '{\"a\": 1}'")
        connection.commit()
    asked = run("query", "Who keeps the ledger?", "--index", index_folder, "--max-tokens", "1")
    assert "the index is empty" not in asked.err
    assert "everything in the index is damaged and left out" in asked.err
    told = run("verify", "--index", index_folder, code=1)
    assert "may not be found until `kvrag verify --repair` repairs it" in told.out


def test_a_repair_that_loses_all_documents_is_no_success(run: Run, index_folder: Path) -> None:
    (index_folder / "catalog.sqlite").write_bytes(b"x" * 500)
    done = run("verify", "--index", index_folder, "--repair", code=1)
    assert "lost: all documents are lost; ingest all of them again\n" in done.out


@pytest.mark.parametrize("content", [b"", None])
def test_a_lost_catalog_is_begun_again(
    run: Run, index_folder: Path, documents: Path, content: bytes | None
) -> None:
    for heal in (["ingest", documents], ["verify", "--repair"]):
        (index_folder / "catalog.sqlite").unlink()
        if content is not None:
            (index_folder / "catalog.sqlite").write_bytes(content)
        for command in (["ls"], ["stats"], ["gc"], ["verify"], ["search", "ledger"]):
            done = run(*command, "--index", index_folder, code=1)
            assert f"the index in {index_folder} has lost" in done.err
            assert f"'kvrag ingest PATH... --index {index_folder}'" in done.err
        run(*heal, "--index", index_folder, code=(0, 1))
        run("ls", "--index", index_folder)
        run("ingest", documents, "--index", index_folder)
        run("verify", "--index", index_folder)
        assert "ledger" in run("search", "ledger", "--index", index_folder).out


def test_gc_of_a_clean_index_frees_nothing(run: Run, index_folder: Path) -> None:
    run("gc", "--index", index_folder, "--json")
    told = run("gc", "--index", index_folder).out
    assert told == "deleted: 0 records (0 B), 0 codec profiles, 0 temporary files\n"
    run("verify", "--index", index_folder)


def test_an_index_with_its_kv_elsewhere(run: Run, tmp_path: Path) -> None:
    documents = tmp_path / "documents"
    documents.mkdir()
    (documents / "ledger.txt").write_text("\n".join(TEXTS.values()))
    place, near = tmp_path / "kv", tmp_path / "near"
    folder = tmp_path / "index"
    common = ("--index", folder, "--embedding", "hashing", "--store")
    run("ingest", documents, "--model", "kvrag-tiny", *common, f"file:{place}")
    assert list(place.rglob("*.kv"))
    assert not (folder / "kv").exists()
    again = run("ingest", documents, "--index", folder, "--store", f"file:{near}", code=1)
    assert f"keeps its KV in file:{place}, asked for file:{near}" in again.err
    assert run("stats", "--index", folder, "--json").json["store"] == f"file:{place}"
    tiers = f"tiered:file:{near}?limit=100MB|file:{place}"
    asked = run("query", "Who keeps it?", "--index", folder, "--store", tiers, "--json")
    assert asked.json["report"]["misses"] == {}
    assert list(near.rglob("*.kv"))
    refused = run("query", "Who?", "--index", folder, "--store", "ftp://somewhere", code=1)
    assert refused.err.startswith("error: a store is file:PATH")
    run("gc", "--index", folder)
    run("verify", "--index", folder)
