import json
import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "plain_python.py"


def test_the_plain_example_is_answered_rightly(capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(EXAMPLE))
    example["main"]()
    answers = {
        asked["question"]: asked["answers"]
        for asked in json.loads((EXAMPLE.parent / "questions.json").read_text())
    }
    shown = capsys.readouterr().out
    assert shown.splitlines()[1] in answers[example["QUESTION"]]
    assert "cached chunks" in shown
    assert ".txt, chunk" in shown
