"""`kvrag serve-kv` as users start it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvrag.cli.main import app
from kvrag.errors import StoreError
from kvrag.store.http_protocol import TOKEN_VARIABLE
from kvrag.store.registry import open_store
from kvrag.testing.store_contract import key_number, record_of, stored
from tests.support.kv_server import TOKEN, make_certificate
from tests.support.servers import free_port

KEY = key_number(0)


@contextmanager
def serving(*arguments: str, **environment: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    server = subprocess.Popen(
        [sys.executable, "-m", "kvrag.cli", "serve-kv", "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        assert server.stdout is not None
        yield server.stdout.readline().strip(), server
    finally:
        if server.poll() is None:
            server.kill()
        server.communicate()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = open_store(f"file:{tmp_path / 'kv'}")
    store.put(KEY, record_of(KEY, 300_000))
    store.close()
    return tmp_path / "kv"


def test_serving_reading_and_ending(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = make_certificate(tmp_path)
    arguments = ["--tls-certificate", str(certificate), "--tls-key", str(key)]
    with serving("--store", f"file:{folder}", *arguments, **{TOKEN_VARIABLE: TOKEN}) as (
        line,
        server,
    ):
        url, _, rights = line.partition(" ")
        assert rights == "(reading)"
        assert TOKEN not in Path(f"/proc/{server.pid}/cmdline").read_text()
        monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
        store = open_store(f"{url}?ca={certificate}")
        assert stored(store, KEY) == record_of(KEY, 300_000)
        with pytest.raises(StoreError, match="--writable"):
            store.put(key_number(1), b"record")
        server.send_signal(signal.SIGTERM)
        _, said = server.communicate(timeout=120)
        assert server.returncode == 0, said
        assert said.startswith("served ")
        assert f"of file:{folder}" in " ".join(said.split())
        store.close()


def test_a_writable_server_ends_on_interrupt(folder: Path) -> None:
    with serving("--store", f"file:{folder}", "--writable") as (line, server):
        url, _, rights = line.partition(" ")
        assert rights == "(reading and writing)"
        store = open_store(url)
        store.put(key_number(1), b"record")
        assert stored(store, key_number(1)) == b"record"
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=120)
        assert server.returncode == 0
        store.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to serve: give --index DIR, or --store URL"),
        (["--index", "/nonexistent"], "there is no index in /nonexistent"),
        (["--store", "memory:", "--host", "0.0.0.0"], "without a token would let everybody"),
        (["--store", "memory:", "--tls-key", "x"], "give both"),
        (["--store", "memory:", "--tls-certificate", "/nonexistent"], "no certificate and key"),
        (["--store", "memory:", "--token-file", "/nonexistent"], "not a file with a token"),
        (["--store", "memory:", "--host", "256.1.2.3x", "--token-file", "TOKEN"], "cannot listen"),
        (["--store", "memory:", "--host", "a" * 70, "--token-file", "TOKEN"], "cannot listen"),
        (["--store", "memory:", "--host", "kv..x", "--token-file", "TOKEN"], "cannot listen"),
        (["--store", "ftp://x"], "a store is file:PATH"),
    ],
)
def test_bad_input(arguments: list[str], message: str, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    given = [str(token) if one == "TOKEN" else one for one in arguments]
    result = CliRunner().invoke(app, ["serve-kv", *given])
    assert result.exit_code == 1
    assert message in result.output


def test_a_port_that_is_taken(folder: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", free_port())) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(
            app, ["serve-kv", "--store", f"file:{folder}", "--port", str(port)]
        )
    assert result.exit_code == 1
    assert f"port {port}: Address already in use" in result.output
