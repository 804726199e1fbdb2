"""A process killed at any moment leaves whole records and nothing that cannot be collected."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvrag.store.file import FileStore
from tests.contracts.store_contract import key_number, record_of, stored

ROOT = Path(__file__).parents[2]
RECORD_BYTES = 400_000

# Puts records one after another, and tells of each when its put has returned.
PUT_FOREVER = f"""
import sys
from kvrag.store.file import FileStore
from tests.contracts.store_contract import key_number, record_of

store = FileStore(sys.argv[1])
number = int(sys.argv[2])
while True:
    key = key_number(number)
    store.put(key, record_of(key, {RECORD_BYTES}))
    print(number, flush=True)
    number += 1
"""

# Puts one record, and dies at the step named.
DIE_AT = f"""
import os, signal, sys
from pathlib import Path
from kvrag.store.file import FileStore
from tests.contracts.store_contract import key_number, record_of

folder, step = sys.argv[1:]
write, replace = os.write, Path.replace

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def write_half(descriptor, data):
    write(descriptor, data[: len(data) // 2])
    die()

def replace_and_die(self, target):
    replace(self, target)
    die()

key = key_number(1)
store = FileStore(folder)
(Path(folder) / key.digest[:2]).mkdir()  # so that the first flush is that of the record
if step == "half written":
    os.write = write_half
elif step == "written":
    os.fsync = die
elif step == "flushed":
    Path.replace = die
elif step == "renamed":
    Path.replace = replace_and_die
store.put(key, record_of(key, {RECORD_BYTES}))
"""


def check(folder: Path) -> int:
    """Every record visible is whole; return how many there are."""
    store = FileStore(folder)
    keys = list(store.keys())
    for key in keys:
        assert stored(store, key) == record_of(key, RECORD_BYTES)
    return len(keys)


def temporaries(folder: Path) -> list[Path]:
    return list(folder.rglob("*.tmp"))


@pytest.mark.parametrize(
    ("step", "num_records", "num_leftovers"),
    [("half written", 0, 1), ("written", 0, 1), ("flushed", 0, 1), ("renamed", 1, 0)],
)
def test_killed_at_each_step(
    tmp_path: Path, step: str, num_records: int, num_leftovers: int
) -> None:
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
    assert len(temporaries(tmp_path)) == num_leftovers
    store.put(key_number(1), record_of(key_number(1), RECORD_BYTES))
    assert check(tmp_path) == 1
    assert store.collect_garbage(0.0) == num_leftovers
    assert temporaries(tmp_path) == []
    assert check(tmp_path) == 1


def test_killed_at_random(tmp_path: Path) -> None:
    chance = random.Random(7)
    number = 0
    for _ in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", PUT_FOREVER, str(tmp_path), str(number)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        with child.stdout:
            assert child.stdout.readline() == f"{number}\n"
            time.sleep(chance.uniform(0, 0.1))
            child.kill()
            child.wait()
            told = [int(line) for line in child.stdout.read().splitlines()]
        number = told[-1] if told else number
        # All that was told of is there; at most the one put after it is there as well.
        assert check(tmp_path) - (number + 1) in (0, 1)
        number += 1
    FileStore(tmp_path).collect_garbage(0.0)
    assert temporaries(tmp_path) == []
