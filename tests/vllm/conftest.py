"""An index, and vLLM over it; without vLLM what needs it is skipped.

``make test-vllm`` sets up an environment that has it.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvrag.engine.engine import KVEngine
from kvrag.ingest.index import Index
from kvrag.llms.vllm.options import engine_options
from kvrag.llms.vllm.settings import ConnectorSettings
from tests.support.models import HEAD, VOCAB_SIZE
from tests.support.rag import save_model, text_index

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_CI_ENV": "1",
    "DO_NOT_TRACK": "1",
}
# Before vLLM is imported anywhere, subprocesses included.
os.environ.update(ENVIRONMENT)

NAMES = ("Ines", "Tomas", "Marta", "Oleg", "Runa", "Pavel", "Lien", "Aino", "Bram", "Cleo")
# Of different lengths, so that none ends where a block of the engine's cache does.
TEXTS = [
    f"{name} keeps ledger {number} of the harbour of Varn. "
    + " ".join(
        f"Entry {entry}: {name} paid {3 * entry + number} coins." for entry in range(3 + number % 4)
    )
    for number, name in enumerate(NAMES)
]
QUESTION = "Question: who wrote the book? Answer:"


def make_prompt(*numbers: int, question: str = QUESTION) -> str:
    """Return a prompt of some of the texts, in that order, with a question.

    It begins as the index's shared prefix does, so its first text is exact.
    """
    return HEAD + "\n\n".join([*(TEXTS[number] for number in numbers), question])


@pytest.fixture(scope="session")
def vllm() -> Any:
    """The package, or a skip that says how to get it."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here: make test-vllm sets up an environment that has it")
    return __import__("vllm")


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    """An index of `TEXTS`, one chunk each, with a model whose heads vLLM's CPU kernels take."""
    folder = tmp_path_factory.mktemp("served")
    save_model(folder / "model", head_dim=32)
    with text_index(folder / "index", folder / "model", TEXTS, codec="raw") as index:
        yield index


@pytest.fixture(scope="session")
def oracle(served: Index) -> KVEngine:
    """Transformers with kvrag, over the same index."""
    # Prompts recur in these tests; their counts are those of a first time.
    return KVEngine(served, links="off", session_bytes=0)


@contextmanager
def running(vllm: Any, index: Index, **options: Any) -> Iterator[Any]:
    """An engine in this process; one at a time."""
    settings = ConnectorSettings(str(index.path), **options.pop("settings", {}))
    arguments: dict[str, Any] = {
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "block_size": 32,
        "enforce_eager": True,
        "max_logprobs": VOCAB_SIZE,
        **options,
    }
    llm = None
    try:
        llm = vllm.LLM(**(engine_options(settings) | arguments))
        yield llm
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        from vllm.distributed import cleanup_dist_env_and_memory
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        # An engine that was refused leaves its connector.
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()
