# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Notebook: quick start
#
# An index of four short pages, a question, and what the answer reused. kvrag is used from Python
# here; [Your first index](../tutorials/first-index.md) does the same from a terminal.
#
# The model is SmolLM2-135M, which `kvrag models pull smollm2-135m` installs. It is small, and often
# wrong. `kvrag-tiny` needs no installation, but cannot answer questions like these.

# %%
import tempfile
from pathlib import Path

import kvrag

MODEL = "smollm2-135m"

folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## Index
#
# The model reads each chunk once. What it computed (keys and values, without positions) is stored.

# %%
PAGES = {
    "lighthouse": "The lighthouse of Varn is on the north pier. It was built in 1887 of grey "
    "granite and is 31 metres high. Its lamp is lit from sunset to sunrise, and shows two white "
    "flashes every fifteen seconds.",
    "keeper": "Ines Varga has kept the light of Varn since 2004. She lives in the low house "
    "beside the tower with her dog, Bruno. She writes every ship that passes into a blue ledger.",
    "market": "The fish market is held on Tuesdays and Fridays in the old rope hall. It opens at "
    "six in the morning and closes at noon. Stalls are let by the harbour office for nine crowns "
    "a day.",
    "ferry": "The ferry to the islands leaves the south pier at eight, at noon and at five. A "
    "crossing takes fifty minutes. Bicycles travel free of charge, and dogs need a muzzle.",
}

index = kvrag.Index.create(folder / "index", model=MODEL, embedding="hashing")
index.add([kvrag.Document(name, text) for name, text in PAGES.items()])
print(index.stats().num_chunks, "chunks")

# %% [markdown]
# ## Search and ask
#
# A prompt is messages for the chat template, or ordinary text. kvrag finds the chunks in it by
# itself, wherever they are.

# %%
engine = kvrag.KVEngine(index)
question = "On which days is the fish market held?"
hits = index.search(question, 4)
texts = [hit.chunk.text for hit in hits]


def asking(texts):
    """Return the messages that ask the question about some texts."""
    content = "\n\n".join([*texts, f"Question: {question}"])
    return [{"role": "user", "content": content}]


answer = engine.generate(asking(texts), max_tokens=32)
print(answer.text.strip())

# %% [markdown]
# ## What was reused
#
# Other text precedes the chunks now than when they were stored. That is why 15 % of their tokens
# were computed again. The question is always computed.

# %%
report = answer.report
print(f"{report.num_tokens} tokens in the prompt")
print(f"{report.num_exact + report.num_reused} of them taken from the index as they are")
print(f"{report.num_recomputed} of the index recomputed, {report.num_fresh} of no chunk")

# %% [markdown]
# ## The order is free
#
# The same chunks in another order come from the same records. With prefix caching, nothing of this
# prompt would be found.

# %%
again = engine.generate(asking(texts[::-1]), max_tokens=32)
print(again.text.strip())
print(f"{again.report.num_exact + again.report.num_reused} tokens from the index")

# %% [markdown]
# ## What it costs without reuse
#
# `reuse=False` is full prefill. With a few hundred tokens there is little to gain; the gain grows
# with the prompt ([figures](../results/speed.md#time-to-first-token)).

# %%
plain = engine.generate(asking(texts), reuse=False, max_tokens=32)
num_computed = report.num_fresh + report.num_recomputed
print(plain.text.strip())
print(f"{plain.report.num_fresh} tokens computed instead of {num_computed}")

# %%
index.close()

# %% [markdown]
# Next: [what reuse changes](what-reuse-changes.md), and [how to tune it for your model](tune.md).
