"""Source code: cut between definitions and statements, under the names that lead to them."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrag.chunk import Chunk, Document, Mark, normalise_text
from kvrag.errors import DocumentError
from kvrag.ingest import code
from kvrag.ingest.chunker import chunk_document
from kvrag.ingest.code import CODE_SUFFIXES, outline
from kvrag.ingest.files import find_files
from kvrag.ingest.headings import paths_of
from kvrag.ingest.index import Index
from kvrag.ingest.limits import MAX_MARKS, MAX_MARKS_CHARACTERS
from kvrag.ingest.loaders import NoTextError, load_bytes, sought_suffixes, to_document
from tests.support.models import make_tokenizer
from tests.support.properties import examples

pytest.importorskip("tree_sitter")

# By suffix: code, and the names that lead to each of its definitions.
SAMPLES = {
    ".py": (
        "import a\n\n\n# Above.\n@cached\ndef one(x):\n    return x\n\n\nclass Two(A):\n"
        '    """Said."""\n\n    # Inside.\n    def three(self):\n        for y in z:\n'
        "            use(y)\n\n    async def four(self): ...\n\n\nfive = lambda x: x\n",
        ["one", "Two", "Two/three", "Two/four", "five"],
    ),
    ".js": (
        "// Above.\nexport function one() { return 1 }\n\nclass Two {\n  three() { return 3 }\n}\n"
        "const four = (x) => { return x }\nexports.five = function () { }\n"
        "for (const a of b) { c }",
        ["one", "Two", "Two/three", "four", "exports.five"],
    ),
    ".ts": (
        "@Part()\nexport class One {\n  @Input()\n  two(): void { a; }\n}\n"
        "interface Three { a: number }\nnamespace Four { function five() { } }\n"
        "enum Six { A, B }\n",
        ["One", "One/two", "Three", "Four", "Four/five", "Six"],
    ),
    ".tsx": ("export function One() { return <p>{two}</p> }\n", ["One"]),
    ".java": (
        "package a;\n\n/** Above. */\n@Part\npublic class One {\n  int a = 1;\n  @Override\n  "
        "int two() { for (int x : y) { } return 1; }\n  One() { }\n}\nrecord Three(int x) { }\n",
        ["One", "One/two", "One/One", "Three"],
    ),
    ".c": (
        "#ifndef A\n#include <a.h>\n// Above.\nstatic int *one(int x) { return 0; }\n"
        "struct two { int a; };\ntypedef struct { int b; } three;\n#endif\n",
        ["one", "two", "three"],
    ),
    ".h": (
        "namespace a::b {\n// Above.\ntemplate <class T>\nclass One : Two {\n public:\n"
        "  int two() const { for (int x : y) { } return 1; }\n};\n"
        "int &One::three() { return x; }\n}\n",
        ["a::b", "a::b/One", "a::b/One/two", "a::b/One::three"],
    ),
    ".go": (
        "package a\n\n// Above.\ntype One struct {\n\tb int\n}\n\n"
        "func (o *One) two() int {\n\treturn 1\n}\n",
        ["One", "two"],
    ),
    ".rs": (
        "#[derive(A)]\nstruct One { a: u8 }\nimpl Two for One {\n    /// Above.\n    #[test]\n"
        "    fn three() { a; }\n}\nmod four { fn five() { } }\n",
        ["One", "Two for One", "Two for One/three", "four", "four/five"],
    ),
    ".rb": (
        "module One\n  class Two < A\n    # Above.\n"
        "    def three(x)\n      x\n    end\n  end\nend\n",
        ["One", "One/Two", "One/Two/three"],
    ),
    ".php": (
        "<?php\nnamespace A;\nclass One {\n  /** Above. */\n  #[B]\n"
        "  public function two() { return 1; }\n}\n",
        ["One", "One/two"],
    ),
    ".cs": (
        "namespace A {\n  public class One {\n    [Fact]\n"
        "    public int Two() { return 1; }\n  }\n}\n",
        ["A", "A/One", "A/One/Two"],
    ),
    ".sh": ("# Above.\none() {\n  echo 1\n}\nfor x in y; do echo $x; done\n", ["one"]),
}


def load(suffix: str, text: str) -> Document:
    (document,) = load_bytes(f"/a{suffix}", text.encode())
    return document


def cut(suffix: str, text: str, chunk_tokens: int) -> list[Chunk]:
    return chunk_document(load(suffix, text), make_tokenizer(), chunk_tokens)


def squeeze(text: str) -> str:
    return re.sub(r"\s+", "", text)


@pytest.mark.parametrize("suffix", SAMPLES)
def test_definitions_are_marked_under_their_names(suffix: str) -> None:
    document = load(suffix, SAMPLES[suffix][0])
    paths = list(paths_of(document.outline))
    named = [
        "/".join(path) for mark, path in zip(document.outline, paths, strict=True) if mark.title
    ]
    assert named == SAMPLES[suffix][1]
    for mark in document.outline:
        if mark.title:
            assert mark.title.split()[-1] in document.text[mark.start :]
    assert list(document.outline) == sorted(document.outline)


def test_each_kind_is_parsed_by_a_grammar_that_is_there() -> None:
    for suffix in CODE_SUFFIXES:
        assert code.is_installed(suffix)
        assert outline("a", suffix)[0] == Mark(0, 0, "")


def test_comments_and_decorators_stay_with_what_they_are_above() -> None:
    text = "\n\n\n".join(
        f"# About {name}.\n# More.\n@kept\n@cached(1)\ndef {name}(x):\n    return {name} + 1"
        for name in ("one", "two", "six")
    )
    for size in range(80, 120, 7):
        chunks = cut(".py", text, size)
        assert [chunk.text.split()[2] for chunk in chunks] == ["one.", "two.", "six."], size
        assert [chunk.metadata["headings"] for chunk in chunks] == [["one"], ["two"], ["six"]]


def test_what_stands_at_the_end_of_a_line_stays_there() -> None:
    text = "a = 1  # of a\nb = 2\n\n# alone\n\nc = 3"
    starts = [text[mark.start :].split("\n")[0] for mark in load(".py", text).outline]
    assert starts == ["a = 1  # of a", "b = 2", "# alone", "c = 3"]


def test_long_functions_are_cut_between_statements() -> None:
    body = "".join(f"        call(one,\n             two_{n})\n" for n in range(40))
    text = f"class A:\n    def long(self):\n{body}\n    def short(self):\n        return 1\n"
    chunks = cut(".py", text, 100)
    assert len(chunks) > 5
    assert all(chunk.text.startswith("call(") for chunk in chunks[1:-1])
    assert chunks[1].metadata["headings"] == ["A", "long"]
    assert chunks[1].metadata["heading"] == "long"
    assert "def short(self):\n        return 1" in chunks[-1].text


def test_names_in_other_scripts_are_where_they_are() -> None:
    text = 's = "東京 😀"\n\ndef größe():\n    """Ä."""\n    return "東京"\n'
    document = load(".py", text)
    (named,) = [mark for mark in document.outline if mark.title]
    assert named.title == "größe"
    assert document.text[named.start :].startswith("def größe")


_PIECES = (
    *("def f(x):\n", "class A:\n", "    ", "  ", "\n", "return x\n", "# c\n", "@d\n", "if x:\n"),
    *("{", "}", "(", ")", '"', '"""', "x = 1\n", "é", "😀", "\f", "\r\n", "\t", "function f() {"),
    *("impl A for B {", "fn f() {}", ";", "\u00a0", "\u2028", "e\u0301", "#ifdef A\n", "#endif\n"),
)


