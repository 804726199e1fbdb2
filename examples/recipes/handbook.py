"""The index that all recipes use: a ferry firm's handbook, on the real small model."""

from __future__ import annotations

from pathlib import Path

from transformers.utils import logging

import kvrag
from kvrag.errors import KVRagError

HANDBOOK = Path(__file__).parents[1] / "handbook"
FOLDER = Path("handbook-index")

logging.disable_progress_bar()  # Transformers shows one for each model that it loads


def handbook_index() -> Path:
    """Return the folder of the index in the working directory; the first recipe makes it."""
    with _opened() as index:
        index.add([HANDBOOK])  # skips what has not changed
    return FOLDER


def _opened() -> kvrag.Index:
    if FOLDER.exists():
        return kvrag.Index.open(FOLDER)
    try:
        return kvrag.Index.create(FOLDER, model="smollm2-135m", chunk_tokens=200)
    except KVRagError as error:
        print(f"{error}\nThe shipped model answers instead; it has learned other documents.")
        return kvrag.Index.create(FOLDER, model="kvrag-tiny", chunk_tokens=200)
