"""A travel plan with parameters, as a Python function (third use case in Prompt Cache).

python examples/pml_travel.py [MODEL]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated

from transformers.utils import logging

import kvrag
from kvrag.pml.engine import PMLEngine
from kvrag.pml.program import Length, prompt, schema_of

logging.disable_progress_bar()  # Transformers shows one for each model that it loads


@prompt
def travel(abroad: bool, days: Annotated[str, Length(12)], city: Annotated[str, Length(16)]):
    f"Plan a trip of {days}."  # noqa: B021
    if abroad:
        "The traveller wants to cross a border: think of passports, money and languages."
    else:
        f"The traveller stays in the country and wants to see {city}: think of trains."
    "Answer with one line a day."


PROMPTS = (
    "<prompt schema='travel' days='three days'><abroad/>Begin.</prompt>",
    "<prompt schema='travel' days='a week'><not-abroad city='Varn'/>Begin.</prompt>",
)


def main(model: str = "kvrag-tiny") -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        kvrag.Index.create(Path(folder) / "index", model=model) as index,
    ):
        pml = PMLEngine(kvrag.KVEngine(index))
        pml.encode(schema_of(travel))
        for one in PROMPTS:
            answer = pml.generate(one, policy="none", max_tokens=16)
            print(answer.report.one_line())


if __name__ == "__main__":
    main(*sys.argv[1:])
