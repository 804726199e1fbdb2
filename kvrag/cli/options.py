"""Options that several commands share, one by one and in groups.

A group is a dataclass whose fields are options. A command has it as one parameter, and
`kvrag.cli.command` lists its options one by one. Options that are hidden from ``--help`` are on
`kvrag config COMMAND`, and mostly set in `kvrag.toml`.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import Field, dataclass, fields, make_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from kvrag import arguments
from kvrag.arguments import COMPUTES, check_compute
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
from kvrag.optiontable import Option, kind_of, parse_spec

if TYPE_CHECKING:
    from kvrag.engine.asking import Asking
    from kvrag.engine.engine import KVEngine
    from kvrag.ingest.index import Index


def setting(*names: str, **given: Any) -> Any:
    """Return an option that ``--help`` leaves out; `kvrag config COMMAND` lists it."""
    return typer.Option(*names, hidden=True, **given)


def _folder(text: str | Path) -> Path | str:
    if not str(text).strip():
        # An empty path would mean the working directory.
        raise typer.BadParameter("expected a folder, found an empty path")
    return str(text) if arguments.is_url(text) else Path(text)


@contextmanager
def _refusing(after: str = "") -> Iterator[None]:
    """Say of an option what a check says, and what is expected."""
    try:
        yield
    except (ValueError, RecursionError) as error:
        hint = "" if isinstance(error, ParameterError) or not after else "not JSON: "
        raise typer.BadParameter(f"{hint}{error}{after}") from error


def _checked(check: Callable[[str], object]) -> Callable[[str], str]:
    """Return a parser of an option that a function checks, by a ValueError."""

    def parse(text: str) -> str:
        with _refusing():
            check(text)
        return text

    return parse


def above_zero(text: str | float, most: float | None = None) -> float:
    """Return an option's number above 0. Raises `typer.BadParameter`."""
    try:
        return arguments.number(float(text), "", most=most, above=0.0)
    except ValueError as error:
        expected = "expected a number above 0" + ("" if most is None else f", at most {most:g}")
        raise typer.BadParameter(f"{expected}, found {arguments.shown(text)}") from error


def _filter(text: str) -> dict[str, Any]:
    from kvrag.ingest.filters import read_filter

    with _refusing('; expected a filter such as \'{"year": {"$gte": 2020}}\''):
        found: dict[str, Any] = json.loads(text)
        read_filter(found)
    return found


