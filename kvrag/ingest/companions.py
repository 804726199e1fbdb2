"""Context ``similar``: the chunks that precede a chunk while it is encoded.

They are its nearest ones in the index, as those that a search puts beside it will be: of other
documents first, without its own text or copies of it. A few chunks that the same ones suit share
them, so that what precedes a chunk costs about one more prefill of as many tokens as it has.

What precedes others begins with its own first token, and has `LEAST_TOKENS` at least. So a context
says itself which texts are in it (`Heads`), and none outlives its text (`RowWriter.forget`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvrag.chunk import Chunk, ChunkKey
from kvrag.ingest.contexts import FOLDER, LEAST_TOKENS, SEPARATOR
from kvrag.ingest.encoders import Encoders
from kvrag.ingest.plan import PlannedDocument
from kvrag.ingest.schema import FORGOTTEN, Change, Heads, pack_ids
from kvrag.ingest.stages import lacking, windows
from kvrag.ingest.storage import Storage
from kvrag.models.tokens import encode

COMPARED_TOKENS = 1 << 20
"""Tokens of the chunks that are encoded at once, each after any other of them."""

_NEAREST = 48  # looked at for one chunk, or for a few
_JOINING = 32  # chunks that may share a given one's context
_ROWS = 256  # compared with all at once
# Two texts are copies if they have this share of the shorter one's runs of this many tokens.
_RUN, _COPIED = 8, 0.2
_OWN = 4.0  # by which chunks of the own document are put after all others

Before: TypeAlias = "tuple[tuple[int, ...], tuple[str, ...]]"
"""The token ids before a chunk, and the ids of the chunks that they are of."""

Encode: TypeAlias = Callable[[list[tuple[ChunkKey, Chunk]]], dict[ChunkKey, str]]
"""Makes and stores records; returns the reasons for those that cannot be made."""


@dataclass(eq=False)
class Passage:
    """A chunk that precedes others, or is encoded after them.

    Attributes
    ----------
    chunk_id, source, token_ids
        As in `Chunk`.
    vector
        What its windows' vectors point to, of length 1.
    folder
        Passages precede those of the same folder only.
    """

    chunk_id: str
    source: str
    token_ids: NDArray[np.int32]
    vector: NDArray[np.float32]
    folder: str = ""

    @cached_property
    def runs(self) -> NDArray[np.uint64]:
        """Digests of its runs of `_RUN` tokens, or of all that it has, ascending."""
        return self._runs_of(min(_RUN, len(self.token_ids)))

    def _runs_of(self, run: int) -> NDArray[np.uint64]:
        ids = self.token_ids.astype(np.uint64)
        digests = np.zeros(len(ids) - run + 1, np.uint64)
        for place in range(run):
            digests = digests * np.uint64(0x9E3779B97F4A7C15) + ids[place : place + len(digests)]
        return np.unique(digests)

    def is_copy(self, other: Passage) -> bool:
        """Return whether a good part of one text is in the other."""
        ours, theirs = self.runs, other.runs
        if (least := min(len(self.token_ids), len(other.token_ids))) < _RUN:
            ours, theirs = self._runs_of(least), other._runs_of(least)
        shared = np.intersect1d(ours, theirs, assume_unique=True)
        return len(shared) > _COPIED * min(len(ours), len(theirs))


def choose(
    wanted: Sequence[Passage],
    others: Sequence[Passage],
    num_tokens: int,
    separator: tuple[int, ...] = (),
) -> list[Before]:
    """Return what precedes each passage, which may be of all passages.

    Parameters
    ----------
    wanted
        The passages to encode.
    others
        More that may precede them.
    num_tokens
        The largest number of tokens before a passage.
    separator
        Tokens after each passage that precedes it.
    """
    if not wanted:
        return []
    choice = _Choice(wanted, others, num_tokens, len(separator))
    found: list[Before] = [((), ())] * len(wanted)
    groups = choice.groups()
    for group, parts in zip(groups, choice.before(groups), strict=True):
        passages = [(choice.passages[one], most) for one, most in reversed(parts)]
        ids = [(*one.token_ids[:most].tolist(), *separator) for one, most in passages]
        before = tuple(sum(ids, ())), tuple(one.chunk_id for one, _ in passages)
        for number in group:
            found[number] = before
    return found


def separator_ids(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens after each passage that precedes a chunk."""
    (separator,) = encode(tokenizer, [SEPARATOR], add_special_tokens=False)
    return separator.token_ids


