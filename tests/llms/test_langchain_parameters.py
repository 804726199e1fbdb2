"""What LangChain's suites do not ask: identity, caches, retries, refusals, usage."""

import asyncio
import copy
import pickle
import shutil
from pathlib import Path
from typing import Any, ClassVar

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import (
    AIMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from kvrag.chunk import Document
from kvrag.engine.engine import KVEngine
from kvrag.errors import IndexMismatchError, IndexNotFoundError, ParameterError, StoreError
from kvrag.fusion.links import FILE_NAME
from kvrag.ingest.index import Index
from kvrag.llms.langchain import ChatKVRag, KVRagLLM, to_turns
from kvrag.llms.llamaindex import KVRagLLM as LlamaIndexLLM
from kvrag.llms.settings import PER_CALL
from kvrag.llms.vllm.engine import VLLMSettings
from kvrag.models.kv_model import KVModel
from tests.fusion.test_links import make_links
from tests.support.rag import PASSAGES, Rag, save_model

PROMPT = f"{PASSAGES['ledger']}\n\n{PASSAGES['clock']}\n\nWho keeps the ledger?"


@pytest.fixture
def llm(rag: Rag) -> KVRagLLM:
    return KVRagLLM(index=rag.path, max_tokens=8)


@pytest.fixture
def chat(rag: Rag) -> ChatKVRag:
    return ChatKVRag(index=rag.path, max_tokens=8)


@pytest.mark.parametrize(
    "call", [{"ratio": 1.0}, {"ratio": 0.0}, {"policy": "none"}, {"max_tokens": 5}]
)
def test_call_parameters_reach_the_engine(llm: KVRagLLM, call: dict[str, Any]) -> None:
    result = llm.generate([PROMPT], **call)
    info = result.generations[0][0].generation_info
    report = info["report"]
    if call.get("ratio") == 1.0:
        assert report["num_recomputed"] > 0
        assert report["num_reused"] == 0
    elif "max_tokens" not in call:
        assert report["num_recomputed"] == 0
        assert report["num_cached"] > 50
    usage = result.llm_output["token_usage"]
    assert usage["completion_tokens"] == call.get("max_tokens", 8)
    assert usage["cached_tokens"] == report["num_cached"]
    assert {source["source"] for source in info["sources"]} == {"ledger", "clock"}


def test_identity_holds_all_that_changes_an_answer(rag: Rag, llm: KVRagLLM) -> None:
    identity = llm._identifying_params
    assert identity["model_fingerprint"] == rag.index.model.fingerprint
    assert identity["index"] == str(rag.path)
    assert identity["dtype"] == "float32"
    others = {
        "policy": "none",
        "ratio": 0.5,
        "boundary_tokens": 4,
        "temperature": 1.0,
        "max_tokens": 9,
        "top_p": 0.5,
        "top_k": 3,
        "repetition_penalty": 1.5,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "min_p": 0.1,
        "seed": 3,
        "stop": ["x"],
        "timeout": 9.0,
        "model": str(rag.model_folder),
        "response_format": {"type": "json_object"},
    }
    assert set(others) == set(PER_CALL)
    policy_of = {"boundary_tokens": "boundary", "policy": "none"}
    for name, value in others.items():
        common = {"index": rag.path, "max_tokens": 8, "policy": policy_of.get(name, "deviation")}
        other = KVRagLLM(**{**common, name: value})
        assert other._identifying_params[name if name != "stop" else "default_stop"] == value
        assert other._identifying_params != identity, name


def test_identity_needs_no_weights_and_no_index(tmp_path: Path) -> None:
    llm = KVRagLLM(index=tmp_path / "nowhere")
    assert "nowhere" in str(llm)
    with pytest.raises(IndexNotFoundError, match="nowhere"):
        llm.invoke("Hello")


def test_no_index_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVRAG_INDEX", raising=False)
    with pytest.raises(ValueError, match="KVRAG_INDEX"):
        KVRagLLM()


@pytest.mark.parametrize("model_class", [KVRagLLM, ChatKVRag])
def test_cache_tells_ratios_apart(rag: Rag, model_class: Any, monkeypatch: Any) -> None:
    cache = InMemoryCache()
    asked = []
    start = KVEngine._start_now

    def counted(self: KVEngine, request: Any, options: Any) -> Any:
        asked.append(request.ratio)
        return start(self, request, options)

    monkeypatch.setattr(KVEngine, "_start_now", counted)
    for ratio in (0.0, 1.0, 0.0):
        model_class(index=rag.path, max_tokens=4, ratio=ratio, cache=cache).invoke(PROMPT)
    assert asked == [0.0, 1.0]
    one = model_class(index=rag.path, max_tokens=4, cache=cache)
    for ratio in (0.25, 0.75, 0.25, None, None):
        one.invoke(PROMPT, **({} if ratio is None else {"ratio": ratio}))
    assert asked == [0.0, 1.0, 0.25, 0.75, None]
    for stop in (["x"], ["y"], ["x"]):
        model_class(index=rag.path, max_tokens=4, cache=cache, stop=stop).invoke(PROMPT)
    assert len(asked) == 7


def test_retries_when_the_store_is_away(llm: KVRagLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    failures, num_starts = 2, 0
    start = KVEngine._start_now

    def shaky(self: KVEngine, prompt: Any, options: Any) -> Any:
        nonlocal failures, num_starts
        num_starts += 1
        if failures:
            failures -= 1
            raise StoreError("away")
        return start(self, prompt, options)

    monkeypatch.setattr(KVEngine, "_start_now", shaky)
    assert llm.invoke("Hello")
    failures, num_starts = 2, 0
    llm.generate(["Hello"] * 3)
    assert num_starts == 3 + 2  # what was answered is not asked again
    for batch in (["Hello"] * 3, ["Hello"]):
        failures = 2
        assert llm.batch(batch) == [llm.invoke("Hello")] * len(batch)
        failures = 2
        assert asyncio.run(llm.ainvoke("Hello")) == llm.invoke("Hello")
    failures = 3
    with pytest.raises(StoreError):
        llm.invoke("Hello")
    failures = 1
    with pytest.raises(StoreError):
        llm.model_copy(update={"max_retries": 0}).invoke("Hello")


def test_another_model_is_refused(rag: Rag, llm: KVRagLLM, tmp_path: Path) -> None:
    save_model(tmp_path / "other", seed=1)
    with pytest.raises(IndexMismatchError):
        llm.invoke("Hello", model=str(tmp_path / "other"))


def test_a_folder_made_anew_is_another_index(rag: Rag, tmp_path: Path) -> None:
    path = tmp_path / "index"
    llm = KVRagLLM(index=path, max_tokens=2)
    reused = []
    for source in ("ledger", "clock"):
        with Index.create(path, model=rag.model_folder, embedding="hashing") as index:
            index.add(Document(source, PASSAGES[source]))
        info = llm.generate([PROMPT]).generations[0][0].generation_info
        reused.append([found["source"] for found in info["sources"]])
        llm.engine().index.close()
        shutil.rmtree(path)
    assert reused == [["ledger"], ["clock"]]


@pytest.mark.parametrize("model_class", [KVRagLLM, ChatKVRag])
def test_copied_and_pickled_after_use(rag: Rag, model_class: Any) -> None:
    llm = model_class(index=rag.index, max_tokens=4)
    said = llm.invoke(PROMPT)
    copied = copy.deepcopy(llm)
    assert copied.index is rag.index
    assert copied._engines == {}
    restored = pickle.loads(pickle.dumps(llm))
    assert restored.index == str(rag.path)
    for other in (copied, restored):
        again = other.invoke(PROMPT)
        assert getattr(again, "content", again) == getattr(said, "content", said)
    assert llm._engines
    assert llm.index is rag.index


@pytest.mark.parametrize("model_class", [KVRagLLM, ChatKVRag])
def test_a_copy_with_another_option_of_engines_has_another_engine(
    rag: Rag, model_class: Any
) -> None:
    llm = model_class(index=rag.index, max_tokens=4)
    engine = llm.engine()
    assert llm.model_copy(update={"max_tokens": 2}).engine() is engine
    for deep in (False, True):
        other = llm.model_copy(update={"session_bytes": 0}, deep=deep)
        other.invoke(PROMPT)
        assert other.engine().kept_bytes == 0
    llm.session_bytes = 0
    assert llm.engine() is not engine


@pytest.mark.parametrize(
    "given",
    [
        {"policy": "nonsense"},
        {"eviction": "lru"},
        {"policy": "none", "ratio": 0.5},
        {"boundary_tokens": 4},
        {"policy": "boundary", "boundary_tokens": 0},
        {"stop": [""]},
        {"timeout": float("inf")},
        {"max_tokens": "2"},
        {"seed": True},
        {"ratio": "0.5"},
        {"max_retries": 1.0},
    ],
)
@pytest.mark.parametrize("model_class", [KVRagLLM, ChatKVRag, LlamaIndexLLM])
def test_refused_when_constructed(model_class: Any, given: dict[str, Any], tmp_path: Path) -> None:
    name = list(given)[-1]
    with pytest.raises(ValueError, match=name):
        model_class(index=tmp_path / "nowhere", **given)
    if name in PER_CALL:
        llm = model_class(index=tmp_path / "nowhere", **dict(list(given.items())[:-1]))
        with pytest.raises(ParameterError, match=name):
            llm.call_values({name: given[name]})


def test_counters_count_control_strings_as_the_engine_reads_them(rag: Rag) -> None:
    llm, chat = (model(index=rag.path, max_tokens=1) for model in (KVRagLLM, ChatKVRag))
    text = "Ines says <eos> and <bos> here"
    plain = rag.tokenizer(text, add_special_tokens=False)["input_ids"]
    # In a message all is text; in a string of his own a caller may mean it.
    assert llm.get_token_ids(text) == plain
    assert not {0, 1}.intersection(chat.get_token_ids(text))
    assert llm.get_num_tokens(text) < chat.get_num_tokens(text)
    empty = chat.invoke("").usage_metadata["input_tokens"]
    asked = chat.invoke(text)
    assert asked.usage_metadata["input_tokens"] == empty + chat.get_num_tokens(text)
    assert asked.response_metadata["report"]["num_neutralised"] == 2
    assert llm.identity()["control_tokens"] == "neutralise"


# -- conversations -----------------------------------------------------------------------------


def test_turns_of_one_role_are_merged() -> None:
    turns = to_turns(
        [
            SystemMessage("a"),
            SystemMessage([{"type": "text", "text": "b"}, "c"]),
            HumanMessage("d", name="someone"),
            AIMessage("e"),
            ChatMessage(role="user", content="f"),
            HumanMessage("g"),
        ]
    )
    assert turns == [
        {"role": "system", "content": "a\n\nbc"},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "e"},
        {"role": "user", "content": "f\n\ng"},
    ]


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (HumanMessage([{"type": "image_url", "image_url": {"url": "data:,"}}]), "image"),
        (FunctionMessage("done", name="t"), "FunctionMessage"),
        (None, "at least one message"),
    ],
)
def test_what_cannot_be_rendered_is_refused(chat: ChatKVRag, message: Any, named: str) -> None:
    with pytest.raises(ParameterError, match=named):
        chat.invoke([HumanMessage("hello"), message] if message else [])


