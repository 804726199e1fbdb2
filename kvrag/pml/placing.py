"""Lays a prompt over its schema: each row's token, position, and where its KV is stored.

Source: Prompt Cache §3.4. Modules keep their positions. An argument takes the first positions of
its parameter's room; the rest stay empty. New text goes into free positions or after everything.

Deviation: the paper does not say what an unfilled parameter is. Here its placeholders, or its
scaffold text, stay as they were encoded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from kvrag.fusion.layout import Layout, ReusedSpan
from kvrag.ingest.passages import Passage
from kvrag.models.control import ControlTokens
from kvrag.pml.layout import SchemaLayout, Stretch, token_ids_of
from kvrag.pml.prompt import Import, Prompt
from kvrag.pml.schema import Path, Schema, Text

IdsOf = Callable[[str], tuple[int, ...]]


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of a prompt.

    Attributes
    ----------
    start
        Position of the first token.
    token_ids
        The tokens, at least one.
    stretch, offset
        The stretch of the schema that the tokens belong to, and the place of the first one in it;
        None and 0 for the prompt's own text.
    """

    start: int
    token_ids: tuple[int, ...]
    stretch: int | None = None
    offset: int = 0

    @property
    def end(self) -> int:
        """The first position after it."""
        return self.start + len(self.token_ids)


def place_prompt(
    layout: SchemaLayout,
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    control: ControlTokens | None = None,
) -> list[Piece]:
    """Return the pieces of a prompt, without the shared prefix, in the order of their positions.

    With `control`, control strings in the prompt's arguments, texts and turns are plain text.

    Raises
    ------
    PMLError
        If an argument is longer than its parameter, a text does not fit into the gap at its place,
        or the prompt is empty.
    """

    def ids_of(text: str) -> tuple[int, ...]:
        return tuple(*token_ids_of(tokenizer, [text], control))

    imports = {one.path: one for one in prompt.body.all()}
    pieces: list[Piece] = []
    for number, stretch in enumerate(layout.stretches):
        if stretch.path in imports:
            pieces += _filled(number, stretch, imports[stretch.path], prompt.schema, ids_of)
    _place_texts(layout, prompt.body, layout.num_positions, pieces, ids_of)
    end = max((piece.end for piece in pieces), default=len(layout.prefix_ids))
    if layout.conversation is None:
        ids = ids_of(prompt.ending)
    else:
        tail = layout.conversation.tail(imports, prompt.turns, prompt.location, control)
        if control is None:
            ids = ids_of(tail.text)
        else:
            tokens = control.prompt(tail.text, add_special_tokens=False, data=tail.data or ())
            ids = tuple(tokens.token_ids)
    if ids:
        pieces.append(Piece(end, ids))
    if not pieces and not layout.prefix_ids:
        raise prompt.location.error("the prompt is empty", "import a module, or write a text")
    return pieces


def as_layout(
    layout: SchemaLayout, pieces: Sequence[Piece], passages: Sequence[Passage], is_bound: bool
) -> Layout:
    """Return a prompt in the form that the fuser takes.

    Parameters
    ----------
    layout
        The schema's layout.
    pieces
        The prompt's pieces, in order.
    passages
        For each stretch, the passage whose KV is opened, under the stretch's number.
    is_bound
        Whether KV fits only the position that it was encoded at.
    """
    prefix = layout.prefix_ids
    token_ids = list(prefix)
    positions = list(range(len(prefix)))
    spans: list[ReusedSpan] = []
    for piece in pieces:
        row = len(token_ids)
        token_ids += piece.token_ids
        positions += range(piece.start, piece.end)
        if piece.stretch is not None and layout.stretches[piece.stretch].is_cached:
            length = len(piece.token_ids)
            # The last token is always computed, since it gives the first logits.
            length -= piece is pieces[-1]
            if length:
                passage = passages[piece.stretch]
                span = ReusedSpan(str(piece.stretch), row, piece.offset, length)
                encoded_at = passage.start if is_bound else None
                spans.append(replace(span, context_ids=passage.context_ids, encoded_at=encoded_at))
    return Layout(
        token_ids=tuple(token_ids),
        spans=tuple(spans),
        prefix_length=len(prefix),
        has_prefix=bool(prefix),
        positions=tuple(positions) if positions != list(range(len(positions))) else None,
    )


def _filled(
    number: int,
    stretch: Stretch,
    found: Import,
    schema: Schema,
    ids_of: IdsOf,
) -> list[Piece]:
    """Return the pieces of one stretch, with arguments instead of placeholders."""
    pieces: list[Piece] = []
    begin = 0
    for slot in stretch.slots:
        if slot.name not in found.arguments:
            continue
        if begin < slot.offset:
            ids = stretch.token_ids[begin : slot.offset]
            pieces.append(Piece(stretch.start + begin, ids, number, begin))
        argument = ids_of(found.arguments[slot.name])
        if len(argument) > slot.length:
            raise found.location.error(
                f"argument {slot.name!r} has {len(argument)} tokens, its parameter holds "
                f"{slot.length}",
                "shorten it, or raise the parameter's length in the schema "
                f"({schema.parameters(stretch.path)[slot.name].location})",
            )
        if argument:
            pieces.append(Piece(stretch.start + slot.offset, argument))
        begin = slot.end
    if begin < len(stretch.token_ids):
        pieces.append(Piece(stretch.start + begin, stretch.token_ids[begin:], number, begin))
    return pieces


def _place_texts(
    layout: SchemaLayout,
    body: Import,
    limit: int,
    pieces: list[Piece],
    ids_of: IdsOf,
) -> None:
    """Put the texts between a module's imports into gaps, and add them to `pieces` in order."""
    lower = layout.extents[body.path][0]
    for number, part in enumerate(body.parts):
        if isinstance(part, Import):
            _place_texts(layout, part, layout.extents[part.path][1], pieces, ids_of)
            lower = max(lower, _last_end(pieces, layout, part.path))
            continue
        following = next((one for one in body.parts[number + 1 :] if isinstance(one, Import)), None)
        upper = limit if following is None else layout.extents[following.path][0]
        ids = ids_of(part.text)
        piece = Piece(_first_gap(pieces, lower, upper, len(ids), part), ids)
        pieces.insert(bisect_left(pieces, piece.start, key=lambda one: one.start), piece)
        lower = piece.end


def _last_end(pieces: Sequence[Piece], layout: SchemaLayout, path: Path) -> int:
    """Return the position after the last piece of a module."""
    first, end = layout.extents[path]
    return max((one.end for one in pieces if first <= one.start < end), default=first)


def _first_gap(pieces: Sequence[Piece], lower: int, upper: int, length: int, text: Text) -> int:
    """Return the first free position with room for a text between two bounds."""
    start, widest = lower, 0
    for piece in pieces:
        if piece.end <= start:
            continue
        if piece.start >= upper:
            break
        if piece.start - start >= length:
            return start
        widest = max(widest, piece.start - start)
        start = piece.end
    if upper - start >= length:
        return start
    raise text.location.error(
        f"a text of {length} tokens where only {max(widest, upper - start, 0)} positions are free",
        "write it at the prompt's end, shorten it, or give the schema a parameter for it there",
    )
