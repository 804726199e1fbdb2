"""What the operating system refuses, simulated and for real."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvrag.errors import StoreError
from kvrag.store.file import FileStore
from kvrag_testing.records import key_number, record_of, stored
from tests.support.folders import file_path, files_under

KEY = key_number(0)
ROOT = Path(__file__).parents[2]

# Puts 64 KB records until the store refuses; prints how many it took and what it said.
PUT_UNTIL_REFUSED = """
import sys
from kvrag.errors import StoreError
from kvrag.store.file import FileStore
from kvrag_testing.records import key_number, record_of, stored

store = FileStore(sys.argv[1])
for number in range(100):
    key = key_number(number)
    try:
        store.put(key, record_of(key, 65536))
    except StoreError as error:
        keys = sorted(store.keys())
        assert keys == sorted(map(key_number, range(number))), keys
        assert all(stored(store, key) == record_of(key, 65536) for key in keys)
        assert store.collect_garbage(0.0) == 0
        print(number, error)
        break
"""


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


def run_mounted(mount: str, program: str, folder: Path) -> str:
    """Run a program on `folder` after `mount`, in a mount namespace of its own."""
    if sys.platform != "linux" or not shutil.which("unshare"):
        pytest.skip("needs Linux and unshare")
    isolate = ["unshare", "--mount"]
    if os.geteuid() != 0:
        isolate += ["--user", "--map-root-user"]
    probe = run([*isolate, "sh", "-c", mount, "sh", str(folder)])
    if probe.returncode != 0:
        pytest.skip(f"may not mount here: {probe.stderr.strip()}")
    script = f'{mount} && exec "$2" -c "$3" "$1"'
    done = run([*isolate, "sh", "-c", script, "sh", str(folder), sys.executable, program])
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.ENOSPC, "the disk is full: free some space"),
        (errno.EDQUOT, "quota"),
        (errno.EIO, "the disk reports a defect"),
        (errno.EFBIG, "ulimit -f"),
        (errno.EBADMSG, "check that the folder exists"),
    ],
)
@pytest.mark.parametrize("step", ["write", "fsync"])
def test_a_write_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, remedy: str, step: str
) -> None:
    store = FileStore(tmp_path)
    store.put(key_number(1), b"before")
    before = files_under(tmp_path)
    whole = os.write
    num_calls = 0

    def fail(descriptor: int, data: memoryview | None = None) -> int:
        nonlocal num_calls
        num_calls += 1
        if data is not None and num_calls < 3:
            return whole(descriptor, data[:100])
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        with pytest.raises(StoreError, match=rf"cannot write .*\.kv: .*{remedy}"):
            store.put(KEY, record_of(KEY))
    assert files_under(tmp_path) == before
    assert list(store.keys()) == [key_number(1)]
    assert store.open(KEY) is None
    assert store.collect_garbage(0.0) == 0
    store.put(KEY, record_of(KEY))
    assert stored(store, KEY) == record_of(KEY)


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.EROFS, "mounted read-only: mount it writable"),
        (errno.EACCES, "permission is missing"),
        (errno.EMFILE, "ulimit -n"),
    ],
)
def test_a_file_that_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, remedy: str
) -> None:
    store = FileStore(tmp_path)
    store.put(key_number(1), b"before")

    def fail(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(StoreError, match=rf"cannot write .*\.kv: .*{remedy}"):
        store.put(KEY, b"record")
    with pytest.raises(StoreError, match=f"cannot open .*: .*{remedy}"):
        store.open(key_number(1))
    assert store.counts()[0].misses == {"unreadable": 1}


@pytest.mark.parametrize(
    ("refused", "code", "call", "message"),
    [
        ("preadv", errno.EIO, lambda store: stored(store, KEY), "read .*; the disk reports a def"),
        ("unlink", errno.EROFS, lambda store: store.delete(KEY), "delete .*mounted read-only"),
        ("unlink", errno.EROFS, lambda store: store.collect_garbage(0.0), "remove .*read-only"),
    ],
)
def test_reading_or_removing_that_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refused: str,
    code: int,
    call: Callable[[FileStore], object],
    message: str,
) -> None:
    store = FileStore(tmp_path)
    store.put(KEY, b"record")
    file_path(tmp_path, KEY).with_name(f".{KEY}.{'0' * 16}.tmp").touch()

    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, refused, fail)
    with pytest.raises(StoreError, match=f"cannot {message}"):
        call(store)
    assert store.contains(KEY)


def test_a_full_disk(tmp_path: Path) -> None:
    output = run_mounted('mount -t tmpfs -o size=512k none "$1"', PUT_UNTIL_REFUSED, tmp_path)
    num_taken, message = output.split(" ", 1)
    assert 3 <= int(num_taken) <= 8
    assert "the disk is full: free some space" in message


def test_a_file_size_limit(tmp_path: Path) -> None:
    """The limit that any user may set on himself; Python ignores its signal."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))\n"
    done = run([sys.executable, "-c", limit + PUT_UNTIL_REFUSED, str(tmp_path)])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("0 cannot write")
    assert "ulimit -f" in done.stdout or "disk is full" in done.stdout, done.stdout


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put(key_number(1), b"record")
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(StoreError, match="permission is missing"):
            store.put(KEY, b"record")
        assert stored(store, key_number(1)) == b"record"
    finally:
        tmp_path.chmod(0o700)
