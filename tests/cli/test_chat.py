from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import kvrag
from kvrag.errors import StoreError
from kvrag.ingest.index import Index
from kvrag.ingest.search import SearchHit
from tests.cli.conftest import Run


def test_a_conversation_from_a_pipe(run: Run, index_folder: Path) -> None:
    lines = "Who keeps the ledger?\n\n/new\n/help\nAnd the clock?\n"
    done = run("chat", "--index", index_folder, "--max-tokens", 3, stdin=lines)
    assert done.code == 0, done.err
    assert done.out.count("first token") == 2


def test_json_is_one_document(run: Run, index_folder: Path) -> None:
    lines = "Who keeps the ledger?\nAnd the clock?\n/quit\nNever asked\n"
    done = run("chat", "--index", index_folder, "--max-tokens", 3, "--json", stdin=lines)
    assert done.code == 0, done.err
    assert [turn["question"] for turn in done.json["turns"]] == [
        "Who keeps the ledger?",
        "And the clock?",
    ]


def test_history_makes_the_prompt_longer(run: Run, index_folder: Path) -> None:
    lines = "Who keeps the ledger?\nAnd the clock?\n"
    common = ("chat", "--index", index_folder, "--max-tokens", 3, "--json")
    alone = run(*common, stdin=lines).json["turns"]
    together = run(*common, "--history", 2, stdin=lines).json["turns"]
    assert alone[0]["usage"]["prompt_tokens"] == together[0]["usage"]["prompt_tokens"]
    assert alone[1]["usage"]["prompt_tokens"] < together[1]["usage"]["prompt_tokens"]


def test_a_question_too_long_is_said_and_survived(run: Run, index_folder: Path) -> None:
    lines = "why " * 3000 + "\nWho keeps the ledger?\n"
    done = run("chat", "--index", index_folder, "--max-tokens", 3, stdin=lines)
    assert done.code == 1
    assert done.err.startswith("error: ")
    assert done.out.count("first token") == 1


def test_a_refused_question_is_a_turn_of_the_json(run: Run, index_folder: Path) -> None:
    lines = "why " * 3000 + "\nWho keeps the ledger?\n"
    done = run("chat", "--index", index_folder, "--max-tokens", 3, "--json", stdin=lines)
    assert done.code == 1
    refused, answered = done.json["turns"]
    assert refused["question"].startswith("why why")
    assert "tokens" in refused["error"]
    assert "answer" in answered


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--temperature", "1e-9"), "temperature"),
        (("--set", "seed=-1"), "seed"),
        (("--set", "policy=nonsense"), "none, boundary, seam, deviation"),
        (("--history", "2", "--set", "no-chat=true"), "--history 2"),
        (("--device", "nonsense"), "device 'nonsense'"),
    ],
)
def test_bad_values_are_named_before_any_question(
    run: Run, index_folder: Path, arguments: tuple[str, ...], expected: str
) -> None:
    done = run("chat", "--index", index_folder, *arguments, stdin="")
    assert done.code == 1
    assert expected in done.err


@pytest.mark.slow
def test_ctrl_c_at_the_prompt_leaves_with_130(index_folder: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "kvrag.cli", "chat", "--index", str(index_folder)],
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
    deadline = time.monotonic() + 120
    while b"> " not in shown and time.monotonic() < deadline:
        shown += os.read(ours, 1024)
    # A signal between the prompt and the read that waits for a line is not seen before the line:
    # as at a keyboard, it takes another one then.
    while process.poll() is None and time.monotonic() < deadline:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=15)
    out, _ = process.communicate(timeout=15)
    os.close(ours)
    assert process.returncode == 130
    assert out == b""
    assert b"Traceback" not in shown


@pytest.mark.parametrize("output", [(), ("--json",)])
def test_bytes_that_are_no_text_are_one_bad_question(
    run: Run, index_folder: Path, output: tuple[str, ...]
) -> None:
    lines = b"Who keeps the ledger?\nWho \xff?\nAnd the clock?\n"
    done = run("chat", "--index", index_folder, "--max-tokens", 3, *output, stdin=lines)
    assert done.code == 1
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


def test_an_error_of_one_question_leaves_the_others(
    run: Run, index_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = Index.search

    def failing(index: Index, question: str, k: int, **options: Any) -> list[SearchHit]:
        if "clock" in question:
            raise StoreError("the store is gone")
        return search(index, question, k, **options)

    monkeypatch.setattr(Index, "search", failing)
    lines = "And the clock?\nWho keeps the ledger?\n"
    done = run("chat", "--index", index_folder, "--max-tokens", 3, "--json", stdin=lines)
    assert done.code == 1
    assert done.err.count("error: the store is gone\n") == 1
    assert done.json["turns"][0] == {"question": "And the clock?", "error": "the store is gone"}
    assert "answer" in done.json["turns"][1]
