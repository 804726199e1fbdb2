import contextlib
import shutil
from pathlib import Path

import pytest

from kvrag.ingest import code, loaders
from kvrag.ingest.plan import Plan
from kvrag.ingest.ray import RayRunner
from kvrag.ingest.stages import Run as Computing
from tests.cli.conftest import Run
from tests.support.models import make_model, make_tokenizer


@pytest.fixture
def common(tmp_path: Path, documents: Path, model_folder: Path) -> tuple[object, ...]:
    return (
        *("ingest", documents, "--index", tmp_path / "index", "--model", model_folder),
        *("--embedding", "hashing"),
    )


def test_an_index_is_made_once(
    run: Run, common: tuple[object, ...], documents: Path, tmp_path: Path
) -> None:
    dry = run(*common, "--dry-run", "--json")
    assert dry.json["dry_run"] is True
    assert not (tmp_path / "index").exists()
    first = run(*common)
    assert first.out.count("embedding: hashing-2 reads all of a text\n") == 1
    again = run(*common, "--json")
    assert again.json["num_tokens_computed"] == 0
    (documents / "river.md").write_text("The bridge fell.\n")
    changed = run(*common)
    assert "1 changed" in changed.out
    assert "embedding" not in changed.out + changed.err
    done = run(*common, "--chunk-tokens", 64, code=1)
    assert "chunk_tokens=512" in done.err


def test_another_model_is_refused_even_where_nothing_is_to_be_done(
    run: Run, common: tuple[object, ...], documents: Path, tmp_path: Path
) -> None:
    run(*common)
    make_model("llama", seed=7).save_pretrained(tmp_path / "other")
    make_tokenizer().save_pretrained(tmp_path / "other")
    again = ("ingest", documents, "--index", common[3], "--model")
    for model, message in ((tmp_path / "gone", "no model at"), (tmp_path / "other", "fingerprint")):
        done = run(*again, model, code=1)
        assert message in done.err
    shutil.copytree(str(common[5]), tmp_path / "copy")
    for model in (common[5], tmp_path / "copy"):
        done = run(*again, model, "--json")
        assert done.json["num_tokens_computed"] == 0


def test_records_for_the_first_place_can_be_stored_at_once(
    run: Run, common: tuple[object, ...]
) -> None:
    settings = (*common, "--chunk-tokens", 32, "--context", "filler:20")
    run(*settings, "--first-records", "--dry-run")
    num_records = run(*settings, "--json").json["num_records"]
    stored = run(*settings, "--first-records", "--json")
    assert stored.json["num_records"] == 0
    assert f"first places: {num_records} records stored" in stored.err
    again = run(*settings, "--first-records")
    assert "first places: 0 records stored" in again.err


def test_context_is_recorded_told_and_cannot_change(
    run: Run, common: tuple[object, ...], documents: Path
) -> None:
    long = "Ines keeps the harbour ledger of Varn. She wrote the book. " * 4
    (documents / "long.txt").write_text(long)
    settings = ("--chunk-tokens", 32, "--context", "document:20")
    done = run(*common, *settings)
    assert "tokens of context computed with them, not stored" in done.out
    stats = run("stats", "--index", common[3], "--json").json
    assert (stats["context"], stats["context_tokens"]) == ("document", 20)
    assert (stats["trust"], stats["writer"]) == ("index", "")
    for same in ("document", "document:20"):
        run(*common, "--context", same)
    other = run(*common, "--context", "neighbours", code=1)
    assert "was made with context=document:20, asked for neighbours" in other.err


def test_control_strings_are_told(
    run: Run, common: tuple[object, ...], documents: Path, tmp_path: Path
) -> None:
    (documents / "evil.txt").write_text("Ines says <eos> and <bos>.")
    assert "read as text: 2 control strings of the model, in 1 document\n" in run(*common).out
    done = run(*common, "--control-tokens", "keep", code=1)
    assert "control_tokens=neutralise" in done.err
    run(*common, "--control-tokens", "drop", code=1)
    refusing = (*common[:2], "--index", tmp_path / "other", *common[4:])
    done = run(*refusing, "--control-tokens", "refuse", code=1)
    assert "left out" in done.err
    assert "line 1 of its text holds '<eos>'" in done.err


