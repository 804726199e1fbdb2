"""Train kvrag-tiny: ``python -m kvrag_train.tiny --out FOLDER``.

A run has two parts. The first, in ``FOLDER/first``, trains five layers from nothing through all
stages of the curriculum but the last; the second, in ``FOLDER``, adds layers and continues in
the last stage. ``--start`` names trained weights for the second part to begin with, and skips the
first. Each part writes ``checkpoint.safetensors`` and ``log.jsonl`` into its folder and continues
from them when it is started again.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file
from torch.multiprocessing.spawn import spawn
from transformers import LlamaForCausalLM

from kvrag_corpus.generate import generate_corpus
from kvrag_corpus.names import NameSource
from kvrag_train.batches import pack
from kvrag_train.checkpoint import (
    Progress,
    load_checkpoint,
    load_weights,
    save_checkpoint,
)
from kvrag_train.copying import copying_loss
from kvrag_train.curriculum import STAGES, Stage, choose_prompt, sample_items
from kvrag_train.evaluate import corpus_items, evaluate
from kvrag_train.growth import grow
from kvrag_train.model import answer_logits, build_config, questions_right
from kvrag_train.parallel import average_over_workers, join_workers
from kvrag_train.schedule import Schedule
from kvrag_train.tokenizer import build_tokenizer, name_token_ids

COPYING_PASS_MARK = 0.9
FIRST_PART = "first"


@dataclass(frozen=True)
class TrainingOptions:
    """The options of one part of a run; the defaults are the second part's."""

    out: Path
    steps: int = 1240
    decay_steps: int = 250
    warmup_steps: int = 50
    rows: int = 16  # of five documents; more rows where documents are fewer
    questions: int = 18
    copying_rows: int = 64
    learning_rate: float = 1.5e-3
    hidden_size: int = 128
    num_layers: int = 6
    twins: str = "3"  # layers of the initial model that are repeated
    grow_at: int = 4  # number of its layers before the repeated ones
    last_stage: int = len(STAGES)  # 1 to 6
    seed: int = 0
    threads: int = 1
    workers: int = 1
    evaluate_every: int = 100
    evaluate_questions: int = 600
    save_every: int = 25
    start: str = ""  # trained weights with which the last stage begins

    def first_part(self) -> TrainingOptions:
        """Return the options of the part that comes before this one."""
        return replace(
            self,
            out=self.out / FIRST_PART,
            steps=4500,
            decay_steps=1200,
            warmup_steps=100,
            rows=10,
            questions=14,
            learning_rate=3e-3,
            num_layers=5,
            twins="",
            last_stage=len(STAGES) - 1,
            workers=2,
        )


