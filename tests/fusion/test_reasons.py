from __future__ import annotations

from kvrag.chunk import Chunk
from kvrag.fusion import runs as r
from kvrag.fusion.layout import Layout, ReusedSpan

# Token n stands for PIECES[n].
PIECES = [*map(chr, range(97, 111)), "\n", " ", "\\n", ".", ".\n\n", "bos", "ab"]
A, B, C, D = range(4)
LINE, SPACE_ID, ESCAPE, DOT, DOT_LINES, BOS, AB = range(14, 21)


def decode(token_ids: list[int]) -> str:
    return "".join(PIECES[one] for one in token_ids)


def reasons(token_ids: list[int], spans: list[ReusedSpan], chunk: list[int], runs=()) -> list:
    starts = tuple(range(len(chunk)))
    chunks = {"c": Chunk("c", "text", tuple(chunk), starts, "source", 0)}
    layout = Layout(tuple(token_ids), tuple(spans), 1, True)
    found = r.why_fresh(layout, chunks, runs, decode)
    assert sum(r.counted(found).values()) == len(token_ids) - layout.num_reused
    return [(one.start, one.end, one.reason) for one in found]


def between(here: int, there: int) -> str:
    chunk = [A, B, C, D, there, 5, 6, 7, 8]
    spans = [ReusedSpan("c", 1, 0, 4), ReusedSpan("c", 6, 5, 4)]
    (_, (start, end, reason), _) = reasons([BOS, A, B, C, D, here, 5, 6, 7, 8, 9], spans, chunk)
    assert (start, end) == (5, 6)
    return reason


def test_what_stands_between_two_parts_of_a_chunk() -> None:
    assert between(LINE, SPACE_ID) == r.SPACE
    assert between(ESCAPE, LINE) == r.ESCAPES
    assert between(12, 13) == r.ABSENT


def test_same_text_in_other_tokens() -> None:
    chunk = [5, 6, 7, 8, A, B, 9, 10, 11, 12]
    spans = [ReusedSpan("c", 1, 0, 4), ReusedSpan("c", 6, 6, 4)]
    found = reasons([BOS, 5, 6, 7, 8, AB, 9, 10, 11, 12, 13], spans, chunk)
    assert (5, 6, r.BORDER) in found


def test_a_last_token_that_the_next_text_changed() -> None:
    found = reasons(
        [BOS, A, B, C, D, DOT_LINES, 12, 13], [ReusedSpan("c", 1, 0, 4)], [0, 1, 2, 3, DOT]
    )
    assert found == [(0, 1, r.PREFIX), (5, 6, r.BORDER), (6, 8, r.ABSENT)]
