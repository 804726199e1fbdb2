from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from kvrag.cli import console


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (3 * 2**40, "3.0 TiB")],
)
def test_bytes_for_a_person(size: int, shown: str) -> None:
    assert console.format_bytes(size) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.00042, "420 us"), (0.0123, "12.3 ms"), (1.239, "1.24 s"), (185, "3 min 05 s")],
)
def test_seconds_for_a_person(seconds: float, shown: str) -> None:
    assert console.format_seconds(seconds) == shown


@dataclass(frozen=True)
class Inner:
    path: Path
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Outer:
    inner: Inner
    by_name: dict[str, Inner]


def test_dataclasses_become_json_values() -> None:
    inner = Inner(Path("a/b"), (1, 2))
    expected = {"path": "a/b", "ids": [1, 2]}
    shown = console.plain(Outer(inner, {"x": inner}))
    assert shown == {"inner": expected, "by_name": {"x": expected}}


def test_fields_are_printed_with_units(capsys: pytest.CaptureFixture[str]) -> None:
    values = {
        "num_chunks": 1234,
        "size_bytes": 2048,
        "load_seconds": 0.5,
        "stored_bytes_per_token": 3122.6,
        "share": 0.12345,
        "ok": True,
        "empty": [],
        "misses": {"flipped": 2},
        "nothing": None,
    }
    console.print_fields(values)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "chunks 1,234",
        "size 2.0 KiB",
        "load 500.0 ms",
        "stored bytes per token 3,123",
        "share 0.123",
        "ok yes",
        "empty none",
        "misses flipped 2",
        "nothing none",
    ]


def test_brackets_in_values_are_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_fields({"policy": "[bold]x[/bold] [/]"})
    assert "[bold]x[/bold] [/]" in capsys.readouterr().out


def test_colons_in_values_are_no_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    console.note("context corpus:100: too short")
    console.out().print("filler:100: too short")
    captured = capsys.readouterr()
    assert captured.err == "context corpus:100: too short\n"
    assert captured.out == "filler:100: too short\n"


def test_escape_sequences_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    console.stream("a\x1b]0;title\x07b\tc\nd\x9b2Je é")
    assert capsys.readouterr().out == "a\ufffd]0;title\ufffdb\tc\nd\ufffd2Je é"


def test_an_answer_is_written_without_the_blank_before_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show = console.AnswerText()
    for piece in ("", " ", "\n In", " Varn", " "):
        show(piece)
    show.end()
    assert capsys.readouterr() == ("In Varn \n", "")


def test_an_empty_answer_is_told_beside_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    for quiet in (True, False):
        show = console.AnswerText(quiet=quiet)
        show(" ")
        show.end()
        told = capsys.readouterr()
        assert told.out == ""
        assert ("empty" in told.err) is not quiet


def test_one_is_singular() -> None:
    assert console.count(1, "document") == "1 document"
    assert [console.count(n, "chunk") for n in (0, 2000)] == ["0 chunks", "2,000 chunks"]
