"""Which links a prompt gets: those that the user names, or those that lie beside the model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from kvrag.errors import LinksError, ParameterError
from kvrag.fusion.layout import Layout
from kvrag.fusion.links import LinkTokens, find_links, insert_links
from kvrag.models.kv_model import KVModel

logger = logging.getLogger("kvrag")

LINKS_OFF = "off"


class ChosenLinks:
    """The links of one model: given, found in its folder, or none.

    Given ones that do not fit are an error. Those found are nobody's wish: where they are damaged
    or do not fit they are left out, with one warning, and counted in every prompt.

    Parameters
    ----------
    given
        LinkTokens, a file of them, ``"off"``, or None for those of the model's folder.
    folder
        Returns the model's folder, without loading its weights, or None where it has none.
    model
        Returns the model.

    Raises
    ------
    ParameterError
        When `given` is something else.
    LinksError
        For a file that is absent or damaged.
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
                f"links {given!r}: expected a file that 'kvrag train links' wrote, or "
                f"{LINKS_OFF!r}; None takes those of the model's folder"
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
        """Digest of the links, "" without any; loads no weights."""
        return "" if self._loaded is None else self._loaded.digest

    @cached_property
    def on_model(self) -> LinkTokens | None:
        """The links where the model is, or None. Raises LinksError for given ones of another."""
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
        """Return the layout with links, or as it is where there are none or no room for them.

        Raises as `on_model` does.

        Parameters
        ----------
        max_tokens
            Of the answer, whose room links do not take.
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
        logger.warning("the links in the model's folder are left out: %s", error)
