"""The suites for other people's stores, codecs, policies and models, as they meet them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONTRACTS = ("store", "codec", "policy", "model")

THEIRS = """
import pytest

from kvrag.store.memory import MemoryStore
from kvrag.testing.records import stored
from kvrag.testing.store_contract import StoreContract


class {name}Store(MemoryStore):
    {method}


class TestTheirs(StoreContract):
    @pytest.fixture
    def store(self):
        return {name}Store()

    def plant(self, store, key, record):
        store.replace(key, record)

    def peek(self, store, key):
        return stored(store, key)
"""


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=folder, check=False
    )


@pytest.mark.parametrize("name", CONTRACTS)
def test_without_pytest_they_say_what_is_missing(name: str, tmp_path: Path) -> None:
    code = "import sys; sys.modules['pytest'] = None; import kvrag.testing.records; "
    done = run("-c", f"{code}import kvrag.testing.{name}_contract", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("run under pytest: pip install pytest")


@pytest.mark.parametrize(
    ("method", "outcome"),
    [
        ("pass", "1 passed"),
        ("def size_bytes(self): return 7", "assert 7 == 5000"),  # says what it compared
    ],
)
def test_a_store_of_theirs_is_judged(method: str, outcome: str, tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(THEIRS.format(name="Their", method=method))
    options = ("-q", "-p", "no:cacheprovider", "-W", "error", "-k", "what_is_put_is_read")
    done = run("-m", "pytest", *options, "test_theirs.py", folder=tmp_path)
    assert outcome in done.stdout
