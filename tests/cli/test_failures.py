from __future__ import annotations

import errno

import pytest
import typer

from kvrag.cli.failures import DEBUG_VARIABLE, guarded
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


def test_our_errors_are_one_paragraph(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_raising(StoreError("the folder\n  is read-only")) == 1
    assert capsys.readouterr() == ("", "error: the folder is read-only\n")


def test_system_errors_name_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_raising(OSError(errno.ENOSPC, "No space left on device", "/x/y")) == 1
    assert capsys.readouterr().err == "error: No space left on device: /x/y\n"


def test_unexpected_errors_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_raising(ZeroDivisionError("division by zero")) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("error: unexpected ZeroDivisionError: division by zero")
    assert "--debug" in shown
    assert shown.count("\n") == 1


def test_a_missing_package_is_named_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_raising(ModuleNotFoundError("No module named 'xxhash'", name="xxhash")) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("error: xxhash cannot be imported")
    assert "kvrag doctor" in shown
    assert "pip install" in shown


def test_interrupt_is_130() -> None:
    assert run_raising(KeyboardInterrupt()) == 130


def test_debug_lets_the_traceback_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEBUG_VARIABLE, "1")

    @guarded
    def command() -> None:
        raise StoreError("full")

    with pytest.raises(StoreError):
        command()


def test_exits_pass() -> None:
    assert run_raising(typer.Exit(7)) == 7


def test_closed_pipe_is_left_to_the_framework() -> None:
    @guarded
    def command() -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        command()
