"""Hiding control strings of messages from a chat template."""

from __future__ import annotations

import re
from typing import Any

from kvrag.errors import ParameterError
from kvrag.models.control import ControlTokens
from kvrag.models.tokens import Span

# A hidden string's mark, with its number.
_MARK = re.compile("\ue010([0-9]+)\ue011")
_MARK_EDGE = re.compile("[\ue010\ue011]")


class HiddenStrings:
    """Control strings of messages while a chat template renders them.

    Marks that no template looks for replace them, so that a message's text neither steers the
    template nor is mistaken for the template's own text.
    """

    def __init__(self, control: ControlTokens) -> None:
        self._control = control
        self._strings: list[str] = []

    def hide(self, value: Any, *, is_answer: bool = False) -> Any:
        """Return a content with marks in place of control strings, also in lists and mappings.

        Parameters
        ----------
        value
            A message's content.
        is_answer
            Whether the content is an answer of the model.
        """
        if isinstance(value, str):
            pieces, end = [], 0
            spans = self._control.hidden_spans(value, is_answer=is_answer)
            # Text that looks like a mark is hidden too: any other mark left over is a damaged one.
            spans += [match.span() for match in _MARK_EDGE.finditer(value)]
            for start, stop in sorted(spans):
                pieces += [value[end:start], f"\ue010{len(self._strings)}\ue011"]
                self._strings.append(value[start:stop])
                end = stop
            return "".join([*pieces, value[end:]])
        if isinstance(value, dict):
            return {
                self._hide_key(key): self.hide(one, is_answer=is_answer)
                for key, one in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.hide(one, is_answer=is_answer) for one in value]
        return value

    def _hide_key(self, key: Any) -> Any:
        # A template looks keys up by name, so only one that no template looks for may change: the
        # name of an argument, which a model chose.
        return self.hide(key) if isinstance(key, str) and self._control.find(key) else key

    def restore(self, rendered: str) -> tuple[str, tuple[Span, ...]]:
        """Return the rendered text with the strings restored, and their spans.

        Raises
        ------
        ParameterError
            When the template split a mark.
        """
        pieces: list[str] = []
        spans: list[Span] = []
        end = length = 0
        for match in _MARK.finditer(rendered):
            string = self._strings[int(match[1])]
            pieces += [rendered[end : match.start()], string]
            length += match.start() - end
            spans.append((length, length + len(string)))
            length += len(string)
            end = match.end()
        pieces.append(rendered[end:])
        if any(_MARK_EDGE.search(piece) for piece in pieces[::2]):
            raise ParameterError(
                "the chat template takes messages apart in the middle of a control string: remove "
                "such strings from the messages, or use another template"
            )
        return "".join(pieces), tuple(spans)
