"""The framework examples run from end to end with any model."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from llama_index.core import Settings

from tests.support.rag import Rag

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.usefixtures("own_event_loop")
@pytest.mark.parametrize("name", ["langchain_rag", "llamaindex_rag"])
def test_example(name: str, rag: Rag, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer_before = Settings._tokenizer
    try:
        runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](str(rag.model_folder))
    finally:
        Settings._tokenizer = tokenizer_before
    reused = re.search(r"(\d+) of (\d+) prompt tokens reused", capsys.readouterr().out)
    assert reused is not None
    assert int(reused[1]) > int(reused[2]) / 2
