"""Full prefill and answers of kvrag and llama.cpp over one GGUF file, in turn; prints JSON.

``OMP_NUM_THREADS=1 python -m tools.beside_llama smollm2-135m`` (``pip install xllamacpp``), also
with 2. Both answer the prompts of ``kvrag bench peers`` in one process. Processor time counts what
each computes, however busy the machine is. ``kl`` after the name compares kvrag's kernels with
Transformers over the file's weights in float32, along Transformers' greedy answers.
"""

from __future__ import annotations

import json
import sys
import time
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kvrag.engine.asking import Asking
from kvrag.fusion.decoding import make_decoder
from kvrag.weights.named import named_model
from kvrag_bench.peers.systems import Kvrag, LlamaCpp
from kvrag_bench.peers.workload import Prompt, handbook_chunks, make_prompts

_NUM_TOKENS = 33
Times = tuple[tuple[float, float], tuple[float, float], tuple[float, float], int]


def of_kvrag(tool: Kvrag, prompt: Prompt) -> Times:
    """Return wall and processor time at the start, after the first token and at the end.

    The last figure counts the tokens between the latter two.
    """
    said: Any = [{"role": "user", "content": Asking().message(prompt.question, prompt.texts)}]
    times = [(time.perf_counter(), time.process_time())]
    number = 0
    for delta in tool._engine.stream(said, max_tokens=_NUM_TOKENS, reuse=False):
        times.append((time.perf_counter(), time.process_time()))
        number = 0 if delta.answer is None else delta.answer.usage.completion_tokens
    return times[0], times[1], times[-1], number - 1


def of_llama(tool: LlamaCpp, prompt: Prompt) -> Times:
    """Return the same."""
    from kvrag_bench.peers.systems import _rendered

    times = [(time.perf_counter(), time.process_time())]

    def take(_: Any) -> bool:
        times.append((time.perf_counter(), time.process_time()))
        return False

    ids = _rendered(prompt, tool._tokenizer).token_ids(tool._tokenizer)
    tool._server.handle_completions(
        {
            **{"prompt": ids, "n_predict": _NUM_TOKENS, "temperature": 0},
            **{"cache_prompt": False, "stream": True},
        },
        take,
    )
    return times[0], times[1], times[-1], len(times) - 2


@torch.no_grad()
def divergence(name: str) -> list[float]:
    """Return the mean KL from Transformers in float32 along each answer, in nats a token."""
    (path,) = named_model(name).files()
    tool = Kvrag(name, "none")
    full: Any = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    found = []
    for prompt in make_prompts(handbook_chunks(), 8, 1, 7):
        said: Any = [{"role": "user", "content": Asking().message(prompt.question, prompt.texts)}]
        ids = tool._engine.prompt_ids(said)
        whole = full.generate(torch.tensor([ids]), max_new_tokens=_NUM_TOKENS, do_sample=False)
        expected = full(whole).logits[0, len(ids) - 1 : -1]
        fused = tool._engine.fuse(said, reuse=False, max_tokens=_NUM_TOKENS)
        decoder = make_decoder(tool._index.model, fused, None)
        logits = [fused.logits, *map(decoder.step, whole[0, len(ids) : -1].tolist())]
        ours, theirs = (
            torch.log_softmax(one.float(), -1) for one in (torch.stack(logits), expected)
        )
        found.append(float((theirs.exp() * (theirs - ours)).sum(-1).mean()))
    return found


def main() -> None:
    """Measure, and print medians and ratios by wall and by processor time."""
    model = sys.argv[1]
    if sys.argv[2:] == ["kl"]:
        print(json.dumps({"kl": divergence(model)}))
        return
    ours, theirs = Kvrag(model, "none"), LlamaCpp(model)
    prompts = list(make_prompts(handbook_chunks(), 8, 1, 7))
    short = Prompt("", (handbook_chunks()[0][:400],), prompts[0].question)
    of_kvrag(ours, short), of_llama(theirs, short)
    rows = []
    for prompt in prompts:
        row: dict[str, list[float]] = {}
        for name, found in (("kvrag", of_kvrag(ours, prompt)), ("llama", of_llama(theirs, prompt))):
            begun, first, last, number = found
            row[name] = [
                figure
                for clock in (0, 1)
                for figure in (
                    first[clock] - begun[clock],
                    (last[clock] - first[clock]) / max(1, number),
                )
            ]
        rows.append(row)
        print(json.dumps(row), file=sys.stderr)
    what = ("prefill", "a token", "prefill, processor time", "a token, processor time")
    found = {
        one: {
            "kvrag": median(row["kvrag"][place] for row in rows),
            "llama.cpp": median(row["llama"][place] for row in rows),
            "ratio": median(row["llama"][place] / row["kvrag"][place] for row in rows),
        }
        for place, one in enumerate(what)
    }
    print(json.dumps({"threads": torch.get_num_threads(), **found}, indent=1))


if __name__ == "__main__":
    main()
