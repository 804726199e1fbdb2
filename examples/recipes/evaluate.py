"""kvrag against plain Transformers: how many answers are right, and how soon they begin.

deepeval and ragas judge answers with a large model behind an API key. These questions have known
answers, so a look-up judges them.
"""

from __future__ import annotations

import json

from handbook import ASK, HANDBOOK, handbook_index

import kvrag

NUM_QUESTIONS = 6


def main() -> None:
    asked = json.loads((HANDBOOK.parent / "handbook-questions.json").read_text())[:NUM_QUESTIONS]
    right, seconds = {"kvrag": 0, "plain": 0}, {"kvrag": 0.0, "plain": 0.0}
    with kvrag.Index.open(handbook_index()) as index:
        engine = kvrag.KVEngine(index, max_tokens=24)
        for number, one in enumerate(asked):
            passages = [hit.chunk.text for hit in index.search(one["question"], k=5)]
            content = "\n\n".join([*reversed(passages), ASK, f"Question: {one['question']}"])
            prompt = [{"role": "user", "content": content}]
            if number == 0:
                engine.generate(prompt)  # makes records and buffers that later prompts find
            for way, reuse in (("plain", False), ("kvrag", True)):
                answer = engine.generate(prompt, reuse=reuse)
                right[way] += any(known in answer.text for known in one["answers"])
                # `reuse=False` computes all in kvrag; Transformers itself is timed here.
                seconds[way] += answer.ttft_seconds if reuse else engine.plain_ttft_seconds(prompt)
    for way, number in right.items():
        print(f"{way}: {number} of {len(asked)} right")
    print(f"first token {seconds['plain'] / seconds['kvrag']:.1f} times as early")


if __name__ == "__main__":
    main()
