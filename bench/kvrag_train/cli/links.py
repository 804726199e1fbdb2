"""`kvrag train links`: link tokens for a model."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvrag import arguments
from kvrag.cli import options as o
from kvrag_bench.cli import options as b
from kvrag_train.cli import options as t
from kvrag_train.cli import run as training_run


def train_links(
    out: t.RunOption,
    model: b.NamedModelOption = "kvrag-tiny",
    data: t.TrainingDataOption = "generated",
    links: Annotated[int, typer.Option(min=1, max=256, help="Link tokens after each chunk.")] = 5,
    mode: Annotated[
        str,
        typer.Option(
            help="tuned: train the whole model, and write it to a folder with its links. frozen: "
            "leave the model, and every chunk stored with it, as they are."
        ),
    ] = "tuned",
    way: Annotated[
        str | None,
        typer.Option(
            help="What is trained over a frozen model: embeddings or adapter (low-rank additions "
            "to link, question and answer rows). Default: adapter.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        str,
        typer.Option(
            metavar="none|filler[:TOKENS]",
            help="What documents are encoded after: the --context of the index that the links are "
            "for.",
        ),
    ] = "none",
    loss: t.LossOption = "labels",
    teacher_answers: Annotated[
        bool,
        typer.Option(
            "--teacher-answers",
            help="Distil along the untouched model's own answers, without labels.",
        ),
    ] = False,
    steps: t.StepsOption = 400,
    warmup_steps: t.WarmupOption = 20,
    rows: t.RowsOption = 10,
    questions: t.QuestionsOption = 14,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            help="Peak rate of the model's weights or the adapter's. Default: 1e-3 tuned, 2e-3 "
            "frozen, for small models; the KVLink paper has 5e-6 for 1 to 8 billion parameters.",
            show_default=False,
        ),
    ] = None,
    link_learning_rate: Annotated[
        float,
        typer.Option(help="Peak rate of the links' own embeddings, or keys and values."),
    ] = 5e-3,
    rank: Annotated[
        int | None,
        typer.Option(min=1, help="Rank of the adapter. Default: 16.", show_default=False),
    ] = None,
    plain_share: Annotated[
        float | None,
        typer.Option(
            help="Share of plain prompts in tuned training, so that the model stays good at them. "
            "Default: 0.3.",
            show_default=False,
        ),
    ] = None,
    keep_order: Annotated[
        bool,
        typer.Option(
            "--keep-order",
            help="Do not shuffle the documents of a file. Generated ones have a random order "
            "in which a continuation follows its predecessor.",
        ),
    ] = False,
    evaluate_every: t.EvaluateEveryOption = 100,
    evaluate_questions: t.EvaluateQuestionsOption = 300,
    seed: t.TrainingSeedOption = 0,
    device: o.DeviceOption = None,
    precision: t.PrecisionOption = "auto",
    gradient_checkpointing: t.CheckpointingOption = False,
    as_json: o.JsonOption = False,
) -> None:
    """Train link tokens, which give reused chunks the view of each other that they lack.

    Writes log.jsonl, checkpoint.safetensors and links.safetensors into --out, and in mode tuned
    the model. If you start it again, the run continues.
    """
    from kvrag.errors import ParameterError
    from kvrag_train.links.options import LinkTrainingOptions

    if way is None:
        way = "adapter" if mode == "frozen" else "embeddings"
    for option, given, owner, is_used in (
        ("--rank", rank, "--way adapter", way == "adapter"),
        ("--plain-share", plain_share, "--mode tuned", mode != "frozen"),
        (
            "--learning-rate",
            learning_rate,
            "--mode tuned and --way adapter",
            mode != "frozen" or way == "adapter",
        ),
    ):
        if given is not None and not is_used:
            raise ParameterError(
                f"train links: {option} {given} is of {owner}: with --mode {mode} --way {way} it "
                "would do nothing; leave it out"
            )
    unlike_default: dict[str, Any] = {
        name: value
        for name, value in (("rank", rank), ("plain_share", plain_share))
        if value is not None
    }
    options = LinkTrainingOptions(
        out=arguments.path(out, "--out"),
        model=model,
        data=data,
        num_links=links,
        mode=mode,
        way=way,
        context=context,
        loss=loss,
        teacher_answers=teacher_answers,
        steps=steps,
        warmup_steps=warmup_steps,
        rows=rows,
        questions=questions,
        learning_rate=learning_rate,
        link_learning_rate=link_learning_rate,
        seed=seed,
        evaluate_every=evaluate_every,
        evaluate_questions=evaluate_questions,
        keep_order=keep_order,
        device=device,
        precision=precision,
        gradient_checkpointing=gradient_checkpointing,
        **unlike_default,
    )
    training_run.run(options, as_json)
