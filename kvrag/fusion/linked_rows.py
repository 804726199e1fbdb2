"""The link tokens that an engine takes, and their rows in a prompt: places and inputs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch

from kvrag.arguments import shown
from kvrag.errors import LinksError, ParameterError
from kvrag.fusion.layout import LINK, Layout, LinkRow, ReusedSpan
from kvrag.fusion.links import LinksHeader, LinkTokens, find_links
from kvrag.models.adapter import RowAdapter
from kvrag.models.known_text import ids_of
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
        self._token_ids = torch.from_numpy(ids_of(layout.token_ids)).to(device)
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


logger = logging.getLogger("kvrag")

LINKS_OFF = "off"


class ChosenLinks:
    """The links of one model: given, found in its folder, or none.

    Given links that do not fit raise an error. Nobody asked for links that were only found in the
    folder: if those are damaged or do not fit, prompts go without, one warning says so, and every
    report counts it.

    Parameters
    ----------
    given
        LinkTokens, a file of them, ``"off"``, or None for those in the model's folder.
    folder
        Returns the model's folder without loading the weights, or None if it has none.
    model
        Returns the model.

    Raises
    ------
    ParameterError
        If `given` is something else.
    LinksError
        If the file is missing or damaged.
    """

    def __init__(
        self,
        given: LinkTokens | str | Path | None,
        folder: Callable[[], Path | None],
        model: Callable[[], KVModel],
    ) -> None:
        if isinstance(given, str | Path):
            given = LINKS_OFF if given == LINKS_OFF else LinkTokens.load(given)
        elif given is not None and not isinstance(given, LinkTokens):
            raise ParameterError(
                f"links {shown(given)}: expected a file that 'kvrag train links' wrote, or "
                f"{LINKS_OFF!r}; None uses those in the model's folder"
            )
        self._given = given
        self._folder = folder
        self._model = model
        self._is_left_out = False

    @cached_property
    def _loaded(self) -> LinkTokens | None:
        if self._given is not None:
            return self._given if isinstance(self._given, LinkTokens) else None
        folder = self._folder()
        if folder is None:
            return None
        try:
            return find_links(folder)
        except LinksError as error:
            self._leave_out(error)
            return None

    @cached_property
    def digest(self) -> str:
        """Digest of the links, or "" without any; loads no weights."""
        return "" if self._loaded is None else self._loaded.digest

    @cached_property
    def on_model(self) -> LinkTokens | None:
        """The links on the model's device, or None.

        Raises LinksError if given links belong to another model.
        """
        if self._loaded is None:
            return None
        try:
            return self._loaded.on(self._model())
        except LinksError as error:
            if self._given is not None:
                raise
            self._leave_out(error)
            return None

    def insert(self, layout: Layout, max_tokens: int) -> Layout:
        """Return the layout with links, or unchanged if there are none or no room for them.

        Raises as `on_model` does.

        Parameters
        ----------
        layout
            The prompt.
        max_tokens
            Maximum number of tokens in the answer; links leave room for them.
        """
        links = self.on_model
        if links is not None:
            limit = self._model().max_positions
            answer = min(max_tokens, limit - len(layout.token_ids))
            linked = insert_links(layout, links.header)
            if len(linked.token_ids) + answer <= limit:
                return linked
        elif not self._is_left_out:
            return layout
        return replace(layout, num_unlinked=len(layout.spans))

    def _leave_out(self, error: LinksError) -> None:
        self._is_left_out = True
        logger.warning("the links in the model's folder are not used: %s", error)
