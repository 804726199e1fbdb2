"""The process that parses: whatever a file does to it costs that file alone."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrag.chunk import Document
from kvrag.errors import DocumentError, ParameterError, ParserError
from kvrag.ingest.limits import ParseLimits
from kvrag.ingest.loaders import NoTextError
from kvrag.ingest.parsing import Parser
from tests.ingest import bad_loaders
from tests.support.waiting import wait_until

LOADERS = {
    f".{name}": f"tests.ingest.bad_loaders:{name}"
    for name, value in vars(bad_loaders).items()
    if getattr(value, "__module__", "") == bad_loaders.__name__
}
LIMITS = ParseLimits(max_file_bytes=1_000_000, seconds=3, memory_bytes=200 << 20)


@pytest.fixture(scope="module")
def parser() -> Iterator[Parser]:
    with Parser(LIMITS, LOADERS) as parser:
        yield parser


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("hang", r"took longer than 3 s.*--parse-seconds"),
        ("crash", r"its parser crashed \(Segmentation fault\)"),
        ("eat", r"more than 200 MiB of memory.*--parse-memory"),
        ("flood", r"more text than the limit.*--max-file-size"),
        ("steal", r"its loader gave the source .*expected the path"),
        ("repeat", r"its loader gave the source .*each once"),
        ("halve", "half a surrogate pair at character 5"),
        ("garble", "its parser's answer"),
        ("nest", "metadata is nested more than 32 levels deep"),
        ("give_up", r"its loader failed \(SystemExit: 3\)"),
        ("blurt", r"its loader failed \(ValueError: half \\ud800\)"),
        ("hang_up", "closed its connection"),
    ],
)
def test_a_file_that_breaks_its_parser_is_refused_and_the_next_one_read(
    parser: Parser, kind: str, reason: str
) -> None:
    with pytest.raises(DocumentError, match=rf"(?s)^/docs/a\.{kind}: .*{reason}"):
        parser.parse(f"/docs/a.{kind}", b"x")
    assert parser.parse("/docs/b.txt", b"next") == [Document("/docs/b.txt", "next")]


def test_a_part_whose_name_cannot_be_stored_is_refused(parser: Parser) -> None:
    with pytest.raises(DocumentError, match=r"^/a\.misname#\\ud800: .* not valid Unicode"):
        parser.parse("/a.misname", b"x")


def test_what_a_process_sends_past_its_own_checks_is_checked(parser: Parser) -> None:
    nested = b'{"a":' * 300 + b"1" + b"}" * 300
    for part, metadata, outline, reason in (
        (b"", nested, b"[]", "nested more than 32 levels"),
        (rb"#\ud800", b"{}", b"[]", "not valid Unicode"),
        (b"", b"{}", b'[[0, 0, ""], [2, 0, ""]]', "mark 1 of its outline is not one"),
    ):
        answer = b'{"part": "%s", "metadata": %s, "outline": %s}' % (part, metadata, outline)
        with pytest.raises(DocumentError, match=reason):
            parser.parse("/a.lie", answer)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("kind", ["fork", "cling"])
def test_a_process_that_a_loader_left_behind_holds_nothing_up(kind: str, tmp_path: Path) -> None:
    number = tmp_path / "number"
    with Parser(ParseLimits(seconds=1), LOADERS) as parser:
        with pytest.raises(DocumentError, match="took longer than 1 s"):
            parser.parse(f"/a.{kind}", str(number).encode())
        assert parser.parse("/b.txt", b"next") == [Document("/b.txt", "next")]
    child = int(number.read_text())
    if kind == "cling":  # has a session of its own
        os.kill(child, signal.SIGKILL)
    wait_until(lambda: not _is_running(Path(f"/proc/{child}")))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_loader_that_forks_answers_once(parser: Parser) -> None:
    for number in range(3):
        path = f"/{number}.double"
        assert parser.parse(path, b"x") == [Document(path, "once")]
    assert parser.parse("/b.txt", b"next") == [Document("/b.txt", "next")]


def test_what_a_loader_prints_goes_nowhere(parser: Parser) -> None:
    assert parser.parse("/a.babble", b"x") == [Document("/a.babble", "said nothing")]


def test_the_process_holds_no_model_library(parser: Parser) -> None:
    (document,) = parser.parse("/a.modules", b"x")
    heavy = {"torch", "transformers", "tokenizers", "numpy", "faiss", "sqlite3"}
    assert not heavy & set(document.text.split())


def test_further_loaders_come_first(parser: Parser) -> None:
    expected = [Document("/a.SHOUT", "QUIET", {"loud": True})]
    assert parser.parse("/a.SHOUT", b"quiet") == expected
    with Parser(loaders={".txt": "tests.ingest.bad_loaders:shout"}) as other:
        assert other.parse("/a.txt", b"quiet")[0].text == "QUIET"


def test_one_process_parses_many_files(parser: Parser) -> None:
    parser.parse("/a.txt", b"x")
    process = parser._process
    for number in range(50):
        parser.parse(f"/{number}.txt", b"x")
    with pytest.raises(NoTextError, match="the file is empty"):
        parser.parse("/a.txt", b"")
    with pytest.raises(DocumentError, match=r"not valid utf-8"):
        parser.parse("/a.txt", b"\xff")
    assert parser._process is process


def test_a_crash_that_an_earlier_file_may_have_caused_is_tried_again(parser: Parser) -> None:
    parser.parse("/a.txt", b"x")
    parser._process._process.kill()
    assert parser.parse("/b.txt", b"y") == [Document("/b.txt", "y")]


def test_loaders_that_are_none_are_named() -> None:
    for suffix, name in (("x", "a:b"), (".x", "a"), (".x", ":b"), (".x", "a:")):
        with pytest.raises(ParameterError, match=re.escape(f"loader {suffix}={name}")):
            Parser(loaders={suffix: name})
    for name in ("no_such_module:load", "no_such_module.part:load", ".x:load"):
        with pytest.raises(ParameterError, match=r"PYTHONPATH=\. for the current one"):
            Parser(loaders={".x": name})
    with (
        Parser(loaders={".x": "tests.no_such_module:load"}) as parser,
        pytest.raises(ParserError, match=r"No module named 'tests\.no_such_module'"),
    ):
        parser.parse("/a.txt", b"x")


def test_an_interpreter_that_cannot_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrag.ingest.parsing.get_executable", lambda: "/no/python")
    with Parser() as parser, pytest.raises(ParserError, match="cannot be started"):
        parser.parse("/a.txt", b"x")
    monkeypatch.setattr("kvrag.ingest.parsing.get_executable", lambda: "/bin/false")
    with Parser() as parser, pytest.raises(ParserError, match="before it was ready"):
        parser.parse("/a.txt", b"x")


_PARENT = """
import signal
# A parent in the background may have left it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
from kvrag.ingest.parsing import Parser
from tests.ingest import bad_loaders
with Parser(loaders={".hang": "tests.ingest.bad_loaders:hang"}) as parser:
    parser.parse("/a.txt", b"x")
    print(parser._process._process.pid, flush=True)
    parser.parse("/a.hang", b"x")
"""


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_the_process_goes_with_its_parent(signum: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        text=True,
    ) as parent:
        worker = Path(f"/proc/{int(parent.stdout.readline())}")
        assert worker.exists()
        time.sleep(1.0)
        os.kill(parent.pid, signum)
        _, errors = parent.communicate(timeout=120)
        # The interrupt reaches the user once, from the parent.
        assert errors.count("KeyboardInterrupt") == (signum == signal.SIGINT)
        wait_until(lambda: not _is_running(worker))


def _is_running(process: Path) -> bool:
    try:
        return process.joinpath("stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
