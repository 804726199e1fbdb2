"""Index a folder of text files and ask about it, with kvrag alone and no framework.

    python examples/plain_python.py [MODEL]

MODEL is a folder or hub name of a Hugging Face decoder. The default is the small model included in
kvrag, so the example runs offline in seconds.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from transformers.utils import logging

import kvrag

DOCUMENTS = Path(__file__).parent / "documents"
QUESTION = "Where did Stikidy go to school?"

logging.disable_progress_bar()  # Transformers shows one for each model that it loads


def main(model: str = "kvrag-tiny") -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        kvrag.Index.create(Path(folder) / "index", model=model, chunk_tokens=64) as index,
    ):
        # Once, offline: compute and store the KV of every chunk.
        index.add([DOCUMENTS])

        # For each question: any prompt that contains chunks of the index reuses their KV.
        chunks = [hit.chunk.text for hit in index.search(QUESTION, k=4)]
        prompt = "\n\n".join([*chunks, f"Question: {QUESTION}\nAnswer:"])
        engine = kvrag.KVEngine(index)
        answer = engine.generate(prompt, max_tokens=24)

        print(QUESTION)
        print(answer.text.strip())
        for source in answer.sources:
            print(f"  from {Path(source.source).name}, chunk {source.ordinal}")
        print(f"  first token after {1000 * answer.ttft_seconds:.1f} ms")
        print(f"  {answer.report.one_line()}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
