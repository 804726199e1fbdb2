"""Prompt markup with variables. Their values become text, never markup."""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter
from xml.sax.saxutils import escape

from kvrag.arguments import shown
from kvrag.errors import ParameterError

_QUOTES = {'"': "&quot;", "'": "&apos;", "\n": "&#10;", "\r": "&#13;", "\t": "&#9;"}


def variables(markup: str) -> list[str]:
    """Return the names in braces, in order, each once.

    Raises
    ------
    ParameterError
        If braces are unbalanced or hold more than a name. ``{{`` and ``}}`` mean single braces.
    """
    try:
        parts = list(Formatter().parse(markup))
    except ValueError as error:
        raise ParameterError(f"prompt template: {error}; write {{{{ and }}}} for braces") from error
    names = []
    for _, name, format_spec, conversion in parts:
        if name is None:
            continue
        if not name.isidentifier() or format_spec or conversion:
            raise ParameterError(
                f"prompt template: {{{name}}} is not a variable; write {{{{ and }}}} for braces"
            )
        names.append(name)
    return list(dict.fromkeys(names))


def fill(markup: str, values: Mapping[str, object]) -> str:
    """Return the markup with the variables' values, as text.

    Raises
    ------
    ParameterError
        If a value is missing, or holds a character that XML does not allow.
    """
    texts = {}
    for name in variables(markup):
        if name not in values:
            raise ParameterError(f"prompt template: no value for {shown(name)}")
        text = str(values[name])
        lost = next((c for c in text if c < " " and c not in "\n\r\t"), None)
        if lost is not None:
            raise ParameterError(
                f"prompt template: {shown(name)} holds the control character {lost!r}; remove it"
            )
        texts[name] = escape(text, _QUOTES)
    return Formatter().vformat(markup, (), texts)
