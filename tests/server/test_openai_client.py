"""The server as the official client sees it."""

import base64
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai import OpenAI

from kvrag.chunk import Document
from kvrag.ingest.index import Index
from tests.support.api_server import Served, serving
from tests.support.rag import PASSAGES, Rag

QUESTION = "Who keeps the harbour ledger?"
PROMPT = "\n\n".join([PASSAGES["ledger"], PASSAGES["clock"], f"Question: {QUESTION}\nAnswer:"])
MESSAGES: list[Any] = [
    {"role": "system", "content": "Use the text."},
    {"role": "user", "content": PROMPT},
]


def test_a_chat_answer_is_the_engines(client: OpenAI, served: Served) -> None:
    expected = served.engine.generate(MESSAGES, max_tokens=12)
    answer = client.chat.completions.create(model="model", messages=MESSAGES, max_tokens=12)
    assert answer.object == "chat.completion"
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == expected.text != ""
    assert choice.finish_reason == expected.finish_reason
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    assert answer.usage.completion_tokens == expected.usage.completion_tokens
    details = answer.usage.prompt_tokens_details
    assert details.cached_tokens == expected.usage.cached_tokens > 0


def test_a_stream_is_the_same_answer_in_pieces(client: OpenAI, served: Served) -> None:
    expected = served.engine.generate(MESSAGES, max_tokens=12)
    with client.chat.completions.create(
        model="model",
        messages=MESSAGES,
        max_completion_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert len([piece for piece in pieces if piece]) > 1
    assert "".join(pieces) == expected.text
    assert chunks[-2].choices[0].finish_reason == expected.finish_reason
    assert all(one.choices[0].finish_reason is None for one in chunks[:-2])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == expected.usage.completion_tokens


def test_completions_of_several_prompts(client: OpenAI, rag: Rag) -> None:
    prompts = [PROMPT, "Ines keeps"]
    answer = client.completions.create(model="model", prompt=prompts, max_tokens=8, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    plain = rag.plain_answer("Ines keeps", 8)
    assert [choice.text for choice in answer.choices[2:]] == [plain, plain]
    assert answer.usage.prompt_tokens == sum(
        len(rag.tokenizer(one)["input_ids"]) for one in prompts
    )


def test_a_seed_makes_choices_repeatable(client: OpenAI, served: Served) -> None:
    def choices(seed: int) -> list[str | None]:
        answer = client.chat.completions.create(
            model="model", messages=MESSAGES, temperature=2, seed=seed, n=3, max_tokens=6
        )
        return [choice.message.content for choice in answer.choices]

    first = choices(7)
    assert first == choices(7)
    assert len(set(first)) == 3
    expected = served.engine.generate(MESSAGES, temperature=2.0, seed=9, max_tokens=6).text
    assert first[2] == expected == choices(8)[1]


def test_what_changes_nothing_is_accepted(client: OpenAI) -> None:
    options: Any = {"model": "model", "max_tokens": 6}
    nothing: Any = {
        "metadata": {"run": "7"},
        "user": "ada",
        "store": True,
        "service_tier": "auto",
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "modalities": ["text"],
        "safety_identifier": "ada",
        "prompt_cache_key": "x",
    }
    plain = client.chat.completions.create(messages=MESSAGES, **options)
    same = client.chat.completions.create(messages=MESSAGES, **options, **nothing)
    assert same.choices[0].message.content == plain.choices[0].message.content


def test_stop_strings_end_the_answer(client: OpenAI, served: Served) -> None:
    whole = served.engine.generate(MESSAGES, max_tokens=12).text
    stop = whole[len(whole) // 2 :][:2]
    answer = client.chat.completions.create(
        model="model", messages=MESSAGES, max_tokens=12, stop=[stop, "never said"]
    )
    assert answer.choices[0].message.content == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_the_report_comes_when_asked(client: OpenAI) -> None:
    def details(**options: Any) -> Any:
        answer = client.chat.completions.create(
            model="model", messages=MESSAGES, max_tokens=4, extra_body={"kvrag": options}
        )
        return (answer.model_extra or {}).get("kvrag")

    assert details() is None
    told = details(report=True, policy="none")
    (report,) = told["reports"]
    assert report["num_recomputed"] == 0 < report["num_reused"]
    assert [source["source"] for source in told["sources"][0]] == ["ledger", "clock"]
    assert details(report=True, reuse=False)["reports"][0]["num_reused"] == 0
    with client.chat.completions.create(
        model="model",
        messages=MESSAGES,
        max_tokens=4,
        stream=True,
        extra_body={"kvrag": {"report": True}},
    ) as stream:
        *_, last = stream
    assert (last.model_extra or {})["kvrag"]["reports"][0]["num_reused"] > 0


def test_the_server_retrieves_and_cites(client: OpenAI, served: Served) -> None:
    asked: list[Any] = [{"role": "user", "content": QUESTION}]
    options: Any = {"model": served.rag, "messages": asked, "max_tokens": 8}
    answer = client.chat.completions.create(
        **options, extra_body={"kvrag": {"k": 2, "report": True}}
    )
    message = answer.choices[0].message
    found = served.engine.index.search(QUESTION, 2)
    cited = [one.url_citation for one in message.annotations]
    # Best first, whatever the order in the prompt.
    assert [*dict.fromkeys(one.title for one in cited)] == [hit.chunk.source for hit in found]
    for one in cited:
        assert 0 <= one.start_index < one.end_index <= len(message.content or "")
        whole = (one.start_index, one.end_index) == (0, len(message.content or ""))
        assert whole or (one.model_extra or {})["best"]
    assert {(one.model_extra or {})["text"] for one in cited} == {hit.chunk.text for hit in found}
    assert answer.usage.prompt_tokens_details.cached_tokens > 0
    wanted = {"source": {"$nin": [found[0].chunk.source]}}
    filtered = client.chat.completions.create(**options, extra_body={"kvrag": {"filter": wanted}})
    others = [one.url_citation.title for one in filtered.choices[0].message.annotations or []]
    assert others
    assert found[0].chunk.source not in others
    with pytest.raises(openai.BadRequestError, match="unknown operator"):
        client.chat.completions.create(
            **options, extra_body={"kvrag": {"filter": {"a": {"$like": 1}}}}
        )
    with client.chat.completions.create(**options, stream=True) as stream:
        chunks = list(stream)
    (last,) = (one.choices[0] for one in chunks if one.choices[0].finish_reason)
    listed = (last.delta.model_extra or {})["annotations"]
    assert len({one["url_citation"]["chunk_id"] for one in listed}) == 4


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_embeddings_are_the_indexs(client: OpenAI, served: Served, encoding: Any) -> None:
    texts = [QUESTION, PASSAGES["fox"]]
    answer = client.embeddings.create(model="hashing-2", input=texts, encoding_format=encoding)
    expected = served.engine.index.embedding.embed(texts)
    for one, vector in zip(answer.data, expected, strict=True):
        found: Any = one.embedding
        if encoding == "base64":
            found = np.frombuffer(base64.b64decode(found), "<f4")
        np.testing.assert_array_equal(np.asarray(found, np.float32), vector)
    assert answer.usage.total_tokens > 0


def test_a_long_text_is_read_to_its_end_at_every_door(rag: Rag, tmp_path: Path) -> None:
    text = "The ledger lists ships, cargo and fees of the harbour. " * 60
    texts = [text, f"{text} Oda paints seven lanterns green.", "short"]
    with Index.create(tmp_path / "index", model=rag.index.model, embedding="minilm") as index:
        index.add(Document("short", "A fox sleeps."))
        windows = index.embedding.embed_windows(texts)
        assert [len(one) > 2 for one in windows] == [True, True, False]
        means = [one.mean(axis=0) for one in windows]
        expected = np.stack([one / np.linalg.norm(one) for one in means])
        assert expected[0] @ expected[1] < 0.999
        with serving(index) as running:

            def post(path: str, body: dict[str, Any]) -> Any:
                url = running.url.removesuffix("/v1") + path
                return httpx.post(url, json={"model": "minilm", **body}, timeout=120).json()

            for path in ("/v1/embeddings", "/api/embed"):
                told = post(path, {"input": texts})
                found = told.get("embeddings") or [one["embedding"] for one in told["data"]]
                np.testing.assert_allclose(found, expected, atol=1e-6)
            (vector,) = post("/api/embeddings", {"prompt": texts[1]}).values()
            np.testing.assert_allclose(vector, expected[1], atol=1e-6)


def test_token_ids_are_decoded(client: OpenAI, served: Served, rag: Rag) -> None:
    def embedded(given: Any) -> list[list[float]]:
        return [
            one.embedding for one in client.embeddings.create(model="hashing-2", input=given).data
        ]

    def completed(given: Any) -> tuple[list[str], int]:
        answer = client.completions.create(model="model", prompt=given, max_tokens=8)
        return [choice.text for choice in answer.choices], answer.usage.prompt_tokens

    texts = [QUESTION, PROMPT]
    for special in (False, True):
        ids = [rag.tokenizer(one, add_special_tokens=special)["input_ids"] for one in texts]
        assert embedded(ids) == embedded(texts)
        assert embedded(ids[0]) == embedded(texts[:1])
        assert completed(ids) == completed(texts)
        assert completed(ids[1]) == completed(texts[1])
    for call in (embedded, completed):
        with pytest.raises(openai.BadRequestError, match=r"no token 999999: .* tokenizer has"):
            call([[5, 999_999]])
        with pytest.raises(openai.BadRequestError, match="600,000 token ids; expected at most"):
            call([[5] * 300_000] * 2)
        for wrong in ([], [[]], [5, "a"], [-1], [True], [[1.5]]):
            with pytest.raises(openai.BadRequestError):
                call(wrong)
    with pytest.raises(openai.BadRequestError, match="prompt: List should have at most 16 items"):
        completed(["a"] * 17)


def test_the_models_are_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["model", "rag:index", "hashing-2"]
    assert client.models.retrieve("rag:index").id == "rag:index"
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-5'"):
        client.models.retrieve("gpt-5")


def test_other_models_and_long_prompts_are_refused(client: OpenAI, served: Served) -> None:
    ask = client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as missing:
        ask(model="gpt-5", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model=served.rag, prompt="x")
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="2048") as long:
            ask(model="model", messages=[{"role": "user", "content": "fox " * 3000}], stream=stream)
        assert long.value.code == "context_length_exceeded"
