"""A process killed at any moment leaves whole records and nothing that cannot be collected."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvrag.store.file import FileStore
from kvrag_testing.records import key_number, record_of, stored
from tests.support.folders import files_under
from tests.support.killing import ROOT

RECORD_BYTES = 400_000


# Puts one record, and dies at the step named.
DIE_AT = f"""
import os, signal, sys
from kvrag.store import file
from kvrag.store.file import FileStore
from kvrag_testing.records import key_number, record_of

folder, step = sys.argv[1:]
write, fsync = os.write, os.fsync

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def write_half(descriptor, data):
    write(descriptor, data[: len(data) // 2])
    die()

def flush_and_die(descriptor):
    fsync(descriptor)
    die()

key = key_number(1)
store = FileStore(folder)
store.put(key_number(2), record_of(key_number(2), {RECORD_BYTES}))
os.makedirs(f"{{folder}}/{{key.digest[:2]}}", exist_ok=True)
if step == "half written":
    os.write = write_half
elif step == "written":
    os.fsync = die
elif step == "flushed":
    os.fsync = flush_and_die
elif step == "renamed":
    file.sync_folder = die
elif step == "done":
    FileStore.metrics = property(die, lambda *_: None)
store.put(key, record_of(key, {RECORD_BYTES}))
"""


def check(folder: Path) -> int:
    """Every record visible is whole; return how many there are."""
    store = FileStore(folder)
    keys = list(store.keys())
    for key in keys:
        assert stored(store, key) == record_of(key, RECORD_BYTES)
    return len(keys)


@pytest.mark.parametrize(
    ("step", "num_records"),
    [("half written", 1), ("written", 1), ("flushed", 1), ("renamed", 2), ("done", 2)],
)
def test_killed_at_each_step(tmp_path: Path, step: str, num_records: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DIE_AT, str(tmp_path), step],
        cwd=ROOT,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    store = FileStore(tmp_path)
    assert check(tmp_path) == num_records
    for number in (1, 3):
        store.put(key_number(number), record_of(key_number(number), RECORD_BYTES))
    assert check(tmp_path) == 3
    assert store.collect_garbage(0.0) == 2 - num_records
    assert check(tmp_path) == 3
    assert len(files_under(tmp_path)) == 3