def test_calls_and_results_are_turns_of_their_own() -> None:
    called = {"name": "search", "args": {"query": "Varn"}, "id": "1"}
    turns = to_turns(
        [
            HumanMessage("a"),
            AIMessage(
                [{"type": "thinking", "thinking": "hm"}, {"type": "redacted_thinking"}, "b"],
                tool_calls=[called],
            ),
            ToolMessage("c", tool_call_id="1", name="search"),
            ToolMessage("d", tool_call_id="2"),
        ]
    )
    function = {"name": "search", "arguments": '{"query": "Varn"}'}
    assert turns == [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "b",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "c", "tool_call_id": "1", "name": "search"},
        {"role": "tool", "content": "d", "tool_call_id": "2"},
    ]


def test_usage_and_report(rag: Rag, chat: ChatKVRag) -> None:
    message = chat.invoke(PROMPT)
    report = message.response_metadata["report"]
    assert report["num_cached"] > 50
    assert message.usage_metadata["input_token_details"] == {"cache_read": report["num_cached"]}
    assert message.usage_metadata["input_tokens"] == report["num_tokens"]
    details = message.response_metadata
    assert details["model_name"] == rag.model_folder.name
    assert 0 < details["ttft_seconds"] <= details["total_seconds"]
    assert details["saved_tokens"] == report["num_cached"]
    assert details["saved_seconds_estimate"] >= 0
    assert all(source["text"] in PROMPT for source in details["sources"])
    assert {source["source"] for source in details["sources"]} == {"ledger", "clock"}
    other = ChatKVRag(index=rag.path, max_tokens=8)  # remembers nothing
    plain = other.invoke("Nothing of the documents.").response_metadata
    assert (plain["saved_tokens"], plain["saved_seconds_estimate"]) == (0, 0.0)
    streamed = list(ChatKVRag(index=rag.path, max_tokens=8).stream(PROMPT))
    whole = sum(streamed[1:], streamed[0])
    assert whole.text == message.text
    assert whole.response_metadata["report"]["num_cached"] == report["num_cached"]


