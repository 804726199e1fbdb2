import pytest

from kvrag.cli import console


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
        "policy": "[bold]x[/bold] filler:100: [/]",
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
        "policy [bold]x[/bold] filler:100: [/]",
    ]


def test_escape_sequences_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    console.stream("a\x1b]0;title\x07b\tc\nd\x9b2Je é")
    assert capsys.readouterr().out == "a\ufffd]0;title\ufffdb\tc\nd\ufffd2Je é"


def test_an_answer_is_written_without_the_blank_before_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for pieces, out, is_told in (
        (("", " ", "\n In", " Varn", " "), "In Varn \n", False),
        ((" ",), "", True),
    ):
        show = console.AnswerText()
        for piece in pieces:
            show(piece)
        show.end()
        told = capsys.readouterr()
        assert (told.out, "empty" in told.err) == (out, is_told)
