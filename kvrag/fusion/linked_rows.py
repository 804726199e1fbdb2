"""The rows of link tokens in a prompt: their places in the layout, and their inputs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from kvrag.fusion.layout import LINK, Layout, LinkRow, ReusedSpan
from kvrag.fusion.links import LinksHeader, LinkTokens
from kvrag.models.adapter import RowAdapter
from kvrag.models.kv_model import KVModel


def insert_links(layout: Layout, header: LinksHeader) -> Layout:
    """Insert link rows after every reused span, one row before all spans and one after them.

    Everything after an inserted row shifts, so positions are those of the longer sequence. If
    there are no spans or K = 0, the layout is returned unchanged. Spans beyond the first M get no
    links and are counted. Several runs of one chunk, one after the other, count as one span.
    """
    if not layout.spans or not header.num_links or layout.links:
        return layout
    token_ids: list[int] = []
    links: list[LinkRow] = []
    spans: list[ReusedSpan] = []

    def put(row: int) -> None:
        links.append(LinkRow(len(token_ids), row))
        token_ids.append(LINK)

    copied = layout.spans[0].prompt_start
    token_ids += layout.token_ids[:copied]
    put(header.start_row)
    number = 0
    for span, following in zip(layout.spans, [*layout.spans[1:], None], strict=True):
        token_ids += layout.token_ids[copied : span.prompt_start]
        spans.append(replace(span, prompt_start=len(token_ids)))
        token_ids += layout.token_ids[span.prompt_start : span.prompt_end]
        copied = span.prompt_end
        if following is not None and _goes_on(span, following):
            continue
        if number < header.max_documents:
            for row in range(number * header.num_links, (number + 1) * header.num_links):
                put(row)
        number += 1
    put(header.end_row)
    token_ids += layout.token_ids[copied:]
    return replace(
        layout,
        token_ids=tuple(token_ids),
        spans=tuple(spans),
        links=tuple(links),
        num_unlinked=max(0, number - header.max_documents),
    )


def _goes_on(span: ReusedSpan, following: ReusedSpan) -> bool:
    """Return whether a span is followed by a later part of the same record."""
    return span.record_id == following.record_id and span.chunk_end <= following.chunk_start


class LinkedRows:
    """The rows of one prompt: the positions of its links, and each row's first-layer input.

    Parameters
    ----------
    model
        The model.
    layout
        The prompt, with or without inserted links.
    links
        The result of `LinkTokens.on` for the model; required if the layout has links.

    Attributes
    ----------
    links
        The given links, or None if the layout has none.
    """

    def __init__(self, model: KVModel, layout: Layout, links: LinkTokens | None) -> None:
        assert links is not None or not layout.links, "the layout has links, but none are given"
        self._model = model
        self.links = links if layout.links else None
        device = model.device
        # By numpy: PyTorch takes seven times as long for a tuple.
        self._token_ids = torch.from_numpy(np.array(layout.token_ids, np.int64)).to(device)
        self._row_positions = (
            torch.arange(len(layout.token_ids), device=device)
            if layout.positions is None
            else torch.tensor(layout.positions, device=device)
        )
        self._positions, self._table_rows = (
            torch.tensor([getattr(link, name) for link in layout.links], device=device).long()
            for name in ("position", "row")
        )

    @property
    def adapter(self) -> RowAdapter | None:
        """The adapter that acts on this prompt's fresh rows, or None."""
        return None if self.links is None else self.links.adapter

    def embed(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the first layer's inputs ``[n, hidden]`` for rows ``[n]``."""
        token_ids = self._token_ids[rows]
        if self.links is None:
            return self._model.embed(token_ids, self._row_positions[rows])
        hidden = self._model.embed(token_ids.clamp(min=0), self._row_positions[rows])
        if self.links.embeddings is not None:
            which = (token_ids == LINK).nonzero()[:, 0]
            place = torch.searchsorted(self._positions, rows[which])
            hidden[which] = self.links.embeddings[self._table_rows[place]]
        return hidden
