"""The searches of `Index`: by meaning, by words, by both, and for text that a prompt repeats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvrag.ingest.filters import Wanted
from kvrag.ingest.search import Search, SearchHit

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvrag.fusion.segments import ChunkMatcher
    from kvrag.ingest.ranking import Reranker


class SearchMethods:
    """The part of `Index` that finds chunks."""

    _search: Search

    def search(
        self,
        query: str,
        k: int = 4,
        *,
        filter: Wanted = None,
        reranker: Reranker | None = None,
    ) -> list[SearchHit]:
        """Return the `k` chunks that best match a question, best first.

        Chunks are ranked by meaning (`search_dense`) and by words (`search_words`), and the two
        rankings are fused by reciprocal rank. A reranker then reads the best of them.

        Parameters
        ----------
        filter
            Which chunks may be found, by source, ordinal and metadata, such as
            ``{"year": {"$gte": 2020}}`` (`kvrag.ingest.filters`); None means all.
        reranker
            A cross-encoder (`kvrag.ingest.ranking.Reranker`), whose scores then count.

        Raises
        ------
        ParameterError
            When the question is not text, is blank, or is longer than 100,000 characters, `k` is
            not a whole number from 1 on, or the filter is wrong.
        """
        return self._search.by_text(query, k, reranker, filter)

    def search_dense(self, query: str, k: int = 4, *, filter: Wanted = None) -> list[SearchHit]:
        """Return the `k` chunks whose vectors are nearest to a question's, as `search` does."""
        return self._search.by_meaning(query, k, filter)

    def search_by_vector(
        self, vector: NDArray[np.float32] | Sequence[float], k: int = 4, *, filter: Wanted = None
    ) -> list[SearchHit]:
        """Return the `k` chunks nearest to a vector ``[dim]``, best first."""
        return self._search.by_vector(vector, k, filter)

    def search_words(self, query: str, k: int = 4, *, filter: Wanted = None) -> list[SearchHit]:
        """Return the `k` chunks that best match a question's words (BM25), best first.

        Needs no model. A question without words finds nothing. Otherwise as `search`.
        """
        return self._search.by_words(query, k, filter)

    @property
    def found_chunk_ids(self) -> tuple[str, ...]:
        """Ids of the chunks found by the latest searches, each as often as it was found."""
        return self._search.found_chunk_ids

    @property
    def recent_chunk_ids(self) -> tuple[str, ...]:
        """Ids of the chunks found by the latest searches, the latest and best first."""
        return self._search.recent_chunk_ids

    @property
    def matcher(self) -> ChunkMatcher:
        """The matcher of the index's chunks in prompts; replaced when the catalog changes."""
        return self._search.matcher
