"""Builds a text with its structure from what readers of HTML and Word find, piece by piece.

Headings begin with ``#``, list items with their number or ``-``, and a row of a table is a line of
cells with bars between them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from kvrag.ingest.headings import find_headings
from kvrag.ingest.limits import MAX_TITLE_CHARACTERS

_SPACE = re.compile(r"[ \t\r\n\f\v]+")
_HASHES = re.compile(r"#{1,6} ")
_ROMAN = {
    **{"m": 1000, "cm": 900, "d": 500, "cd": 400, "c": 100, "xc": 90, "l": 50, "xl": 40},
    **{"x": 10, "ix": 9, "v": 5, "iv": 4, "i": 1},
}
_MAX_INDENTED = 8
# A value that spans rows is repeated in each of them, unless it is a long text.
_MAX_REPEATED_CHARACTERS = 200
# Columns and cells of spans in one document, so that its tables cost no more than their size.
_MAX_CARRIED = 200_000
_MAX_SPAN = 1000
# Cells with more are parts of a page, not of a row.
_MAX_CELL_CHARACTERS = 2_000
_MAX_CELL_CHARACTERS_OF_BLOCKS = 500


@dataclass
class _Flow:
    """Blocks one under another: those of the document, or of a cell."""

    blocks: list[str] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    depth: int = 0
    marker: str = ""
    in_title: bool = False
    has_title: bool = False
    is_page: bool = False

    @property
    def starts_line(self) -> bool:
        return not self.parts or self.parts[-1].endswith("\n")


@dataclass
class _Table:
    rows: list[dict[int, str]] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)
    is_page: bool = False
    has_several: bool = False
    is_filled: bool = False
    row: dict[int, str] | None = None
    column: int = 0
    cell: tuple[int, int, bool] | None = None
    # By column: for how many more rows, and the text.
    spans: dict[int, tuple[int, str]] = field(default_factory=dict)


class Layout:
    """Receives text and the starts and ends of blocks and items.

    Attributes
    ----------
    tables
        Receives those of tables, rows and cells.
    """

    def __init__(self) -> None:
        self._flows = [_Flow()]
        self.tables = Tables(self, self._flows)

    def finish(self) -> str:
        """Return the whole text."""
        self.close_block()  # in an open list too
        return "\n\n".join(self._flows[0].blocks)

    def text(self, text: str, *, is_raw: bool = False) -> None:
        """Add text to the open line; runs of white space become one space unless it is raw."""
        flow = self._flows[-1]
        text = text.replace("\u00ad", "")
        if not is_raw:
            text = _SPACE.sub(" ", text)
            if flow.starts_line or flow.parts[-1].endswith(" "):
                text = text.lstrip(" ")
        if not text:
            return
        if flow.starts_line and (flow.depth or flow.marker) and not text.isspace():
            indent = min(flow.depth, _MAX_INDENTED) - bool(flow.marker)
            flow.parts.append("  " * indent + flow.marker)
            flow.marker = ""
        flow.parts.append(text)

    def line_break(self) -> None:
        """End the line, even an empty one."""
        if self._flows[-1].parts:
            self._flows[-1].parts.append("\n")

    def end_line(self) -> None:
        """End the line unless it is empty."""
        parts = self._flows[-1].parts
        while parts:
            parts[-1] = parts[-1].rstrip()
            if parts[-1]:
                parts.append("\n")
                return
            parts.pop()

    def end_block(self, *, is_raw: bool = False) -> None:
        """End the block; inside a list only the line, and in a heading nothing."""
        flow = self._flows[-1]
        if flow.in_title and sum(map(len, flow.parts)) > MAX_TITLE_CHARACTERS:
            flow.in_title = False  # a heading that nothing ends
        if flow.in_title:
            self.text(" ")
        elif flow.depth:
            self.end_line()
        else:
            self.close_block(is_raw=is_raw)

    def close_block(self, *, is_raw: bool = False) -> None:
        """End the block, also inside a list."""
        flow = self._flows[-1]
        block = "".join(flow.parts)
        block = block.strip("\n") if is_raw else block.rstrip().strip("\n")
        if block.strip():
            flow.blocks.append(block)
        flow.parts.clear()

    def heading(self, level: int) -> None:
        """Begin a heading, a block also inside a list; its number stays with it."""
        flow = self._flows[-1]
        flow.in_title = False
        self.close_block()
        flow.parts.append("#" * level + " " + flow.marker.removeprefix("- "))
        flow.marker, flow.in_title, flow.has_title = "", True, True

    def end_heading(self) -> None:
        """End a heading; one without text goes."""
        flow = self._flows[-1]
        if flow.in_title and not "".join(flow.parts).strip("# \n"):
            flow.parts.clear()
        flow.in_title = False
        self.close_block()

    def preformatted(self) -> None:
        """End a block of lines that stay as they are, in a fence if one looks like a heading."""
        flow = self._flows[-1]
        lines = "".join(flow.parts).strip("\n")
        if find_headings(f"\n\n{lines}"):
            flow.parts = [f"```\n{lines}\n```"]
        flow.has_title = True
        self.close_block(is_raw=True)

    def begin_list(self, depth: int) -> None:
        """Let what follows be items of lists nested so deep; 0 ends the outermost."""
        flow = self._flows[-1]
        if depth and flow.depth:
            self.end_line()
        else:
            self.close_block()
        flow.depth, flow.marker = depth, ""

    def item(self, marker: str) -> None:
        """Begin an item with this marker."""
        self.end_line()
        self._flows[-1].marker = f"{marker} "

    @property
    def list_depth(self) -> int:
        """How deep lists are nested, inside this cell."""
        return self._flows[-1].depth


class Tables:
    """Receives the starts and ends of tables, rows and cells.

    Parameters
    ----------
    layout
        Receives what is in cells.
    flows
        Its open flows; each open cell is one.
    """

    def __init__(self, layout: Layout, flows: list[_Flow]) -> None:
        self._layout = layout
        self._flows = flows
        self._tables: list[_Table] = []
        self._ignored_cells = [0]
        self._num_carried = 0

    def begin_table(self) -> None:
        """Begin a table, which is a block."""
        self._layout.close_block()
        self._tables.append(_Table())
        self._ignored_cells.append(0)

    def begin_row(self) -> None:
        """Begin a row, and end the one before."""
        self.end_row()
        if self._is_between_cells:
            table = self._tables[-1]
            table.row, table.column, table.is_filled = {}, 0, False

    def begin_cell(self, columns: int = 1, rows: int = 1, *, is_below: bool = False) -> None:
        """Begin a cell with its numbers of columns and rows, or one that continues one above."""
        if not self._is_between_cells:
            self._layout.end_block()
            self._ignored_cells[-1] += 1
            return
        table = self._tables[-1]
        if table.row is None:
            self.begin_row()
        while table.column in table.spans:
            table.column += 1
        table.cell = (max(1, min(columns, _MAX_SPAN)), rows, is_below)
        self._flows.append(_Flow())

    def skip_columns(self, number: int) -> None:
        """Leave out this many columns of the row."""
        if self._is_between_cells:
            self._tables[-1].column += max(0, min(number, _MAX_SPAN))

    def end_cell(self) -> None:
        """End the cell."""
        if self._ignored_cells[-1]:
            self._ignored_cells[-1] -= 1
            self._layout.end_block()
            return
        table = self._tables[-1]
        assert table.cell is not None
        assert table.row is not None
        (columns, rows, is_below), table.cell = table.cell, None
        self._layout.begin_list(0)
        flow = self._flows.pop()
        size = sum(map(len, flow.blocks))
        table.blocks += flow.blocks
        table.has_several |= len(flow.blocks) > 1
        table.is_page |= (
            flow.is_page
            or size > _MAX_CELL_CHARACTERS
            or (len(flow.blocks) > 1 and (flow.has_title or size > _MAX_CELL_CHARACTERS_OF_BLOCKS))
        )
        text = ""
        if not table.is_page:
            text = " ".join(" ".join(_HASHES.sub("", one, 1) for one in flow.blocks).split())
        table.is_filled |= bool(text)
        if is_below and table.rows and not text:
            above = table.rows[-1].get(table.column, "")
            text = above if len(above) <= _MAX_REPEATED_CHARACTERS else ""
        table.row[table.column] = text
        self._num_carried += columns
        if rows != 1 and self._num_carried <= _MAX_CARRIED:
            repeated = text if len(text) <= _MAX_REPEATED_CHARACTERS else ""
            last = rows - 1 if rows > 0 else 1 << 30
            for place in range(table.column, table.column + columns):
                table.row.setdefault(place, "")
                table.spans[place] = (last, repeated if place == table.column else "")
        table.column += columns

    def end_row(self) -> None:
        """End the row; one without its own text goes."""
        if not self._is_between_cells or self._tables[-1].row is None:
            return
        table = self._tables[-1]
        row, table.row = table.row, None
        assert row is not None
        self._num_carried += len(table.spans)
        if self._num_carried > _MAX_CARRIED:
            table.spans.clear()
        for column, (left, text) in list(table.spans.items()):
            if column in row:  # it began in this row
                continue
            row[column] = text
            if left > 1:
                table.spans[column] = (left - 1, text)
            else:
                del table.spans[column]
        if table.is_filled:
            table.rows.append({column: text for column, text in row.items() if text})

    def end_group(self) -> None:
        """End a group of rows, where every span of rows ends."""
        self.end_row()
        if self._is_between_cells:
            self._tables[-1].spans.clear()

    def end_table(self) -> None:
        """End the table: rows of cells, or the cells' blocks if it only arranges a page."""
        self.end_row()
        self._layout.close_block()
        table = self._tables.pop()
        self._ignored_cells.pop()
        columns = sorted(set().union(*table.rows))
        is_page = table.is_page or (table.has_several and len(columns) <= 1)
        flow = self._flows[-1]
        flow.is_page |= is_page or (len(columns) > 1 and len(table.rows) > 1)
        if is_page:
            flow.blocks += table.blocks
        elif columns:
            flow.blocks.append("\n".join(_lines(table.rows, columns)))

    @property
    def _is_between_cells(self) -> bool:
        """Whether a table is open, and none of its cells is."""
        return bool(self._tables) and self._tables[-1].cell is None


def _lines(rows: list[dict[int, str]], columns: list[int]) -> list[str]:
    """Return rows as lines; columns stay aligned unless nearly all cells are empty."""
    is_sparse = len(rows) * len(columns) > 1000 + 4 * sum(map(len, rows))
    lines = []
    for row in rows:
        places = sorted(row) if is_sparse else columns[: columns.index(max(row)) + 1]
        lines.append(" | ".join(row.get(column, "") for column in places).lstrip(" "))
    return lines


def numeral(number: int, kind: str) -> str:
    """Return a number as a list shows it: "1", "a", "A", "i" or "I"; digits where it cannot."""
    text = str(number)
    if kind in "aA" and 0 < number <= 702:
        text = chr(ord("a") + (number - 1) % 26)
        if number > 26:
            text = chr(ord("a") + (number - 27) // 26) + text
    elif kind in "iI" and 0 < number < 4000:
        text = ""
        for letters, value in _ROMAN.items():
            text += letters * (number // value)
            number %= value
    return text.upper() if kind.isupper() else text
