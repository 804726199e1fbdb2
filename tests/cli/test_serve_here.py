"""`kvrag serve` on Transformers, as a process: what it says, its keys, its log, and its stop."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvrag.chunk import Document
from tests.cli.conftest import Run
from tests.support.rag import PASSAGES, make_index

KEY = "0123456789abcdef0123"
KEYS = f"""
[[keys]]
name = "ada"
key = "{KEY}"
tenant = "research"
"""

FEW_FILES = ("sh", "-c", 'ulimit -n 256; exec "$0" "$@"')


@pytest.fixture(scope="module")
def index_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    with make_index(folder) as index:
        index.add([Document(source=name, text=text) for name, text in PASSAGES.items()])
    return folder / "index"


@contextmanager
def running(
    index: Path, *options: str, before: Sequence[str] = (), **environment: str
) -> Iterator[Any]:
    """Yield a started server's process; its address is the attribute `url`."""
    command = [sys.executable, "-m", "kvrag", "serve", "-i", str(index), "--port", "0", *options]
    process: Any = subprocess.Popen(
        [*before, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        process.url = process.stdout.readline().strip()
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_server_with_keys_from_start_to_stop(index_path: Path, tmp_path: Path) -> None:
    """Answers depend neither on silent connections nor on a collector that is not there."""
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    file.chmod(0o600)
    soon = {"OTEL_BSP_SCHEDULE_DELAY": "100", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    options = ("--keys", str(file), "--grace", "20", "--trace", "http://127.0.0.1:9")
    with running(index_path, *options, before=FEW_FILES, **soon) as process, ExitStack() as silent:
        assert process.url.endswith("/v1")
        address = httpx.URL(process.url)
        for _ in range(400):  # beyond the limit of descriptors
            place = (address.host, address.port)
            silent.enter_context(socket.create_connection(place, timeout=20))
        body = {
            "model": "model",
            "messages": [{"role": "user", "content": PASSAGES["fox"]}],
            "max_tokens": 60,
            "stream": True,
            "user": "u1",
        }
        where = f"{process.url}/chat/completions"
        assert httpx.post(where, json=body).status_code == 401
        headers = {"Authorization": f"Bearer {KEY}"}
        # Told to stop in the middle of an answer, it finishes the answer.
        with httpx.stream("POST", where, json=body, headers=headers, timeout=30) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] is not None
        _, log = process.communicate(timeout=30)
        assert process.returncode == 0
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    refused, answered = (line for line in lines if line["event"] == "request")
    assert (refused["status"], refused["key"]) == (401, "")
    assert (answered["status"], answered["key"]) == (200, "ada")
    assert (answered["tenant"], answered["user"]) == ("research", "u1")
    assert answered["request_id"] == response.headers["x-request-id"]
    assert answered["prompt_tokens"] > 0 < answered["completion_tokens"]
    assert answered["cached_tokens"] > 0
    assert 0 < answered["ttft_seconds"] <= answered["seconds"]
    assert KEY not in log
    assert "fox" not in log
    assert any("export" in one["event"] for one in lines if one["level"] != "info")


@pytest.mark.slow
@pytest.mark.parametrize("num_lines", [0, 1, 10, 30])
def test_a_kill_during_an_upload(tmp_path: Path, num_lines: int) -> None:
    """Killed after so many lines of progress, it takes the same file again."""
    make_index(tmp_path).close()
    table = b"name\n" + b"".join(b"Ines %d\n" % number for number in range(40))
    for is_killed in (True, False):
        with running(tmp_path / "index", "--allow-upload") as process:
            where = f"{process.url}/kvrag/documents"
            with httpx.stream("PUT", f"{where}/a.csv", content=table, timeout=60) as answer:
                lines = answer.iter_lines()
                if is_killed:
                    for _ in range(num_lines):
                        next(lines)
                    process.kill()
                    continue
                assert json.loads(list(lines)[-1])["stage"] == "done"
            listed = httpx.get(where, timeout=60).json()["documents"]
            assert len(listed) == 40
            for one in listed:
                httpx.delete(where, params={"source": one["source"]}, timeout=60)
    assert list((tmp_path / "index.uploads").iterdir()) == []


@pytest.mark.slow
def test_the_environments_key(index_path: Path) -> None:
    with running(index_path, KVRAG_SERVER_KEY=KEY) as process:
        where = f"{process.url}/models"
        assert httpx.get(where).status_code == 401
        assert httpx.get(where, headers={"Authorization": f"bearer {KEY}"}).status_code == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--host", "0.0.0.0"], "without keys would let everybody on the network ask"),
        (["--engine", "llama"], "expected 'transformers' or 'vllm'"),
        (["--show"], "--show is for --engine vllm"),
        (["--max-model-len", "10"], "options of 'vllm serve' are for --engine vllm"),
        (["--prot", "80"], "no option --prot (is it '--port'?)"),
        (["--engine", "vllm", "--streams", "3"], "--streams is for --engine transformers"),
        (["--host", "999.1.1.1", "--anyone"], "choose a --host of this machine"),
        (["--policy", "none:shift=x"], "shift"),
        (["--allow-origin", "app.example"], "expected an origin"),
        (["--keys", "missing.toml"], "is not a file of keys"),
    ],
)
def test_what_cannot_be_served(run: Run, index_path: Path, options: list[str], why: str) -> None:
    ran = run("serve", "-i", index_path, "--port", "0", *options, code=1)
    assert why in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("content", "mode", "why"),
    [
        (KEYS, 0o644, "other users may read these keys"),
        ("keys = 3", 0o600, "keys: Input should be a valid list"),
        (KEYS + KEYS, 0o600, "the same name"),
        (KEYS + "requests_per_hour = 3", 0o600, "Extra inputs"),
        ("keys", 0o600, "is not a file of keys"),
    ],
)
def test_wrong_files_of_keys(
    run: Run, index_path: Path, tmp_path: Path, content: str, mode: int, why: str
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(content)
    file.chmod(mode)
    ran = run("serve", "-i", index_path, "--port", "0", "--keys", file, code=1)
    assert why in ran.err
    assert "secret" not in ran.err
    assert KEY not in ran.err
