"""Encodes schemas once into an index, and answers prompts with their modules' KV.

Source: Prompt Cache §3.4, §4. Storing, keys, fusing and generating are the same as for retrieval: a
stretch of a schema is a passage of the index, and a module that is also a chunk after the same
prefix is stored once.

Deviations: modules are encoded after what the schema's prompts begin with of the index's shared
prefix, or else after all of it, so that the attention sink is present. The members of a scaffold
are encoded one after the other, without the gaps between them. Each gets a separate record, whose
key names what it was encoded after. Models with learned positions have no scaffolds.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

from kvrag.arguments import shown
from kvrag.chunk import Chunk, ChunkKey, chunk_key
from kvrag.engine.answer import Answer, AnswerDelta
from kvrag.engine.base import Engine
from kvrag.engine.request import PlacedPrompt
from kvrag.errors import ParameterError, RecordError
from kvrag.fusion.layout import Layout, ReusedSpan
from kvrag.ingest.config import no_kv, writer_lock
from kvrag.ingest.maintenance import KEPT_FOLDER, write_kept
from kvrag.ingest.stages import BackgroundWriter
from kvrag.models.control import ControlTokens
from kvrag.pml.layout import SchemaLayout, Stretch, lay_out_schema, token_ids_of
from kvrag.pml.parser import Import, Prompt, parse_prompt, parse_schema, schema_name
from kvrag.pml.schema import Path, Schema, Text
from kvrag.process import OfProcess

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvrag.codec.base import EncodedChunk
    from kvrag.ingest.index import Index
    from kvrag.kvcache import ChunkKV

# -- passages ------------------------------------------------------------------------------------
#
# A passage has the same key as a chunk of the same tokens after the same prefix, so the later one
# of the two finds the record in the store. `gc` keeps what any name still needs.

_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_.-]*")


@dataclass(frozen=True)
class Passage:
    """Tokens whose KV is kept.

    Attributes
    ----------
    prefix_ids
        Token ids that it is encoded after, as they begin prompts.
    token_ids
        The passage's token ids, at least one.
    context_ids
        Token ids between the prefix and the passage during encoding.
    start
        Position of the first token. It matters only for KV that is bound to positions.
    """

    prefix_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    context_ids: tuple[int, ...] = ()
    start: int | None = None


@dataclass(frozen=True)
class KeepReport:
    """The result of keeping passages.

    Attributes
    ----------
    num_passages, num_tokens
        Number of passages and tokens in the request.
    num_records, num_tokens_computed, size_bytes
        New records, with their tokens and bytes.
    seconds, prefill_seconds
        Total wall time, and the time of the model's forward passes.
    """

    num_passages: int
    num_tokens: int
    num_records: int
    num_tokens_computed: int
    size_bytes: int
    seconds: float
    prefill_seconds: float


class Passages:
    """Keeps passages next to an index's chunks, in the same store.

    Parameters
    ----------
    index
        The index.

    Raises
    ------
    ParameterError
        When the index stores no KV.
    """

    def __init__(self, index: Index) -> None:
        if not index.config.has_kv:
            raise ParameterError(no_kv(index.path, index.model.why_whole))
        self.index = index

    def key_of(self, passage: Passage) -> ChunkKey:
        """Return the name of a passage's KV."""
        config = self.index.config
        options = {}
        if self._bound_start(passage) is not None:
            options["position"] = str(passage.start)
        return chunk_key(
            tenant_salt=bytes.fromhex(config.tenant_salt),
            model_fingerprint=config.model_fingerprint,
            tokenizer_fingerprint=config.tokenizer_fingerprint,
            prefix_ids=passage.prefix_ids,
            token_ids=passage.token_ids,
            context_ids=passage.context_ids,
            options=options,
        )

    def _bound_start(self, passage: Passage) -> int | None:
        """Return the position that a passage's KV is bound to, or None if it is not."""
        behind = len(passage.prefix_ids) + len(passage.context_ids)
        if not self.index.model.is_position_bound or passage.start in (None, behind):
            return None
        return passage.start

    def keep(
        self,
        name: str,
        passages: Sequence[Passage],
        on_progress: Callable[[int, int], None] | None = None,
    ) -> KeepReport:
        """Compute and store missing records, and keep all passages until `forget`.

        Parameters
        ----------
        name
            The name to store them under; replaces the passages under that name.
        on_progress
            Called with the number of finished records and the number to do.

        Raises
        ------
        ParameterError
            When the name is not valid.
        IndexLockedError
            When another process is writing to the index.
        StoreError
            When the store refuses a write; records already stored stay.
        """
        started = time.perf_counter()
        index = self.index
        path = self._path(name)
        by_key = {self.key_of(one): one for one in passages}
        size_bytes = 0
        prefill_seconds = 0.0
        with writer_lock(index.path):
            missing = [(key, one) for key, one in by_key.items() if not index.store.contains(key)]
            # Before the records: the lock keeps others from collecting a record without a name,
            # and the next run completes the name that a killed run leaves.
            path.parent.mkdir(exist_ok=True)
            keys = {key.digest: len(one.token_ids) for key, one in sorted(by_key.items())}
            write_kept(path, keys)
            if missing:
                chunks = [_as_chunk(one) for _, one in missing]
                codec = index.upkeep.codec_for(chunks)
                missing.sort(key=lambda pair: (len(pair[1].token_ids), pair[0]))
                with BackgroundWriter() as writer:
                    for number, (key, one) in enumerate(missing):
                        begun = time.perf_counter()
                        before = (*one.prefix_ids, *one.context_ids)
                        start = self._bound_start(one)
                        (kv,) = index.model.prefill(
                            before, [one.token_ids], None if start is None else [start]
                        )
                        prefill_seconds += time.perf_counter() - begun

                        def store(key: ChunkKey = key, kv: ChunkKV = kv) -> None:
                            nonlocal size_bytes
                            record = codec.encode(key, kv)
                            index.store.put(key, record)
                            size_bytes += len(record)

                        writer.submit(store)
                        if on_progress is not None:
                            on_progress(number + 1, len(missing))
        return KeepReport(
            num_passages=len(passages),
            num_tokens=sum(len(one.token_ids) for one in passages),
            num_records=len(missing),
            num_tokens_computed=sum(len(one.token_ids) for _, one in missing),
            size_bytes=size_bytes,
            seconds=time.perf_counter() - started,
            prefill_seconds=prefill_seconds,
        )

    def forget(self, name: str) -> bool:
        """Stop keeping a name's passages; the next `gc` removes their records."""
        path = self._path(name)
        with writer_lock(self.index.path):
            known = path.exists()
            path.unlink(missing_ok=True)
        return known

    def open(self, passage: Passage) -> EncodedChunk | None:
        """Open a passage's KV, or return None if there is none.

        Raises
        ------
        RecordError
            When the record is damaged, or has another number of tokens.
        StoreError
            When the store cannot be read.
        """
        index = self.index
        key = self.key_of(passage)
        record = index.store.open(key)
        if record is None:
            return None
        try:
            encoded = index.coding.open(key, record, index.config.spec)
            if encoded.num_tokens != len(passage.token_ids):
                raise RecordError(
                    f"record {key} holds {encoded.num_tokens} tokens, expected "
                    f"{len(passage.token_ids)}"
                )
        except BaseException:
            record.close()
            raise
        return encoded

    def _path(self, name: str) -> FilePath:
        if not _NAME.fullmatch(name):
            raise ParameterError(f"name {shown(name)}: expected letters, digits, '_', '.' and '-'")
        return self.index.path / KEPT_FOLDER / f"{name}.json"


