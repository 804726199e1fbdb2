"""`kvrag train writer`: an adapter that acts while chunks are encoded."""

from __future__ import annotations

from typing import Annotated

import typer

from kvrag import arguments
from kvrag.cli import options as o
from kvrag_bench.cli import options as b
from kvrag_train.cli import options as t
from kvrag_train.cli import run as training_run


def train_writer(
    out: t.RunOption,
    model: b.NamedModelOption = "kvrag-tiny",
    data: t.TrainingDataOption = "real",
    context: Annotated[
        str,
        typer.Option(
            metavar="similar[:TOKENS]|filler[:TOKENS]",
            help="What documents are encoded after: the --context of the index that the writer is "
            "for.",
        ),
    ] = "similar",
    labels: Annotated[
        bool,
        typer.Option(
            "--labels",
            help="Distil along the data's answers instead of full prefill's own.",
        ),
    ] = False,
    answer_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of full prefill's own answers.")
    ] = 16,
    steps: t.StepsOption = 400,
    warmup_steps: t.WarmupOption = 20,
    rows: t.RowsOption = 4,
    questions: t.QuestionsOption = 2,
    learning_rate: Annotated[float, typer.Option(help="Peak rate.")] = 4e-4,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the adapter.")] = 16,
    evaluate_every: t.EvaluateEveryOption = 100,
    evaluate_questions: t.EvaluateQuestionsOption = 50,
    seed: t.TrainingSeedOption = 0,
    device: o.DeviceOption = None,
    precision: t.PrecisionOption = "auto",
    as_json: o.JsonOption = False,
) -> None:
    """Train a writer, which brings stored chunks closer to what full prefill makes of them.

    It acts only while 'kvrag ingest --writer' encodes chunks; the model stays as it is. Writes
    log.jsonl, checkpoint.safetensors and writer.safetensors into --out. If you start it again,
    the run continues.
    """
    from kvrag.fusion.links import WRITER
    from kvrag_train.links.options import LinkTrainingOptions

    options = LinkTrainingOptions(
        out=arguments.path(out, "--out"),
        model=model,
        data=data,
        mode="frozen",
        way=WRITER,
        loss="distill",
        context=context,
        teacher_answers=not labels,
        answer_tokens=answer_tokens,
        rank=rank,
        steps=steps,
        warmup_steps=warmup_steps,
        rows=rows,
        questions=questions,
        learning_rate=learning_rate,
        evaluate_every=evaluate_every,
        evaluate_questions=evaluate_questions,
        seed=seed,
        device=device,
        precision=precision,
    )
    training_run.run(options, as_json)
