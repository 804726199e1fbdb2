"""Schemas as they are parsed, and every way in which one can be wrong."""

import time
from pathlib import Path

import pytest

from kvrag.errors import ParameterError, PMLError
from kvrag.pml.parser import parse_schema
from kvrag.pml.schema import MAX_BYTES, MAX_DEPTH, Module, Parameter, Text, Turn, Union

SCHEMAS = Path(__file__).parent / "schemas"


def texts(nodes: tuple[object, ...]) -> list[str]:
    return [node.text for node in nodes if isinstance(node, Text)]


@pytest.mark.parametrize(
    ("name", "num_modules"),
    [
        ("code_generation_bookstore.xml", 5),
        ("parameterized_prompts.xml", 11),
        ("personalization-education.xml", 30),
        ("test_empty.xml", 0),
        ("test_schema_mbti_short.xml", 12),
    ],
)
def test_shipped_schemas_load(name: str, num_modules: int) -> None:
    assert len(parse_schema(SCHEMAS / name).modules) == num_modules


def test_code_outside_cdata_is_refused_with_the_hint() -> None:
    with pytest.raises(PMLError, match=r"game\.xml:\d+:\d+: .*CDATA") as raised:
        parse_schema(SCHEMAS / "code_generation_game.xml")
    lines = (SCHEMAS / "code_generation_game.xml").read_text().splitlines()
    assert "<" in lines[raised.value.line - 1]
    assert raised.value.column > 1


def test_everything_a_schema_may_hold(tmp_path: Path) -> None:
    (tmp_path / "book.py").write_text("\nclass Book:\r\n    title = '<&>'\n\n")
    (tmp_path / "s.xml").write_text(
        """<schema name="all">
          <system>Be kind.</system>
          Between.
          <module name="a">
              Two lines,
                one indented.
              <module name="b"> x <param name="p" len="3" scaffold="abc"/>, y</module>
          </module>
          <module name="book.py" src="book.py"/>
          <union scaffold="d"><module name="c"><![CDATA[ if a < b && c ]]></module>
            <module name="d"/></union>
          <scaffold modules="book.py a/b"/>
        </schema>"""
    )
    schema = parse_schema(tmp_path / "s.xml")
    turn, between, a, book, union = schema.children
    assert isinstance(turn, Turn)
    assert texts(turn.children) == ["Be kind."]
    assert isinstance(between, Text)
    assert between.text == "\nBetween.\n"
    assert isinstance(a, Module)
    assert texts(a.children) == ["Two lines,\n  one indented.\n"]
    b = a.children[1]
    assert isinstance(b, Module)
    assert [type(part) for part in b.children] == [Text, Parameter, Text]
    assert texts(b.children) == ["x ", ", y"]
    assert b.children[1] == schema.parameters(("a", "b"))["p"]
    assert (b.children[1].length, b.children[1].scaffold) == (3, "abc")
    assert isinstance(book, Module)
    assert texts(book.children) == ["class Book:\n    title = '<&>'"]
    assert isinstance(union, Union)
    assert texts(union.members[0].children) == ["if a < b && c"]
    assert schema.exclusions == {("c",): 0, ("d",): 0}
    assert [scaffold.paths for scaffold in schema.scaffolds] == [(("a", "b"), ("book.py",))]


def test_members_that_unions_name_make_a_scaffold() -> None:
    schema = parse_schema(SCHEMAS / "test_schema_mbti_short.xml")
    assert [one.paths for one in schema.scaffolds] == [(("EI",), ("ST",), ("TF",), ("JP",))]


