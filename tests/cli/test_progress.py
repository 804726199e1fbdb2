"""Progress where stderr is no terminal: a line now and then, none of short work."""

from pathlib import Path

import pytest

from kvrag.cli import console
from tests.cli.conftest import Run


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time stands still but for what a test adds to it."""
    clock = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: clock[0])
    return clock


def test_lines_come_every_few_seconds(now: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with console.progress("working") as say:
        for second in range(21):
            now[0] = float(second)
            say(f"at {second}\n of 20 \x1b[2J")
        now[0] = 40.0
        say("the same")
        now[0] = 50.0
        say("the same")
    out, err = capsys.readouterr()
    assert out == ""
    shown = err.splitlines()
    assert [line.split(" of")[0] for line in shown] == [
        "at 5",
        "at 10",
        "at 15",
        "at 20",
        "the same",
    ]
    assert "\x1b" not in err


@pytest.mark.parametrize(
    "command", [("verify",), ("recode", "--codec", "raw"), ("ingest", "DOCUMENTS")]
)
def test_long_commands_tell_how_far_they_are(
    run: Run,
    index_folder: Path,
    documents: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
) -> None:
    monkeypatch.setattr(console, "SECONDS_BETWEEN_LINES", 0.0)
    if command[0] == "ingest":
        (documents / "more.txt").write_text("A lantern burns on the pier of Varn.")
        command = ("ingest", str(documents))
    done = run(*command, "-i", index_folder)
    assert " of " in done.err
