"""Options that the commands of `kvrag train` have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunOption = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="Folder of the run; an existing run continues.")
]
TrainingDataOption = Annotated[
    str,
    typer.Option(
        help="'generated' (the training split of the corpus generator), 'real' (questions over "
        "invented people and firms in prose, for language models), a JSON file in MuSiQue layout, "
        "a JSONL file in LongBench layout, or a folder of pages, whose headings and first "
        "sentences are asked for."
    ),
]
LossOption = Annotated[
    str,
    typer.Option(help="labels, or distill: the untouched model's full prefill is the teacher."),
]
StepsOption = Annotated[int, typer.Option(min=1, help="Optimizer steps.")]
WarmupOption = Annotated[int, typer.Option(min=0, help="Steps over which the rate rises.")]
RowsOption = Annotated[int, typer.Option(min=1, help="Sets of documents in each step.")]
QuestionsOption = Annotated[
    int,
    typer.Option(min=1, help="Most questions about each set."),
]
EvaluateEveryOption = Annotated[
    int,
    typer.Option(min=1, help="Steps between scores on questions held out."),
]
EvaluateQuestionsOption = Annotated[int, typer.Option(min=1, help="Number of those questions.")]
TrainingSeedOption = Annotated[int, typer.Option(help="Seed of everything random.")]
PrecisionOption = Annotated[
    str,
    typer.Option(help="Arithmetic: float32, bfloat16, or auto (bfloat16 on GPUs that have it)."),
]
CheckpointingOption = Annotated[
    bool,
    typer.Option(
        "--gradient-checkpointing",
        help="Keep less for the backward pass and compute layers twice; not with an adapter.",
    ),
]