def test_one_bad_file_leaves_the_rest_and_exit_code_1(
    run: Run, common: tuple[object, ...], documents: Path
) -> None:
    (documents / "empty.txt").write_text("")
    (documents / "broken.pdf").write_bytes(b"%PDF-1.4 nothing")
    (documents / "rows.jsonl").write_text('{"text": 1\n')
    (documents / "bad.html").write_text('<meta charset="hex"><p>x')
    (documents / "long.txt").write_text("x" * 2000)
    done = run(*common, "--max-file-size", "1kB", code=1)
    assert "left out" in done.err
    assert "declares 'hex'" in done.err
    assert "at most 1,000 are read" in done.err
    assert "5 left out" in done.out
    for name in ("empty.txt", "broken.pdf", "rows.jsonl: line 1"):
        assert done.err.count(name) == 1
    again = run(*common, "--max-file-size", "3kB", "--json", code=1)
    assert (len(again.json["added"]), len(again.json["failed"])) == (1, 4)


def test_limits_and_loaders_reach_the_parser(
    run: Run, common: tuple[object, ...], documents: Path
) -> None:
    (documents / "a.hang").write_text("x")
    (documents / "a.shout").write_text("the loud one")
    loaders = [f"--loader=.{name}=tests.ingest.bad_loaders:{name}" for name in ("hang", "shout")]
    done = run(*common, *loaders, "--parse-seconds", "0.5", "--json", code=1)
    (failed,) = done.json["failed"]
    assert "took longer than 0.5 s" in failed["reason"]
    assert any(source.endswith("a.shout") for source in done.json["added"])


def test_a_folder_with_nothing_to_read_is_told(
    run: Run, common: tuple[object, ...], tmp_path: Path
) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    (folder / "boat.png").write_bytes(b"\x89PNG")
    (folder / ".hidden.txt").write_text("Ines keeps the harbour ledger.")
    done = run("ingest", folder, *common[2:])
    assert "no file of a known type was found" in done.err
    assert " .pdf " in done.err
    assert ".parquet is read with --ray" in done.err
    assert "no file of a known kind" not in run(*common).err


def test_code_without_its_grammar_is_noted_once(
    run: Run, common: tuple[object, ...], documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.py", "b.py", "c.rs"):
        (documents / name).write_text("# One\nlet = 1\n")
    monkeypatch.setattr(code, "is_installed", lambda suffix: False)
    monkeypatch.setattr(loaders, "is_installed", lambda suffix: False)
    named = [documents / name for name in ("a.py", "b.py", "c.rs")]
    done = run("ingest", *named, *common[1:])
    assert done.err.count("source code (.py .rs) was read as plain text; pip install") == 1
    again = run("ingest", *named, *common[1:])
    assert "plain text" not in again.err


def test_the_json_of_a_dry_run_says_what_it_takes(
    run: Run, common: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyarrow", reason="kvrag[ray] is not installed")

    class Here(RayRunner):
        def __call__(self, computing: Computing) -> Plan:
            self.config = computing.config
            computing.outcome.num_tokens_computed = 7200
            return Plan(missing={"key": (7200, 0)})

    monkeypatch.setattr("kvrag.ingest.ray.RayRunner", Here)
    monkeypatch.setattr("kvrag.cli.ingest.Asked.connected", lambda _: contextlib.nullcontext())
    monkeypatch.setattr("kvrag.cli.ingest.require", lambda *_: None)
    gone = run(*common, "--ray", "local", "--dry-run", "--ray-rate", "2", code=2)
    assert "--dry-run says the tokens" in gone.err
    done = run(*common, "--ray", "local", "--dry-run", "--json")
    found = done.json["estimate"]
    assert found["num_tokens"] == 7200
    assert found["size_bytes"]["raw"] > found["size_bytes"]["cachegen:1"] > 0
