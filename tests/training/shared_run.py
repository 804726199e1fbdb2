"""What each process of `test_processes.py` does: trainings, one after another."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvrag.errors import ParameterError
from kvrag.models.kv_model import KVModel
from kvrag_train.links.data import FileSource
from kvrag_train.links.processes import ALONE, Processes, launched
from kvrag_train.links.student import training_mode
from kvrag_train.links.trainer import LinkTrainer
from tests.support.models import make_model, make_tokenizer
from tests.training.test_links import options, questions

# Of unlike lengths, so that shares weigh differently.
ANSWERS = ("Ines", "the keeper of the northern light of Varn", "a tall clock")


def train(out: Path, case: dict[str, Any], processes: Processes = ALONE) -> dict[str, Any]:
    """Train a case and return what this process knows of it.

    Parameters
    ----------
    case
        Options, and besides them ``tied``, ``sharded``, ``frees_layers``, and ``stop``: after how
        many steps a checkpoint is written and nothing more done.
    """
    chosen = dict(case)
    tied, stop = chosen.pop("tied", False), chosen.pop("stop", None)
    processes = replace(
        processes,
        is_sharded=chosen.pop("sharded", False),
        frees_layers=chosen.pop("frees_layers", True),
    )
    model = KVModel(make_model(num_hidden_layers=2, tie_word_embeddings=tied), make_tokenizer())
    fields = {"steps": 3, "evaluate_every": 3, **chosen}
    source = FileSource(questions(answers=ANSWERS), model.tokenizer)
    trainer = LinkTrainer(options(out, **fields), model, source, processes)
    first = trainer.step
    if stop is None:
        trainer.run()
    else:
        with training_mode(model, trainer.options.mode == "tuned"):
            while trainer.step < stop:
                trainer.advance()
        trainer._save_checkpoint()
    held: Any = [getattr(w, "_local_tensor", w) for w in model.hf.parameters()]
    moments = [
        getattr(state["exp_avg"], "_local_tensor", state["exp_avg"]).numel()
        for weight, state in trainer.optimizer.state.items()
        if any(weight is own for own in model.hf.parameters())
    ]
    return {
        "first": first,
        "held_weights": sum(weight.numel() for weight in held),
        "held_moments": sum(moments),
        "weights": sum(weight.numel() for weight in model.hf.parameters()),
        "scores": trainer.evaluate(),
    }


def main(plan: Path) -> None:
    """Train all cases of a plan: ``leave`` names the process that dies there, and where a case
    ``differs`` each has a run of its own in mind.
    """
    torch.set_num_threads(1)
    with launched(None) as processes:
        for name, case in json.loads(plan.read_text()).items():
            if case.pop("leave", None) == processes.index:
                os._exit(3)
            if case.pop("differs", False):
                case["seed"] = processes.index
            try:
                found = train(plan.parent / name, case, processes)
            except ParameterError as error:
                found = {"refused": str(error)}
            (plan.parent / f"{name}-{processes.index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
