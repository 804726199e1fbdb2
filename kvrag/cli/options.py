"""Options that several commands share, so that they read the same everywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kvrag import arguments
from kvrag.errors import ParameterError
from kvrag.fusion.policies import AUTO_POLICY
from kvrag.fusion.policies.registry import POLICIES
from kvrag.models.precision import COMPUTES, check_compute
from kvrag.parameters import parse_spec

# The panels of --help. Options of the last panel are settings only (`kvrag.cli.settings`).
EVERYDAY = "Everyday"
TUNING = "Tuning"
RESEARCH = "Research"


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
        rich_help_panel=TUNING,
        show_default=False,
    ),
]
DEFAULT_INDEX = Path("kvrag-index")
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
        rich_help_panel=TUNING,
        show_default=False,
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        help="Where the model runs, such as 'cuda'. Default: cpu.",
        rich_help_panel=TUNING,
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
        rich_help_panel=TUNING,
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
        rich_help_panel=TUNING,
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
        rich_help_panel=RESEARCH,
        show_default=False,
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document and nothing else.")
]
TopKOption = Annotated[int, typer.Option("-k", min=1, help="Number of chunks to retrieve.")]
PolicyOption = Annotated[
    str,
    typer.Option(
        metavar="NAME[:KEY=VALUE]",
        parser=_policy,
        help="Which tokens of reused chunks are recomputed: none, boundary (the first of each "
        "chunk), seam (first and last), deviation (those whose KV deviates most), gradual (the "
        "same, chosen again on every layer), query (those the question attends to), two_stage "
        "(attended to and deviating), random, or auto (uses the results of 'kvrag calibrate'). "
        "Parameters follow colons: query:depth=0.5.",
    ),
]
RatioOption = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1,
        help="Share of reused tokens to recompute, 0 to 1; for 'auto', the maximum.",
        show_default=False,
    ),
]
BoundaryTokensOption = Annotated[
    int | None,
    typer.Option(
        "--boundary-tokens",
        min=1,
        help="Tokens of each chunk that 'boundary' and 'seam' recompute, instead of 'ratio'.",
        rich_help_panel=RESEARCH,
        show_default=False,
    ),
]
EvictionOption = Annotated[
    str | None,
    typer.Option(
        "--eviction",
        metavar="POLICY",
        help="Which KV to drop while the answer is generated: corm (keys that no recent query "
        "needs), streaming (all but the first and last tokens), h2o or snapkv (tokens with the "
        "least attention). Parameters follow colons: corm:window=256:recent=256. Default: none.",
        rich_help_panel=TUNING,
        show_default=False,
    ),
]
LinksOption = Annotated[
    str | None,
    typer.Option(
        "--links",
        metavar="FILE|off",
        help="File of link tokens, from 'kvrag train links', to insert after each reused chunk, or "
        "'off'. Default: links.safetensors in the model's folder, if it exists.",
        rich_help_panel=TUNING,
        show_default=False,
    ),
]
StorePatienceOption = Annotated[
    float | None,
    typer.Option(
        "--store-patience",
        metavar="SECONDS",
        parser=above_zero,
        help="How long a prompt waits for a stored chunk before it computes what is not loaded. "
        "Default: the price of computing, for stores on other machines.",
        rich_help_panel=TUNING,
        show_default=False,
    ),
]
NeverSlowerOption = Annotated[
    bool,
    typer.Option(
        "--never-slower/--no-never-slower",
        help="Whether a prompt is computed as a whole where that is as fast as taking stored KV.",
        rich_help_panel=RESEARCH,
    ),
]
TTFTOption = Annotated[
    float | None,
    typer.Option(
        "--ttft",
        metavar="SECONDS",
        parser=above_zero,
        help="Target time to the first token: kvrag loads as much of each chunk as it can in that "
        "time. Default: load everything.",
        rich_help_panel=TUNING,
        show_default=False,
    ),
]


def _memory(text: str | int) -> int:
    from kvrag.store.registry import parse_bytes

    if str(text).strip() == "0":
        return 0
    try:
        return parse_bytes(str(text))
    except ValueError as error:
        raise typer.BadParameter(f"{error}; 0 keeps nothing") from error


SessionBytesOption = Annotated[
    Any,
    typer.Option(
        "--session-bytes",
        metavar="BYTES",
        parser=_memory,
        help="Memory for the KV of earlier turns, such as 4GB; 0 keeps none. Default: 1 GiB.",
        rich_help_panel=TUNING,
        show_default=False,
    ),
]
SessionStoreBytesOption = Annotated[
    Any,
    typer.Option(
        "--session-store-bytes",
        metavar="BYTES",
        parser=_memory,
        help="Room in the index's store for the KV of earlier turns that memory has no room for, "
        "such as 20GB. Default: 0, nothing of a conversation is written.",
        rich_help_panel=TUNING,
        show_default=False,
    ),
]
RerankOption = Annotated[
    str | None,
    typer.Option(
        "--rerank",
        metavar="MODEL",
        help="Cross-encoder of sentence-transformers that reads the 30 best chunks and orders "
        "them: its folder or hub name. Default: none.",
        rich_help_panel=TUNING,
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
        rich_help_panel=TUNING,
        show_default=False,
    ),
]
MaxTokensOption = Annotated[
    int, typer.Option("--max-tokens", min=1, help="Maximum length of the answer, in tokens.")
]
TemperatureOption = Annotated[
    float,
    typer.Option(
        min=0,
        help="0 always takes the likeliest token; higher values sample.",
        rich_help_panel=TUNING,
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Makes sampled answers repeatable.",
        rich_help_panel=RESEARCH,
        show_default=False,
    ),
]
NoChatOption = Annotated[
    bool,
    typer.Option(
        "--no-chat",
        help="Use the bare prompt: no chat template, no solved examples.",
        rich_help_panel=RESEARCH,
    ),
]


DEFAULT_TOP_K = 4
DEFAULT_MAX_TOKENS = 256
