import errno

import pytest
import typer

from kvrag.cli.console import DEBUG_VARIABLE, guarded
from kvrag.errors import StoreError


@pytest.fixture(autouse=True)
def without_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEBUG_VARIABLE, raising=False)


def run_raising(error: BaseException) -> int:
    def command() -> None:
        raise error

    with pytest.raises(typer.Exit) as raised:
        guarded(command)()
    return raised.value.exit_code


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (StoreError("the folder\n  is read-only"), 1, "error: the folder is read-only\n"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/x/y"),
            1,
            "error: No space left on device: /x/y\n",
        ),
        (ZeroDivisionError("division by zero"), 1, "error: unexpected ZeroDivisionError: division"),
        (
            ModuleNotFoundError("No module named 'xxhash'", name="xxhash"),
            1,
            "error: xxhash cannot be imported, which kvrag needs here",
        ),
        (KeyboardInterrupt(), 130, "\ninterrupted\n"),
        (typer.Exit(7), 7, ""),
    ],
)
def test_an_error_is_one_line(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: int, said: str
) -> None:
    assert run_raising(error) == code
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(said)
    assert told.err.strip().count("\n") == 0


def test_debug_lets_the_traceback_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEBUG_VARIABLE, "1")

    @guarded
    def command() -> None:
        raise StoreError("full")

    with pytest.raises(StoreError):
        command()
