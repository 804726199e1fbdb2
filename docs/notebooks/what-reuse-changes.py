# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Notebook: what reuse changes
#
# A chunk's stored keys and values have not seen the chunks before it. This notebook shows, for one
# question, where they differ from those of full prefill, which tokens the policies compute again,
# what the question attends to, and what all this does to the answer. It needs `kvrag[bench]`.

# %%
import matplotlib.pyplot as plt
import numpy as np

import kvrag
from kvrag_bench.inspection.measure import inspect_question
from kvrag_bench.quality.datasets import load_suite

MODEL = "smollm2-135m"

model = kvrag.KVModel.load(MODEL)
(asked,) = load_suite(["biography:4"], num_questions_per_set=1)
print(asked.question)
print(asked.answers[0])
for text in asked.texts:
    print("-", text[:90], "...")

# %% [markdown]
# ## Where stored values are off
#
# Each row is a layer, each column a token of the prompt. Dark means far from full prefill: the
# distance between stored and computed values, divided by the length of the computed ones. Nothing
# is off in layer 0, which sees no other token. Dotted lines are where a chunk begins.

# %%
policies = ("boundary", "deviation", "two_stage")
found = inspect_question(model, asked, policies, ratio=0.15)

figure, (above, below) = plt.subplots(
    2, 1, figsize=(8, 4.2), sharex=True, height_ratios=(3, 1), layout="constrained"
)
image = above.imshow(np.sqrt(found.value_deviation), aspect="auto", cmap="magma_r")
above.set(ylabel="layer", title="deviation of values (square root)")
for row, picked in enumerate(found.picked.values()):
    below.plot(picked, [row] * len(picked), "|", ms=9)
below.set_yticks(range(len(found.picked)), found.picked)
below.set(xlabel="token", ylim=(len(found.picked) - 0.4, -0.6), title="computed again")
for begin, _ in found.spans:
    above.axvline(begin - 0.5, color="tab:green", ls=":")
    below.axvline(begin - 0.5, color="tab:green", ls=":")
figure.colorbar(image, ax=above)
plt.show()

# %% [markdown]
# Nothing is off in the first chunk: the text before it is the same as when it was stored. In the
# others the first tokens are off most, since alone they were the beginning of a text. The rest
# is off less, but nowhere zero, and more in later chunks and in the middle layers. This is the
# share of the squared deviation that the worst 15 % of reused tokens have:

# %%
reused = np.concatenate([np.arange(*span) for span in found.spans])
squared = np.square(found.value_deviation).sum(axis=0)[reused]
worst = np.sort(squared)[::-1][: round(0.15 * len(squared))]
print(f"{worst.sum() / squared.sum():.0%} of the squared deviation")

# %% [markdown]
# ## What the question attends to
#
# The mean attention of the tokens after the last chunk, by layer. A token that nothing attends to
# may be off without harm. That is why deviation alone does not say what to recompute: `two_stage`
# chooses among the tokens that the question gathers from.

# %%
attention = np.asarray(found.attention)
figure, panel = plt.subplots(figsize=(6, 3.6), layout="constrained")
image = panel.imshow(attention, aspect="auto", cmap="Blues", vmin=0, vmax=1)
names = [f"chunk {number + 1}" for number in range(len(found.spans))]
panel.set_xticks(range(len(names) + 1), [*names, "the rest"])
panel.set(ylabel="layer", title="where the question looks")
figure.colorbar(image, ax=panel)
plt.show()

# %% [markdown]
# ## What it does to the answer
#
# How far each policy's next-token distributions are from those of full prefill, along full
# prefill's answer: the mean KL divergence, in nats a token. `none` is plain reuse; the policies
# repair 15 % of the tokens. A model as small as this is often wrong with full prefill too; what
# counts here is the distance. One question does not say which policy is best:
# [the results](../results/real-models.md) have many.

# %%
from kvrag_bench.quality.contest import judge_questions
from kvrag_bench.quality.entrants import QualityOptions

options = QualityOptions(
    model=model, policies=("none", *policies), ratios=(0.15,), max_tokens=16, controls=False
)
judged, _ = judge_questions(model, [asked], options, lambda _: None)
for contestant, (judgement,) in judged.items():
    print(f"{contestant.policy:10} {np.mean(judgement.kl):.4f}   {judgement.given.text!r}")
print(f"{'full':10} {0:.4f}   {judgement.reference.text!r}")

# %% [markdown]
# `kvrag inspect --out FOLDER --model MODEL` draws the same maps from a terminal. Next: [tune it for
# your model](tune.md).