@settings(max_examples=examples(120))
@given(
    pieces=st.lists(st.sampled_from(_PIECES), max_size=80),
    suffix=st.sampled_from(sorted(SAMPLES)),
    limit=st.integers(16, 64),
)
def test_chunks_cover_the_code_within_the_limit(pieces: list[str], suffix: str, limit: int) -> None:
    text = "".join(pieces)
    try:
        document = load(suffix, text)
    except NoTextError:
        return
    assert to_document(document) == document  # its outline is a sound one
    tokenizer = make_tokenizer()
    chunks = chunk_document(document, tokenizer, limit)
    assert squeeze("".join(chunk.text for chunk in chunks)) == squeeze(
        normalise_text(text.replace("\f", "\n"))
    )
    for chunk in chunks:
        assert 1 <= len(chunk.token_ids) <= limit
        start = chunk.metadata.get("start", 0)
        assert document.text[start:].lstrip().startswith(chunk.text)


def test_too_many_marks_leave_out_the_innermost() -> None:
    text = "".join(f"def f{n}():\n" + "    call()\n" * 30 + "\n" for n in range(2_000))
    marks = outline(normalise_text(text), ".py")
    assert len(marks) == 2_001
    assert {mark.level for mark in marks} == {0}
    assert outline(";\n".join(["a"] * (MAX_MARKS + 5)), ".js") == (Mark(0, 0, ""),)


