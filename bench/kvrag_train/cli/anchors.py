"""`kvrag train anchors`: a model that writes chunks into fewer rows, and reads them."""

from __future__ import annotations

from typing import Annotated

import typer

from kvrag import arguments
from kvrag.cli import options as o
from kvrag_bench.cli import lists
from kvrag_bench.cli import options as b
from kvrag_train.cli import options as t
from kvrag_train.cli import run as training_run


def train_anchors(
    out: t.RunOption,
    model: b.NamedModelOption = "kvrag-tiny",
    data: t.TrainingDataOption = "generated",
    rates: Annotated[
        str,
        typer.Option(
            help="Shares of a chunk's rows to leave out, with commas; one model serves all."
        ),
    ] = "0.5,0.75",
    loss: t.LossOption = "labels",
    steps: t.StepsOption = 600,
    warmup_steps: t.WarmupOption = 20,
    rows: t.RowsOption = 10,
    questions: t.QuestionsOption = 14,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            help="Peak rate of the model's weights. Default: 1e-3, for small models; the KVLink "
            "paper has 5e-6 for 1 to 8 billion parameters.",
            show_default=False,
        ),
    ] = None,
    anchor_learning_rate: Annotated[
        float,
        typer.Option(help="Peak rate of the anchors' own embeddings."),
    ] = 5e-3,
    plain_share: Annotated[
        float,
        typer.Option(help="Share of plain prompts, so that the model stays good at them."),
    ] = 0.3,
    keep_order: Annotated[
        bool,
        typer.Option("--keep-order", help="Do not shuffle the documents of a file."),
    ] = False,
    evaluate_every: t.EvaluateEveryOption = 100,
    evaluate_questions: t.EvaluateQuestionsOption = 300,
    seed: t.TrainingSeedOption = 0,
    device: o.DeviceOption = None,
    precision: t.PrecisionOption = "auto",
    gradient_checkpointing: t.CheckpointingOption = False,
    as_json: o.JsonOption = False,
) -> None:
    """Train a model to write a chunk into few anchors, and store only their KV.

    Writes a model folder with anchors.safetensors into --out, beside log.jsonl and
    checkpoint.safetensors. If you start it again, the run continues. 'kvrag ingest --model DIR
    --compress anchors:0.5' uses the model; 'kvrag train links --model DIR --anchors
    0.5,0.75' trains links on it.
    """
    from kvrag_train.links.options import LinkTrainingOptions

    options = LinkTrainingOptions(
        out=arguments.path(out, "--out"),
        model=model,
        data=data,
        num_links=0,
        anchor_rates=lists.shares(rates, "--rates"),
        loss=loss,
        steps=steps,
        warmup_steps=warmup_steps,
        rows=rows,
        questions=questions,
        plain_share=plain_share,
        learning_rate=learning_rate,
        link_learning_rate=anchor_learning_rate,
        seed=seed,
        evaluate_every=evaluate_every,
        evaluate_questions=evaluate_questions,
        keep_order=keep_order,
        device=device,
        precision=precision,
        gradient_checkpointing=gradient_checkpointing,
    )
    training_run.run(options, as_json)
