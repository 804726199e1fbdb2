"""What the commands of `kvrag train` do with their options: train, and say what came of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrag.cli import console

if TYPE_CHECKING:
    from kvrag_train.links.options import LinkTrainingOptions
    from kvrag_train.links.trainer import LinkTrainer


def run(options: LinkTrainingOptions, as_json: bool) -> None:
    """Train, in as many processes as were launched; the main one prints the result."""
    from kvrag.cli.opening import quiet_libraries
    from kvrag_train.links.processes import launched
    from kvrag_train.links.trainer import train_links

    quiet_libraries()
    with launched(options.device) as processes:
        if processes.is_main:
            with console.progress("preparing") as say:
                trainer = train_links(options, say, processes)
        else:
            trainer = train_links(options, processes=processes)
        scores = trainer.evaluate()
        if processes.is_main:
            _print_scores(trainer, scores, as_json)


def _print_scores(trainer: LinkTrainer, scores: dict[str, float], as_json: bool) -> None:
    """Print the path of a finished run's result, and its scores on held-out questions."""
    path = trainer.result_path
    if as_json:
        console.print_json({path.stem: str(path), "steps": trainer.step, "scores": scores})
        return
    console.write(f"{path}\n")
    for name, score in scores.items():
        shown = f"{score:.4f}" if name.startswith("KL") else f"{score:.1%}"
        console.write(f"{name.replace('/', ', ').replace('_', ' ')}: {shown}\n")