def _as_chunk(passage: Passage) -> Chunk:
    """Return a passage as a chunk, for fitting codecs."""
    starts = tuple(range(len(passage.token_ids)))
    return Chunk("", "", passage.token_ids, starts, "", 0, contexts=(passage.context_ids,))


# Lays a prompt over its schema: each row's token, position, and where its KV is stored.
#
# Source: Prompt Cache §3.4. Modules keep their positions. An argument takes the first positions of
# its parameter's room; the rest stay empty. New text goes into free positions or after everything.
#
# Deviation: the paper does not say what an unfilled parameter is. Here its placeholders, or its
# scaffold text, stay as they were encoded.


# -- schemas and prompts -------------------------------------------------------------------------

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
    number: int, stretch: Stretch, found: Import, schema: Schema, ids_of: IdsOf
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
    layout: SchemaLayout, body: Import, limit: int, pieces: list[Piece], ids_of: IdsOf
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


KEPT_PREFIX = "pml-"


@dataclass(frozen=True)
class EncodedSchema:
    """A schema laid out for an index.

    Attributes
    ----------
    layout
        The schema's tokens and positions.
    passages
        The passage of each stretch. It is stored if the stretch is cached.
    scaffolds
        For each scaffold, its stretches, each with its passage there.
    """

    layout: SchemaLayout
    passages: tuple[Passage, ...]
    scaffolds: tuple[tuple[frozenset[Path], dict[int, Passage]], ...]

    def all_passages(self) -> list[Passage]:
        """Return the passages to store, including those of scaffolds."""
        is_cached = (stretch.is_cached for stretch in self.layout.stretches)
        of_scaffolds = (members.values() for _, members in self.scaffolds)
        return [*compress(self.passages, is_cached), *chain.from_iterable(of_scaffolds)]


