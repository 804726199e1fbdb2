"""The framework examples run from end to end with the shipped model, which answers rightly."""

import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
from llama_index.core import Settings

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def tokenizer_put_back(own_event_loop: None) -> Iterator[None]:
    before = Settings._tokenizer
    yield
    Settings._tokenizer = before


@pytest.mark.usefixtures("tokenizer_put_back")
@pytest.mark.parametrize("name", ["langchain_rag", "llamaindex_rag"])
def test_the_shipped_model_answers_rightly(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(EXAMPLES / f"{name}.py"))
    example["main"]()
    asked = json.loads((EXAMPLES / "questions.json").read_text())
    answers = {one["question"]: one["answers"] for one in asked}[example["QUESTION"]]
    told = capsys.readouterr().out
    assert told.partition("\n  from")[0].removeprefix(example["QUESTION"]).strip() in answers
    reused = re.search(r"(\d+) of (\d+) prompt tokens reused", told)
    assert int(reused[1]) > int(reused[2]) / 2
