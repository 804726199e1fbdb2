"""Options that several commands share, one by one and in groups.

A group is a dataclass whose fields are options. A command has it as one parameter, and
`kvrag.cli.command` lists its options one by one. Options that are hidden from ``--help`` are on
`kvrag config COMMAND`, and mostly set in `kvrag.toml`.
"""

from __future__ import annotations

import json
from collections.abc import Container
from dataclasses import Field, dataclass, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from kvrag import arguments
from kvrag.engine.options import (
    DEFAULT_MAX_TOKENS,
    AnswerOptions,
    EngineOptions,
    Sampling,
    everywhere,
)
from kvrag.errors import ParameterError
from kvrag.fusion.policies import AUTO_POLICY, DEFAULT_POLICY
from kvrag.fusion.policies.registry import POLICIES
from kvrag.models.precision import COMPUTES, check_compute
from kvrag.optiontable import Option, kind_of
from kvrag.parameters import parse_spec

if TYPE_CHECKING:
    from kvrag.engine.asking import Asking
    from kvrag.engine.engine import KVEngine
    from kvrag.ingest.index import Index


def _folder(text: str | Path) -> Path | str:
    if not str(text).strip():
        # An empty path would mean the working directory.
        raise typer.BadParameter("expected a folder, found an empty path")
    return str(text) if arguments.is_url(text) else Path(text)


def _policy(text: str) -> str:
    # Everything else about it is checked with the engine, which takes seconds to import.
    try:
        parse_spec(text, "policy", POLICIES, [AUTO_POLICY])
    except ParameterError as error:
        raise typer.BadParameter(str(error)) from error
    return text


def above_zero(text: str | float) -> float:
    """Return an option's number above 0. Raises `typer.BadParameter`."""
    try:
        return arguments.number(float(text), "", above=0.0)
    except ValueError as error:
        found = arguments.shown(text)
        raise typer.BadParameter(f"expected a number above 0, found {found}") from error


def _filter(text: str) -> dict[str, Any]:
    from kvrag.ingest.filters import read_filter

    try:
        found: dict[str, Any] = json.loads(text)
        read_filter(found)
    except (ValueError, RecursionError) as error:
        hint = "" if isinstance(error, ParameterError) else "not JSON: "
        raise typer.BadParameter(
            f'{hint}{error}; expected a filter such as \'{{"year": {{"$gte": 2020}}}}\''
        ) from error
    return found


FilterOption = Annotated[
    Any,
    typer.Option(
        "--filter",
        metavar="JSON",
        parser=_filter,
        help='Find only chunks with this metadata, such as \'{"source": {"$in": ["a.md"]}}\'.',
        show_default=False,
    ),
]
DEFAULT_INDEX = Path("kvrag-index")
DEFAULT_TOP_K = 4
IndexOption = Annotated[
    Any,  # Path | str
    typer.Option(
        "--index",
        "-i",
        metavar="DIR|URL",
        parser=_folder,
        help="Folder of the index, or the URL of a shared one, such as s3://BUCKET/INDEX.",
    ),
]
OtherIndexOption = Annotated[
    Any,  # Path | str | None
    typer.Option(
        "--index",
        "-i",
        metavar="DIR",
        parser=_folder,
        help="Folder of an index.",
        show_default=False,
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="Folder or hub name of a Hugging Face decoder, or 'kvrag-tiny'. "
        "Default: the index's model.",
        hidden=True,
        show_default=False,
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        help="Where the model runs, such as 'cuda'. Default: cpu.",
        show_default=False,
    ),
]


def _compute(text: str) -> str:
    try:
        check_compute(text)
    except ParameterError as error:
        raise typer.BadParameter(str(error)) from error
    return text


