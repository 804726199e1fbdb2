"""Which record of a text is taken, where several chunks have it."""

from __future__ import annotations

import pytest

from kvrag.chunk import Chunk
from kvrag.fusion.layout import FoundText, choose_records

A, B, C = (1, 1), (2, 2), (3, 3)  # what the shared text stands behind in documents a, b and c


def chunk(source: str, ordinal: int, *contexts: tuple[int, ...], text: str = "") -> Chunk:
    text = text or f"{source}{ordinal}"
    return Chunk(f"{source}{ordinal}", text, (9,), (0,), source, ordinal, {}, contexts or ((),))


def found(*chunks: Chunk, is_whole: bool = True, has_more: bool = False) -> FoundText:
    return FoundText(chunks, is_whole, has_more)


def shared(*contexts: tuple[tuple[int, ...], ...]) -> FoundText:
    """Return a text that is chunk 1 of documents a, b, ..., with the contexts of each."""
    return found(
        *(
            chunk(source, 1, *each, text="shared")
            for source, each in zip("abc", contexts, strict=False)
        )
    )


FIRST_A, FIRST_B, FIRST_C = (found(chunk(source, 0)) for source in "abc")
LATER_A, LATER_B = (found(chunk(source, 5)) for source in "ab")
BOTH = found(chunk("a", 4, text="both"), chunk("b", 4, text="both"))
DOCUMENT = shared((A,), (B,))
NEIGHBOURS = shared(((), A), ((), B))


@pytest.mark.parametrize(
    ("text", "before", "after", "expected"),
    [
        # The predecessor; of several the nearest.
        (DOCUMENT, [FIRST_B], [], ("b1", B)),
        (DOCUMENT, [FIRST_B, FIRST_A], [], ("a1", A)),
        (DOCUMENT, [FIRST_B, LATER_A], [], ("b1", B)),
        (NEIGHBOURS, [FIRST_A, FIRST_B], [], ("b1", B)),
        # Other text of the document, before or behind; but not of both.
        (DOCUMENT, [LATER_B], [], ("b1", B)),
        (DOCUMENT, [], [FIRST_A], ("a1", A)),
        (DOCUMENT, [LATER_B], [LATER_A], None),
        (DOCUMENT, [BOTH], [], None),
        (DOCUMENT, [BOTH], [LATER_A], ("a1", A)),
        (DOCUMENT, [found(chunk("b", 5), has_more=True)], [], None),
        (NEIGHBOURS, [LATER_B], [FIRST_A], ("a1", ())),
        # Nothing.
        (DOCUMENT, [], [], None),
        (DOCUMENT, [DOCUMENT], [DOCUMENT], None),
        (NEIGHBOURS, [], [], ("a1", ())),
        (shared((A,), ((),)), [], [], ("b1", ())),
        (shared((A,), ((),)), [FIRST_A], [], ("a1", A)),
        # Several chunks, but one KV.
        (shared((A,), (A,)), [], [], ("a1", A)),
        (shared((A,)), [], [], ("a1", A)),
        (shared(((),), ((),)), [LATER_B], [], ("a1", ())),
        (shared((A,), (B,), (B,)), [FIRST_C], [], ("c1", B)),
    ],
)
def test_what_stands_in_the_prompt_decides(
    text: FoundText,
    before: list[FoundText],
    after: list[FoundText],
    expected: tuple[str, tuple[int, ...]] | None,
) -> None:
    record = choose_records([*before, text, *after], lambda *_: False)[len(before)]
    assert (record and (record[0].chunk_id, record[1])) == expected


def test_a_predecessor_in_part_is_none() -> None:
    cut = found(chunk("b", 0), is_whole=False)
    assert choose_records([cut, NEIGHBOURS], lambda *_: False)[1] == (NEIGHBOURS.chunks[0], ())


def test_the_exact_record_comes_first() -> None:
    found = [FIRST_B, DOCUMENT, LATER_B]
    record = choose_records(found, lambda number, ids: number == 1 and ids == A, ["b1"])[1]
    assert record == (DOCUMENT.chunks[0], A)


def test_hints_decide_what_the_prompt_does_not() -> None:
    def chosen(*texts: FoundText, hints: list[str]) -> tuple[int, ...] | None:
        record = choose_records([*texts, DOCUMENT], lambda *_: False, hints)[-1]
        return record and record[1]

    assert chosen(hints=["b1"]) == B
    assert chosen(hints=["a1", "b1"]) is None
    assert chosen(FIRST_A, hints=["b1"]) == A
    assert chosen(LATER_A, LATER_B, hints=["b1"]) == B
