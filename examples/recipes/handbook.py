"""Indexes for the recipes: a ferry firm's handbook, on the real small model."""

from __future__ import annotations

from pathlib import Path

from transformers.utils import logging

import kvrag
from kvrag.errors import KVRagError

HANDBOOK = Path(__file__).parents[1] / "handbook"
# Small models need to be told.
ASK = "Answer from the text above in a few words."

logging.disable_progress_bar()  # Transformers shows one for each model that it loads


def handbook_index() -> Path:
    """Return the folder of the handbook's index; the first recipe makes it, in some 20 seconds."""
    with own_index("handbook-index") as index:
        index.add([HANDBOOK])  # skips what has not changed
        return index.path


def own_index(name: str) -> kvrag.Index:
    """Return an index in the working directory, a new one if there is none."""
    if Path(name).exists():
        return kvrag.Index.open(name)
    try:
        # A filler keeps single facts of like passages apart, which so small a model mixes up.
        return kvrag.Index.create(
            name, model="smollm2-135m", chunk_tokens=200, context="filler:512", codec="raw"
        )
    except KVRagError as error:
        print(f"{error}\nThe shipped model answers instead; it has learned other documents.")
        return kvrag.Index.create(name, model="kvrag-tiny", chunk_tokens=200)
