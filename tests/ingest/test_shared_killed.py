"""Writers of a shared index are killed at any moment: what they said is written is there, once."""

import random
import time
from collections import Counter
from pathlib import Path

import pytest

from kvrag.ingest.index import Index
from kvrag.ingest.shared.manifest import Log
from kvrag.ingest.shared.place import read_place
from kvrag.models.kv_model import KVModel
from tests.ingest.test_kill import tiny_model
from tests.support.killing import Forking
from tests.support.properties import trials

WRITE = """
from kvrag.chunk import Document
from kvrag.ingest.index import Index
from kvrag.ingest.shared import log
from tests.ingest.test_kill import tiny_model
log.MOST_DELTAS = 5
model = tiny_model()

def work(url, views, name, journal):
    os.environ["KVRAG_VIEWS"] = views
    index = Index.open(url, model=model)
    with open(journal, "a") as said:
        said.write("open\\n")
        said.flush()
        for number in range(1000):
            source = name + "." + str(number)
            text = "Page " + source + ". The keeper of the light wrote it. "
            index.add([Document(source, text * 3)])
            said.write(source + "\\n")
            said.flush()
"""


def text_of(journal: Path) -> str:
    return journal.read_text() if journal.exists() else ""


@pytest.mark.slow
def test_killed_writers(tmp_path: Path, model: KVModel, monkeypatch: pytest.MonkeyPatch) -> None:
    num_kills = trials(100, 3)
    url = f"file://{tmp_path}/bucket/index"
    views = [tmp_path / "machine0", tmp_path / "machine1"]
    monkeypatch.setenv("KVRAG_VIEWS", str(views[0]))
    tiny = tiny_model()
    Index.create(url, model=tiny, embedding="hashing", chunk_tokens=64, context="none").close()
    chance = random.Random(num_kills)
    journals: list[Path] = []
    with Forking(WRITE) as writers:
        running: list[int] = []
        for kill in range(num_kills):
            # Two machines write at once; each is killed in turn, and its view is opened again.
            while len(running) < 2:
                number = len(journals)
                journals.append(tmp_path / f"journal{number}")
                machine = views[(kill + len(running)) % 2]
                running.append(writers.start(url, machine, f"w{number}", journals[-1]))
            # Every other one has written, and is killed in one of its next commits.
            deadline = time.monotonic() + 60 * (kill % 2)
            while time.monotonic() < deadline and "w" not in text_of(journals[-2]):
                time.sleep(0.01)
            time.sleep(chance.uniform(0, 0.4))
            writers.kill(running.pop(0))
        for writer in running:
            writers.kill(writer)
    said = {
        line for journal in journals for line in text_of(journal).split("\n")[:-1] if line != "open"
    }
    assert said
    for machine in [*views, tmp_path / "newcomer"]:
        monkeypatch.setenv("KVRAG_VIEWS", str(machine))
        with Index.open(url, model=tiny) as index:
            found = Counter(row.source for row in index.documents())
            assert not said - found.keys()
            assert set(found.values()) == {1}
            # Each writer may have been killed between its commit and its journal, once.
            assert len(found) <= len(said) + len(journals)
            report = index.upkeep.verify()
            assert report.ok, report
            version = index.refresh()
            assert index.catalog.version()[0] == version
    versions = Log(read_place(url).bucket("log")).versions()
    assert versions == list(range(version + 1))
