# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Notebook: tune it for your model
#
# Which policy and which ratio suit a model and its documents can be measured in
# minutes, without questions of your own: kvrag asks about quotations of the index, and compares
# each answer with full prefill's. `kvrag calibrate` does the same from a terminal. Replace the
# model and the documents with yours.

# %%
import tempfile
from pathlib import Path

import kvrag
from kvrag.tune.calibrate import CalibrationOptions, calibrate

MODEL = "smollm2-135m"
DOCUMENTS = sorted(Path("examples/handbook").glob("*.md"))[:6]

index = kvrag.Index.create(
    Path(tempfile.mkdtemp()) / "index",
    model=MODEL,
    embedding="hashing",
    chunk_tokens=128,
    context="none",
)
index.add([kvrag.Document(path.name, path.read_text("utf-8")) for path in DOCUMENTS])
print(index.stats().num_chunks, "chunks")

# %% [markdown]
# ## Policies and ratios
#
# The loss is the share of tokens where the likeliest one is no longer full prefill's. With eight
# questions the intervals overlap: this shows what repair gains, not which policy is best.
# `kvrag calibrate` asks up to 200.

# %%
options = CalibrationOptions(
    num_questions=8,
    num_chunks=3,
    max_tokens=12,
    policies=("none", "boundary", "deviation", "query:shift=1", "two_stage"),
    ratios=(0.05, 0.15, 0.3),
)
found = calibrate(index, options)
for one in sorted(found.policies, key=lambda one: one.loss):
    share = "" if one.ratio is None else f"{one.ratio:.0%}"
    interval = f"{one.loss_low:.1%} to {one.loss_high:.1%}"
    print(f"{one.policy:14} {share:>4} {one.loss:6.1%}   ({interval})")

# %% [markdown]
# ## Loss against cost
#
# The calibration also fits what a row and a cached token cost on this machine. For a prompt of
# three chunks of 128 tokens, relative to full prefill:

# %%
import matplotlib.pyplot as plt

layers, num_reused, num_fresh = index.model.spec.num_layers, 3 * 128, 60
full = found.cost.of((num_reused + num_fresh) * layers, 0)
figure, panel = plt.subplots(figsize=(6, 3.6), layout="constrained")
for policy in dict.fromkeys(one.policy for one in found.policies):
    mine = [one for one in found.policies if one.policy == policy]
    shares = [one.ratio or 0.0 for one in mine]
    costs = [
        found.cost.of(round(share * num_reused + num_fresh) * layers, num_reused) / full
        for share in shares
    ]
    panel.plot(costs, [one.loss for one in mine], "o-", label=policy)
panel.set(xlabel="time over full prefill's", ylabel="loss", ylim=(0, None))
panel.legend(frameon=False)
plt.show()

# %% [markdown]
# ## Use it
#
# Kept in the index, the calibration lets policy `auto` choose for each prompt: the cheapest policy
# that loses less than a bound, or the one that loses least if none does.

# %%
index.upkeep.keep_calibration(found)
engine = kvrag.KVEngine(index)
hits = index.search("How is leave requested?", 3)
content = "\n\n".join([*(hit.chunk.text for hit in hits), "Question: How is leave requested?"])
for policy in ("auto:loss=0.2", "auto:loss=0.02"):
    answer = engine.generate([{"role": "user", "content": content}], policy=policy, max_tokens=8)
    report = answer.report
    print(f"{policy}: {report.policy}, {report.num_recomputed} tokens recomputed")

# %%
index.close()
