"""Arguments that cannot be meant: one sentence on stderr, and nothing else happens."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvrag
from tests.cli.conftest import Run

QUESTION = "Who keeps the harbour ledger?"
ROOT = Path(kvrag.__file__).parent.parent


def message(run: Run, *arguments: object) -> str:
    done = run(*arguments)
    assert done.code in (1, 2), done.out
    assert done.out == ""
    assert "Traceback" not in done.err
    assert "unexpected" not in done.err
    return " ".join(done.err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        *(
            (["--plain", option, value], f"no use for {option}")
            for option, value in (
                ("--policy", "none"),
                ("--ratio", "0.1"),
                ("--eviction", "corm"),
                ("--links", "off"),
                ("--ttft", "1"),
                ("--temperature", "0"),
                ("--boundary-tokens", "4"),
                ("--seed", "1"),
            )
        ),
        (["--plain", "--policy", "none", "--ratio", "0.1"], "no use for --policy, --ratio;"),
        (
            ["--device", "meta"],
            "device 'meta' cannot be used: torch computes nothing on it here; leave",
        ),
        (["--device", "abacus"], "device 'abacus' cannot be used"),
        (["--ratio", "nan"], "ratio"),
        (["--ratio", "inf"], "ratio"),
        (["--ratio", "2"], "ratio"),
        (["--ratio", "a"], "--ratio"),
        (["--temperature", "nan"], "Invalid value for '--temperature'"),
        (["--temperature", "inf"], "temperature inf: expected a number, at least 0"),
        (["--temperature", "-1"], "Invalid value for '--temperature'"),
        (["--seed", "-1"], "seed"),
        (["--seed", "1.5"], "seed"),
        (["--seed", f"{2**64}"], "seed"),
        (["--ttft", "nan"], "'--ttft': expected a number above 0, found 'nan'"),
        (["--ttft", "0"], "'--ttft': expected a number above 0, found '0'"),
        (["--max-tokens", "0"], "Invalid value for '--max-tokens'"),
        (["-k", "0"], "-k"),
        (["-k", str(2**40)], "k 1099511627776: expected a whole number"),
        (["--boundary-tokens", "0", "--policy", "boundary"], "tokens"),
        (["--policy", "boundry"], "unknown policy 'boundry'"),
        (["--eviction", "korm"], "unknown eviction 'korm'"),
        (["--links", "/nonexistent"], "/nonexistent"),
        (["--model", "/nonexistent"], "/nonexistent"),
        (["--store", "s4://x"], "a store is file:PATH"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_query(run: Run, index_folder: Path, options: list[str], said: str) -> None:
    assert said in message(run, "query", QUESTION, "-i", index_folder, *options)


@pytest.mark.parametrize("command", [("query",), ("search",), ("search", "--sparse")])
def test_bytes_that_are_no_text(index_folder: Path, command: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvrag.cli", *command, b"caf\xe9?", "--index", str(index_folder)],
        capture_output=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 1
    assert done.stdout == b""
    assert done.stderr.startswith(b"error: the question is not valid Unicode: character 3 is ")
    assert done.stderr.count(b"\n") == 1


def test_names_that_are_no_text_are_shown(tmp_path: Path, index_folder: Path) -> None:
    odd = tmp_path / "index-\udce9"
    shutil.copytree(index_folder, odd)
    for options in ([], ["--json"]):
        done = subprocess.run(
            [sys.executable, "-m", "kvrag.cli", "stats", "--index", str(odd), *options],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
        )
        assert done.returncode == 0, done.stderr
        if options:
            assert json.loads(done.stdout)["path"] == str(odd)
        else:
            assert "index-\\udce9" in done.stdout


@pytest.mark.parametrize(
    "content",
    [b"[" * 200_000, b'{"a":' * 200_000, b"\xff\xfe", b"[]", b"null", b"{}", b"\0" * 100, b"1e999"],
    ids=["brackets", "braces", "bytes", "list", "null", "empty", "zeros", "number"],
)
@pytest.mark.parametrize("command", ["ls", "stats", "gc", "verify"])
def test_index_json_of_anything(run: Run, index_folder: Path, command: str, content: bytes) -> None:
    (index_folder / "index.json").write_bytes(content)
    said = message(run, command, "-i", index_folder)
    assert "index.json does not describe an index" in said


@pytest.mark.parametrize("field", ["kind", "format_version", "model", "codec", "dtype", "profile"])
def test_index_json_with_long_values(run: Run, index_folder: Path, field: str) -> None:
    path = index_folder / "index.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {field: "x" * 1_000_000}))
    assert len(message(run, "ls", "-i", index_folder)) < 1000


def test_a_command_of_version_0_2_says_what_replaces_it(run: Run) -> None:
    for arguments in ([], ["--help"], ["--index", "x", "--port", "8650", "--writable"]):
        done = run("serve-kv", *arguments)
        assert done.code == 2
        assert done.err.startswith("error: 'kvrag serve-kv' is gone: let a web server")
    assert "serve-kv" not in run("--help").out


def test_an_option_of_version_0_2_says_what_replaces_it(run: Run) -> None:
    for given in (["--data", "x"], ["--data=x"], ["--contexts", "none"]):
        done = run("calibrate", *given)
        assert done.code == 2
        said = " ".join(re.sub("[\u2500-\u257f]", " ", done.err).split())
        assert f"{given[0].partition('=')[0]} is gone: 'kvrag calibrate' asks about" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[serve-kv]\nport = 8650", "kvrag.toml:1: 'kvrag serve-kv' is gone: let a web server"),
        ('[calibrate]\ndata = "x"', "kvrag.toml:2: data is gone: 'kvrag calibrate' asks about"),
    ],
)
def test_settings_of_version_0_2_say_what_replaces_them(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kvrag.toml").write_text(text)
    assert said in message(run, "ls")
    (tmp_path / "kvrag.toml").unlink()
    assert "is gone: let a web server" in message(run, "config", "serve-kv")


@pytest.mark.parametrize("command", ["ls", "gc", "query"])
def test_an_index_json_that_is_no_file(run: Run, tmp_path: Path, command: str) -> None:
    index, question = tmp_path / "index", [QUESTION] if command == "query" else []
    (index / "index.json").mkdir(parents=True)
    said = message(run, command, *question, "-i", index)
    assert "but a folder; a folder is where a file should be: move it away" in said
    (index / "index.json").rmdir()
    (index / "index.json").symlink_to("index.json")
    assert "links lead in a circle: remove them" in message(run, command, *question, "-i", index)


def test_names_of_indexes_that_no_folder_can_have(run: Run, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for name in ("~nosuchuser/x", tmp_path / "loop", "a" * 5000):
        assert message(run, "ls", "-i", name).startswith(f"error: path '{str(name)[:100]}")


def test_ingest_with_a_type(run: Run, tmp_path: Path, documents: Path, model_folder: Path) -> None:
    folder = tmp_path / "index"
    asked = ("ingest", documents, "-i", folder, "--model", model_folder, "--embedding", "hashing")
    assert "dtype 'float8'" in message(run, *asked, "--dtype", "float8")
    assert not folder.exists()
    assert run(*asked, "--dtype", "bfloat16").code == 0
    stats = run("stats", "-i", folder, "--json").json
    assert stats["dtype"] == "bfloat16"
    assert run(*asked, "--dtype", "bfloat16").code == 0
    said = message(run, *asked, "--dtype", "float16")
    assert "made with dtype=bfloat16, asked for float16" in said
    answer = run("query", QUESTION, "-i", folder, "--max-tokens", 2, "--json")
    assert answer.code == 0, answer.err
