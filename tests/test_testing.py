"""The suites for other people's stores, codecs, policies and models, as they meet them."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

THEIRS = """
import pytest

from kvrag.store.memory import MemoryStore
from kvrag_testing.records import stored
from kvrag_testing.store_contract import StoreContract


class TestGood(StoreContract):
    @pytest.fixture
    def store(self):
        return MemoryStore()

    def plant(self, store, key, record):
        store.replace(key, record)

    def peek(self, store, key):
        return stored(store, key)


class BadStore(MemoryStore):
    def keys(self):
        return iter([])


class TestBad(TestGood):
    @pytest.fixture
    def store(self):
        return BadStore()
"""


def run(*arguments: str, folder: Path) -> str:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=folder, check=False
    ).stdout


@pytest.mark.slow
def test_stores_of_theirs_are_judged(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(THEIRS)
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:asyncio", "-W", "error")
    found = run("-m", "pytest", *options, "-k", "what_is_put_is_read", folder=tmp_path)
    assert "1 failed, 1 passed" in found
    assert "assert [] == [" in found  # says what it compared


def test_the_old_name_works_or_says_what_to_install(tmp_path: Path) -> None:
    imported = "from kvrag.testing.store_contract import StoreContract; print(StoreContract)"
    assert "StoreContract" in run("-W", "ignore", "-c", imported, folder=tmp_path)
    with pytest.warns(DeprecationWarning, match="import that; the old name goes in 0.4"):
        import_module("kvrag.testing")
    absent = """
import sys
sys.modules["kvrag_testing"] = None
try:
    import kvrag.testing
except ImportError as error:
    print(error)
from kvrag.eviction.registry import make_eviction
from kvrag.fusion.policies.registry import POLICIES
for call in (lambda: make_eviction("h2o"), lambda: POLICIES["seam"]):
    try:
        call()
    except ValueError as error:
        print(error)
print(list(POLICIES))
"""
    said = run("-c", absent, folder=tmp_path)
    assert said.count("pip install 'kvrag[bench]'") == 3
    assert "'boundary', 'deviation'" in said
