"""The checker of plain English: what it finds, where, and what it leaves alone."""

from tools.prose import find, in_markdown, in_python

MARKDOWN = """\
# A page

Of a folder, records count twice. The server gives
back the room, and `behind` is code, as is [this](behind.md).

```sh
echo behind  # Of course
```

- The server is behind a proxy. Of course it is.
- A row behind the others.
- Never are other
  bytes read.

| a | Of b |
|---|---|
"""

PYTHON = '''\
"""Rows behind the prompt."""

BEHIND = "behind"  # whoever reads this


def first(help: str) -> None:
    """Be told that it is damaged.

    >>> print("behind")

    Of each head the first. The clause
    (``behind``) is code.
    """
    first(help="Rows that are not to "
               "be had.")
'''


def lapses(source: str, kind: str) -> list[tuple[int, str]]:
    paragraphs = {"md": in_markdown, "py": in_python}[kind](source)
    return sorted((line, words) for lines in paragraphs for line, words, _ in find(lines))


def test_pages_are_read_except_their_code() -> None:
    assert lapses(MARKDOWN, "md") == [
        (3, "Of"),
        (3, "gives back"),
        (11, "behind"),
        (12, "Never are"),
        (15, "Of"),
    ]


def test_docstrings_comments_and_help_are_read() -> None:
    assert lapses(PYTHON, "py") == [
        (1, "behind"),
        (3, "whoever"),
        (7, "Be told"),
        (11, "Of"),
        (14, "to be had"),
    ]
