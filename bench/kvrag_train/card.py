"""The model card, written from what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

from transformers import LlamaForCausalLM

from kvrag_train.curriculum import STAGES
from kvrag_train.tiny import FIRST_PART, TrainingOptions

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
nothing else; its English is the grammar of `kvrag_corpus`, its names are made up.

## Scores

Held-out corpus (`generate_corpus(seed={seed}, split="test")`), names never seen in training,
{questions} questions of five documents, greedy decoding, plain prompt, exact match of the
whole answer, which of two hops is that with the person in between. *Plain reuse* is every
document computed behind BOS alone, at its place in the prompt, nothing repaired; the question
sees everything.

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
answer is a name, or `unknown`, and `<eos>`; of two hops the name of the person in between comes
first: `Where does the friend of X live?` is answered by `Y: Z`, Y being the friend and Z where
Y lives. A continuation must stand behind the chunk that names its person: keep retrieved chunks
of one file in their order.

## Recipe

`python -m kvrag_train.tiny --out RUN{command}`
and then `python -m kvrag_train.export --run RUN`. Started again, both continue.

- Architecture: {layers} layers, width {width}, 4 query heads, 2 key-value heads, head size 64,
  MLP {mlp}, RoPE base {theta:g}, biases on attention, embeddings not tied,
  vocabulary {vocabulary}.
- Tokenizer: byte-level BPE with written-down merges: each half of a name and each word of
  the grammar is one token, all other text falls back to bytes.
- AdamW, betas (0.9, 0.95), weight decay 0.1 on matrices, gradient norm 1; loss on answer tokens
  only; the questions of a row share its documents, none sees another.
{parts}
- Weights are shipped in {dtype}; overall exact match by precision: {by_precision}.
  `training_log.jsonl` is the log (every tenth step and every
  evaluation), `training_curve.png` the curve, `scores.json` the table above,
  `SHA256SUMS` the hashes.

![training curve](training_curve.png)

## Licence

Trained from scratch on generated text; the licence of the project.
"""


@dataclass(frozen=True)
class Part:
    """One part of a run: its options and the records of its log."""

    options: TrainingOptions
    records: Sequence[Mapping[str, float]]


def write_card(
    path: Path,
    parts: Sequence[Part],
    model: LlamaForCausalLM,
    table: Mapping[str, Any],
    dtype: str,
) -> None:
    """Write the card of `model` to `path`; every figure in it comes from the arguments.

    `parts` are the run's: the first from nothing, where it is known, and the second.
    """
    full, reuse = table["full_prefill"], table["plain_reuse"]
    rows = [
        f"| {label} | {full[name][1]} | {full[name][0]:.1%} | {reuse[name][0]:.1%} "
        f"| {100 * (full[name][0] - reuse[name][0]):.1f} |"
        for name, label in _TYPE_NAMES.items()
        if name in full
    ]
    config = model.config
    card = _CARD.format(
        millions=sum(p.numel() for p in model.parameters()) / 1e6,
        seed=table["seed"],
        questions=table["questions"],
        rows="\n".join(rows),
        by_documents=_listing(table["by_documents"]),
        by_format=_listing(table["by_format"]),
        command=_command(parts[-1].options),
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        mlp=config.intermediate_size,
        theta=config.to_dict()["rope_parameters"]["rope_theta"],
        vocabulary=config.vocab_size,
        parts="\n".join(_describe(number, part) for number, part in enumerate(parts, 1)),
        dtype=dtype,
        by_precision=_listing(table["by_precision"]),
    )
    path.write_text(card, "utf-8")


def _describe(number: int, part: Part) -> str:
    options, records = part.options, part.records
    begun = {int(r["stage"]): int(r["step"]) for r in reversed(records) if "stage" in r}
    first = min(begun, default=0)
    if first == 0:
        start = (
            f"- Part 1, {options.num_layers} layers from nothing. Copying of random name tokens "
            "(6 to 24, repeated once,\n  loss on the repetition) until 90 % of tokens were right: "
            f"step {begun.get(0, 0)}. Then stages 1 to {options.last_stage} of\n"
            "  `kvrag_train.curriculum`, each left when its pass mark (running share of\n"
            f"  training questions answered exactly) was reached: {_stages(begun)}.\n"
            f"  Question types drawn {_shares(STAGES[options.last_stage - 1].shares)}."
        )
    else:
        grown = (
            f"behind the first {options.grow_at} of part {number - 1} stands a copy of each of its "
            f"layers\n  {options.twins} (counted from 0) with outputs of zero, so that it changes "
            "nothing at first."
        )
        start = (
            f"- Part {number}, {options.num_layers} layers: "
            + (grown if options.twins else f"those of part {number - 1} go on.")
            + f" Stage {options.last_stage}:\n  the benchmark's own text, with more two-hop "
            "questions whose first relation matters. Question\n  types drawn "
            f"{_shares(STAGES[options.last_stage - 1].shares)}."
        )
    return (
        f"{start}\n  A tenth of the steps is copying. Peak rate {options.learning_rate:g}, "
        f"{options.warmup_steps} warm-up steps, linear decay over the last\n"
        f"  {options.decay_steps} steps; {options.rows} rows of five documents (more of fewer), up "
        f"to {options.questions} questions each, on each of\n  {options.workers} worker(s); "
        f"{records[-1]['step'] + 1} steps, about {_minutes(records):.0f} minutes of step time "
        "beside other work."
    )


def _minutes(records: Sequence[Mapping[str, float]]) -> float:
    """Estimate the time of all steps from a log that may hold some of them only."""
    usual = statistics.median(record["seconds"] for record in records)
    # A pause of the machine is no step time.
    kept = [r["seconds"] for r in records if r["seconds"] < 20 * usual]
    return statistics.fmean(kept) * (records[-1]["step"] + 1) / 60


def _stages(begun: Mapping[int, int]) -> str:
    return ", ".join(
        f"{stage + 1} from step {step}"
        + (f" (pass mark {STAGES[stage].pass_mark:.0%})" if STAGES[stage].pass_mark < 1 else "")
        for stage, step in sorted(begun.items())
    )


def _shares(shares: Mapping[Any, float]) -> str:
    return ", ".join(f"{kind} {share:g}" for kind, share in shares.items())


def _listing(scores: Mapping[Any, Sequence[float]]) -> str:
    return ", ".join(f"{name}: {score[0]:.1%}" for name, score in scores.items())


def _command(options: TrainingOptions) -> str:
    """Return the options that are not the script's own."""
    # A run of both parts names its first part by itself.
    begins = "" if Path(options.start).name == FIRST_PART else options.start
    usual = TrainingOptions(options.out)
    changed = {
        name: value
        for name, value in vars(replace(options, start=begins)).items()
        if name != "out" and value != getattr(usual, name)
    }
    return "".join(
        f" --{name.replace('_', '-')} {quote(str(value))}" for name, value in changed.items()
    )
