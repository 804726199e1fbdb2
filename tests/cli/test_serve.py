"""`kvrag serve` and `kvrag bench vllm` as far as they go without vLLM."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from kvrag.llms.vllm import settings as versions
from tests.cli.conftest import Run
from tests.support.rag import make_index


@pytest.fixture(scope="module")
def index_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve")
    make_index(folder).close()
    return folder / "index"


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda: versions.TESTED_VERSIONS[-1])


@pytest.mark.usefixtures("tested")
def test_what_it_would_start(run: Run, index_path: Path) -> None:
    ran = run(
        *("serve", "--engine", "vllm", "-i", index_path, "--show"),
        *("--policy", "boundary", "--boundary-tokens", "4"),
        *("--only-asked", "--port", 81, "--max-model-len", 512, "--enforce-eager"),
    )
    command = shlex.split(ran.out)
    assert command[-3:] == ["--max-model-len", "512", "--enforce-eager"]
    assert "--port=81" in command
    (config,) = (one for one in command if one.startswith("--kv-transfer-config="))
    values = json.loads(config.partition("=")[2])
    assert values["kv_load_failure_policy"] == "recompute"
    assert values["kv_connector_extra_config"] == {
        "index": str(index_path),
        "policy": "boundary",
        "boundary_tokens": 4,
        "find_chunks": False,
    }


@pytest.mark.usefixtures("tested")
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--policy", "auto"), "run 'kvrag calibrate'"),
        (("--store", "redis:/host"), "a store is file:PATH"),
        (("--store", "memory:?limit=1kB"), "holds no chunk"),
    ],
)
def test_what_cannot_be_served(
    run: Run, index_path: Path, arguments: tuple[str, ...], why: str
) -> None:
    ran = run("serve", "--engine", "vllm", "-i", index_path, "--show", *arguments, code=1)
    assert why in ran.err
