"""Random schemas and prompts of them, as markup."""

from __future__ import annotations

from hypothesis import strategies as st

WORDS = st.sampled_from(["the clock", "of Varn", "Ines keeps", "a ledger.", "x", "été", "a < b"])


def _text(draw: st.DrawFn) -> str:
    words = " ".join(draw(st.lists(WORDS, min_size=1, max_size=4)))
    return words.replace("<", "&lt;")


def _nodes(draw: st.DrawFn, depth: int, names: list[str]) -> str:
    parts: list[str] = []
    for _ in range(draw(st.integers(0, 4))):
        kinds = ["text", "parameter"] + ["module", "union"] * (depth < 3)
        kind = draw(st.sampled_from(kinds))
        number = len(names)
        names.append("")
        if kind == "text":
            parts.append(_text(draw))
        elif kind == "parameter":
            scaffold = " scaffold='abc'" * draw(st.booleans())
            length = draw(st.integers(4, 9))
            parts.append(f"<parameter name='p{number}' length='{length}'{scaffold}/>")
        elif kind == "module":
            parts.append(f"<module name='m{number}'>{_nodes(draw, depth + 1, names)}</module>")
        else:
            members = "".join(
                f"<module name='u{number}-{one}'>{_nodes(draw, depth + 1, names)}</module>"
                for one in range(draw(st.integers(1, 3)))
            )
            parts.append(f"<union>{members}</union>")
        parts.append(draw(st.sampled_from(["", "\n", " "])))
    return "".join(parts)


@st.composite
def schemas(draw: st.DrawFn, *, turns: bool = False) -> str:
    """Return the markup of a schema with nested unions, parameters and perhaps turns."""
    names: list[str] = []
    body = _nodes(draw, 0, names)
    if turns:
        body = f"<system>Be kind.</system><user>{body}</user>"
    return f"<schema name='random'>{body}</schema>"
