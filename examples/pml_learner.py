"""Personalise by traits that exclude each other, in one batch (second use case in Prompt Cache).

python examples/pml_learner.py [MODEL]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from transformers.utils import logging

import kvrag
from kvrag.pml.batch import generate_batch
from kvrag.pml.engine import PMLEngine

SCHEMA = Path(__file__).parent / "pml" / "learner.xml"
LEARNERS = (("elementary", "visual"), ("high-school", "visual"), ("university", "reader"))

logging.disable_progress_bar()  # Transformers shows one for each model that it loads


def main(model: str = "kvrag-tiny") -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        kvrag.Index.create(Path(folder) / "index", model=model) as index,
    ):
        pml = PMLEngine(kvrag.KVEngine(index))
        pml.encode(SCHEMA)
        prompts = [
            f"<prompt schema='learner'><{level}/><{way}/>What is a fraction?</prompt>"
            for level, way in LEARNERS
        ]
        # A module that several prompts import is in memory once.
        report = generate_batch(pml, prompts, max_tokens=16).report
        print(
            f"{report.num_prompts} prompts of {report.num_tokens} tokens: "
            f"{report.num_shared_rows} rows shared, {report.num_fresh_rows} computed, "
            f"{report.buffer_bytes / report.separate_bytes:.0%} of the memory of one buffer each"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