class PMLEngine(OfProcess):
    """Answers prompts of schemas over one index.

    Parameters
    ----------
    engine
        The engine that fuses and generates, with its own policy unless a call names another.

    Raises
    ------
    ParameterError
        If its index stores chunks compressed.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.passages = Passages(engine.index)
        self._schemas: dict[str, EncodedSchema] = {}

    def add(self, schema: Schema | str | FilePath) -> EncodedSchema:
        """Add a schema without computing anything. It replaces a schema of the same name.

        Parameters
        ----------
        schema
            A parsed schema, its path, or its markup.

        Raises
        ------
        PMLError
            If it is wrong, or the model's chat template does not fit it.
        """
        if not isinstance(schema, Schema):
            schema = parse_schema(schema)
        index = self.engine.index
        layout = lay_out_schema(schema, index.tokenizer, index.prefix_ids, index.control)
        prefix_ids = layout.prefix_ids or index.prefix_ids
        passages = tuple(
            Passage(prefix_ids, stretch.token_ids, start=stretch.start)
            for stretch in layout.stretches
        )
        is_bound = index.model.is_position_bound
        scaffolds = () if is_bound else tuple(_scaffolds(layout, prefix_ids))
        found = EncodedSchema(layout, passages, scaffolds)
        self._schemas[schema.name] = found
        return found

    def encode(
        self, schema: Schema | str | FilePath, on_progress: Callable[[int, int], None] | None = None
    ) -> KeepReport:
        """Compute and store what is missing of a schema. `gc` keeps it from now on.

        Parameters
        ----------
        schema
            As in `add`.
        on_progress
            Called with the number of records done, and of all records to do.

        Raises
        ------
        PMLError
            As `add` does, and if the model has too few positions for the schema.
        IndexLockedError, StoreError
            As `Passages.keep` does.
        """
        found = self.add(schema)
        self._check_room(found)
        storable = found.all_passages()
        if self.engine.index.model.is_position_bound and not found.layout.prefix_ids:
            # Its prompts lack the prefix that records are encoded after, so no record would fit.
            storable = []
        return self.passages.keep(KEPT_PREFIX + found.layout.schema.name, storable, on_progress)

    def _check_room(self, found: EncodedSchema) -> None:
        """Raise PMLError if a part cannot be encoded, or no prompt can be answered."""
        layout, schema = found.layout, found.layout.schema
        index = self.engine.index
        holds = f"{index.model.name} holds {index.model.max_positions:,}"
        room = index.model.max_positions - len(layout.prefix_ids or index.prefix_ids)
        for stretch in layout.stretches:
            is_beyond = index.model.is_position_bound and stretch.end > index.model.max_positions
            if len(stretch.token_ids) > room or is_beyond:
                owner = schema.modules[stretch.path] if stretch.path else schema
                where = f"module {'/'.join(stretch.path)!r}" if stretch.path else "the schema"
                raise owner.location.error(
                    f"text of {where} takes {len(stretch.token_ids):,} positions up to "
                    f"{stretch.end:,}, and {holds}",
                    "shorten it, or use a model with a longer context",
                )
        for scaffold in schema.scaffolds:
            members = dict(found.scaffolds).get(frozenset(scaffold.paths), {})
            length = sum(len(passage.token_ids) for passage in members.values())
            if length > room:
                raise scaffold.location.error(
                    f"a scaffold of {length:,} tokens in all, and {holds}", "give it fewer modules"
                )
        # Text outside modules is in every prompt, and the answer needs one position.
        end = max((one.end for one in layout.stretches if not one.path), default=0)
        if end >= index.model.max_positions:
            raise schema.location.error(
                f"every prompt of this schema reaches position {end:,}, and {holds} with at least "
                "one to answer in",
                "shorten modules, make some of them a union, or use a model with a longer context",
            )

    def place(self, prompt: str | FilePath | Prompt) -> PlacedPrompt:
        """Return a prompt as `KVEngine` takes it.

        Parameters
        ----------
        prompt
            A prompt's path or markup, or a parsed prompt.

        Raises
        ------
        PMLError
            If it is wrong.
        ParameterError
            If its schema was not added.
        """
        name = self.schema_of(prompt)
        found = self._schemas.get(name)
        if found is None:
            known = ", ".join(sorted(self._schemas)) or "none"
            raise ParameterError(f"schema {shown(name)} was not added; known: {known}")
        if not isinstance(prompt, Prompt):
            prompt = parse_prompt(prompt, found.layout.schema)
        pieces = place_prompt(
            found.layout, prompt, self.engine.index.tokenizer, self.engine.index.control
        )
        chosen = _choose_scaffolds(found, prompt)
        passages = [chosen.get(number, own) for number, own in enumerate(found.passages)]
        is_bound = self.engine.index.model.is_position_bound
        layout = as_layout(found.layout, pieces, passages, is_bound)
        return PlacedPrompt(layout, lambda number, _: self.passages.open(passages[int(number)]))

    @staticmethod
    def schema_of(prompt: str | FilePath | Prompt) -> str:
        """Return the name of a prompt's schema. Raises PMLError."""
        return prompt.schema.name if isinstance(prompt, Prompt) else schema_name(prompt)

    def generate(self, prompt: str | FilePath | Prompt, **options: Any) -> Answer:
        """Answer a prompt. Options are as in `KVEngine.generate`."""
        return self.engine.generate(self.place(prompt), **options)

    def stream(self, prompt: str | FilePath | Prompt, **options: Any) -> Iterator[AnswerDelta]:
        """Answer a prompt piece by piece. Options are as in `KVEngine.generate`."""
        return self.engine.stream(self.place(prompt), **options)


