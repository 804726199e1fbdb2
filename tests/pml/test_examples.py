"""The examples run offline with the model that comes with kvrag, and reuse what they encode."""

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("pml_code", r"(\d+) from \d+ cached chunks"),
        ("pml_learner", r"3 prompts of \d+ tokens: (\d+) rows shared"),
        ("pml_travel", r"(\d+) from \d+ cached chunks"),
    ],
)
def test_example(name: str, pattern: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]()
    found = re.search(pattern, capsys.readouterr().out)
    assert int(found[1]) > 30
