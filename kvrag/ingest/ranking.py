"""How several rankings of chunks become one: reciprocal-rank fusion, and a cross-encoder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from kvrag import arguments
from kvrag.errors import ParameterError
from kvrag.ingest.sentences import load_sentences
from kvrag.ingest.turns import Turns

if TYPE_CHECKING:
    from kvrag.ingest.embedding import Embedding

Ranking = list[tuple[int, float]]
"""Row numbers of chunks with their scores, best first."""

CANDIDATES = 100
"""Chunks of each ranking that take part in a fusion, at least."""
_BATCH_SIZE = 32
RERANKED = 30
"""Chunks that a reranker reads, at least; each takes it a pass of its model or more."""

_RANK_OFFSET = 5
"""Small, so that what one ranking puts first stays near the front, though the other misses it."""

WORDS_WEIGHT = 2.0
"""How much more than the vectors' ranking that of the words counts: questions hold names."""


def fused(rankings: Sequence[tuple[Ranking, float]]) -> Ranking:
    """Return the chunks of several rankings by the weighted sum of their reciprocal ranks.

    A score is the share of the largest possible sum: 1 for a chunk that is first in every ranking
    that found anything. Equal scores appear in the order of the first ranking, then of the others.

    Source: reciprocal rank fusion (Cormack, Clarke and Büttcher 2009), which has no weights and
    k = 60, for more rankings than two; here both measured worse (``kvrag bench retrieval``).

    Parameters
    ----------
    rankings
        Each with its weight.
    """
    rankings = [(ranking, weight) for ranking, weight in rankings if ranking]
    sums: dict[int, float] = {}
    for ranking, weight in rankings:
        for rank, (row, _) in enumerate(ranking, start=1):
            sums[row] = sums.get(row, 0.0) + weight / (_RANK_OFFSET + rank)
    most = sum(weight for _, weight in rankings) / (_RANK_OFFSET + 1)
    return sorted(((row, s / most) for row, s in sums.items()), key=lambda hit: -hit[1])


class Reranker:
    """A cross-encoder of sentence-transformers: it reads a question and a text together.

    Parameters
    ----------
    model
        Its folder, its hub name, or a loaded ``CrossEncoder``. A hub name is downloaded unless the
        hub's cache has it.

    Attributes
    ----------
    name
        What a server calls it: the last part of its folder's or hub name.

    Raises
    ------
    ParameterError
        When it cannot be loaded.
    """

    def __init__(self, model: str | Path | Any) -> None:
        is_named = isinstance(model, str | Path)
        self.name = PurePath(model).name if is_named else type(model).__name__
        self._model: Any = (
            load_sentences("CrossEncoder", _folder_or_name(str(model)), "rerank", num_labels=1)
            if is_named
            else model
        )
        # Each call sets the truncation of one tokenizer.
        self._reading = Turns()
        if not hasattr(self._model, "predict"):
            raise ParameterError(
                f"{type(model).__name__} is not a cross-encoder: expected a folder, a hub name or "
                "a loaded CrossEncoder of sentence-transformers"
            )

    def scores(self, question: str, texts: Sequence[Sequence[str]]) -> list[float]:
        """Return each text's score, that of its best window.

        Parameters
        ----------
        texts
            For each text its windows, at least one.
        """
        pairs = [(question, window) for windows in texts for window in windows]
        if not pairs:
            return []
        predicted: list[Any] = []
        for first in range(0, len(pairs), _BATCH_SIZE):
            batch = pairs[first : first + _BATCH_SIZE]
            with self._reading:
                predicted += self._model.predict(batch, show_progress_bar=False).tolist()
        if not all(isinstance(one, float) and math.isfinite(one) for one in predicted):
            raise ParameterError(
                f"the reranker {type(self._model).__name__} predicts "
                f"{arguments.shown(predicted[0])} for a text: expected one finite "
                "number, as a CrossEncoder with one label gives"
            )
        found = iter(predicted)
        return [max(next(found) for _ in windows) for windows in texts]


class CosineRanker:
    """Ranks texts by the cosine of their vectors and the question's.

    Parameters
    ----------
    embedding
        What makes the vectors.

    Attributes
    ----------
    name
        The embedding's name, without its folder.
    """

    def __init__(self, embedding: Embedding) -> None:
        self.name = PurePath(embedding.name).name
        self._embedding = embedding

    def scores(self, question: str, texts: Sequence[Sequence[str]]) -> list[float]:
        """Return each text's score, -1 to 1: that of its best window; see `Reranker.scores`."""
        vectors = self._embedding.embed([window for windows in texts for window in windows])
        found = iter((vectors @ self._embedding.embed_query(question)).tolist())
        return [max(next(found) for _ in windows) for windows in texts]


def _folder_or_name(reference: str) -> str:
    path = arguments.path(reference, "rerank")
    return str(path) if path.exists() else reference