FilterOption = Annotated[
    Any,
    typer.Option(
        "--filter",
        metavar="JSON",
        parser=_filter,
        help='Find only chunks with this metadata, such as \'{"source": {"$in": ["a.md"]}}\'.',
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
ModelOption = Annotated[
    str | None,
    setting(
        "--model",
        "-m",
        help="Folder or hub name of a Hugging Face decoder, or 'kvrag-tiny'. "
        "Default: the index's model.",
    ),
]
DeviceOption = Annotated[
    str | None, typer.Option(help="Where the model runs, such as 'cuda'. Default: cpu.")
]


ComputeOption = Annotated[
    str | None,
    setting(
        parser=_checked(check_compute),
        metavar="|".join(COMPUTES),
        help="What the model's linear layers compute in on the CPU, for prompts; auto measures and "
        "takes the fastest. Default: the type of its weights.",
    ),
]
ProfileOption = Annotated[
    Path | None,
    setting(help="File of a codec profile, from 'kvrag profile --out'. Default: fit a new one."),
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
    ),
]
StoreSetting = Annotated[
    str | None,
    setting(
        "--store",
        help="Store URL to use instead of the recorded one, for example with 'key_file=PATH' after "
        "the key file has moved.",
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
    with _refusing():
        return parse_bytes(str(text))


# -- options of answers, from the table -------------------------------------------------------

_SHOWN = ("policy", "ratio", "max_tokens", "embedding", "chunk_tokens", "codec")
# Everything else about it is checked with the engine, which takes seconds to import.
_PARSERS = {"policy": _checked(lambda text: parse_spec(text, "policy", POLICIES, [AUTO_POLICY]))}
_METAVARS = {
    "policy": "NAME[:KEY=VALUE]",
    "eviction": "POLICY",
    "links": "FILE|off",
    "context": "NAME[:TOKENS]",
}
_USUAL = {"policy": DEFAULT_POLICY, "max_tokens": DEFAULT_MAX_TOKENS}
# Larger bounds say nothing.
_FAR = 2**31 - 1


def of_table(one: Field[Any], default: Any) -> Any:
    """Return an option as Typer's."""
    rule: Option = one.metadata["option"]
    most = None if rule.most is None or rule.most >= _FAR else rule.most
    given: dict[str, Any] = {"min": rule.least, "max": most, "metavar": _METAVARS.get(one.name)}
    if rule.is_bytes:
        given = {"metavar": "BYTES", "parser": _memory}
    elif rule.above is not None:
        given = {"metavar": "NUMBER", "parser": partial(above_zero, most=rule.most)}
    elif one.name in _PARSERS:
        given["parser"] = _PARSERS[one.name]
    text = rule.text.replace("``", "").replace("`", "'").replace("[", "\\[")
    return typer.Option(
        help=text, hidden=one.name not in _SHOWN, show_default=default is not None, **given
    )


def annotated(one: Field[Any], default: Any) -> Any:
    """Return the type of a command's parameter that is an option of a table."""
    kind: Any = Any if one.metadata["option"].is_bytes else kind_of(one)
    return Annotated[kind | None if default is None else kind, of_table(one, default)]


_ANSWERS = everywhere(AnswerOptions, EngineOptions)
if TYPE_CHECKING:
    PolicyOption = str
    RatioOption = float | None
    MaxTokensOption = int
else:
    PolicyOption, RatioOption, MaxTokensOption = (
        annotated(_ANSWERS[name], _USUAL.get(name)) for name in ("policy", "ratio", "max_tokens")
    )


def group(name: str, base: type, options: Iterable[Field[Any]], **usual: Any) -> Any:
    """Return a group whose fields are options of tables; `usual` are other defaults of them."""
    defaults = {one.name: usual.get(one.name, one.default) for one in options}
    made = [(one.name, annotated(one, defaults[one.name]), defaults[one.name]) for one in options]
    return make_dataclass(name, made, bases=(base,), frozen=True)


@contextmanager
def importing() -> Iterator[None]:
    """Collect no garbage while PyTorch is imported, and never what that made: 0.15 s."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if "triton" not in sys.modules:  # it would complain at the exit
                gc.freeze()
            gc.enable()


class Options:
    """The values of a group, by name."""

    @property
    def values(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(cast("Any", self))}


class _Engine(Options):
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
        with importing():
            from kvrag.engine.engine import KVEngine

        return KVEngine(index, **{"max_batch": 1, **self.values, **more})


class _Sampled(Options):
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
    _sampling = everywhere(Sampling)
    _answering = [one for one in _ANSWERS.values() if one.name not in _sampling]
    Answering = group("Answering", _Engine, _answering, **_USUAL)
    Sampled = group("Sampled", _Sampled, _sampling.values())


# -- other groups -----------------------------------------------------------------------------

RerankOption = Annotated[
    str | None,
    setting(
        "--rerank",
        metavar="MODEL",
        help="Cross-encoder of sentence-transformers that reads the 30 best chunks and orders "
        "them: its folder or hub name. Default: none.",
    ),
]
EmbeddingOption = Annotated[
    str | None,
    setting(
        "--embedding",
        metavar="MODULE:NAME",
        help="The embedding that the index was made with, if it was made with an object: a "
        "module and its attribute, an embedding or a function that returns one.",
    ),
]
NoChatOption = Annotated[
    bool, setting("--no-chat", help="Use the bare prompt: no chat template, no solved examples.")
]


@dataclass(frozen=True)
class Opening(Options):
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

        return open_index(**self.values)


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

        with importing():
            from kvrag.engine.asking import Asking

        return Asking(
            self.k, self.filter, load_reranker(self.rerank), use_chat_template=not self.no_chat
        )