class _Choice:
    """Passages by number: first those to encode."""

    def __init__(
        self,
        wanted: Sequence[Passage],
        others: Sequence[Passage],
        num_tokens: int,
        num_between: int,
    ) -> None:
        self.passages = [*wanted, *others]
        self._num_wanted = len(wanted)
        self._num_tokens, self._num_between = num_tokens, num_between
        self._vectors = np.stack([one.vector for one in self.passages])
        self._lengths = np.array([len(one.token_ids) for one in self.passages])
        self._num_own = int(self._lengths[: len(wanted)].sum())
        self._sources = _numbered(one.source for one in self.passages)
        self._folders = _numbered(one.folder for one in self.passages)

    def groups(self) -> list[list[int]]:
        """Return who shares what precedes them, enough of them that it costs no more than they do.

        Each joins the one whose nearest passages suit it best, and those that lose least by it
        first. (Balanced clusters, whose halves precede each other, keep 70 % of the similarity to
        a passage's own nearest ones; this keeps 93 %, at the same cost.)
        """
        found = [[number] for number in range(self._num_wanted)]
        while True:
            before = list(self.before(found))
            if sum(most for parts in before for _, most in parts) <= self._num_own:
                return found
            joined = self._joined(found, before)
            if len(joined) == len(found):
                return found
            found = joined

    def _joined(
        self, groups: list[list[int]], before: Sequence[list[tuple[int, int]]]
    ) -> list[list[int]]:
        """Return larger groups: each of some, with those that join it."""
        leader_of: dict[int, int] = {}
        sizes = [int(self._lengths[group].sum()) for group in groups]
        for _, leader, other in sorted(self._losses(groups, before)):
            is_free = other not in leader_of and leader_of.get(leader, leader) == leader
            if is_free and sizes[leader] < self._num_tokens:
                leader_of[leader] = leader_of[other] = leader
                sizes[leader] += sizes[other]
        found: dict[int, list[int]] = {}
        for number, group in enumerate(groups):
            found.setdefault(leader_of.get(number, number), []).extend(group)
        return list(found.values())

    def before(self, groups: Sequence[list[int]]) -> Iterator[list[tuple[int, int]]]:
        """Yield what precedes each group, nearest first: passages, and tokens of each."""
        for group, ranked in zip(groups, self._ranked(groups), strict=True):
            chosen: list[tuple[int, int]] = []
            room = self._num_tokens
            for one in ranked:
                taken = min(int(self._lengths[one]), room - self._num_between)
                if taken < LEAST_TOKENS:
                    break
                seen = (*group, *(number for number, _ in chosen))
                if not any(self.passages[one].is_copy(self.passages[each]) for each in seen):
                    chosen.append((one, taken))
                    room -= taken + self._num_between
            yield chosen

    def _ranked(self, groups: Sequence[list[int]]) -> Iterator[list[int]]:
        """Yield the passages that may precede each group, nearest first."""
        is_short = self._lengths < LEAST_TOKENS
        for first in range(0, len(groups), _ROWS):
            some = groups[first : first + _ROWS]
            scores = np.stack([self._vectors[group].mean(0) for group in some]) @ self._vectors.T
            for row, group in zip(scores, some, strict=True):
                row[np.isin(self._sources, self._sources[group])] -= _OWN
                row[is_short | (self._folders != self._folders[group[0]])] = -np.inf
                row[group] = -np.inf
                best = np.argpartition(-row, min(_NEAREST, len(row)) - 1)[:_NEAREST]
                best = best[np.argsort(-row[best], kind="stable")]
                yield best[row[best] > -np.inf].tolist()

    def _losses(
        self, groups: list[list[int]], before: Sequence[list[tuple[int, int]]]
    ) -> Iterator[tuple[float, int, int]]:
        """Yield what a group loses that shares another one's context, that one, and itself."""
        leaders = [number for number, parts in enumerate(before) if parts]
        vectors = np.stack([self._vectors[group].mean(0) for group in groups])
        folders = np.array([self._folders[group[0]] for group in groups])
        sources = [set(self._sources[group].tolist()) for group in groups]
        middles = np.zeros_like(vectors)
        for number in leaders:
            places, weights = zip(*before[number], strict=True)
            middles[number] = np.average(self._vectors[list(places)], 0, weights)
        reached = (middles * vectors).sum(1)
        for first in range(0, len(leaders), _ROWS):
            some = leaders[first : first + _ROWS]
            for leader, row in zip(some, reached - middles[some] @ vectors.T, strict=True):
                row[folders != folders[leader]] = np.inf
                row[leader] = np.inf
                standing = {int(self._sources[place]) for place, _ in before[leader]}
                best = np.argpartition(row, min(_JOINING, len(row)) - 1)[:_JOINING]
                for other in best[row[best] < np.inf].tolist():
                    if standing.isdisjoint(sources[other]):
                        yield float(row[other]), leader, other