@pytest.mark.parametrize(
    ("marks", "reason"),
    [
        ("x" * 9, "no list of"),
        ({"a": 1}, "no list of at most 50,000 marks"),
        ([[0, 0, ""]] * (MAX_MARKS + 1), "no list of at most 50,000 marks"),
        ([[0, 0]], "mark 0 of its"),
        ([[0, 0, ""], [99, 0, ""]], "mark 1 of its"),
        ([[2, 0, ""], [1, 0, ""]], "mark 1 of its"),
        ([[-1, 0, ""]], "mark 0 of its"),
        ([[True, 0, ""]], "mark 0 of its"),
        ([[0, 32, ""]], "mark 0 of its"),
        ([[0, 0, "x" * 257]], "mark 0 of its"),
        ([[0, 0, "x" * 256]] * (MAX_MARKS_CHARACTERS // 256 + 1), "more than 524,288 characters"),
    ],
)
def test_outlines_that_are_none_are_refused(marks: object, reason: str) -> None:
    with pytest.raises(DocumentError, match=rf"^d: .*{reason}"):
        to_document(Document("d", "text", {}, outline=marks))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", [" text", "a\r\nb", "e\u0301", "a\fb"])
def test_outlines_of_texts_that_are_not_normalised_are_refused(text: str) -> None:
    with pytest.raises(DocumentError, match=r"apply kvrag\.chunk\.normalise_text"):
        to_document(Document("d", text, {}, outline=(Mark(0, 0, "x"),)))


def test_code_is_indexed_and_found_under_its_names(index: Index, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "a.py").write_text(SAMPLES[".py"][0])
    (folder / "notes.txt").write_text("Nothing else.")
    report = index.add(folder)
    assert {Path(source).name for source in report.added} == {"a.py", "notes.txt"}
    assert index.add(folder, force=True).changed == ()
    hits = index.search("three", 9, filter={"headings": "Two"})
    assert {Path(hit.chunk.source).name for hit in hits} == {"a.py"}


def test_without_the_extra_code_is_plain_text_if_it_is_named(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.py").write_text(SAMPLES[".py"][0])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not CODE_SUFFIXES & sought_suffixes()
    assert not find_files(tmp_path, tmp_path / "index", sought_suffixes()).files
    document = load(".py", SAMPLES[".py"][0])
    assert document.outline == (Mark(0, 0, ""),)
    (chunk,) = chunk_document(document, make_tokenizer(), 512)
    assert chunk.text == SAMPLES[".py"][0].strip()
    assert chunk.metadata == {}  # not the comments as headings
    monkeypatch.undo()
    assert load(".py", SAMPLES[".py"][0]).outline[1:]
