"""Many streams at once: none is lost, none is mixed up with another."""

import asyncio
import itertools

from openai import AsyncOpenAI

from kvrag.server.app import ServerOptions
from tests.support.api_server import Served, serving
from tests.support.properties import trials
from tests.support.rag import PASSAGES, Rag

NUM_STREAMS = trials(64, 24)


def prompts() -> list[str]:
    pairs = itertools.permutations(PASSAGES.values(), 2)
    found = [
        f"{first}\n\n{second}\n\nQuestion {number}:"
        for number, (first, second) in zip(range(NUM_STREAMS), itertools.cycle(pairs))
    ]
    assert len(set(found)) == NUM_STREAMS
    return found


async def ask_all(served: Served, asked: list[str]) -> list[str]:
    async with AsyncOpenAI(base_url=served.url, api_key="x", max_retries=0) as client:

        async def ask(prompt: str) -> str:
            stream = await client.completions.create(
                model="model", prompt=prompt, max_tokens=6, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        return await asyncio.gather(*map(ask, asked))


def test_many_streams_at_once_are_the_engines_answers(rag: Rag) -> None:
    asked = prompts()
    with serving(rag.index, ServerOptions(max_streams=NUM_STREAMS // 4)) as served:
        expected = [served.engine.generate(prompt, max_tokens=6).text for prompt in asked]
        assert len(set(expected)) > NUM_STREAMS / 2
        assert asyncio.run(ask_all(served, asked)) == expected
