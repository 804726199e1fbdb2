"""Prompts as tensors: documents to encode alone, and the rows that are computed over them.

The rows are those of question time: the engine's code finds and lays out documents, and each is
encoded after the shared prefix. Questions about the same documents share a row of the batch: after
the common beginning of all prompts come their tails and answers. None sees another, and each has
the positions that it would have alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from kvrag.chunk import Chunk
from kvrag.fusion.layout import LINK, Layout, lay_out
from kvrag.fusion.linked_rows import insert_links
from kvrag.fusion.links import LinksHeader
from kvrag.fusion.segments import ChunkMatcher
from kvrag.ingest.contexts import filler_ids
from kvrag.models.kv_model import KVModel
from kvrag.models.tokens import encode
from kvrag_train.batches import IGNORED
from kvrag_train.links.data import LinkItem

_PADDING = -1
NOBODY = -2
"""Segment of padding rows of stored KV: no query belongs to it."""


@dataclass(frozen=True)
class LinkBatch:
    """B rows of questions over C documents; int64 throughout.

    Attributes
    ----------
    chunk_ids, chunk_positions
        ``[C, W]``: prefix, filler if any, and document, padded at the end, and their positions in
        the prompt (all right before the document).
    num_before
        For each document, how many rows precede it: the same tokens for the same number.
    stored
        ``[B, D]``: which of the C * W rows are the row's stored KV, in prompt order.
    stored_positions, stored_segments
        ``[B, D]``: their positions; 0, or `NOBODY` for padding.
    input_ids
        ``[B, Q]``: tokens of the computed rows; 0 for links.
    link_rows
        ``[B, Q]``: a link's row in the table, -1 elsewhere.
    positions, segments
        ``[B, Q]``: positions; 0 for tokens that all questions of the row share, otherwise the
        question's number, -1 for padding.
    targets, question_ids
        ``[B, Q]``: the next token if it belongs to an answer, otherwise `IGNORED`; the question's
        index in the batch, otherwise -1.
    types
        The type of each question.
    is_written
        ``[C]`` bool: which documents are encoded after text of a context.
    """

    chunk_ids: torch.Tensor
    chunk_positions: torch.Tensor
    num_before: tuple[int, ...]
    stored: torch.Tensor
    stored_positions: torch.Tensor
    stored_segments: torch.Tensor
    input_ids: torch.Tensor
    link_rows: torch.Tensor
    positions: torch.Tensor
    segments: torch.Tensor
    targets: torch.Tensor
    question_ids: torch.Tensor
    types: tuple[str, ...]
    is_written: torch.Tensor

    def to(self, device: torch.device) -> LinkBatch:
        """Return the batch on a device."""
        moved: dict[str, Any] = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in vars(self).items()
        }
        return LinkBatch(**moved)


@dataclass(frozen=True)
class _Asked:
    """A tokenised item: the common part of its prompts, laid out, and the tails.

    `leader` is the id of the chunk that directly follows the shared prefix, if one does.
    """

    layout: Layout
    leader: str | None
    chunks: Mapping[str, Chunk]
    tails: tuple[tuple[int, ...], ...]
    answers: tuple[tuple[int, ...], ...]


class Packer:
    """Makes batches of items.

    Parameters
    ----------
    model
        Provides the tokenizer and the shared prefix.
    header
        The links after documents.
    num_filler
        Tokens of kvrag's filler before each document that does not stand first.
    similar
        Or, for each document's text, the tokens before it.
    """

    def __init__(
        self,
        model: KVModel,
        header: LinksHeader,
        num_filler: int = 0,
        similar: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self._similar = similar or {}
        self._tokenizer = model.tokenizer
        self._prefix = model.default_prefix_ids()
        self._filler: tuple[int, ...] = ()
        if num_filler:
            self._filler = filler_ids(model.tokenizer)[-num_filler:]
        self._header = header

    def pack(
        self,
        items: Sequence[LinkItem],
        *,
        linked: bool,
        answers: Sequence[Sequence[int]] | None = None,
    ) -> LinkBatch:
        """Return items as a batch.

        Parameters
        ----------
        items
            At least one.
        linked
            Documents are encoded alone, with links after them; False computes their rows in the
            prompt, without links: plain prompts.
        answers
            Answer tokens for all questions, ends included; None: the items' own.
        """
        given = None if answers is None else iter(answers)
        asked = [self._tokenised(item, linked) for item in items]
        rows = [_Row() for _ in items]
        chunks: list[tuple[list[int], int]] = []
        num_before: list[int] = []
        number = 0
        for row, item in zip(rows, asked, strict=True):
            first_chunk = len(chunks)
            for span in item.layout.spans:
                chunk = item.chunks[span.chunk_id]
                before = self._prefix
                if span.chunk_id != item.leader:
                    before += self._similar.get(chunk.text, self._filler)
                # Relative positions count: the first may be negative.
                start = span.prompt_start - span.chunk_start - len(before)
                row.put_stored(
                    len(chunks), len(before) + span.chunk_start, span.prompt_start, span.length
                )
                chunks.append(([*before, *chunk.token_ids], start))
                num_before.append(len(before))
            assert len(chunks) - first_chunk == len(item.layout.spans)
            row.put_shared(item.layout)
            for tail, own in zip(item.tails, item.answers, strict=True):
                answer = own if given is None else next(given)
                row.put_question(tail, answer, len(item.layout.token_ids), number)
                number += 1
        if linked and not chunks:
            # Nothing was found, so no query sees it. But processes that share a model must all
            # run the same layers, whatever their rows are.
            chunks.append(([*self._prefix, 0], 0))
            num_before.append(len(self._prefix))
        width = max((len(tokens) for tokens, _ in chunks), default=0)
        num_stored = max(*(len(row.stored) for row in rows), int(linked))
        positions = [list(range(start, start + width)) for _, start in chunks]
        return LinkBatch(
            chunk_ids=_padded([tokens for tokens, _ in chunks], width, 0),
            chunk_positions=_padded(positions, width, 0),
            num_before=tuple(num_before),
            stored=_padded(
                [[c * width + at for c, at in row.stored] for row in rows], num_stored, 0
            ),
            stored_positions=_padded([row.stored_positions for row in rows], num_stored, 0),
            stored_segments=_padded([[0] * len(row.stored) for row in rows], num_stored, NOBODY),
            input_ids=_padded([row.input_ids for row in rows], None, 0),
            link_rows=_padded([row.link_rows for row in rows], None, -1),
            positions=_padded([row.positions for row in rows], None, 0),
            segments=_padded([row.segments for row in rows], None, _PADDING),
            targets=_padded([row.targets for row in rows], None, IGNORED),
            question_ids=_padded([row.question_ids for row in rows], None, -1),
            types=tuple(kind for item in items for kind in item.types),
            is_written=torch.tensor(num_before) > len(self._prefix),
        )

    def _tokenised(self, item: LinkItem, linked: bool) -> _Asked:
        tokenizer = self._tokenizer
        prompts = [tuple(prompt.token_ids(tokenizer)) for prompt in item.prompts]
        answers: list[list[int]] = list(
            tokenizer(list(item.answers), add_special_tokens=False)["input_ids"]
        )
        chunks = {f"{i}": _chunk(tokenizer, f"{i}", text) for i, text in enumerate(item.texts)}
        matcher = ChunkMatcher()
        for chunk in chunks.values():
            matcher.add(chunk.chunk_id, chunk.text)
        first = item.prompts[0]
        (tokens,) = encode(tokenizer, [first.text], first.add_special_tokens)
        matches = matcher.find(first.text) if linked else ()
        layout = lay_out(tokens, matches, chunks, self._prefix)
        # A prompt's last token is not shared: the tokens after it are learned there.
        shared = min(_common_length(prompts), *(len(prompt) - 1 for prompt in prompts))
        # A question that quotes a document is computed, because it is in one prompt only.
        spans = tuple(span for span in layout.spans if span.prompt_end <= shared)
        layout = Layout(layout.token_ids[:shared], spans, layout.prefix_length, layout.has_prefix)
        # As in an index, before the first link is inserted there.
        leader = next((span.chunk_id for span in spans if layout.is_exact(span)), None)
        end = int(tokenizer.eos_token_id)
        return _Asked(
            insert_links(layout, self._header),
            leader,
            chunks,
            tuple(prompt[shared:] for prompt in prompts),
            tuple((*answer, end) for answer in answers),
        )


class _Row:
    """One row of a batch while it is filled."""

    def __init__(self) -> None:
        self.stored: list[tuple[int, int]] = []  # document of the batch, row of it
        self.stored_positions: list[int] = []
        self.input_ids: list[int] = []
        self.link_rows: list[int] = []
        self.positions: list[int] = []
        self.segments: list[int] = []
        self.targets: list[int] = []
        self.question_ids: list[int] = []
        self._num_segments = 0

    def put_stored(self, chunk: int, first: int, position: int, length: int) -> None:
        self.stored += [(chunk, first + i) for i in range(length)]
        self.stored_positions += range(position, position + length)

    def put_shared(self, layout: Layout) -> None:
        stored = set(self.stored_positions)
        rows = {link.position: link.row for link in layout.links}
        for position, token in enumerate(layout.token_ids):
            if position not in stored:
                self._put([0 if token == LINK else token], position, 0, rows.get(position, -1))

    def put_question(
        self, asked: Sequence[int], answer: Sequence[int], start: int, number: int
    ) -> None:
        self._num_segments += 1
        self._put([*asked, *answer[:-1]], start, self._num_segments, -1)
        self.targets[-len(answer) :] = answer
        self.question_ids[-len(answer) :] = [number] * len(answer)

    def _put(self, ids: Sequence[int], start: int, segment: int, link_row: int) -> None:
        count = len(ids)
        self.input_ids += ids
        self.link_rows += [link_row] * count
        self.positions += range(start, start + count)
        self.segments += [segment] * count
        self.targets += [IGNORED] * count
        self.question_ids += [-1] * count


def _chunk(tokenizer: PreTrainedTokenizerBase, chunk_id: str, text: str) -> Chunk:
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return Chunk(
        chunk_id=chunk_id,
        text=text,
        token_ids=tuple(encoding["input_ids"]),
        token_starts=tuple(start for start, _ in encoding["offset_mapping"]),
        source="training",
        ordinal=0,
    )


def _common_length(sequences: Sequence[Sequence[int]]) -> int:
    shortest = min(map(len, sequences))
    for index in range(shortest):
        if any(sequence[index] != sequences[0][index] for sequence in sequences):
            return index
    return shortest


def _padded(lists: Sequence[Sequence[int]], width: int | None, filler: int) -> torch.Tensor:
    if width is None:
        width = max(map(len, lists))
    rows = [[*row, *([filler] * (width - len(row)))] for row in lists]
    return torch.tensor(rows, dtype=torch.long).view(len(lists), width)
