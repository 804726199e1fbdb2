import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvrag
from kvrag.cli.conversation import is_usable
from kvrag.engine.engine import KVEngine
from kvrag.engine.request import Request
from kvrag.ingest.index import Index
from kvrag.ingest.search import SearchHit
from tests.cli.conftest import Run


def test_turns_are_remembered_and_kept(run: Run, index_folder: Path) -> None:
    lines = "Who keeps the ledger?\nAnd the clock?\n/new\nAnd the clock?\n"
    done = run("chat", "--index", index_folder, "--max-tokens", 4, "--json", stdin=lines)
    first, second, third = done.json["turns"]
    num_first = first["usage"]["prompt_tokens"]
    assert second["report"]["num_kept"] >= num_first
    assert second["usage"]["prompt_tokens"] > num_first + 4
    # Passages of the first turn are not repeated.
    sources = [source["chunk_id"] for source in second["sources"]]
    assert len(set(sources)) == len(sources) >= len(first["sources"])
    with Index.open(index_folder) as index:
        for turn in (first, second):
            (best,) = index.search(turn.get("search", turn["question"]), 1)
            assert turn["sources"][0]["chunk_id"] == best.chunk.chunk_id
    assert third["usage"]["prompt_tokens"] < second["usage"]["prompt_tokens"]
    assert "search" not in first
    assert "search" not in third
    # The random model writes nothing usable.
    assert second["search"] == "Who keeps the ledger? And the clock?"
    forgetful = run(
        *("chat", "--index", index_folder, "--max-tokens", 4, "--json", "--session-bytes", 0),
        stdin=lines,
    )
    assert all(turn["report"]["num_kept"] == 0 for turn in forgetful.json["turns"])


def test_a_follow_up_searches_for_what_the_model_writes(
    run: Run, index_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    search = Index.search

    def noted(index: Index, question: str, k: int, **options: Any) -> list[SearchHit]:
        asked.append(question)
        return search(index, question, k, **options)

    def written(engine: KVEngine, request: Request) -> Any:
        assert "Last question: And the clock?" in request.prompt[0]["content"]
        return SimpleNamespace(text='\nQuestion: "Who repairs the clock?"\nBecause')

    monkeypatch.setattr(Index, "search", noted)
    monkeypatch.setattr(KVEngine, "generate", written)
    lines = "Who keeps the ledger?\nAnd the clock?\n"
    done = run("chat", "--index", index_folder, "--max-tokens", 3, stdin=lines)
    assert asked == ["Who keeps the ledger?", "Who repairs the clock?"]
    assert done.out.count("searching for: Who repairs the clock?") == 1


@pytest.mark.parametrize(
    ("written", "question", "usable"),
    [
        ("When did Ines write the ledger?", "And when did she write it?", True),
        ("She did write it then.", "And when did she write it?", False),
        ("the clock of Varn, repaired", "repaired clock", True),
        ("!!!", "Why?", False),
        ("write " * 100, "When did she write?", False),
        ("The fox jumps over the dog.", "And where does the river end?", False),
        ("巴黎的埃菲尔铁塔有多高？", "它有多高？", True),
        ("किताब कहाँ रखी हुई है?", "वह कहाँ रखी हुई है?", True),
        ("Where is the o\ufb03ce?", "where is the OFFICE?", True),
    ],
)
def test_what_replaces_a_question(written: str, question: str, usable: bool) -> None:
    assert is_usable(written, question) is usable


def test_commands(run: Run, index_folder: Path) -> None:
    lines = "/why\n/sources\nWho keeps the ledger?\n/sources\n/why\n/help\n/ratio\n"
    done = run("chat", "--index", index_folder, "--max-tokens", 3, stdin=lines)
    assert done.err.count("nothing has been answered yet") == 2
    assert "Ines keeps the harbour ledger. She writes down every boat." in done.out
    assert "Who keeps the ledger?" in done.out.partition("searched for")[2]
    assert "prompt tokens" in done.out
    assert "/ratio SHARE" in done.err
    assert "policy two_stage, ratio its own" in done.err


def test_another_ratio_recomputes_the_conversation(run: Run, index_folder: Path) -> None:
    lines = "Who keeps the ledger?\n/ratio 1.0\nAnd the clock?\nAnd the fox?\n"
    done = run("chat", "--index", index_folder, "--max-tokens", 3, "--json", stdin=lines)
    first, second, third = (turn["report"] for turn in done.json["turns"])
    assert first["num_reused"] > 0
    assert second["num_reused"] == 0 < second["num_recomputed"]
    assert third["num_kept"] >= second["num_tokens"]


def test_wrong_commands_get_one_line_each(run: Run, index_folder: Path) -> None:
    expected = {
        "/sourcs": "unknown command '/sourcs' (is it '/sources'?)",
        "/ratio much": "/ratio 'much': expected a share between 0 and 1",
        "/ratio 1.5": "/ratio '1.5': expected a share",
        "/ratio nan": "/ratio 'nan': expected a share",
        "/new now": "/new 'now': expected nothing after /new",
        "/": "unknown command '/'",
    }
    done = run("chat", "--index", index_folder, stdin="\n".join([*expected, ""]))
    told = [one for one in done.err.splitlines() if "error: " in one]
    for line, one in zip(expected.values(), told, strict=True):
        assert line in one


def test_the_oldest_turns_are_forgotten_when_the_window_is_full(
    run: Run, index_folder: Path
) -> None:
    """The test model holds 2,048 tokens."""
    long = "why does the keeper of the light go to the river bank " * 12
    lines = "".join(f"{number} {long}\n" for number in range(12))
    done = run("chat", "--index", index_folder, "--max-tokens", 3, stdin=lines)
    assert done.out.count("first token") == 12
    assert 1 <= done.err.count("the model's window is full: forgot") <= 6


@pytest.mark.slow
def test_ctrl_c_at_the_prompt_leaves_with_130(index_folder: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "kvrag", "chat", "--index", str(index_folder)],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
        start_new_session=True,
        cwd=Path(kvrag.__file__).parent.parent,
        # A background job's shell has it ignored, which children inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(theirs)
    shown = b""
    deadline = time.monotonic() + 300
    while b"> " not in shown and time.monotonic() < deadline:
        shown += os.read(ours, 1024)
    # A signal between the prompt and the read that waits for a line is not seen before the line:
    # as at a keyboard, it takes another one then.
    while process.poll() is None and time.monotonic() < deadline:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=15)
    out, _ = process.communicate(timeout=120)
    os.close(ours)
    assert process.returncode == 130
    assert out == b""
    assert b"Traceback" not in shown


@pytest.mark.parametrize("output", [(), ("--json",)])
def test_bytes_that_are_no_text_are_one_bad_question(
    run: Run, index_folder: Path, output: tuple[str, ...]
) -> None:
    lines = b"Who keeps the ledger?\nWho \xff?\nAnd the clock?\n"
    done = run("chat", "--index", index_folder, "--max-tokens", 3, *output, stdin=lines, code=1)
    assert "is not valid Unicode" in done.err
    if not output:
        assert done.out.count("first token") == 2
        return
    turns = done.json["turns"]
    assert [turn["question"] for turn in turns] == [
        "Who keeps the ledger?",
        "Who \\xff?",
        "And the clock?",
    ]
    assert "is not valid Unicode" in turns[1]["error"]
