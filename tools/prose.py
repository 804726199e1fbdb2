"""Find lapses of plain English that recur here: `python -m tools.prose [--python] [PATH ...]`.

By default it reads the repository's Markdown, except the model card. With `--python` it reads
docstrings, comments, `help=` texts and the messages of errors, logs and notes, of the package and
the examples. It never judges code.
Vale would do this, but what package indexes offer of it only downloads a binary.
"""

from __future__ import annotations

import argparse
import ast
import io
import itertools
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = ("*.md", "docs/**/*.md")
SOURCES = ("kvrag/**/*.py", "bench/**/*.py", "examples/*.py")

# What a sentence does not begin with, in the case given.
OPENINGS = (
    "Of(?! course)",
    "(?:Never|Nor|Neither|Only then) (?:is|are|was|were|do|does|did|has|have|can)",
)
# What no sentence holds, in any case, and what to write instead.
WORDS = {
    "(?<!hides )(?<!hide )behind(?! (?:·|(?:an?|the) (?:proxy|flag|key|extra)))": "after",
    "(?<=[,;] )(?:and )?so (?:is|are|was|were|do|does|did)(?! not)": "the subject first",
    "(?:comes?|came|coming) to": "takes, is, reaches",
    "(?<=[,;:(] )of (?:each|every)": "for each",
    "(?:can|could|cannot|to) be had|is had|are had": "available",
    "(?:is|are|be|was|were|been|not) told": "is reported, says",
    "tells? of|told (?:apart|from)": "reports, distinguishes",
    "(?:gives?|gave|given|giving) (?:it |them )?back": "returns, reclaims, frees",
    "(?:lets?|letting) go": "frees, drops",
    "(?:goes|go|went|gone|going) on (?:with|being|from)": "continues",
    "as of": "from, on",
    "who(?:so)?ever": "anyone who",
    "he|him|his": "they",
    "(?:at|to) hand": "available",
    "anew": "again",
    "beside (?:much |little |some )?other work": "while other programs ran",
    "wants (?:an?|to be|the)": "needs",
    "of (?:its|their|one's|our) own": "its own X, a separate X",
    "but for": "except for",
    "(?:nothing|nobody|none|anything) but": "only, except",
    "so many": "this many",
    "becomes? of": "happens to",
    "hands? out": "sends, serves",
    "reckon(?:s|ed|ing)?": "estimates, expects",
    "whereof|whence|hence|thereby|thereof|therein|upon|whilst|amongst": "a common word",
    "(?<=[;,] )else": "otherwise",
    "as ever": "as always",
    "one another": "each other",
    "(?:stand|lie)s? (?:in|at|on|there|where|beside|before|right)": "is, follows, precedes",
    "br(?:ing|ings|ought) (?:about|forth)": "causes, produces",
    "hold(?:s|ing)? (?:nothing|nobody|anything|others?) up": "delays",
    "all that (?:is|was|are)": "everything that",
}

_OPENING = re.compile(rf"(?:^|[.!?:|] )\W*\b((?:{'|'.join(OPENINGS)})) ")
_WORDS = [
    (re.compile(rf"(?<!\w)(?:{words})(?!\w)", re.IGNORECASE), use) for words, use in WORDS.items()
]
# Calls whose first argument is a message.
_MESSAGE = re.compile(r"Error$|^console\.note$|^logger\.")
_CODE = re.compile(r"`+[^`]*`+|\]\([^)]*\)|<!--.*?-->")

Line = tuple[int, str]


def find(lines: Iterable[Line]) -> Iterator[tuple[int, str, str]]:
    """Yield line, words and what to write instead, for each lapse in the lines of a paragraph."""
    numbers: list[int] = []
    text = ""
    for number, line in lines:
        words = line.strip() + " "
        text += words
        numbers += [number] * len(words)
    text = _CODE.sub(lambda code: "·" * len(code[0]), text)
    for found in _OPENING.finditer(text):
        yield numbers[found.start(1)], found[1], "the subject first"
    for pattern, use in _WORDS:
        for found in pattern.finditer(text):
            yield numbers[found.start()], found[0], use


def split(lines: Iterable[Line]) -> Iterator[list[Line]]:
    """Yield paragraphs: list items, rows and headings are some; fenced code and doctests none."""
    paragraph: list[Line] = []
    fenced = False
    for number, line in lines:
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced or line.lstrip().startswith((">>>", "...")):
            continue
        elif re.match(r"\s*([-*|#]|\d+\.|$)", line):
            yield paragraph
            paragraph = [(number, line)]
        else:
            paragraph.append((number, line))
    yield paragraph


def in_markdown(source: str) -> Iterator[list[Line]]:
    return split(enumerate(source.split("\n"), 1))


def in_python(source: str) -> Iterator[list[Line]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = (ast.get_source_segment(source, node) or "").replace('"""', "")
            yield from split(enumerate(text.split("\n"), node.lineno))
        elif isinstance(node, ast.keyword) and node.arg == "help":
            parts = (str(part.value) for part in ast.walk(node) if isinstance(part, ast.Constant))
            yield [(node.lineno, " ".join(parts))]
        elif isinstance(node, ast.Call) and node.args and _MESSAGE.search(ast.unparse(node.func)):
            texts = (
                part.value for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant)
            )
            yield [(node.lineno, "{}".join(text for text in texts if isinstance(text, str)))]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [
        (token.start[0], token.string.strip("# "))
        for token in tokens
        if token.type == tokenize.COMMENT
    ]
    for _, block in itertools.groupby(enumerate(comments), lambda pair: pair[1][0] - pair[0]):
        yield [comment for _, comment in block]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", action="store_true", help="read Python, not Markdown")
    parser.add_argument("paths", nargs="*", type=Path, help="files to read instead of all")
    arguments = parser.parse_args()
    globs, paragraphs = (SOURCES, in_python) if arguments.python else (PAGES, in_markdown)
    counts: Counter[str] = Counter()
    paths = arguments.paths or sorted({path for glob in globs for path in ROOT.glob(glob)})
    for path in paths:
        name = path.resolve().relative_to(ROOT)
        for paragraph in paragraphs(path.read_text("utf-8")):
            for number, words, use in find(paragraph):
                print(f'{name}:{number}: "{words}" (write: {use})')
                counts["/".join(name.parts[:2])] += 1
    if counts:
        found = ", ".join(f"{where} {number}" for where, number in counts.most_common())
        raise SystemExit(f"Lapses of plain English: {counts.total()} ({found})")


if __name__ == "__main__":
    main()
