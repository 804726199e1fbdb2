"""Choosing a prompt's links: those that the user names, or those in the model's folder."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from kvrag.arguments import shown
from kvrag.errors import LinksError, ParameterError
from kvrag.fusion.layout import Layout
from kvrag.fusion.linked_rows import insert_links
from kvrag.fusion.links import LinkTokens, find_links
from kvrag.models.kv_model import KVModel

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
