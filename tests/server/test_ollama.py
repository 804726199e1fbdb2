"""Ollama's API, as its own client, LangChain's and LlamaIndex's see it."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_ollama import ChatOllama, OllamaEmbeddings
from llama_index.core.llms import ChatMessage
from llama_index.llms.ollama import Ollama
from ollama import Client, ResponseError

import kvrag
from kvrag.server.access import ApiKey
from kvrag.server.app import ServerOptions
from kvrag.server.ollama import OllamaChat
from tests.llms.conftest import own_event_loop
from tests.models.test_tools import TOOL
from tests.server.test_openai_client import MESSAGES, PROMPT, QUESTION
from tests.server.test_tools import script
from tests.support.api_server import Served, serving
from tests.support.rag import PASSAGES, Rag
from tests.support.scripted import follow

__all__ = ["own_event_loop"]

FEW: Any = {"num_predict": 12}


@pytest.fixture
def ollama(served: Served) -> Iterator[Client]:
    with Client(host=served.server.url) as opened:
        yield opened


def posted(served: Served, route: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{served.server.url}/api/{route}", json=body)


def test_a_chat_is_the_engines_answer(ollama: Client, served: Served) -> None:
    expected = served.engine.generate(MESSAGES, max_tokens=12)
    found = ollama.chat("model", MESSAGES, options=FEW)
    assert found.message.content == expected.text != ""
    assert (found.done, found.done_reason) == (True, "length")
    assert found.prompt_eval_count == expected.usage.prompt_tokens
    assert found.eval_count == expected.usage.completion_tokens
    assert found.total_duration == found.prompt_eval_duration + found.eval_duration
    lines = list(ollama.chat("model:latest", MESSAGES, options=FEW, stream=True))
    assert "".join(one.message.content or "" for one in lines) == expected.text
    assert [one.done for one in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1].eval_count == found.eval_count
    assert lines[-1].done_reason == "length"
    assert len(lines) > 2


def test_a_prompt(ollama: Client, served: Served) -> None:
    expected = served.engine.generate(MESSAGES, max_tokens=12).text
    system, user = (one["content"] for one in MESSAGES)
    found = ollama.generate("model", user, system=system, options=FEW)
    assert found.response == expected
    lines = ollama.generate("model", user, system=system, options=FEW, stream=True)
    assert "".join(one.response or "" for one in lines) == expected
    raw = served.engine.generate(PROMPT, max_tokens=12).text
    assert ollama.generate("model", PROMPT, raw=True, options=FEW).response == raw != expected


def test_the_server_retrieves(ollama: Client, served: Served) -> None:
    body: Any = {"model": "rag:index", "messages": [{"role": "user", "content": QUESTION}]}
    body |= {"stream": False, "options": FEW, "kvrag": {"report": True, "k": 2}}
    found = posted(served, "chat", **body).json()
    hits = served.engine.index.search(QUESTION, 2)
    (sources,) = found["kvrag"]["sources"]
    assert {one["chunk_id"] for one in sources} == {one.chunk.chunk_id for one in hits}
    assert ollama.chat("rag:index", body["messages"], options=FEW).message.content


@pytest.mark.parametrize("is_streamed", [False, True])
def test_calls_and_their_results(
    rag: Rag, ollama: Client, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    follow(monkeypatch, rag, script)
    asked: list[Any] = [{"role": "user", "content": f"{PASSAGES['ledger']}\n\nWho keeps it?"}]
    options: Any = {"tools": [TOOL], "options": {"num_predict": 120}}
    if is_streamed:
        lines = list(ollama.chat("model", asked, stream=True, **options))
        said = "".join(one.message.content or "" for one in lines)
        (call,) = [call for one in lines for call in one.message.tool_calls or ()]
    else:
        found = ollama.chat("model", asked, **options)
        said = found.message.content or ""
        (call,) = found.message.tool_calls or ()
    assert said == "I look."
    assert (call.function.name, call.function.arguments) == ("search", {"query": "Varn"})
    asked += [
        {"role": "assistant", "content": said, "tool_calls": [call]},
        {"role": "tool", "tool_name": "search", "content": PASSAGES["clock"]},
    ]
    assert ollama.chat("model", asked, **options).message.content == "It is Ines."


def test_results_are_those_of_the_last_calls() -> None:
    def called(*names: str) -> dict[str, Any]:
        calls = [{"function": {"name": name, "arguments": {}}} for name in names]
        return {"role": "assistant", "tool_calls": calls}

    results: Any = [{"role": "tool"}, {"role": "tool", "tool_name": "b"}, {"role": "tool"}]
    asked = OllamaChat(model="m", messages=[called("lost"), called("a", "b", "c"), *results])
    ids = [one.turn.get("tool_call_id") for one in asked.chat.messages[2:]]
    assert ids == ["call_2", "call_3", "call_4"]


def test_vectors(ollama: Client, served: Served) -> None:
    texts = [QUESTION, PASSAGES["fox"]]
    expected = [pytest.approx(one.tolist()) for one in served.engine.index.embedding.embed(texts)]
    found = ollama.embed("hashing-2", texts, truncate=True)
    assert list(found.embeddings) == expected
    assert found.prompt_eval_count
    assert list(ollama.embed("hashing-2", QUESTION).embeddings) == expected[:1]
    assert list(ollama.embed("hashing-2", []).embeddings) == []
    assert ollama.embeddings("hashing-2", QUESTION).embedding == expected[0]
    with pytest.raises(ResponseError, match="dimensions 5: this embedding has 1024"):
        ollama.embed("hashing-2", QUESTION, dimensions=5)


def test_the_models(ollama: Client, served: Served) -> None:
    index = served.engine.index
    names = [one.model for one in ollama.list().models]
    assert names == ["model", "rag:index", "hashing-2"]
    assert [one.model for one in ollama.ps().models] == names
    *answering, embedding = ollama.list().models
    for one in answering:
        assert one.digest == index.config.model_fingerprint
        assert (one.size or 0) > 100_000
        assert one.details.family == "llama"
    assert (embedding.digest, embedding.size) == ("", 0)
    shown = ollama.show("rag:index")
    assert shown.modelinfo["llama.context_length"] == index.model.max_positions
    assert shown.capabilities == ["completion", "tools"]
    assert shown.template == index.tokenizer.chat_template
    assert ollama.show("hashing-2").capabilities == ["embedding"]
    version = httpx.get(f"{served.server.url}/api/version").json()
    assert version == {"version": kvrag.__version__}


def test_a_model_is_always_loaded(ollama: Client) -> None:
    for found in (ollama.chat("model", []), ollama.generate("model", "", keep_alive=60)):
        assert (found.done, found.done_reason) == (True, "load")
    assert ollama.generate("model", "", keep_alive=0).done_reason == "unload"
    with pytest.raises(ResponseError, match="there is no model 'llama3'"):
        ollama.chat("llama3", [])


def test_options_of_ollamas_runner_change_nothing(ollama: Client, served: Served) -> None:
    expected = served.engine.generate(MESSAGES, max_tokens=12).text
    options: Any = {**FEW, "num_ctx": 2048, "num_thread": 3, "mirostat": 0, "tfs_z": 1.0}
    options |= {"seed": -1, "repeat_last_n": 64, "temperature": 0.0, "keep": None}
    del options["keep"]
    found = ollama.chat("model", MESSAGES, options=options, keep_alive="5m", think=False)
    assert found.message.content == expected
    penalised: Any = {**FEW, "repeat_penalty": 1.8, "repeat_last_n": -1}
    same = served.engine.generate(MESSAGES, max_tokens=12, repetition_penalty=1.8).text
    assert ollama.chat("model", MESSAGES, options=penalised).message.content == same != expected
    endless: Any = {"num_predict": -1}
    assert ollama.chat("model", MESSAGES, options=endless).eval_count == 16  # the server's default


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"options": {"mirostat": 2}}, "mirostat: this server does not sample so"),
        ({"options": {"temprature": 1.0}}, "unknown parameter 'options.temprature'"),
        ({"options": {"num_predict": 0}}, "max_tokens: Input should be greater"),
        ({"options": {"repeat_penalty": 1.3, "repeat_last_n": 64}}, "set it to -1"),
        ({"options": {"stop": ["a", "b", "c", "d", "e"]}}, "stop: List should have at most 4"),
        ({"think": True}, "think: Input should be False"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
        (
            {"messages": [{"role": "user", "content": "x", "images": ["aaaa"]}]},
            "images: this server does",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{}] * 120}] * 40}, "4,800 parts and"),
        ({"nonsense": 1}, "unknown parameter 'nonsense'"),
        ({"model": "llama3"}, "there is no model 'llama3' for this request"),
    ],
)
def test_what_is_refused(served: Served, given: dict[str, Any], reason: str) -> None:
    body: Any = {"model": "model", "messages": MESSAGES, "stream": False, **given}
    found = posted(served, "chat", **body)
    assert found.status_code == (404 if "model" in given else 400)
    assert set(found.json()) == {"error"}
    assert reason in found.json()["error"]


def test_refused_prompts_and_routes(served: Served) -> None:
    for given in ({"context": [1]}, {"images": ["x"]}):
        found = posted(served, "generate", model="model", prompt="x", **given)
        assert found.status_code == 400
        reason = f"{next(iter(given))}: this server does not support it; leave it out"
        assert found.json() == {"error": reason}
    raw = posted(served, "generate", model="model", prompt="x", raw=True, system="x")
    assert "a raw prompt has no system text" in raw.json()["error"]
    found = posted(served, "pull", model="llama3")
    assert found.status_code == 404
    assert "there is no route POST '/api/pull'" in found.json()["error"]
    assert posted(served, "show", model="llama3").json() == {"error": "model 'llama3' not found"}


def test_a_key_is_needed_here_too(rag: Rag) -> None:
    options = ServerOptions(keys=[ApiKey(name="someone", key="secret-secret-secret")])
    with serving(rag.index, options) as kept:
        with (
            Client(host=kept.server.url) as unknown,
            pytest.raises(ResponseError, match="this server asks for a key") as refused,
        ):
            unknown.list()
        assert refused.value.status_code == 401
        headers = {"Authorization": "Bearer secret-secret-secret"}
        with Client(host=kept.server.url, headers=headers) as known:
            assert known.list().models


def test_langchain(served: Served) -> None:
    expected = served.engine.generate(MESSAGES, max_tokens=12)
    model = ChatOllama(
        model="model",
        base_url=served.server.url,
        num_predict=12,
        temperature=0,
        validate_model_on_init=True,
    )
    system, user = (one["content"] for one in MESSAGES)
    answer = model.invoke([SystemMessage(system), HumanMessage(user)])
    assert answer.content == expected.text
    assert answer.usage_metadata["input_tokens"] == expected.usage.prompt_tokens
    pieces = [str(one.content) for one in model.stream([SystemMessage(system), HumanMessage(user)])]
    assert "".join(pieces) == expected.text
    vectors = OllamaEmbeddings(model="hashing-2", base_url=served.server.url)
    (vector,) = served.engine.index.embedding.embed([QUESTION])
    assert vectors.embed_query(QUESTION) == pytest.approx(vector.tolist())
    for one in (model._client, vectors._client):
        one.close()


@pytest.mark.usefixtures("own_event_loop")
def test_llamaindex(served: Served) -> None:
    expected = served.engine.generate(MESSAGES, max_tokens=12).text
    model = Ollama(
        model="model",
        base_url=served.server.url,
        temperature=0.0,
        additional_kwargs={"num_predict": 12},
    )
    messages = [ChatMessage(role=one["role"], content=one["content"]) for one in MESSAGES]
    assert model.chat(messages).message.content == expected
    assert "".join(one.delta or "" for one in model.stream_chat(messages)) == expected
    assert model.metadata.context_window == served.engine.index.model.max_positions
    model.client.close()
