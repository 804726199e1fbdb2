"""Finding calls of tools in answers."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from kvrag.engine.answer import AnswerDelta
from kvrag.models.tools import ToolFormat, new_call_id

_PYTHON_TAG = "<|python_tag|>"
# The name in Mistral's later formats, and where its arguments begin.
_NAMED = re.compile(r"\s*([\w.\-]+)\s*(?:\[ARGS\]\s*)?(?=\{)")
_JSON_MARK = re.compile(r"[\s;]*(?:<\|python_tag\|>)?\s*(?=\{)")
_decoder = json.JSONDecoder()


@dataclass(frozen=True)
class ToolCall:
    """A call.

    Attributes
    ----------
    id
        Names the call; its result refers to it.
    name
        The tool's name.
    arguments
        The arguments, a mapping.
    """

    id: str
    name: str
    arguments: dict[str, Any]

    @property
    def json(self) -> str:
        """The arguments as JSON."""
        return json.dumps(self.arguments, ensure_ascii=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the call as in a message of OpenAI's API."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.json},
        }


@dataclass(frozen=True)
class Piece:
    """What a piece of an answer adds: text for the reader, and calls that are complete."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()

    def __add__(self, other: Piece) -> Piece:
        return Piece(self.text + other.text, self.calls + other.calls)


class ToolCallParser:
    """Tells an answer's calls from its text, piece by piece.

    A call is given out as soon as it is complete. What begins like a call but is none is text.

    Parameters
    ----------
    form
        How the model writes calls; None if there are no tools, and all is text.
    """

    def __init__(self, form: ToolFormat | None) -> None:
        self._form = form
        self._whole = self._rest = ""
        self._num_calls = 0
        self._has_said = False
        self._has_called = False  # just now

    def push(self, text: str) -> Piece:
        """Add a piece of the answer."""
        if self._form is None:
            return Piece(text)
        self._whole += text
        self._rest += text
        return self._take(self._form, is_last=False)

    def finish(self) -> Piece:
        """Return what was held back; call this after the last piece."""
        return Piece() if self._form is None else self._take(self._form, is_last=True)

    def read(self, delta: AnswerDelta) -> Piece:
        """Add a piece of an answer; with the last one comes what was held back."""
        said = self.push(delta.text)
        return said if delta.answer is None else said + self.finish()

    def whole(self, text: str) -> Piece:
        """Return a whole answer's text and calls."""
        return self.push(text) + self.finish()

    def _take(self, form: ToolFormat, *, is_last: bool) -> Piece:
        said, calls = "", []
        while mark := self._mark(form.marker):
            said += self._say(self._rest[: mark.start()])
            self._rest = self._rest[mark.start() :]
            found = self._read(form, mark.end() - mark.start(), is_last)
            if found is None:
                break
            calls += [self._numbered(*one) for one in found[0]]
            self._rest = self._rest[found[1] :]
            self._has_called = True
        if mark is None or is_last:
            settled = len(self._rest) if is_last else self._settled(form.marker)
            said += self._say(self._rest[:settled])
            self._rest = self._rest[settled:]
        return Piece(said, tuple(calls))

    def _say(self, text: str) -> str:
        """Return a piece of text; the white space after a call is the format's."""
        if self._has_called:
            text = text.lstrip()
        if text:
            self._has_called = False
        self._has_said = self._has_said or bool(text.strip("; \n"))
        return text

    def _mark(self, marker: str) -> re.Match[str] | None:
        """Return where the next call begins."""
        if marker:
            return re.search(rf"\s*{re.escape(marker)}\s*", self._rest)
        # The whole answer is a call, or several with semicolons between them.
        return None if self._has_said else _JSON_MARK.match(self._rest)

    def _settled(self, marker: str) -> int:
        """Return how many characters are certainly text, though no call has begun."""
        rest = self._rest
        if not marker:
            is_open = not self._has_said and _PYTHON_TAG.startswith(rest.strip("; \n"))
            return 0 if is_open else len(rest)
        most = min(len(marker) - 1, len(rest))
        held = next((n for n in range(most, 0, -1) if rest.endswith(marker[:n])), 0)
        return len(rest[: len(rest) - held].rstrip())

    def _read(
        self, form: ToolFormat, begin: int, is_last: bool
    ) -> tuple[list[tuple[str, Any]], int] | None:
        """Return the calls that begin there and where they end; None if they are not complete."""
        name = _NAMED.match(self._rest, begin) if form.separator else None
        try:
            found, end = _decoder.raw_decode(self._rest, name.end() if name else begin)
        except (ValueError, RecursionError):
            return None
        listed = found if isinstance(found, list) else [found]
        calls = [(name[1], found)] if name else [_named(one) for one in listed]
        if not calls or not all(isinstance(n, str) and isinstance(a, dict) for n, a in calls):
            return None
        close = "" if form.is_list else form.end.strip()
        tail = re.compile(rf"\s*{re.escape(close)}\s*").match(self._rest, end)
        if tail is None and not is_last:
            return None
        return calls, tail.end() if tail else end

    def _numbered(self, name: str, given: dict[str, Any]) -> ToolCall:
        self._num_calls += 1
        return ToolCall(new_call_id(f"{self._num_calls} {self._whole}"), name, given)


def _named(call: Any) -> tuple[Any, Any]:
    if not isinstance(call, dict):
        return None, None
    return call.get("name"), call.get("arguments", call.get("parameters"))