WRONG = [
    *(
        (f"<schema name='x'>{markup}</schema>", line, words)
        for markup, line, words in (
            ("\n<module name='user'/>", 2, "is not a valid name"),
            ("\n<modul name='a'/>", 2, "<modul> is not known here"),
            ("<module name='a'/>\n<union><module name='a'/></union>", 2, "second module 'a'"),
            ("<user><module name='a'/></user>\n<module name='a'/>", 2, "second module 'a'"),
            ("\n<union/>", 2, "empty <union>"),
            ("\n<union>text</union>", 2, "text directly in <union>"),
            ("\n<union scaffold='b'><module name='a'/></union>", 2, "not a member of this union"),
            ("\n<param name='p'/>", 2, "0 lengths"),
            ("\n<param name='p' len='1' length='1'/>", 2, "2 lengths"),
            ("\n<param name='p' len='0'/>", 2, "length='0'"),
            ("\n<param name='p' len='99999999999'/>", 2, "length='99999999999'"),
            (f"\n<param name='p' len='{'0' * 5000}1'/>", 2, "a whole number"),
            ("<param name='p' len='1'/>\n<param name='p' len='1'/>", 2, "second parameter 'p'"),
            ("\n<scaffold modules='a'/>", 2, "no module 'a'"),
            ("<module name='a'/>\n<scaffold modules='a a'/>", 2, "a scaffold of 1 modules"),
            (
                "<union><module name='a'/><module name='b'/></union>\n<scaffold modules='a b'/>",
                2,
                "members of one union",
            ),
            ("\n<module name='a' src='b'/>", 2, "not a file"),
            ("\n<?php echo ?>", 2, "means nothing here"),
            ("\n<module name='a'>", 2, "mismatched tag"),
            ("\n&nbsp;", 2, "undefined entity"),
            ("\nif a < b", 2, "CDATA"),
            ("\ud800", 1, "surrogate"),
            (
                "<user>\n<module name='a'><assistant/></module></user>",
                2,
                "<assistant> inside <user> (line 1); one turn ends before the next begins",
            ),
            ("\n<module name='a' cache='no'/>", 2, "cache='no' of a module; expected 'false'"),
            ("\n<union><module>x</module></union>", 2, "a member of <union> has no name"),
            ("\n<union><union/></union>", 2, "put it into one, <module name=...><union ..."),
            ("\n<union cache='false'><module name='a'/></union>", 2, "attribute 'cache'"),
            ("\n<parameter name='p' length='2'>x</parameter>", 2, "default text as scaffold='...'"),
            ("\n<module name='a'><scaffold modules='b c'/></module>", 2, "it directly in <schema>"),
            ("\n<module name='a'><prompt/></module>", 2, "put the prompt into a separate file"),
            (
                "<module name='a'/><module name='b' cache='false'/>\n<scaffold modules='a b'/>",
                2,
                "a scaffold of 'b', which has cache='false'",
            ),
            (
                "\n<union scaffold='a'><module name='a' cache='false'/></union>",
                2,
                "scaffold='a' is a module with cache='false'",
            ),
        )
    ),
    ("<prompt schema='x'/>", 1, "is not a schema"),
    ("<schema/>", 1, "has no name"),
    ("<schema name='1a'/>", 1, "is not a valid name"),
    ("<schema name='a b'/>", 1, "is not a valid name"),
    ("<schema name='x\n'/>", 1, "is not a valid name"),
    ("<schema name='x' cache='false'/>", 1, "attribute 'cache'"),
    ("", 1, "holds one <schema>"),
]


@pytest.mark.parametrize(("markup", "line", "words"), WRONG)
def test_what_is_wrong_is_refused_with_its_place(markup: str, line: int, words: str) -> None:
    with pytest.raises(PMLError) as raised:
        parse_schema(markup)
    assert words in str(raised.value)
    assert str(raised.value).startswith(f"<string>:{line}:{raised.value.column}: ")
    assert raised.value.line == line


SOURCES = {
    "../secret": "leads out",
    "/etc/passwd": "not a relative path",
    "link": "leads out",
    "sub/../../secret": "leads out",
    "": "not a relative path",
    "a\\b": "not a relative path",
    "absent": "expected a file, found no file",
    "a/b/..": r"s\.xml:2:1: src='a/b/..': expected a file, found a folder",
    "circle": "cannot be found",
    "a" * 300: "cannot be found",
    "a/" * 3000: "cannot be found",
    "binary": "not UTF-8",
    "large": "more than 8 MiB",
}


