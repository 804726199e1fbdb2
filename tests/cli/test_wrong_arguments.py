"""Arguments that cannot be meant: one sentence on stderr, and nothing else happens."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvrag
from tests.cli.conftest import Run
from tests.cli.test_startup import probed
from tests.support.models import make_model, make_tokenizer

QUESTION = "Who keeps the harbour ledger?"
ROOT = Path(kvrag.__file__).parent.parent


def message(run: Run, *arguments: object) -> str:
    done = run(*arguments, code=(1, 2))
    assert done.out == ""
    assert "Traceback" not in done.err
    assert "unexpected" not in done.err
    return " ".join(done.err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--plain --policy none --ratio 0.1", "no use for --policy, --ratio;"),
        ("--device meta", "device 'meta' cannot be used: torch computes nothing on it here; leave"),
        ("--device mps", "device 'mps' cannot be used: kvrag has not been tried on Apple's"),
        ("--ratio 2", "Invalid value for '--ratio'"),
        ("--policy none --ratio 0.5", "none"),
        ("--temperature inf", "temperature inf: expected a number, at least 0"),
        ("--never-slower=3", "never-slower"),
        ("--session-bytes much", "expected bytes as in 20GB or 512MiB"),
        (f"-k {2**40}", "k 1099511627776: expected a whole number"),
        ("--boundary-tokens 3", "boundary_tokens"),
        ("--policy boundry", "unknown policy 'boundry'"),
        ("--policy none:scale=2.0", "scale of reused keys left kvrag with 0.3"),
        ("--eviction corm:window=0", "expected 1 or more"),
        ("--model /nonexistent", "/nonexistent"),
        ("--store s4://x", "a store is file:PATH"),
        ("--indx x", "(Possible options: --index)"),
        ("--k 3", "(Possible options: -k)"),
        ("and the clock", "too many words: and the clock; put a text of several in quotes"),
    ],
)
def test_query(run: Run, whole_index: Path, options: str, said: str) -> None:
    assert said in message(run, "query", QUESTION, "-i", whole_index, *options.split())


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("query", "  ", "-i", "INDEX"), "the question is empty"),
        (("query", "why " * 3000, "-i", "INDEX"), "tokens"),
        (("query", QUESTION, "-i", "INDEX", "--model", "OTHER"), "model"),
        (("chat", "-i", "INDEX", "--policy", "nonsense"), "unknown policy 'nonsense'"),
        (("chat", "-i", "INDEX", "--history", "2", "--no-chat"), "--history 2"),
        *(
            ((*command, "-i", "MISSING"), "kvrag ingest")
            for command in (("ls",), ("stats",), ("verify",), ("gc",), ("query", "who?"))
        ),
        (("doctor", "-i", ""), "expected a folder, found an empty path"),
        (("ls", "-i", "~nosuchuser/x"), "path '~nosuchuser/x'"),
        (("ls", "-i", "a" * 5000), "a shorter name"),
        (("rm", "river.md", " ", "-i", "INDEX"), "error: SOURCE is empty"),
        (("adopt", "x:y.z", "-i", "MISSING"), "expected MODULE:NAME"),
        (("adopt", "../x:y", "-i", "MISSING"), "expected MODULE:NAME"),
        (("ingset",), "ingest"),
        (("train", "lnks"), "links"),
    ],
)
def test_commands(
    run: Run, whole_index: Path, tmp_path: Path, command: tuple[str, ...], said: str
) -> None:
    if "OTHER" in command:
        make_model("llama", seed=1).save_pretrained(tmp_path / "other")
        make_tokenizer().save_pretrained(tmp_path / "other")
    places = {"INDEX": whole_index, "MISSING": tmp_path / "nowhere", "OTHER": tmp_path / "other"}
    assert said in message(run, *(places.get(one, one) for one in command))
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--codec zip", "raw"),
        ("--dtype float8", "dtype 'float8'"),
        ("--compress drop:0.5", "--compress is gone. Compression by drop, anchors and kvzip left"),
        ("gone.txt", "gone.txt"),
        ("--store memory:?limit=1GB", "lost when the command ends"),
        ("--store tiered:redis://:secret@h|memory:", "lost when the command ends"),
        ("--store nowhere://h", "found 'nowhere://h'"),
        ("--max-file-size much", "--max-file-size: expected bytes"),
        ("--loader x", "--loader x: expected SUFFIX=MODULE:FUNCTION"),
        ("--loader .x=tests.ingest.bad_loaders:none", "a loader cannot be imported"),
        ("--loader .x=no_such_module:load", "no module 'no_such_module' is found"),
        ("--ray-actors 2", "--ray-actors says what to use of a cluster: add --ray"),
        ("s3://bucket/docs", "s3://bucket/docs: only tasks of Ray read it; add --ray"),
        ("s3://bucket/docs --ray local", "give s3://bucket/docs alone"),
        ("https://host/docs", "https://host/docs: https:// cannot be read; expected"),
        ("s3://b/x.hang --loader=.hang=tests.ingest.bad_loaders:hang", "add --ray"),
        ("--ray local --ray-actors 0", "--ray-actors 0: expected a whole number"),
        ("--ray local --ray-memory 1", "ray-memory 1: expected a whole number"),
        ("--ray 127.0.0.1:1", "cannot be used"),
    ],
)
def test_ingest_leaves_no_index(
    run: Run, documents: Path, model_folder: Path, tmp_path: Path, options: str, said: str
) -> None:
    if options == "--ray 127.0.0.1:1":
        pytest.importorskip("ray.data", reason="kvrag[ray] is not installed")
    model = () if "--model" in options else ("--model", model_folder)
    asked = ("ingest", documents, "-i", tmp_path / "index", *model, *options.split())
    told = message(run, *asked)
    assert said in told
    assert "secret" not in told
    assert not (tmp_path / "index" / "index.json").exists()


def test_an_empty_path_is_not_the_working_directory(
    run: Run, tmp_path: Path, model_folder: Path, documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert "PATH is empty: give a file or a folder" in message(
        run, "ingest", " ", "-i", tmp_path / "i", "--model", model_folder
    )
    assert "found an empty path" in message(run, "ingest", documents, "-i", "")
    assert not any((tmp_path / "here").iterdir())


@pytest.mark.parametrize("command", [("query",), ("search",), ("search", "--sparse")])
def test_bytes_that_are_no_text(index_folder: Path, command: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvrag", *command, b"caf\xe9?", "--index", str(index_folder)],
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
    command = ("stats", "--index", odd)
    said = probed(command, (*command, "--json")).stdout
    shown, as_json, _ = re.split(r"\n\|\[0, .*\n", said)
    assert "index-\\udce9" in shown
    assert json.loads(as_json)["path"] == str(odd)


def test_a_command_of_version_0_2_says_what_replaces_it(run: Run) -> None:
    for arguments in ([], ["--help"], ["--index", "x", "--port", "8650", "--writable"]):
        done = run("serve-kv", *arguments, code=2)
        assert done.err.startswith("error: 'kvrag serve-kv' is gone: let a web server")
    assert "serve-kv" not in run("--help").out
    assert "is gone: 'kvrag bench ttft'" in message(run, "bench", "attention", "--device", "cpu")


def test_an_option_of_version_0_2_says_what_replaces_it(run: Run) -> None:
    for given in (["--data", "x"], ["--data=x"], ["--contexts", "none"]):
        done = run("calibrate", *given, code=2)
        said = " ".join(re.sub("[\u2500-\u257f]", " ", done.err).split())
        assert f"{given[0].partition('=')[0]} is gone: 'kvrag calibrate' asks about" in said
    for command, option in (("quality", "--jobs"), ("codec", "--out")):
        assert f"{option} is gone: " in run("bench", command, option, "2", code=2).err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[serve-kv]\nport = 8650", "kvrag.toml: 'kvrag serve-kv' is gone: let a web server"),
        ('[calibrate]\ndata = "x"', "kvrag.toml: data is gone: 'kvrag calibrate' asks about"),
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
