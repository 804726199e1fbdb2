"""`kvrag query` and `kvrag chat` through the socket of a running server."""

import errno
import json
import os
import re
import shutil
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvrag.cli import listening as through_listening
from kvrag.cli import options as o
from kvrag.cli import through
from kvrag.cli.conversation import Asker
from kvrag.cli.listening import listening as socket_of_server
from kvrag.engine.idle import Idle
from kvrag.server.metrics import ServerMetrics
from tests.cli.conftest import Ran, Run
from tests.cli.test_serve_here import running
from tests.cli.test_startup import check

QUESTION = "Who keeps the harbour ledger?"
LINES = "Who keeps the ledger?\nAnd the clock?\n/new\nwhy " + "why " * 3000 + "\nAnd the clock?\n"


@pytest.fixture(autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("run")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder / "kvrag"


@contextmanager
def listening(
    index: Path, model: Path | None = None, grace_seconds: float = 20.0, **answers: Any
) -> Iterator[ServerMetrics]:
    """Listen as `kvrag serve` does."""
    opening = o.Opening(index, model=None if model is None else str(model))
    answering = o.Answering(**answers)
    with opening.open() as opened, Idle() as idle:
        metrics = ServerMetrics(opened)
        engine = answering.engine(opened)
        with socket_of_server(engine, idle, metrics, opening, answering, grace_seconds):
            yield metrics


@contextmanager
def served(index: Path, model: Path | None = None, **answers: Any) -> Iterator[ServerMetrics]:
    """Listen as `kvrag serve` does, and open no index for commands."""
    with listening(index, model, **answers) as metrics, pytest.MonkeyPatch.context() as patch:
        patch.setattr(o.Opening, "open", lambda _: pytest.fail("the command opens the index"))
        yield metrics


@contextmanager
def impostor(index: Path, *lines: Any) -> Iterator[None]:
    """Answer a greeting and a question with lines, and close the connection."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(socket_path(index))
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                wire = through.Wire(connection)
                wire.receive()
                for line in lines[:1]:
                    connection.sendall(json.dumps(line).encode() + b"\n")
                if len(lines) > 1:
                    wire.receive()
                for line in lines[1:]:
                    wire.send(**line)

        thread = threading.Thread(target=answer)
        thread.start()
        yield
        thread.join()


def socket_path(index: Path) -> str:
    return str(through.place(index, makes=True))


def untimed(value: Any) -> Any:
    """Return JSON values without times."""
    if isinstance(value, dict):
        return {name: untimed(one) for name, one in value.items() if "seconds" not in name}
    return [untimed(one) for one in value] if isinstance(value, list) else value


def shown(done: Ran) -> list[str]:
    """Return what was printed, without the times of the report."""
    return [" ".join(re.split("first.token", one)[0].split()) for one in done.out.splitlines()]


@pytest.mark.parametrize(
    "options",
    [
        ("--max-tokens", 6, "--ratio", 0.5, "--policy", "query", "-k", 2, "--verify", "--no-chat"),
        ("--max-tokens", 6, "--temperature", 0.8, "--seed", 3, "--eviction", "streaming:share=0.5"),
        ("--max-tokens", 100_000, "--filter", '{"source": {"$in": ["none"]}}'),
    ],
)
def test_query_prints_the_same(run: Run, index_folder: Path, options: tuple[object, ...]) -> None:
    common = ("query", "--index", index_folder, QUESTION, *options)
    run(*common)  # records for first places are made, and stored
    alone, alone_json = run(*common), run(*common, "--json")
    with served(index_folder):
        asked, asked_json = run(*common), run(*common, "--json")
    assert (asked.code, asked.err, shown(asked)) == (alone.code, alone.err, shown(alone))
    if alone.code == 0:
        assert untimed(asked_json.json) == untimed(alone_json.json)


def test_chat_is_the_same(run: Run, index_folder: Path) -> None:
    common = ("chat", "--index", index_folder, "--max-tokens", 4)
    lines = LINES + "/why\n"
    run(*common, stdin=LINES, code=1)  # records for first places are made, and stored
    # One question is too long.
    alone = run(*common, stdin=lines, code=1)
    alone_json = run(*common, "--json", stdin=LINES, code=1)
    with served(index_folder):
        asked = run(*common, stdin=lines, code=1)
        asked_json = run(*common, "--json", stdin=LINES, code=1)
    assert asked.err == alone.err
    assert shown(asked) == shown(alone)
    assert untimed(asked_json.json) == untimed(alone_json.json)
    assert asked_json.json["turns"][1]["search"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--compute", "float32"), "its --compute is the default, not float32"),
        (("--session-bytes", 0), "its --session-bytes is"),
        (("--policy", "boundary"), "its --boundary-tokens is 3, not the default"),
    ],
)
def test_other_options_are_answered_here(
    run: Run, index_folder: Path, options: tuple[object, ...], why: str
) -> None:
    common = ("query", "--index", index_folder, QUESTION, "--max-tokens", 2, "--json")
    if "boundary" not in options:
        common = (*common, "--boundary-tokens", 3, "--policy", "seam")
    with listening(index_folder, boundary_tokens=3, policy="seam"):
        done = run(*common, *options)
    assert why in done.err
    assert done.json["usage"]["completion_tokens"] <= 2


def test_an_index_in_the_place_of_the_served_one(
    run: Run, index_folder: Path, whole_index: Path
) -> None:
    with listening(index_folder):
        for path in index_folder.iterdir():  # the folder stays, as a volume's does
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.copytree(whole_index, index_folder, dirs_exist_ok=True)
        done = run("query", "--index", index_folder, QUESTION, "--max-tokens", 2, "--json")
        assert "its index was replaced" in done.err
        assert done.json["sources"]
        (index_folder / "catalog.sqlite").unlink()
        asked = ("query", "--index", index_folder, QUESTION, "--max-tokens", 2)
        done, alone = run(*asked, code=1), run(*asked, "--no-server", code=1)
        assert done.err == alone.err


def test_paths_begin_where_each_command_is(
    run: Run,
    index_folder: Path,
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "model").symlink_to(model_folder)
    monkeypatch.chdir(tmp_path)
    with served(index_folder, model=Path("model")), ExitStack() as held:
        common = ("query", "--index", index_folder, QUESTION, "--max-tokens", 2)
        run(*common, "--model", "model")
        monkeypatch.chdir(index_folder)
        run(*common, "--model", model_folder)
        opening = o.Opening(index_folder, model="model")  # there is none here
        assert through.connected(held, opening, o.Searching(), o.Answering()) is None


@pytest.mark.skipif(sys.platform == "win32", reason="no such limits there")
def test_a_server_with_many_open_files(run: Run, index_folder: Path) -> None:
    import resource

    most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    with served(index_folder), ExitStack() as held:
        for _ in range(1100):  # more than select() takes
            held.callback(os.close, os.dup(0))
        done = run("query", "--index", index_folder, QUESTION, "--max-tokens", 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    assert done.err == ""


def test_a_server_that_was_short_of_files(
    run: Run, index_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures, accept = [errno.EMFILE], socket.socket.accept

    def accepted(listener: socket.socket) -> Any:
        if failures:
            raise OSError(failures.pop(), "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accepted)
    with served(index_folder):
        done = run("query", "--index", index_folder, QUESTION, "--max-tokens", 2)
    assert (done.err, failures) == ("", [])


def test_an_interrupted_answer_and_the_next(index_folder: Path) -> None:
    opening, answering = o.Opening(index_folder), o.Answering(max_tokens=200)
    with served(index_folder, max_tokens=200), through.ExitStack() as held:
        remote = through.connected(held, opening, o.Searching(), answering)
        pieces: list[str] = []

        def interrupt(kind: str, text: str) -> None:
            pieces.append(text)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            remote.ask(QUESTION, interrupt, {})
        assert len(pieces) == 1
        said: list[str] = []
        outcome = remote.ask(QUESTION, lambda _, text: said.append(text), {"max_tokens": 4})
        assert outcome.answer.usage.completion_tokens <= 4
        assert "".join(said).strip() == outcome.answer.text.strip()


READY, PIECE = {"ready": True}, {"say": ["text", "half an"]}


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([], "ended before it had answered"),
        ([{"no": "it is of version 9"}], "it is of version 9"),
        ([READY, {"ping": True}], "ended before it had answered"),
        ([[1]], "ended before it had answered"),
    ],
)
def test_a_server_that_is_of_no_use(
    run: Run, index_folder: Path, lines: list[Any], why: str
) -> None:
    common = ("query", "--index", index_folder, QUESTION, "--max-tokens", 4, "--json")
    with impostor(index_folder, *lines):
        done = run(*common)
    assert (done.code, why in done.err, "loading the model here" in done.err) == (0, True, True)
    assert untimed(done.json) == untimed(run(*common, "--no-server").json)


def test_a_server_that_ends_in_mid_answer(run: Run, index_folder: Path) -> None:
    with impostor(index_folder, READY, PIECE):
        done = run("query", "--index", index_folder, QUESTION, code=1)
    assert done.out == "half an"
    assert "'kvrag serve' ended before it had answered" in done.err
    Path(socket_path(index_folder)).unlink()
    with impostor(index_folder, READY, PIECE):
        done = run("chat", "--index", index_folder, stdin=f"{QUESTION}\n{QUESTION}\n", code=1)
    assert done.err.count("ended before it had answered") == 1


def test_a_server_that_says_nothing(
    run: Run, index_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(through, "_GREETING_SECONDS", 0.05)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(socket_path(index_folder))
        listener.listen()
        done = run("query", "--index", index_folder, QUESTION, "--max-tokens", 2)
    assert "does not answer" in done.err


def test_the_end_waits_for_no_long_prompt(
    index_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, goes_on = threading.Event(), threading.Event()

    def ask(*_: Any, **__: Any) -> None:
        asked.set()
        goes_on.wait(30)

    monkeypatch.setattr(Asker, "ask", ask)
    monkeypatch.setattr(through_listening, "_CUT_SECONDS", 0.1)
    failures: list[Exception] = []

    def hear(remote: through.Remote) -> None:
        try:
            remote.ask(QUESTION, lambda *_: None, {})
        except through.ServerGoneError as error:
            failures.append(error)

    with ExitStack() as held:
        with listening(index_folder, grace_seconds=0.1):
            remote = through.connected(held, o.Opening(index_folder), o.Searching(), o.Answering())
            assert remote is not None
            client = threading.Thread(target=hear, args=[remote])
            client.start()
            assert asked.wait(10)
            begun = time.monotonic()
        seconds = time.monotonic() - begun
        client.join(10)
        goes_on.set()
    assert seconds < 10
    assert len(failures) == 1


def test_only_this_user_may_open_it(run: Run, index_folder: Path, place: Path) -> None:
    common = ("query", "--index", index_folder, QUESTION, "--max-tokens", 2)
    with served(index_folder):
        (path,) = place.iterdir()
        assert stat.S_IMODE(place.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        run(*common)
    assert not [*place.iterdir()]
    place.chmod(0o770)
    with listening(index_folder):
        assert not [*place.iterdir()]
    done = run(*common)
    assert f"{place} is not used" in done.err


@pytest.mark.filterwarnings("error")  # of a thread that fails
def test_what_is_no_greeting_ends_nothing(run: Run, index_folder: Path, place: Path) -> None:
    with served(index_folder):
        (path,) = place.iterdir()
        for said in (b"what", b"[]", b"3", b"\xff", b"{}", b'{"same": 1}', b'{"same": {}}'):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(path))
                connection.sendall(said + b"\n")
                told = connection.makefile().read()
            assert (b"{" in said) is ("it is of version" in told)
        assert run("query", "--index", index_folder, QUESTION, "--max-tokens", 2).code == 0


def test_of_two_servers_the_newer_is_asked(run: Run, index_folder: Path) -> None:
    common = ("query", "--index", index_folder, QUESTION, "--max-tokens", 2)
    with listening(index_folder) as first, listening(index_folder) as last:
        assert run(*common).err == ""
    asked = 'requests_total{route="socket",status="200",tenant=""}'
    assert [asked in one.text().decode() for one in (first, last)] == [False, True]


def test_an_older_server_takes_no_newer_ones_place(index_folder: Path, place: Path) -> None:
    with ExitStack() as newer:
        with listening(index_folder):
            newer.enter_context(listening(index_folder))
        assert len([*place.iterdir()]) == 1
    assert not [*place.iterdir()]


def test_answers_are_counted(run: Run, index_folder: Path) -> None:
    common = ("query", "--index", index_folder, "--max-tokens", 3)
    with served(index_folder) as metrics:
        usage = run(*common, QUESTION, "--json").json["usage"]
        run(*common, "why " * 3000, code=1)
    counts = metrics.text().decode()
    for status in (200, 400):
        count = f'requests_total{{route="socket",status="{status}",tenant=""}} 1.0'
        assert f"kvrag_server_{count}" in counts
    for kind in ("prompt", "completion"):
        count = f'tokens_total{{kind="{kind}",tenant=""}} {float(usage[f"{kind}_tokens"])}'
        assert f"kvrag_server_{count}" in counts
    assert "kvrag_server_ttft_seconds_count 1.0" in counts


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KVRAG_ISA", "scalar"),
        ("KVRAG_NEVER_SLOWER", "off"),
        ("KVRAG_CUDA_GRAPHS", "off"),
        ("KVRAG_GPU_KERNELS", "off"),
    ],
)
def test_another_way_to_compute_is_taken_here(
    run: Run, index_folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    common = ("query", "--index", index_folder, QUESTION, "--max-tokens", 2)
    monkeypatch.delenv(name, raising=False)
    with listening(index_folder):
        monkeypatch.setenv(name, value)
        done = run(*common)
    assert f"its {name} is the default, not {value}" in done.err


def test_a_server_until_it_is_killed(
    run: Run, index_folder: Path, tmp_path: Path, place: Path
) -> None:
    with running(index_folder) as process:
        link = tmp_path / "link"
        link.symlink_to(index_folder)
        # By another name, and without what a model takes.
        check(None, [(["query", QUESTION, "--index", link, "--max-tokens", 2], 0)])
        process.kill()
        process.wait()
        assert [*place.iterdir()]
        run("query", QUESTION, "--index", index_folder, "--max-tokens", 2)
        assert not [*place.iterdir()]


def test_two_servers_that_start_together(
    index_folder: Path,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chmod = Path.chmod
    opening = o.Opening(index_folder)
    with ExitStack() as held:

        def start_another(path: Path, mode: int) -> None:
            if path.parent == place:
                monkeypatch.setattr(Path, "chmod", chmod)
                held.enter_context(listening(index_folder))
            chmod(path, mode)

        monkeypatch.setattr(Path, "chmod", start_another)
        with listening(index_folder):
            assert Path.chmod is chmod
            assert through.connected(held, opening, o.Searching(), o.Answering()) is not None
    assert capsys.readouterr().err == ""
    assert not [*place.iterdir()]


def test_a_dead_socket_that_a_new_server_replaces(
    index_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(socket_path(index_folder))
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    new = path.with_name("new")
    new.touch()  # refuses, too
    monkeypatch.setattr(through, "described", lambda *_: new.replace(path) and {})
    opening = o.Opening(index_folder)
    with ExitStack() as held:
        assert through.connected(held, opening, o.Searching(), o.Answering()) is None
    assert path.exists()