@pytest.mark.parametrize("src", SOURCES)
def test_src_names_a_text_of_bounded_size_in_the_folder(tmp_path: Path, src: str) -> None:
    (tmp_path / "secret").write_text("secret")
    folder = tmp_path / "schema"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "circle").symlink_to("circle")
    (folder / "binary").write_bytes(b"\xff\xfe\x00")
    (folder / "large").write_bytes(b"x" * (MAX_BYTES + 1))
    path = folder / "s.xml"
    path.write_text(f"<schema name='x'>\n<module name='a' src='{src}'/></schema>")
    with pytest.raises(PMLError, match=SOURCES[src]) as raised:
        parse_schema(path)
    assert raised.value.line == 2
    path.write_text(f"<schema name='x'>\n<module name='a' src='{src}'>x</module></schema>")
    with pytest.raises(PMLError, match="has src and contents"):
        parse_schema(path)


def _declared(encoding: str, text: str = "a", written: str = "ascii") -> bytes:
    head = f"<?xml version='1.0' encoding='{encoding}'?>\n"
    return f"{head}<schema name='x'>{text}</schema>".encode(written)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        *(
            (_declared(name), r"s\.xml:1:\d+: the encoding .*save it as UTF-8")
            for name in ("shift_jis", "utf-7", "nowhere", "rot13", "punycode", "idna")
        ),
        # Signs in other encodings are signs.
        *((_declared(name, "\xe9 & tea", name), "CDATA") for name in ("utf-16", "iso-8859-1")),
        (b"<schema name='x'>\ncaf\xe9</schema>", r"s\.xml:2:\d: bytes that are not UTF-8 text"),
        (b"<schema name='x'>\na\0b</schema>", r"s\.xml:2:\d: bytes that are not UTF-8 text"),
        (
            b'<!DOCTYPE s [<!ENTITY e SYSTEM "file:///etc/passwd">]><schema name="x">&e;</schema>',
            "document type",
        ),
        (None, "cannot be read"),
    ],
)
def test_files_that_are_no_markup_are_said(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    path = tmp_path / "s.xml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PMLError, match=words):
        parse_schema(path)


def test_entities_are_refused_before_they_grow() -> None:
    laughs = "".join(f'<!ENTITY l{level} "{f"&l{level - 1};" * 10}">' for level in range(1, 10))
    markup = f'<!DOCTYPE s [<!ENTITY l0 "ha">{laughs}]>\n<schema name="x">&l9;</schema>'
    started = time.process_time()
    with pytest.raises(PMLError, match="document type"):
        parse_schema(markup)
    assert time.process_time() - started < 1


@pytest.mark.parametrize("byte", [b"\0", b"<", b"a", b"\xff", b"&"])
@pytest.mark.parametrize("size", [10_000_000, MAX_BYTES])
def test_garbage_is_refused_at_once(tmp_path: Path, byte: bytes, size: int) -> None:
    path = tmp_path / "garbage.xml"
    path.write_bytes(byte * size)
    started = time.process_time()
    with pytest.raises(PMLError):
        parse_schema(path)
    assert time.process_time() - started < 2


def test_depth_is_bounded() -> None:
    def nested(depth: int) -> str:
        inside = "".join(f"<module name='m{level}'>" for level in range(depth - 1))
        return f"<schema name='x'>{inside}{'</module>' * (depth - 1)}</schema>"

    assert len(parse_schema(nested(MAX_DEPTH)).modules) == MAX_DEPTH - 1
    for depth in (MAX_DEPTH + 1, 100_000):
        with pytest.raises(PMLError, match="at most 64 levels"):
            parse_schema(nested(depth))


def test_ten_thousand_modules_parse_in_under_two_seconds() -> None:
    modules = "".join(f"<module name='m{n}'>Text of {n}.</module>\n" for n in range(10_000))
    started = time.process_time()
    schema = parse_schema(f"<schema name='x'>{modules}</schema>")
    assert len(schema.modules) == 10_000
    assert time.process_time() - started < 2


def test_what_is_no_markup_is_said() -> None:
    for path in ("schema.xml", "some/schema.xml", "x"):
        with pytest.raises(PMLError, match=r"given as a pathlib\.Path"):
            parse_schema(path)
    for name in ("a\0b", "\ud800", "a" * 300):
        with pytest.raises(PMLError, match="cannot be read"):
            parse_schema(Path(name))
    for other in (None, 5, b"<schema name='x'/>"):
        with pytest.raises(ParameterError, match="expected markup as a string"):
            parse_schema(other)  # type: ignore[arg-type]
