"""Settings of the whole suite."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported anywhere, subprocesses included: the models of the tests are so small
# that a second thread costs more than it brings, and spinning threads starve other processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The prompts of the tests are so short that full prefill would be faster than what they test.
os.environ.setdefault("KVRAG_NEVER_SLOWER", "off")
# Kernels in Triton are interpreted; Triton reads this once, when it is imported.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

from tests.support import properties  # noqa: F401  # its profiles, before any test is imported
from tests.support.servers import S3Server

MEMORY = Path("/dev/shm")


def pytest_configure() -> None:
    """Put the tests' folders in memory where there is room.

    Waiting for a disk is half of what tests of stores and indexes take. No test ends the machine,
    so a disk would keep nothing more.
    """
    if MEMORY.is_dir():
        room = os.statvfs(MEMORY)
        if room.f_bavail * room.f_frsize > 8 << 30 and not room.f_flag & os.ST_NOEXEC:
            os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Collect no garbage while libraries are imported: an eighth of that time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _without_what_was_imported() -> None:
    """Keep imported libraries out of garbage collection, which took 0.4 s each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Return the one server of a process; starting it takes seconds."""
    server = S3Server(tmp_path_factory.mktemp("s3"))
    yield server
    server.kill()


@pytest.fixture
def s3_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