ComputeOption = Annotated[
    str | None,
    typer.Option(
        parser=_compute,
        metavar="|".join(COMPUTES),
        help="What the model's linear layers compute in on the CPU, for prompts; auto measures and "
        "takes the fastest. Default: the type of its weights.",
        hidden=True,
        show_default=False,
    ),
]
CodecOption = Annotated[
    str,
    typer.Option(
        help="How KV is stored: raw, raw-heads, lossless, cachegen:1 to cachegen:4, "
        "transform:BITS or stream:BITS, where BITS is any number of bits per element."
    ),
]
ProfileOption = Annotated[
    Path | None,
    typer.Option(
        help="File of a codec profile, from 'kvrag profile --out'. Default: fit a new one.",
        hidden=True,
        show_default=False,
    ),
]
StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        help="Where KV is stored: file:PATH, redis://HOST/DB, s3://BUCKET/PREFIX, gs://, az://, "
        "http://HOST/PATH (a web server), or tiered:URL|URL. Any URL may end with "
        "'?limit=20GB'. "
        "Default: the index's own store.",
        show_default=False,
    ),
]
StoreSetting = Annotated[
    str | None,
    typer.Option(
        "--store",
        help="Store URL to use instead of the recorded one, for example with 'key_file=PATH' after "
        "the key file has moved.",
        hidden=True,
        show_default=False,
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document and nothing else.")
]
TopKOption = Annotated[int, typer.Option("-k", min=1, help="Number of chunks to retrieve.")]


def _memory(text: str | int) -> int:
    from kvrag.store.registry import parse_bytes

    if str(text).strip() == "0":
        return 0
    try:
        return parse_bytes(str(text))
    except ValueError as error:
        raise typer.BadParameter(f"{error}; 0 keeps nothing") from error


# -- options of answers, from the table -------------------------------------------------------

_SHOWN = ("policy", "ratio", "max_tokens")
_PARSERS = {"policy": _policy}
_METAVARS = {"policy": "NAME[:KEY=VALUE]", "eviction": "POLICY", "links": "FILE|off"}
_USUAL = {"policy": DEFAULT_POLICY, "max_tokens": DEFAULT_MAX_TOKENS}
# Larger bounds say nothing.
_FAR = 2**31 - 1


def of_table(one: Field[Any]) -> Any:
    """Return an option of answers as Typer's."""
    rule: Option = one.metadata["option"]
    most = None if rule.most is None or rule.most >= _FAR else rule.most
    given: dict[str, Any] = {"min": rule.least, "max": most, "metavar": _METAVARS.get(one.name)}
    if rule.is_bytes:
        given = {"metavar": "BYTES", "parser": _memory}
    elif rule.above is not None:
        given = {"metavar": "NUMBER", "parser": above_zero if rule.most is None else _share}
    elif one.name in _PARSERS:
        given["parser"] = _PARSERS[one.name]
    text = rule.text.replace("``", "").replace("`", "'").replace("[", "\\[")
    default = _USUAL.get(one.name, one.default)
    return typer.Option(
        help=text, hidden=one.name not in _SHOWN, show_default=default is not None, **given
    )


def _share(text: str | float) -> float:
    try:
        return arguments.number(float(text), "", above=0.0, most=1.0)
    except ValueError as error:
        found = arguments.shown(text)
        raise typer.BadParameter(f"expected a number above 0, at most 1, found {found}") from error


_ANSWERS = everywhere(AnswerOptions, EngineOptions)
PolicyOption = Annotated[str, of_table(_ANSWERS["policy"])]
RatioOption = Annotated[float | None, of_table(_ANSWERS["ratio"])]
MaxTokensOption = Annotated[int, of_table(_ANSWERS["max_tokens"])]


def _group(name: str, base: type, *tables: Any, apart: Container[str] = ()) -> Any:
    """Return a group whose fields are the options of tables that every door has."""
    made = []
    for one in everywhere(*tables).values():
        default = _USUAL.get(one.name, one.default)
        kind: Any = Any if one.metadata["option"].is_bytes else kind_of(one)
        kind = kind | None if default is None else kind
        if one.name not in apart:
            made.append((one.name, Annotated[kind, of_table(one)], default))
    return make_dataclass(name, made, bases=(base,), frozen=True)


class _Options:
    """The values of a group, by name."""

    @property
    def values(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(cast(Any, self))}


class _Engine(_Options):
    """What makes an engine of its options."""

    def engine(self, index: Index, **more: Any) -> KVEngine:
        """Return an engine with these options; they are checked before any model is loaded.

        Raises
        ------
        ParameterError
            When a value is out of range, or the policy or one of its parameters is unknown.
        LinksError
            When the links file cannot be read.
        """
        from kvrag.engine.engine import KVEngine

        return KVEngine(index, **{"max_batch": 1, **self.values, **more})


class _Sampled(_Options):
    """Checks its options, before any model is loaded."""

    def __post_init__(self) -> None:
        Sampling(**self.values)


if TYPE_CHECKING:

    class Answering(_Engine):
        """Options of an engine and the defaults of its answers."""

        policy: str
        ratio: float | None
        boundary_tokens: int | None
        max_tokens: int

    class Sampled(_Sampled):
        """How tokens are sampled."""
else:
    Answering = _group(
        "Answering", _Engine, AnswerOptions, EngineOptions, apart=everywhere(Sampling)
    )
    Sampled = _group("Sampled", _Sampled, Sampling)


# -- other groups -----------------------------------------------------------------------------

RerankOption = Annotated[
    str | None,
    typer.Option(
        "--rerank",
        metavar="MODEL",
        help="Cross-encoder of sentence-transformers that reads the 30 best chunks and orders "
        "them: its folder or hub name. Default: none.",
        hidden=True,
        show_default=False,
    ),
]
EmbeddingOption = Annotated[
    str | None,
    typer.Option(
        "--embedding",
        metavar="MODULE:NAME",
        help="The embedding that the index was made with, if it was made with an object: a "
        "module and its attribute, an embedding or a function that returns one.",
        hidden=True,
        show_default=False,
    ),
]
NoChatOption = Annotated[
    bool,
    typer.Option(
        "--no-chat",
        help="Use the bare prompt: no chat template, no solved examples.",
        hidden=True,
    ),
]


@dataclass(frozen=True)
class Opening:
    """Which index, and what it is opened with."""

    index: IndexOption = DEFAULT_INDEX
    model: ModelOption = None
    device: DeviceOption = None
    compute: ComputeOption = None
    store: StoreOption = None
    embedding: EmbeddingOption = None

    def open(self) -> Index:
        """Open the index without loading its model."""
        from kvrag.cli.opening import open_index

        return open_index(
            self.index,
            self.model,
            self.device,
            self.store,
            embedding=self.embedding,
            compute=self.compute,
        )


@dataclass(frozen=True)
class Searching:
    """What is found for a question, and how it is asked."""

    k: TopKOption = DEFAULT_TOP_K
    filter: FilterOption = None
    rerank: RerankOption = None
    no_chat: NoChatOption = False

    def asking(self) -> Asking:
        """Return how questions are asked; loads the reranker."""
        from kvrag.cli.opening import load_reranker
        from kvrag.engine.asking import Asking

        return Asking(
            self.k,
            self.filter,
            load_reranker(self.rerank),
            use_chat_template=not self.no_chat,
        )