def _numbered(names: Iterable[str]) -> NDArray[np.int64]:
    """Return a number for each name, the same for equal ones."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(name, len(numbers)) for name in names])


class Companions:
    """Gives chunks of an index the context ``similar``.

    Parameters
    ----------
    storage, encoders
        Of the index.
    planned
        Sources that are still to be written: their former chunks precede nothing any more.
    encode
        Encodes chunks once they have their contexts.
    """

    def __init__(
        self, storage: Storage, encoders: Encoders, planned: set[str], encode: Encode
    ) -> None:
        self._storage = storage
        self._encoders = encoders
        self._planned = planned
        self._encode = encode
        self._forgetful: set[str] = set()  # ids of chunks read whose context was deleted

    def write(
        self,
        documents: Iterable[PlannedDocument],
        commit: Callable[[list[PlannedDocument], dict[ChunkKey, str], Change], None],
    ) -> None:
        """Give chunks their contexts, encode and commit them; then those that have lost theirs.

        Parameters
        ----------
        documents
            The documents to write, embedded.
        commit
            Writes some of them: what is chosen among is written together, since nothing precedes
            a chunk that is not there.
        """
        for window in windows(documents, COMPARED_TOKENS):
            bad, after = self._encoded(window)
            commit(window, bad, Change(after=after))
            self._planned.difference_update(one.source for one in window)
        for window in windows(self._without(), COMPARED_TOKENS):
            bad, after = self._encoded(window)
            encode = {
                chunk.chunk_id: chunk.contexts
                for document in window
                for chunk in document.chunks
                if (chunk.contexts[0] or chunk.chunk_id in self._forgetful)
                and self._storage.config.key_of(chunk) not in bad
            }
            if encode:
                self._storage.apply(Change(encode=encode, after=after))

    def choose(self, documents: Iterable[PlannedDocument]) -> dict[str, tuple[str, ...]]:
        """Give chunks their contexts; return by chunk id the chunks that precede each.

        A chunk that its document had before keeps its context, if all that it holds remains.
        """
        documents = [one for one in documents if not one.reason]
        kept = self._kept(documents)
        wanted: dict[tuple[str, bytes], Passage] = {}
        others: list[Passage] = []
        for document in documents:
            for chunk, vectors in zip(document.chunks, document.vectors, strict=True):
                passage = self._passage(chunk, vectors)
                if (document.source, chunk.token_ids) in kept:
                    others.append(passage)
                else:
                    wanted.setdefault(self._place(chunk), passage)
        ours = {one.chunk_id for one in (*wanted.values(), *others)}
        near = self._near(wanted.values()) if wanted else ()
        others += [one for one in near if one.chunk_id not in ours]
        most = self._storage.config.context_tokens
        # Loading the tokenizer takes longer than finding out that nothing is new.
        between = separator_ids(self._encoders.tokenizer)
        chosen = choose([*wanted.values()], others, most, between)
        found = dict(zip(wanted, chosen, strict=True))
        after: dict[str, tuple[str, ...]] = {}
        for document in documents:
            for number, chunk in enumerate(document.chunks):
                contexts = kept.get((document.source, chunk.token_ids))
                if contexts is None:
                    ids, after[chunk.chunk_id] = found[self._place(chunk)]
                    contexts = (ids, ()) if ids else (ids,)
                document.chunks[number] = replace(chunk, contexts=contexts)
        return after

    # -- private -----------------------------------------------------------------------------

    def _encoded(
        self, documents: Sequence[PlannedDocument]
    ) -> tuple[dict[ChunkKey, str], dict[str, tuple[str, ...]]]:
        """Choose contexts and encode; return why some could not be, and what precedes each."""
        after = self.choose(documents)
        key_of, store = self._storage.config.key_of, self._storage.home
        missing = lacking(documents, key_of, store, by_context=True)
        return (self._encode(missing) if missing else {}), after

    def _without(self) -> Iterator[PlannedDocument]:
        """Yield the documents of the index that have chunks without a context, with these only."""
        for source, rows in self._storage.catalog.stored.rows(is_alone=True).items():
            found = PlannedDocument(source, "", {})
            for chunk, vectors in self._read(rows):
                found.chunks.append(chunk)
                found.vectors.append(vectors)
                found.num_tokens += len(chunk.token_ids)
            yield found

    def _kept(
        self, documents: Iterable[PlannedDocument]
    ) -> dict[tuple[str, tuple[int, ...]], tuple[tuple[int, ...], ...]]:
        """Return the contexts that remain, by source and token ids."""
        catalog = self._storage.catalog
        before: dict[tuple[str, tuple[int, ...]], tuple[tuple[int, ...], ...]] = {}
        remaining: set[tuple[int, ...]] = set()
        for one in documents:
            if one.is_known:
                for chunk in catalog.chunks(catalog.chunk_ids_of(one.source)):
                    before[one.source, chunk.token_ids] = chunk.contexts
                remaining.update(chunk.token_ids for chunk in one.chunks)
        gone = Heads(pack_ids(ids) for _, ids in before if ids not in remaining)
        return {
            place: contexts
            for place, contexts in before.items()
            if contexts[0] and not gone.are_in(pack_ids(contexts[0]))
        }

    def _near(self, wanted: Iterable[Passage]) -> Iterator[Passage]:
        """Yield chunks of the index that are near some passages, of other documents if it can."""
        rows_of = self._storage.catalog.stored.rows()
        for source in self._planned:
            rows_of.pop(source, None)
        here: dict[str, tuple[list[int], list[str]]] = {}
        for source, of_source in rows_of.items():
            numbers, sources = here.setdefault(self._folder(source), ([], []))
            numbers += of_source
            sources += [source] * len(of_source)
        admitted = {
            folder: (np.array(numbers, np.int64), np.array(sources, object))
            for folder, (numbers, sources) in here.items()
        }
        if not admitted:
            return
        vectors = self._storage.vectors.get()
        near: set[int] = set()
        for one in wanted:
            if one.folder in admitted:
                rows, owners = admitted[one.folder]
                others = rows[owners != one.source]
                some = others if len(others) else rows
                near.update(row for row, _ in vectors.search(one.vector, _NEAREST, some))
        for chunk, found in self._read(sorted(near)):
            yield self._passage(chunk, found)

    def _read(self, rows: Sequence[int]) -> Iterator[tuple[Chunk, NDArray[np.float32]]]:
        """Yield the sound ones of some chunks of the index, with their vectors."""
        for one in self._storage.catalog.stored.chunks(rows):
            if one.chunk is not None and one.embedding is not None:
                if one.packed.contexts == FORGOTTEN:
                    self._forgetful.add(one.chunk.chunk_id)
                vectors = np.frombuffer(one.embedding, "<f4")
                yield one.chunk, vectors.reshape(-1, self._storage.config.embedding_dim)

    def _passage(self, chunk: Chunk, vectors: NDArray[np.float32]) -> Passage:
        middle = vectors.mean(0)
        return Passage(
            chunk.chunk_id,
            chunk.source,
            np.array(chunk.token_ids, np.int32),
            middle / max(float(np.linalg.norm(middle)), 1e-12),
            self._folder(chunk.source),
        )

    def _place(self, chunk: Chunk) -> tuple[str, bytes]:
        """Return what chunks have in common that are encoded after the same text."""
        return self._folder(chunk.source), pack_ids(chunk.token_ids)

    def _folder(self, source: str) -> str:
        is_apart = self._storage.config.trust == FOLDER
        return source.rpartition("/")[0] if is_apart else ""
