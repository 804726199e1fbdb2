"""Positions of schemas and prompts, against a reference that is as plain as can be."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrag.errors import PMLError
from kvrag.pml.engine import Passage, as_layout, place_prompt
from kvrag.pml.layout import SchemaLayout, lay_out_schema, placeholder_id
from kvrag.pml.parser import Import, parse_prompt, parse_schema
from kvrag.pml.schema import Module, Node, Parameter, Schema, Text, Turn, Union, flat
from tests.pml.schemas import schemas
from tests.support.models import make_tokenizer
from tests.support.properties import trials

TOKENIZER = make_tokenizer()
PREFIX = (0,)


def passages_of(layout: SchemaLayout) -> list[Passage]:
    return [Passage(PREFIX, stretch.token_ids) for stretch in layout.stretches]


def laid_out(markup: str) -> tuple[Schema, SchemaLayout]:
    schema = parse_schema(markup)
    return schema, lay_out_schema(schema, TOKENIZER, PREFIX)


def pieces_of(nodes: tuple[Node, ...]) -> Iterator[Node | None]:
    """Yield nodes as the template of the tests has them; None where text does not go on."""
    for node in nodes:
        if isinstance(node, Turn):
            yield Text(f"<|{node.role}|>\n", node.location)
            yield from pieces_of(node.children)
            yield Text("\n", node.location)
        elif isinstance(node, Module) and not node.name:
            yield from (None, *pieces_of(node.children), None)
        else:
            yield node


def reference(
    nodes: tuple[Node, ...], start: int, path: tuple[str, ...], found: dict[object, int]
) -> int:
    """Walk a schema: texts side by side count together, unions take the longest member."""
    text = ""
    for node in (*pieces_of(nodes), None):
        if isinstance(node, Text):
            text += node.text
            continue
        start += len(TOKENIZER(text, add_special_tokens=False)["input_ids"])
        text = ""
        if isinstance(node, Parameter):
            found[path, node.name] = start
            start += node.length
        elif isinstance(node, Module | Union):
            ends = []
            for one in node.members if isinstance(node, Union) else (node,):
                inner = (*path, one.name)
                found[inner] = start
                ends.append(reference(one.children, start, inner, found))
            start = max(ends)
    return start


def check_layout(schema: Schema, layout: SchemaLayout) -> None:
    expected: dict[object, int] = {(): len(PREFIX)}
    end = reference(schema.children, len(PREFIX), (), expected)
    found: dict[object, int] = {path: start for path, (start, _) in layout.extents.items()}
    for one in layout.stretches:
        found.update({(one.path, slot.name): one.start + slot.offset for slot in one.slots})
    assert found == expected
    assert (layout.prefix_ids, layout.num_positions) == (PREFIX, end)


@st.composite
def prompts(draw: st.DrawFn, schema: Schema) -> str:
    """Import some modules of a schema, fill some parameters."""

    def inside(path: tuple[str, ...], nodes: tuple[Node, ...]) -> str:
        parts = []
        for node in flat(nodes):
            if isinstance(node, Module) and draw(st.booleans()):
                parts.append(one(path, node))
            elif isinstance(node, Union) and draw(st.booleans()):
                parts.append(one(path, draw(st.sampled_from(node.members))))
        return "\n".join(parts)

    def one(path: tuple[str, ...], module: Module) -> str:
        inner = (*path, module.name)
        return f"<{module.name}{arguments(inner)}>{inside(inner, module.children)}</{module.name}>"

    def arguments(path: tuple[str, ...]) -> str:
        given = [name for name in schema.parameters(path) if draw(st.booleans())]
        return "".join(f" {name}='{draw(st.sampled_from(['', 'x', 'to']))}'" for name in given)

    body = inside((), schema.children)
    return f"<prompt schema='random'{arguments(())}>{body}\nQuestion?</prompt>"


@settings(deadline=None, max_examples=trials(1000, 15))
@given(st.data(), st.booleans())
def test_prompts_never_overlap_and_keep_their_positions(data: st.DataObject, turns: bool) -> None:
    check_prompt(data, turns)


def said(
    nodes: tuple[Node, ...], path: tuple[str, ...], imported: dict[tuple[str, ...], Import]
) -> Iterator[str | tuple[str, str]]:
    """Yield what a prompt holds of a schema: each turn with its role, and text beside them."""
    text = ""
    for node in nodes:
        found: list[str | tuple[str, str]] = []
        if isinstance(node, Text):
            text += node.text
            continue
        if isinstance(node, Parameter):
            given = imported[path].arguments.get(node.name)
            scaffold = TOKENIZER(node.scaffold, add_special_tokens=False)["input_ids"]
            rest = [placeholder_id(TOKENIZER)] * (node.length - len(scaffold))
            text += given if given is not None else node.scaffold + TOKENIZER.decode(rest)
            continue
        if isinstance(node, Turn):
            found = [(node.role, "".join(said(node.children, path, imported)))]  # type: ignore[arg-type]
        elif isinstance(node, Module) and not node.name:
            found = list(said(node.children, path, imported))
        else:
            for one in node.members if isinstance(node, Union) else (node,):
                inner = (*path, one.name)
                if inner in imported:
                    found += said(one.children, inner, imported)
        yield from [text] * bool(text)
        text = ""
        yield from found
    yield from [text] * bool(text)


def check_prompt(data: st.DataObject, turns: bool) -> None:
    schema, layout = laid_out(data.draw(schemas(turns=turns)))
    check_layout(schema, layout)
    prompt = parse_prompt(data.draw(prompts(schema)), schema)
    pieces = place_prompt(layout, prompt, TOKENIZER)
    for before, after in itertools.pairwise(pieces):
        assert before.end <= after.start
    imported = {one.path: one for one in prompt.body.all()}
    covered = {}
    for piece in pieces:
        if piece.stretch is not None:
            stretch = layout.stretches[piece.stretch]
            assert stretch.path in imported
            assert piece.start == stretch.start + piece.offset
            end = piece.offset + len(piece.token_ids)
            assert piece.token_ids == stretch.token_ids[piece.offset : end]
            covered[piece.stretch] = covered.get(piece.stretch, 0) + len(piece.token_ids)
    for number, stretch in enumerate(layout.stretches):
        if stretch.path in imported:
            given = imported[stretch.path].arguments
            replaced = sum(slot.length for slot in stretch.slots if slot.name in given)
            assert covered.get(number, 0) == len(stretch.token_ids) - replaced
    fused = as_layout(layout, pieces, passages_of(layout), is_bound=False)
    positions = [fused.position(row) for row in range(len(fused.token_ids))]
    assert positions == sorted(set(positions))
    # The last token is always computed.
    assert all(span.prompt_end < len(fused.token_ids) for span in fused.spans)
    # What is not to be cached is never reused.
    assert all(layout.stretches[int(span.chunk_id)].is_cached for span in fused.spans)
    reused = sum(span.length for span in fused.spans)
    cached = sum(num for number, num in covered.items() if layout.stretches[number].is_cached)
    assert cached - 1 <= reused <= cached
    # The text is what the chat template makes of the turns that are there.
    expected = "<bos>"
    for part in said(schema.children, (), imported):
        if isinstance(part, str):
            expected += part
        else:
            expected += TOKENIZER.apply_chat_template(
                [{"role": part[0], "content": part[1]}], tokenize=False
            ).removeprefix("<bos>")
    if schema.has_turns:
        expected += "<|user|>\nQuestion?\n<|assistant|>\n"
    else:
        expected += "\nQuestion?" if prompt.ending.startswith("\n") else prompt.ending
    assert TOKENIZER.decode(fused.token_ids) == expected


def test_accents_and_line_ends_are_one_text_wherever_they_come_from(tmp_path: Path) -> None:
    said = {}
    for name, cafe, end in (("plain", "caf\u00e9", "\n"), ("other", "cafe\u0301", "&#13;&#10;")):
        folder = tmp_path / name
        folder.mkdir()
        file = f"{cafe}{end}of a file".replace("&#13;&#10;", "\r\n")
        (folder / "file.txt").write_bytes(file.encode())
        (folder / "schema.xml").write_text(
            f"<schema name='s'>In a {cafe}{end}<module name='m'>a {cafe},{end}or <param name='p'"
            f" length='9' scaffold='{cafe}'/></module><module name='f' src='file.txt'/></schema>"
        )
        schema = parse_schema(folder / "schema.xml")
        layout = lay_out_schema(schema, TOKENIZER, PREFIX)
        markup = f"<prompt schema='s'><m p='{cafe}'/><f/>Which {cafe}{end}was it?</prompt>"
        pieces = place_prompt(layout, parse_prompt(markup, schema), TOKENIZER)
        said[name] = [one.token_ids for one in (*layout.stretches, *pieces)]
    assert said["other"] == said["plain"]


GAPPED = (
    "<schema name='s'>one <module name='a'>aaaaaa</module>"
    "<module name='b'>bbbbbb<module name='c'>cccccc</module>dd</module></schema>"
)


def test_text_goes_where_positions_are_free() -> None:
    schema, layout = laid_out(GAPPED)
    prompt = parse_prompt("<prompt schema='s'>xy<b>z</b>end</prompt>", schema)
    pieces = place_prompt(layout, prompt, TOKENIZER)
    own = [piece for piece in pieces if piece.stretch is None]
    assert [TOKENIZER.decode(piece.token_ids) for piece in own] == ["xy", "z", "end"]
    first, _ = layout.extents["a",]
    inner, _ = layout.extents["b", "c"]
    assert [own[0].start, own[1].start] == [first, inner]
    assert own[2].start == layout.num_positions


def test_an_argument_may_fill_its_room_and_the_last_token_is_computed() -> None:
    room = "<parameter name='p' length='9'/>"
    schema, layout = laid_out(f"<schema name='s'><module name='a'>{room} days</module></schema>")
    prompt = parse_prompt("<prompt schema='s'><a p='xxxxxxxxx'/></prompt>", schema)
    pieces = place_prompt(layout, prompt, TOKENIZER)
    assert len(pieces[0].token_ids) == 9
    fused = as_layout(layout, pieces, passages_of(layout), is_bound=False)
    assert fused.positions is None
    assert fused.spans[-1].prompt_end == len(fused.token_ids) - 1


WRONG_PROMPTS = [
    ("<schema name='s'/>", "is not a prompt"),
    ("<prompt/>", "names no schema"),
    ("<prompt schema='t'/>", "expected one of schema 's'"),
    ("<prompt schema='s'><d/></prompt>", "has no module 'd'; expected one of a, b"),
    ("<prompt schema='s'><c/></prompt>", "has no module 'c'"),
    ("<prompt schema='s'><a/>\n<a/></prompt>", "imported again"),
    ("<prompt schema='s'><a p='1'/></prompt>", "has no parameter 'p'"),
    ("<prompt schema='s' p='1'/>", "schema 's' has no parameter 'p'"),
    ("<prompt schema='s'><user>x</user></prompt>", "turns in a prompt of a schema without any"),
    (
        "<prompt schema='s'>a text far longer than what a left free<b/></prompt>",
        "positions are free",
    ),
]


@pytest.mark.parametrize(("markup", "words"), WRONG_PROMPTS)
def test_wrong_prompts_are_refused_with_their_place(markup: str, words: str) -> None:
    schema, layout = laid_out(GAPPED)
    with pytest.raises(PMLError, match=r"^<string>:\d+:\d+: ") as raised:
        place_prompt(layout, parse_prompt(markup, schema), TOKENIZER)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("schema", "prompt", "words"),
    [
        (
            "<union><module name='a'/><module name='b'/></union>",
            "\n<a/>\n <b/>",
            "<string>:3:2: 'a' and 'b' are members of one union",
        ),
        ("<parameter name='p' length='2'/>", None, "has 9 tokens, its parameter holds 2"),
        ("<parameter name='p' length='2' scaffold='xxxxxxxxx'/>", "", "its length is 2"),
        ("<user>hi</user>", "<user>x</user><a/>", "after a turn"),
        ("<user>hi</user><module name='a'/>", "<user><a/></user>", "in <user> of a prompt"),
    ],
)
def test_what_excludes_or_overflows_is_refused(schema: str, prompt: str | None, words: str) -> None:
    argument = " p='xxxxxxxxx'" if prompt is None else ""

    def place() -> None:
        parsed, layout = laid_out(f"<schema name='s'>{schema}</schema>")
        found = parse_prompt(f"<prompt schema='s'{argument}>{prompt or ''}</prompt>", parsed)
        place_prompt(layout, found, TOKENIZER)

    with pytest.raises(PMLError) as raised:
        place()
    assert words in str(raised.value)
