"""Search for chunks, by a question's vector and words and verbatim in a prompt; their KV.

Several rankings become one by reciprocal-rank fusion, or a cross-encoder.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, cast

from kvrag import arguments
from kvrag.chunk import Chunk, ChunkKey
from kvrag.errors import IndexFormatError, ParameterError, RecordError, StoreError
from kvrag.ingest.encoders import Encoders
from kvrag.ingest.filters import Filter, Wanted, read_filter
from kvrag.ingest.sentences import Turns, load_sentences
from kvrag.ingest.storage import Storage
from kvrag.loading.patience import Patience
from kvrag.process import OfProcess
from kvrag.store.base import tier_of, tiers_of
from kvrag.store.limited import limits_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvrag.codec.base import EncodedChunk
    from kvrag.fusion.segments import ChunkMatcher
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
        self.name = type(model).__name__
        self._model: Any = model
        if isinstance(model, str | Path):
            self.name = PurePath(model).name
            self._model = load_sentences("CrossEncoder", str(model), "rerank", num_labels=1)
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
        return _best(predicted, texts)


def _best(scores: Iterable[float], texts: Sequence[Sequence[str]]) -> list[float]:
    """Return each text's best score, given those of all windows."""
    found = iter(scores)
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
        return _best((vectors @ self._embedding.embed_query(question)).tolist(), texts)


_MAX_RECENT = 256
_MAX_FILTERS = 16  # whose rows are kept, 8 bytes each
_MOST_CHUNKS = 2**31 - 1
_MOST_CHARACTERS = 100_000  # in a question; embeddings read far less


@dataclass(frozen=True)
class SearchHit:
    """A search result.

    Attributes
    ----------
    chunk
        The chunk.
    score
        What the search ranks by: the inner product of the chunk's best vector with the question's,
        BM25, both fused (`kvrag.ingest.search.fused`), or the score of a reranker.
    """

    chunk: Chunk
    score: float