def test_streaming_hands_tokens_to_callbacks_of_invoke(rag: Rag) -> None:
    class Tokens(BaseCallbackHandler):
        pieces: ClassVar[list[str]] = []

        def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
            self.pieces.append(token)

    chat = ChatKVRag(index=rag.path, max_tokens=8, streaming=True)
    message = chat.invoke(PROMPT, config={"callbacks": [Tokens()]})
    assert "".join(Tokens.pieces) == message.text
    assert len(Tokens.pieces) > 2


@pytest.mark.parametrize("given", [{"never_slower": False}, {"store_patience": 1.0}])
def test_vllm_refuses_what_it_would_ignore(given: dict[str, Any]) -> None:
    assert VLLMSettings(index="x", links="off", eviction="none").never_slower
    with pytest.raises(ValueError, match="vLLM takes no schemas, device"):
        VLLMSettings(index="x", **given)


def test_identity_and_caches_tell_links_apart(rag: Rag, tmp_path: Path) -> None:
    cache, found = InMemoryCache(), rag.model_folder / FILE_NAME
    named = tmp_path / "mine"
    make_links(KVModel.load(rag.model_folder)).save(named)

    def make(**settings: Any) -> KVRagLLM:
        settings = {"index": rag.path, "max_tokens": 8, "policy": "none", **settings}
        return KVRagLLM(**settings, cache=cache)

    shutil.copy(named, found)
    try:
        linked, off = make(), make(links="off")
        assert linked._identifying_params != off._identifying_params
        assert linked._identifying_params == make(links=named)._identifying_params
        assert linked.invoke(PROMPT) == linked.answers([PROMPT], {})[0].text
        assert off.invoke(PROMPT) == off.answers([PROMPT], {})[0].text != linked.invoke(PROMPT)
    finally:
        found.unlink()
