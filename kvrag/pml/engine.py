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

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from kvrag.arguments import shown
from kvrag.engine.answer import Answer, AnswerDelta
from kvrag.engine.base import Engine
from kvrag.engine.request import PlacedPrompt
from kvrag.errors import ParameterError
from kvrag.ingest.passages import KeepReport, Passage, Passages
from kvrag.pml.layout import SchemaLayout, lay_out_schema
from kvrag.pml.parser import parse_schema
from kvrag.pml.placing import as_layout, place_prompt
from kvrag.pml.prompt import Prompt, parse_prompt, schema_name
from kvrag.pml.schema import Path, Schema
from kvrag.process import OfProcess

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
        stretches = self.layout.stretches
        found = [
            passage
            for stretch, passage in zip(stretches, self.passages, strict=True)
            if stretch.is_cached
        ]
        for _, members in self.scaffolds:
            found += members.values()
        return found


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
        self,
        schema: Schema | str | FilePath,
        on_progress: Callable[[int, int], None] | None = None,
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
