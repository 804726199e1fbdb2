"""Options that several commands share, so that they read the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# The panels of --help. An entry of the last is a setting, not an option (`kvrag.cli.settings`).
EVERYDAY = "Everyday"
TUNING = "Tuning"
RESEARCH = "Research"


def _folder(text: str) -> Path:
    if not text.strip():
        # As a path it would be the working directory.
        raise typer.BadParameter("expected a folder, found an empty path")
    return Path(text)


IndexOption = Annotated[
    Path,
    typer.Option("--index", "-i", metavar="DIR", parser=_folder, help="Folder of the index."),
]
OtherIndexOption = Annotated[
    Path | None,
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
        "Default: the one the index was made with.",
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
CodecOption = Annotated[
    str,
    typer.Option(
        help="How KV is stored: raw, lossless, cachegen:1 to cachegen:4, or transform:BITS or "
        "stream:BITS with any number of bits per element."
    ),
]
ProfileOption = Annotated[
    Path | None,
    typer.Option(
        help="File of a codec profile ('kvrag profile --out'). Default: one is fitted.",
        rich_help_panel=TUNING,
        show_default=False,
    ),
]
StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        help="Where KV is kept: file:PATH, redis://HOST/DB, s3://BUCKET/PREFIX, gs://, az://, "
        "http://HOST:PORT ('kvrag serve-kv'), or tiered:URL|URL; any URL may end with "
        "'?limit=20GB'. "
        "Default: the index's own.",
        show_default=False,
    ),
]
StoreSetting = Annotated[
    str | None,
    typer.Option(
        "--store",
        help="URL of the index's store in place of the one recorded, such as one with "
        "'key_file=PATH' of a key that has moved.",
        rich_help_panel=RESEARCH,
        show_default=False,
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document and nothing else.")
]
TopKOption = Annotated[int, typer.Option("-k", min=1, help="Chunks to retrieve.")]
PolicyOption = Annotated[
    str,
    typer.Option(
        help="How reused chunks are repaired: none, boundary (first tokens of each chunk), seam "
        "(first and last), deviation (tokens whose KV is furthest off), gradual (the same, chosen "
        "on every layer), query (tokens the question looks at), two_stage (looked at and off), "
        "random, or auto (by 'kvrag calibrate'). Parameters follow colons: query:depth=0.5."
    ),
]
RatioOption = Annotated[
    float | None,
    typer.Option(
        help="Share of reused tokens that is recomputed, 0 to 1; of 'auto' the greatest.",
        show_default=False,
    ),
]
BoundaryTokensOption = Annotated[
    int | None,
    typer.Option(
        "--boundary-tokens",
        help="In place of 'ratio', tokens that 'boundary' and 'seam' recompute of each chunk.",
        rich_help_panel=RESEARCH,
        show_default=False,
    ),
]
EvictionOption = Annotated[
    str | None,
    typer.Option(
        "--eviction",
        metavar="POLICY",
        help="What to forget while the answer is written: corm (keys that no recent query needs), "
        "streaming (all but the first and last), h2o or snapkv (what is looked at least). "
        "Parameters follow colons: corm:window=256:recent=256. Default: nothing.",
        rich_help_panel=TUNING,
        show_default=False,
    ),
]
LinksOption = Annotated[
    str | None,
    typer.Option(
        "--links",
        metavar="FILE|off",
        help="File of link tokens ('kvrag train links'), which are put after each reused chunk, or "
        "'off'. Default: links.safetensors in the model's folder, if it is there.",
        rich_help_panel=TUNING,
        show_default=False,
    ),
]
TTFTOption = Annotated[
    float | None,
    typer.Option(
        "--ttft",
        metavar="SECONDS",
        help="Time to first token to stream stored KV towards: as much of each chunk is loaded as "
        "there is time for. Default: all of it.",
        rich_help_panel=TUNING,
        show_default=False,
    ),
]
NamedModelOption = Annotated[
    str, typer.Option("--model", "-m", help="Folder, hub name or 'kvrag-tiny'.")
]
BenchModelOption = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Folder, hub name or 'kvrag-tiny'.", show_default=False),
]
ShapeOption = Annotated[
    str, typer.Option(help="Without --model: random weights in the shape of this model.")
]
QuestionTokensOption = Annotated[
    int, typer.Option(min=1, help="Tokens of the question.", rich_help_panel=TUNING)
]
RepeatsOption = Annotated[
    int, typer.Option(min=1, help="Runs; the median counts.", rich_help_panel=TUNING)
]
MaxTokensOption = Annotated[int, typer.Option("--max-tokens", help="Longest answer, in tokens.")]
TemperatureOption = Annotated[
    float,
    typer.Option(
        help="0 takes the likeliest token; above, tokens are drawn.", rich_help_panel=TUNING
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        help="Makes drawn answers repeatable.", rich_help_panel=RESEARCH, show_default=False
    ),
]
NoChatOption = Annotated[
    bool,
    typer.Option(
        "--no-chat",
        help="A plain prompt even where the model has a chat template.",
        rich_help_panel=RESEARCH,
    ),
]


DEFAULT_TOP_K = 4
DEFAULT_MAX_TOKENS = 256
