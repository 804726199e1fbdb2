"""Options that several benches, and the commands of `kvrag train`, have in common."""

from __future__ import annotations

from typing import Annotated

import typer

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
ChunkCodecOption = Annotated[str, typer.Option(help="What the chunks are stored with.")]
MemoryOption = Annotated[
    str,
    typer.Option(
        help="Where earlier runs leave the chunks' KV on a card: none, pinned (memory) or card."
    ),
]
QuestionTokensOption = Annotated[int, typer.Option(min=1, help="Tokens in the question.")]
ProcessorTimeOption = Annotated[
    bool,
    typer.Option(help="Count processor time: for a machine that others use too (one thread)."),
]
RepeatsOption = Annotated[
    int,
    typer.Option(min=1, help="Number of runs; the median is reported."),
]