class Trainer:
    """One run: a copying phase, then the curriculum with a tenth of copying kept in."""

    def __init__(self, options: TrainingOptions, rank: int = 0) -> None:
        self.options = options
        self.rank = rank
        torch.set_num_threads(options.threads)
        torch.manual_seed(options.seed)
        self.tokenizer = build_tokenizer()
        self.name_tokens = name_token_ids(self.tokenizer)
        config = build_config(self.tokenizer, options.hidden_size, options.num_layers)
        self.model = LlamaForCausalLM(config)
        self.model.train()
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim == 1]
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95))
        self.schedule = Schedule(
            options.learning_rate, options.steps, options.decay_steps, options.warmup_steps
        )
        self.progress = Progress()
        written = {name: value for name, value in vars(options).items() if name != "out"}
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "options.json").write_text(json.dumps(written, indent=1) + "\n")
        self.checkpoint = options.out / "checkpoint.safetensors"
        if self.checkpoint.exists():
            self.progress = load_checkpoint(self.checkpoint, self.model, self.optimizer)
        elif options.start:
            self.progress = Progress(copying_done=0, stage=options.last_stage - 1)
            weights = _trained_weights(Path(options.start))
            twins = [int(layer) for layer in options.twins.split(",") if layer]
            self.model.load_state_dict(grow(weights, twins, options.grow_at))

    def run(self) -> None:
        """Train until the last step."""
        while self.progress.step < self.options.steps:
            started = time.perf_counter()
            record = self.advance()
            record["seconds"] = round(time.perf_counter() - started, 3)
            step = self.progress.step
            if self.rank > 0:
                continue
            if step % self.options.evaluate_every == 0 and self.progress.copying_done >= 0:
                record.update(self._evaluate())
            self._log(record)
            if step % self.options.save_every == 0 or step == self.options.steps:
                save_checkpoint(self.checkpoint, self.model, self.optimizer, self.progress)

    def advance(self) -> dict[str, float]:
        """Take one optimizer step and return its log record."""
        progress = self.progress
        rng = Random(f"step {self.options.seed} {progress.step}")
        own_rng = Random(f"step {self.options.seed} {progress.step} worker {self.rank}")
        rate = self.schedule.rate(progress.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        copying = progress.copying_done < 0 or rng.random() < 0.1
        stage = STAGES[progress.stage]
        if copying:
            rows = self.options.copying_rows
            loss, accuracy = copying_loss(self.model, self.name_tokens, rows, rng, own_rng)
        else:
            loss, accuracy = self._question_loss(stage, rng, own_rng)
        loss.backward()  # type: ignore[no-untyped-call]
        parameters = list(self.model.parameters())
        mean_loss, accuracy = average_over_workers(parameters, [float(loss.detach()), accuracy])
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        record = {"step": progress.step, "rate": rate, "loss": mean_loss}
        if not copying:
            record["stage"] = progress.stage
        record["copying_accuracy" if copying else "accuracy"] = accuracy
        progress.step += 1
        progress.optimizer_steps += 1
        self._note(copying, accuracy)
        return record

    def _question_loss(
        self, stage: Stage, rng: Random, own_rng: Random
    ) -> tuple[torch.Tensor, float]:
        count, prompt_format = choose_prompt(stage, rng)
        names = NameSource("train", own_rng)
        rows, questions = self.options.rows * 6 // (count + 1), self.options.questions
        items = sample_items(stage, names, count, prompt_format, rows, questions, own_rng)
        batch = pack(items, self.tokenizer)
        logits, targets, ids = answer_logits(self.model, batch)
        loss = torch.nn.functional.cross_entropy(logits, targets)
        return loss, float(questions_right(logits, targets, ids).float().mean())

    def _note(self, copying: bool, accuracy: float) -> None:
        """Keep the running accuracy of the present phase, and begin the next one when it is due."""
        progress = self.progress
        if progress.copying_done < 0:
            progress.accuracy += 0.1 * (accuracy - progress.accuracy)
            if progress.accuracy > COPYING_PASS_MARK:
                progress.copying_done, progress.accuracy = progress.step, 0.0
        elif not copying:
            progress.accuracy += 0.05 * (accuracy - progress.accuracy)
            is_last = progress.stage + 1 >= self.options.last_stage
            if progress.accuracy > STAGES[progress.stage].pass_mark and not is_last:
                progress.stage, progress.accuracy = progress.stage + 1, 0.0

    def _evaluate(self) -> dict[str, float]:
        items = corpus_items(generate_corpus(0, "validation", self.options.evaluate_questions))
        found = {}
        for label, isolate in (("full", False), ("reuse", True)):
            scores = evaluate(self.model, self.tokenizer, items, isolate)
            found.update({f"{label}/{k}": round(s.exact_match, 4) for k, s in scores.items()})
        return found

    def _log(self, record: dict[str, float]) -> None:
        with (self.options.out / "log.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")


def _trained_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a part of a run, or of a model as Hugging Face stores it."""
    run = folder / "checkpoint.safetensors"
    return load_weights(run) if run.exists() else load_file(folder / "model.safetensors")


def _parse(arguments: list[str] | None) -> TrainingOptions:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    defaults = TrainingOptions(Path())
    for name, value in vars(defaults).items():
        if name != "out":
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    return TrainingOptions(**vars(parser.parse_args(arguments)))


def _work(rank: int, options: TrainingOptions) -> None:
    trainer = Trainer(options, rank)
    join_workers(options.out, rank, options.workers)
    trainer.run()


def _run_part(options: TrainingOptions) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "rendezvous").unlink(missing_ok=True)
    if options.workers == 1:
        _work(0, options)
    else:
        spawn(_work, (options,), nprocs=options.workers, daemon=True)  # type: ignore[no-untyped-call]


def train(options: TrainingOptions) -> None:
    """Train both parts, or the second alone when `options` say where to start from."""
    if not options.start:
        first = options.first_part()
        _run_part(first)
        options = replace(options, start=str(first.out))
    _run_part(options)


def main() -> None:
    """Run the command line."""
    # A terminated run ends its workers too: daemons end when this process exits.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    train(_parse(None))


if __name__ == "__main__":
    main()
