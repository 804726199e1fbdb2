"""Turn a run into the files that ship: ``python -m kvrag_train.export --run FOLDER``.

Writes weights, configuration, tokenizer, chat template, log, measured scores and checksums into
``kvrag/models/tiny``. The model card there is written by hand, from the scores and the log.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

import kvrag
from kvrag_corpus import generate_corpus
from kvrag_train.evaluate import corpus_items, evaluate
from kvrag_train.prompts import FORMATS, PLAIN, PromptFormat
from kvrag_train.tiny import FIRST_PART, Trainer, TrainingOptions
from kvrag_train.tokenizer import save_tokenizer

SHIPPED = Path(kvrag.__file__).parent / "models" / "tiny"
TEST_SEED = 2024


def measure(model: LlamaForCausalLM, trainer: Trainer, num_questions: int) -> dict[str, Any]:
    """Score `model` on held-out questions: by type, by number of documents, by format."""

    def scores(
        count: int, documents: int = 5, asked: PromptFormat = PLAIN, isolate: bool = False
    ) -> dict[str, list[float]]:
        corpus = generate_corpus(TEST_SEED, "test", count, documents)
        found = evaluate(model, trainer.tokenizer, corpus_items(corpus, asked), isolate)
        return {name: [score.exact_match, score.asked] for name, score in found.items()}

    fewer = max(100, num_questions // 4)
    return {
        "questions": num_questions,
        "seed": TEST_SEED,
        "full_prefill": scores(num_questions),
        "plain_reuse": scores(num_questions, isolate=True),
        "by_documents": {number: scores(fewer, number)["overall"] for number in range(1, 7)},
        "by_format": {asked.name: scores(fewer, asked=asked)["overall"] for asked in FORMATS},
    }


def overall(model: LlamaForCausalLM, trainer: Trainer, num_questions: int) -> list[float]:
    """Return the exact match over all types with full prefill, and how many were asked."""
    items = corpus_items(generate_corpus(TEST_SEED, "test", num_questions))
    score = evaluate(model, trainer.tokenizer, items)["overall"]
    return [score.exact_match, score.asked]


def export(run: Path, folder: Path, num_questions: int, dtype: torch.dtype) -> None:
    """Write the model of `run` into `folder`.

    Parameters
    ----------
    run
        A folder of `kvrag_train.tiny`.
    folder
        Folder to write to.
    num_questions
        Number of held-out questions to measure with.
    dtype
        Element type of the shipped weights; scores are measured with them, in float32 arithmetic.
    """
    options = TrainingOptions(**json.loads((run / "options.json").read_text()) | {"out": run})
    trainer = Trainer(options)
    folder.mkdir(parents=True, exist_ok=True)
    precision = {"float32 weights": overall(trainer.model, trainer, num_questions)}
    trainer.model.to(dtype=dtype)  # type: ignore[call-arg]
    trainer.model.save_pretrained(str(folder), safe_serialization=True)
    (folder / "model.safetensors").chmod(0o644)
    save_tokenizer(folder)
    model = LlamaForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    table = measure(model, trainer, num_questions)
    name = str(dtype).removeprefix("torch.")
    precision[f"{name} weights, float32 arithmetic"] = table["full_prefill"]["overall"]
    precision[f"{name} weights and arithmetic"] = overall(trainer.model, trainer, num_questions)
    table["by_precision"] = precision
    (folder / "scores.json").write_text(json.dumps(table, indent=1) + "\n")
    kept = [
        json.dumps({"part": number, **record})
        for number, records in enumerate(_logs(run), 1)
        for record in records
        if _is_kept(record)
    ]
    (folder / "training_log.jsonl").write_text("\n".join(kept) + "\n")
    sums = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}"
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name not in ("SHA256SUMS", "__init__.py")
    ]
    (folder / "SHA256SUMS").write_text("\n".join(sums) + "\n")


def _logs(run: Path) -> list[list[Mapping[str, float]]]:
    """Return the log of each part of a run, the earliest first."""
    if not (run / "log.jsonl").exists():
        return []
    # Steps repeated after a resumption count once, with their last record.
    by_step = {r["step"]: r for r in map(json.loads, (run / "log.jsonl").open())}
    return [*_logs(run / FIRST_PART), [by_step[step] for step in sorted(by_step)]]


def _is_kept(record: Mapping[str, float]) -> bool:
    return record["step"] % 10 == 0 or "full/overall" in record


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder of the training run")
    parser.add_argument("--to", type=Path, default=SHIPPED, help="folder to write")
    parser.add_argument("--questions", type=int, default=2000, help="held-out questions")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    chosen = parser.parse_args()
    export(chosen.run, chosen.to, chosen.questions, getattr(torch, chosen.dtype))


if __name__ == "__main__":
    main()
