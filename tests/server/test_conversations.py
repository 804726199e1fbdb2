"""The next turn of a conversation takes the KV of the earlier ones, but no other tenant's."""

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from kvrag.server.access import ApiKey
from kvrag.server.app import ServerOptions
from tests.support.api_server import Served, serving
from tests.support.rag import PASSAGES, Rag

KEYS = [
    ApiKey(name=name, key=name * 8, tenant=tenant)
    for name, tenant in (("ines", "varn"), ("tomas", "varn"), ("other", ""))
]


@pytest.fixture
def remembering(rag: Rag) -> Iterator[Served]:
    with serving(rag.index, ServerOptions(keys=KEYS)) as running:
        yield running


def cached(served: Served, key: str, messages: list[Any], **options: Any) -> tuple[int, str]:
    """Return how many tokens were cached, and the answer."""
    with OpenAI(base_url=served.url, api_key=key * 8, max_retries=0) as client:
        answer = client.chat.completions.create(
            model="model", messages=messages, max_tokens=6, **options
        )
    details = answer.usage.prompt_tokens_details
    assert details.cached_tokens is not None
    return details.cached_tokens, answer.choices[0].message.content or ""


def test_a_second_turn_computes_its_question(remembering: Served) -> None:
    messages: list[Any] = [{"role": "user", "content": PASSAGES["ledger"] + "\n\nWho keeps it?"}]
    first, text = cached(remembering, "ines", messages)
    num_first = len(remembering.engine.prompt_ids(messages))
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And why?"}]
    report: Any = {"kvrag": {"report": True}}
    second, _ = cached(remembering, "ines", messages, extra_body=report)
    assert first < num_first <= second


def test_tenants_share_nothing(remembering: Served) -> None:
    messages = [{"role": "user", "content": "Nothing of the documents: who goes there, and why?"}]
    assert cached(remembering, "ines", messages)[0] == 0
    assert cached(remembering, "other", messages)[0] == 0
    # Keys of one tenant count as one.
    assert cached(remembering, "tomas", messages)[0] > 10
    assert remembering.engine.generate(messages).report.num_kept == 0
