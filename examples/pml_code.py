"""Generate code from a project's files, one module for each (Prompt Cache §6, first use case).

    python examples/pml_code.py [MODEL]

The small model included in kvrag writes no useful code; the example shows what is computed.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from transformers.utils import logging

import kvrag
from kvrag.pml.engine import PMLEngine

SCHEMA = Path(__file__).parent / "pml" / "code.xml"
TASKS = (
    "<prompt schema='code'><book.py/><store.py/>Write a test of Store.cheapest.</prompt>",
    "<prompt schema='code'><book.py/><store.py/><user.py/>Let a User buy a Book.</prompt>",
)

logging.disable_progress_bar()  # Transformers shows one for each model that it loads


def main(model: str = "kvrag-tiny") -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        kvrag.Index.create(Path(folder) / "index", model=model) as index,
    ):
        pml = PMLEngine(kvrag.KVEngine(index))
        # Once: compute the files' KV. If a file changes, only that file is computed again.
        encoded = pml.encode(SCHEMA)
        print(f"{encoded.num_tokens} tokens of files encoded")
        for task in TASKS:
            answer = pml.generate(task, policy="none", max_tokens=16)
            print(answer.report.one_line())


if __name__ == "__main__":
    main(*sys.argv[1:])