class Search(OfProcess):
    """The part of `Index` that finds chunks and opens their KV.

    Parameters
    ----------
    storage, encoders
        The storage and the encoders of the index.
    """

    def __init__(self, storage: Storage, encoders: Encoders) -> None:
        self._storage = storage
        self._encoders = encoders
        self._refreshing = threading.Lock()
        self._matcher: tuple[tuple[int, bytes], ChunkMatcher] | None = None
        self._admitted: dict[tuple[tuple[int, bytes], str], NDArray[np.int64]] = {}
        self._recent: deque[str] = deque(maxlen=_MAX_RECENT)

    def search(
        self, query: str, k: int = 4, *, filter: Wanted = None, reranker: Reranker | None = None
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
            A cross-encoder (`kvrag.ingest.search.Reranker`), whose scores then count.

        Raises
        ------
        ParameterError
            When the question is not text, is blank, or is longer than 100,000 characters, `k` is
            not a whole number from 1 on, or the filter or the reranker is wrong.
        """
        query, k = self._checked(query, k)
        if reranker is not None and not hasattr(reranker, "scores"):
            raise ParameterError(
                f"reranker {arguments.shown(reranker)}: expected an object such as "
                "kvrag.ingest.search.Reranker(MODEL)"
            )
        admitted = read_filter(filter)
        vector = self._encoders.embedding.embed_query(query)
        by_meaning, catalog = self._nearest_to(vector, admitted), self._storage.catalog

        def find(most: int) -> Ranking:
            most = max(most, CANDIDATES)
            words = catalog.words.search(query, most, admitted)
            return fused([(by_meaning(most), 1.0), (words, WORDS_WEIGHT)])

        if reranker is None:
            return self._noted(self._hits(find, k))
        windows = self._encoders.embedding.windows
        hits = self._hits(find, max(k, RERANKED))
        scores = reranker.scores(query, [windows(hit.chunk.text) for hit in hits])
        again = [SearchHit(hit.chunk, score) for hit, score in zip(hits, scores, strict=True)]
        return self._noted(sorted(again, key=lambda hit: -hit.score)[:k])

    def search_dense(self, query: str, k: int = 4, *, filter: Wanted = None) -> list[SearchHit]:
        """Return the `k` chunks whose vectors are nearest to a question's, as `search` does."""
        query, k = self._checked(query, k)
        vector = self._encoders.embedding.embed_query(query)
        return self.search_by_vector(vector, k, filter=filter)

    def search_by_vector(
        self, vector: NDArray[np.float32] | Sequence[float], k: int = 4, *, filter: Wanted = None
    ) -> list[SearchHit]:
        """Return the `k` chunks nearest to a vector ``[dim]``, best first."""
        self._storage.require_open()
        k = arguments.whole(k, "k", 1, _MOST_CHUNKS)
        search = self._nearest_to(_as_vector(vector), read_filter(filter))
        return self._noted(self._hits(search, k))

    def search_words(self, query: str, k: int = 4, *, filter: Wanted = None) -> list[SearchHit]:
        """Return the `k` chunks that best match a question's words (BM25), best first.

        Needs no model. A question without words finds nothing. Otherwise as `search`.
        """
        query, k = self._checked(query, k)
        catalog, admitted = self._storage.catalog, read_filter(filter)
        return self._noted(self._hits(lambda most: catalog.words.search(query, most, admitted), k))

    def _nearest_to(
        self, vector: NDArray[np.float32], wanted: Filter | None
    ) -> Callable[[int], Ranking]:
        """Return a search for the chunks nearest to a vector that a filter admits."""
        vectors = self._storage.vectors.get()
        rows = None if wanted is None else self._rows_of(wanted)
        return lambda most: vectors.search(vector, most, rows)

    def _rows_of(self, wanted: Filter) -> NDArray[np.int64]:
        import numpy as np

        catalog = self._storage.catalog
        key = catalog.version(), wanted.key
        rows = self._admitted.get(key)
        if rows is None:
            rows = np.array(catalog.words.rows_of(wanted), np.int64)
            if len(self._admitted) >= _MAX_FILTERS:
                self._admitted.clear()
            self._admitted[key] = rows
        return rows

    @property
    def found_chunk_ids(self) -> tuple[str, ...]:
        """Ids of the chunks found by the latest searches, each as often as it was found."""
        return tuple(reversed(self._recent.copy()))

    @property
    def recent_chunk_ids(self) -> tuple[str, ...]:
        """Ids of the chunks found by the latest searches, the latest and best first."""
        return tuple(dict.fromkeys(reversed(self._recent.copy())))

    @property
    def matcher(self) -> ChunkMatcher:
        """The matcher of the index's chunks in prompts; replaced when the catalog changes."""
        from kvrag.fusion.segments import ChunkMatcher

        catalog = self._storage.catalog
        texts = catalog.texts
        with self._refreshing:
            if self._matcher is None or self._matcher[0] != catalog.version():
                # A copy: other threads may be searching with the old one.
                known = ChunkMatcher(texts.text_of) if self._matcher is None else self._matcher[1]
                matcher = known.copy()
                self._matcher = texts.each_text(matcher.add, known, matcher.discard), matcher
            return self._matcher[1]

    def open_kv(
        self,
        chunk_id: str,
        context_ids: tuple[int, ...] | None = None,
        *,
        patience: Patience | None = None,
    ) -> EncodedChunk | None:
        """Open a chunk's KV, or return None if there is none.

        Opens the record that was encoded after `context_ids`; None means the chunk's first record.
        With `patience`, opening and reading it take no longer.

        Raises
        ------
        RecordError
            When the record is damaged or foreign, or the catalog names another chunk's record.
        IndexFormatError
            When the catalog is damaged.
        StoreError
            When the store cannot be read.
        """
        wanted = _ids(context_ids)
        found = self._storage.catalog.chunk_and_keys(arguments.text(chunk_id, "chunk_id"))
        if found is None:
            return None
        chunk, stored_keys = found
        # Derived from the tokens: a damaged name must not lead to the KV of other tokens.
        keys = {one.contexts[0]: self._storage.config.key_of(one) for one in chunk.encodings()}
        if stored_keys != [key.digest for key in keys.values()]:
            raise RecordError(
                f"chunk {arguments.cut(chunk_id)} names the KV "
                f"{arguments.shown(' '.join(stored_keys))}, expected "
                + " ".join(map(str, keys.values()))
            )
        # The document may have changed since the prompt was laid out.
        context = chunk.contexts[0] if wanted is None else wanted
        key = keys.get(context)
        if key is None:
            return None
        note_damage = partial(self._note_record_damage, key, chunk.is_optional(context))
        try:
            opening = partial(self._storage.store.open, key)
            record = opening() if patience is None else patience.open(opening)
            if record is None:
                return None
            with ExitStack() as on_error:
                on_error.callback(record.close)
                encoded = self._storage.coding.open(key, record, self._storage.config.spec)
                if encoded.num_tokens != len(chunk.token_ids):
                    raise RecordError(
                        f"the record of chunk {chunk_id} holds {encoded.num_tokens} tokens, "
                        f"expected {len(chunk.token_ids)}"
                    )
                on_error.pop_all()
        except RecordError:
            note_damage()
            raise
        return cast("EncodedChunk", WatchedChunk(encoded, note_damage))

    def tier_of(self, chunk_id: str, context_ids: tuple[int, ...] | None = None) -> int | None:
        """Return the number of the store's tier that would deliver a chunk's KV, 0 the fastest.

        Names the record as `open_kv` does, but reads none of it; None if the catalog names none.
        """
        wanted = _ids(context_ids)
        arguments.text(chunk_id, "chunk_id")
        store = self._storage.store
        if len(tiers_of(store)) == 1:
            return 0
        try:
            found = self._storage.catalog.chunk_and_keys(chunk_id)
        except (IndexFormatError, StoreError):
            return None
        for one in found[0].encodings() if found is not None else ():
            if wanted is None or one.contexts[0] == wanted:
                return tier_of(store, self._storage.config.key_of(one))
        return None

    def pin(self, sources: Sequence[str]) -> int:
        """Keep the KV of documents in every tier that holds it, until the index is closed.

        Returns the number of records, made or not, which is 0 for a store without limits.
        """
        sources = arguments.texts(sources, "sources", is_utf8=True)
        catalog = self._storage.catalog
        chunk_ids = [chunk_id for one in sources for chunk_id in catalog.chunk_ids_of(one)]
        keys = {
            self._storage.config.key_of(one)
            for chunk in catalog.chunks(chunk_ids)
            for one in chunk.encodings()
        }
        pins = limits_of(self._storage.store)
        for one in pins:
            one.pin(keys)
        return len(keys) if pins else 0

    def _checked(self, query: Any, k: Any) -> tuple[str, int]:
        self._storage.require_open()
        k = arguments.whole(k, "k", 1, _MOST_CHUNKS)
        if len(arguments.text(query, "the question")) > _MOST_CHARACTERS:
            raise ParameterError(
                f"the question has {len(query):,} characters: expected at most "
                f"{_MOST_CHARACTERS:,}; search for a part of it"
            )
        if not query.strip():
            raise ParameterError("the question is empty: there is nothing to search for")
        return query, k

    def _hits(self, search: Callable[[int], list[tuple[int, float]]], k: int) -> list[SearchHit]:
        """Return the `k` best sound chunks that `search` finds."""
        hits: list[SearchHit] = []
        seen: set[int] = set()
        # If a chunk is damaged or gone, the next one takes its place.
        while len(hits) < k:
            found = [one for one in search(max(k, 2 * len(seen))) if one[0] not in seen]
            if not found:
                break
            # A search may find many more than are wanted; only those are read.
            while found and len(hits) < k:
                part, found = found[:k], found[k:]
                chunks = self._storage.catalog.chunks_at([row for row, _ in part])
                hits += [SearchHit(chunks[row], score) for row, score in part if row in chunks]
                seen.update(row for row, _ in part)
        return hits[:k]

    def _noted(self, hits: list[SearchHit]) -> list[SearchHit]:
        """Return the hits of a search, remembered as the latest."""
        self._recent.extend(hit.chunk.chunk_id for hit in reversed(hits))
        return hits

    def _note_record_damage(self, key: ChunkKey, is_optional: bool) -> None:
        """Report a damaged record to the store; the next prompt makes an optional one again."""
        self._storage.store.note_damage(key)
        if is_optional:
            with suppress(StoreError):
                self._storage.store.delete(key)


def _ids(context_ids: Sequence[int] | None) -> tuple[int, ...] | None:
    """Return the token ids of a context as a tuple. Raises ParameterError."""
    try:
        found = None if context_ids is None else tuple(context_ids)
        hash(found)
    except TypeError:
        shown = arguments.shown(context_ids)
        raise ParameterError(f"context_ids {shown}: expected token ids, or None") from None
    return found


def _as_vector(vector: Any) -> NDArray[np.float32]:
    import numpy as np

    try:
        found = np.asarray(vector, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise ParameterError(f"vector: expected numbers, found {str(vector)[:60]!r}") from error
    if found.ndim != 1 or not np.isfinite(found).all():
        raise ParameterError(
            f"vector: expected finite numbers in one dimension, found shape {found.shape}"
        )
    return found


class WatchedChunk:
    """An `EncodedChunk` that reports damage; it has all that the opened record has.

    Parameters
    ----------
    inner
        The opened record.
    note_damage
        Called when bytes that were read are not those that were written.
    """

    def __init__(self, inner: EncodedChunk, note_damage: Callable[[], None]) -> None:
        self._inner: Any = inner
        self._note_damage = note_damage

    def __getattr__(self, name: str) -> Any:
        """Return what the record has; what reads it reports damage."""
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self._inner, name)
        return partial(self._watched, found) if callable(found) else found

    def _watched(self, read: Callable[..., Any], *given: Any, **named: Any) -> Any:
        try:
            return read(*given, **named)
        except RecordError:
            self._note_damage()
            raise
