"""Engines and processes: forks, copies, and an exit while daemon threads answer."""

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvrag.engine.engine import KVEngine
from kvrag.errors import ProcessError
from kvrag.ingest.index import Index
from kvrag.pml.engine import PMLEngine

_BUSY = """
import os, sys, threading, warnings
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
from kvrag.chunk import Document
from kvrag.engine.engine import KVEngine
from kvrag.errors import ProcessError
from kvrag.ingest.index import Index

text = "The ferry of Varn leaves at nine. " * 20
index = Index.create({path!r}, model="kvrag-tiny", embedding="hashing")
index.add([Document("a", text)])
engine = KVEngine(index)
started = threading.Event()

def answer():
    while True:
        for _ in engine.stream(text + "When?", max_tokens=64):
            started.set()

def answer_or_add(number):
    if number % 2:
        answer()
    while True:
        index.add([Document("b", text + str(number))])
        number += 2

def start(work, *given):
    threading.Thread(target=work, args=given, daemon=True).start()
"""


def run(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _BUSY.format(path=str(path)) + code],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes are forked here")
def test_a_forked_process_is_told_to_open_the_index_itself(tmp_path: Path) -> None:
    done = run(
        """
import asyncio

def calls(engine):
    yield lambda: engine.generate("When?")
    yield lambda: engine.generate_batch(["When?"])
    yield lambda: next(engine.stream("When?"))
    yield lambda: asyncio.run(engine.agenerate("When?"))
    yield lambda: engine.fuse("When?")
    yield lambda: engine.prompt_ids("When?")
    yield lambda: index.search("ferry")
    yield lambda: index.add([Document("c", text)])

start(answer)
started.wait()
child = os.fork()
if not child:
    for number, call in enumerate(calls(engine)):
        try:
            call()
        except ProcessError as error:
            assert "spawn" in str(error) and "Index.open" in str(error)
        else:
            os._exit(10 + number)
    with Index.open(index.path) as opened:
        KVEngine(opened).generate("When?", max_tokens=2)
    os._exit(0)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert code == 0, code
os._exit(0)
""",
        tmp_path / "index",
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_process_ends_while_daemon_threads_answer(tmp_path: Path) -> None:
    done = run(
        """
for number in range(2):
    start(answer_or_add, number)
started.wait()
print("ended")
""",
        tmp_path / "index",
    )
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr[-3000:]
    assert "terminate" not in done.stderr


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_cannot_be_copied_says_what_to_do(index: Index, make: Any) -> None:
    for one in (index, KVEngine(index), PMLEngine(KVEngine(index))):
        with pytest.raises(ProcessError, match=r"cannot be copied or pickled.*Index\.open there"):
            make(one)
