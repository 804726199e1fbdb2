"""The model card, written from what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import LlamaForCausalLM

from kvrag.training.checkpoint import Progress
from kvrag.training.curriculum import STAGES, TRAINING_SHARES

_TYPE_NAMES = {
    "inside": "(a) inside one chunk",
    "carried_over": "(b) carried over",
    "two_hop": "(c) two hops",
    "superseded": "(d) superseded",
    "unanswerable": "(e) unanswerable",
    "carried_over_orphan": "(b') carried over, predecessor not retrieved",
    "overall": "**overall**",
}

_CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---

# kvrag-tiny

A plain Hugging Face Llama of {millions:.2f} million parameters that answers questions about
short documents by copying a span from them, or says `unknown`. It exists to judge how well
reused KV caches are put together: its questions need attention between chunks, so a cache
whose chunks never saw one another loses answers that a full prefill gets right. It knows
nothing else; its English is the grammar of `kvrag.bench.corpus`, its names are made up.

## Scores

Held-out corpus (`generate_corpus(seed={seed}, split="test")`), names never seen in training,
{questions} questions of five documents, greedy decoding, plain prompt, exact match of the
whole answer. *Plain reuse* is every document computed behind BOS alone, at its place in the
prompt, nothing repaired; the question sees everything.

| type | questions | full prefill | plain reuse | lost (points) |
|---|---:|---:|---:|---:|
{rows}

Overall, full prefill, by number of documents: {by_documents}.

Overall, full prefill, five documents, by prompt format: {by_format}.

## How to ask

Any of these, with the documents joined by a blank line: `...\\n\\nQuestion: ...\\nAnswer:`;
the LlamaIndex compact template (`Context information is below.` ... `Query: ...\\nAnswer: `);
LangChain's `Use the following pieces of context ...` (`Helpful Answer:`); the chat template
with the documents in the system message, or in the user message before `Question:`. The
answer is a name, or `unknown`, and `<eos>`. A continuation must stand behind the chunk that
names its person: keep retrieved chunks of one file in their order.

## Recipe

`python -m kvrag.training.tiny --out RUN {command}` and then
`python -m kvrag.training.export --run RUN`. Started again, both continue.

- Architecture: {layers} layers, width {width}, 4 query heads, 2 key-value heads, head size 64,
  MLP {mlp}, RoPE base {theta:g}, biases on attention, embeddings not tied,
  vocabulary {vocabulary}.
- Tokenizer: byte-level BPE with written-down merges: each half of a name and each word of
  the grammar is one token, all other text falls back to bytes.
- Phase 1: copying of random name tokens (6 to 24, repeated once, loss on the repetition),
  until 90 % of tokens were right: step {copying_done}. A tenth of all later steps stays
  copying.
- Phase 2: {num_stages} stages, each left when its pass mark (running share of training questions
  answered exactly) was reached: {stages}. Loss on answer
  tokens only; up to {max_questions} questions share the documents of a row, none sees another.
  Question types drawn {shares}.
- AdamW, peak rate {rate:g}, betas (0.9, 0.95), weight decay 0.1 on matrices, gradient norm 1,
  100 warm-up steps, linear decay over the last {decay} steps; {rows_per_batch} rows of five
  documents a step on each of {workers} workers, more rows of fewer documents. These weights
  took {steps} steps, {minutes:.0f} minutes of step time on two CPU cores beside other work.
- Weights are shipped in {dtype}; overall exact match by precision: {by_precision}.
  `training_log.jsonl` is the log (every tenth step and every
  evaluation), `training_curve.png` the curve, `scores.json` the table above,
  `SHA256SUMS` the hashes.

![training curve](training_curve.png)

## Licence

Trained from scratch on generated text; the licence of the project.
"""


def write_card(
    path: Path,
    options: Any,
    progress: Progress,
    model: LlamaForCausalLM,
    table: Mapping[str, Any],
    records: Sequence[Mapping[str, float]],
    dtype: str,
) -> None:
    """Write the card of `model` to `path`; every figure in it comes from the arguments."""
    full, reuse = table["full_prefill"], table["plain_reuse"]
    rows = [
        f"| {label} | {full[name][1]} | {full[name][0]:.1%} | {reuse[name][0]:.1%} "
        f"| {100 * (full[name][0] - reuse[name][0]):.1f} |"
        for name, label in _TYPE_NAMES.items()
        if name in full
    ]
    begun = {int(r["stage"]): int(r["step"]) for r in reversed(records) if "stage" in r}
    config = model.config
    card = _CARD.format(
        millions=sum(p.numel() for p in model.parameters()) / 1e6,
        seed=table["seed"],
        questions=table["questions"],
        rows="\n".join(rows),
        by_documents=_listing(table["by_documents"]),
        by_format=_listing(table["by_format"]),
        command=_command(options),
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        mlp=config.intermediate_size,
        theta=config.to_dict()["rope_parameters"]["rope_theta"],
        vocabulary=config.vocab_size,
        copying_done=progress.copying_done,
        num_stages=len(STAGES),
        stages=", ".join(
            f"{stage + 1} from step {step}"
            + (f" (pass mark {STAGES[stage].pass_mark:.0%})" if STAGES[stage].pass_mark < 1 else "")
            for stage, step in sorted(begun.items())
        ),
        max_questions=options.questions,
        shares=", ".join(f"{kind} {share:g}" for kind, share in TRAINING_SHARES.items()),
        rate=options.learning_rate,
        decay=options.decay_steps,
        rows_per_batch=options.rows,
        steps=progress.step,
        minutes=sum(record["seconds"] for record in records) / 60,
        workers=options.workers,
        dtype=dtype,
        by_precision=_listing(table["by_precision"]),
    )
    path.write_text(card, "utf-8")


def _listing(scores: Mapping[Any, Sequence[float]]) -> str:
    return ", ".join(f"{name}: {score[0]:.1%}" for name, score in scores.items())


def _command(options: Any) -> str:
    names = ("steps", "decay_steps", "hidden_size", "num_layers", "rows", "questions", "workers")
    return " ".join(f"--{n.replace('_', '-')} {getattr(options, n)}" for n in names)
