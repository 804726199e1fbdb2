"""The recipes of examples/: short, and their answers are those that stand beside them."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import kvrag
from tests.support.models import needs_named_model

EXAMPLES = Path(__file__).parents[2] / "examples"
# What an output says on every machine. The rest of a sentence may differ where a processor rounds
# otherwise.
SAID = {
    "stuff_chain": ["Limpet", "fleet.md"],
    "lcel": ["240", "prompt tokens reused"],
    "agent": ["ai: {'question': ", "tool: ", "kittiwake"],
    "history": ["Limpet", "240"],
    "existing_faiss": ["240", "prompt tokens reused"],
    "existing_chroma": ["kittiwake", "prompt tokens reused"],
    "query_engine": ["kittiwake", "computers.md"],
    "chat_engine": ["kittiwake"],
    "ingestion_pipeline": ["0 nodes written", "Saffron", "old notice found: False"],
    "ensemble_rerank": ["313"],
    "evaluate": ["kvrag: ", "plain: ", "times as early"],
}


def holds(output: str, name: str) -> None:
    for words in SAID[name]:
        assert words in output
    reused = re.search(r"(\d+) of (\d+) prompt tokens reused", output)
    assert reused is None or int(reused[1]) > int(reused[2]) / 3


def test_every_recipe_is_short_and_has_its_output() -> None:
    recipes = {path.stem: path for path in (EXAMPLES / "recipes").glob("*.py")}
    recipes.pop("handbook")
    assert recipes.keys() == SAID.keys()
    assert {path.stem for path in (EXAMPLES / "output").glob("*.txt")} == SAID.keys()
    table = (EXAMPLES / "README.md").read_text()
    for name, path in recipes.items():
        assert len(path.read_text().splitlines()) < 60
        holds((EXAMPLES / "output" / f"{name}.txt").read_text(), name)
        assert f"[{name}](recipes/{name}.py)" in table
        assert f"(output/{name}.txt)" in table


@pytest.fixture(scope="session")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the recipes print, in one process and folder: the first makes the handbook's index."""
    code = f"""
import runpy, sys, traceback
for name in {list(SAID)!r}:
    print("\\0" + name)
    try:
        runpy.run_path({str(EXAMPLES / "recipes")!r} + "/" + name + ".py", run_name="__main__")
    except Exception:
        traceback.print_exc(file=sys.stdout)
"""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=tmp_path_factory.mktemp("recipes"),
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(EXAMPLES / "recipes")},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    return dict(one.split("\n", 1) for one in ran.stdout.split("\0")[1:])


@pytest.mark.slow
@needs_named_model("smollm2-135m")
@pytest.mark.parametrize("name", SAID)
def test_recipe(name: str, outputs: dict[str, str]) -> None:
    if name == "existing_chroma" and find_spec("langchain_chroma") is None:
        pytest.skip("needs langchain-chroma")
    assert "Traceback" not in outputs[name], outputs[name]
    holds(outputs[name], name)


def test_the_handbook_index_survives_a_recipe_that_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = runpy.run_path(str(EXAMPLES / "recipes" / "handbook.py"))
    monkeypatch.setitem(made["own_index"].__globals__, "HANDBOOK", tmp_path / "pages")
    (tmp_path / "pages").mkdir()
    shutil.copy(EXAMPLES / "handbook" / "weather.md", tmp_path / "pages")
    kvrag.Index.create("handbook-index", model="kvrag-tiny", embedding="hashing").close()
    made["handbook_index"]()
    with kvrag.Index.open("handbook-index") as index:
        assert index.search("weather", k=1)