def _scaffolds(
    layout: SchemaLayout, prefix_ids: tuple[int, ...]
) -> Iterator[tuple[frozenset[Path], dict[int, Passage]]]:
    """Yield each scaffold's modules, with their stretches to be encoded one after the other."""
    for scaffold in layout.schema.scaffolds:
        members: dict[int, Passage] = {}
        before: tuple[int, ...] = ()
        position = None
        for number, stretch in enumerate(layout.stretches):
            if stretch.path not in scaffold.paths or not stretch.is_cached:
                continue
            if position is None:
                position = stretch.start
            members[number] = Passage(prefix_ids, stretch.token_ids, before, position)
            before += stretch.token_ids
            position += len(stretch.token_ids)
        if len(members) > 1:
            yield frozenset(scaffold.paths), members


def _choose_scaffolds(found: EncodedSchema, prompt: Prompt) -> dict[int, Passage]:
    """Return the passages of stretches whose scaffold's modules are all imported.

    If scaffolds overlap, the larger one counts, then the earlier.
    """
    imported = {one.path: one for one in prompt.body.all()}
    chosen: dict[int, Passage] = {}
    for paths, members in sorted(found.scaffolds, key=lambda one: -len(one[1])):
        if paths <= imported.keys() and not chosen.keys() & members.keys():
            chosen |= members
    return chosen
