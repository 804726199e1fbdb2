"""Random schemas and prompts of them, as markup."""

from hypothesis import strategies as st

WORDS = st.sampled_from(["the clock", "of Varn", "Ines keeps", "a ledger.", "x", "été", "a < b"])


def _text(draw: st.DrawFn) -> str:
    words = " ".join(draw(st.lists(WORDS, min_size=1, max_size=4)))
    return words.replace("<", "&lt;")


def _nodes(draw: st.DrawFn, depth: int, names: list[str], turns: bool) -> str:
    """Return the contents of an element; `turns` says that turns may stand in it."""
    parts: list[str] = []
    for _ in range(draw(st.integers(0, 4))):
        kinds = ["text", "parameter"] + ["module", "union", "anonymous"] * (depth < 3)
        kind = draw(st.sampled_from(kinds + ["turn"] * (2 * turns)))
        number = len(names)
        names.append("")
        cache = draw(st.sampled_from([""] * 4 + [" cache='false'", " cache='true'"]))
        if kind == "text":
            parts.append(_text(draw))
        elif kind == "parameter":
            scaffold = " scaffold='abc'" * draw(st.booleans())
            length = draw(st.integers(4, 9))
            parts.append(f"<parameter name='p{number}' length='{length}'{scaffold}/>")
        elif kind == "turn":
            role = draw(st.sampled_from(["system", "user", "assistant"]))
            parts.append(f"<{role}>{_nodes(draw, depth + 1, names, False)}</{role}>")
        elif kind == "module":
            inside = _nodes(draw, depth + 1, names, turns)
            parts.append(f"<module name='m{number}'{cache}>{inside}</module>")
        elif kind == "anonymous":
            parts.append(f"<module{cache}>{_nodes(draw, depth + 1, names, turns)}</module>")
        else:
            members = "".join(
                f"<module name='u{number}-{one}'{cache}>{_nodes(draw, depth + 1, names, turns)}"
                "</module>"
                for one in range(draw(st.integers(1, 3)))
            )
            parts.append(f"<union>{members}</union>")
        parts.append(draw(st.sampled_from(["", "\n", " "])))
    return "".join(parts)


@st.composite
def schemas(draw: st.DrawFn, *, turns: bool = False) -> str:
    """Return the markup of a schema with nested unions, parameters and perhaps turns anywhere."""
    body = _nodes(draw, 0, [], turns)
    if turns and draw(st.booleans()):
        body = f"<system>Be kind.</system>{body}"
    return f"<schema name='random'>{body}</schema>"
