"""What is decided without vLLM: chunks in token ids, plans, names, versions, views of weights."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config

from kvrag.chunk import Document
from kvrag.engine.constraint import Constraint
from kvrag.engine.engine import KVEngine
from kvrag.engine.prompt_reader import PromptReader
from kvrag.engine.request import Request
from kvrag.engine.shared import shared_index
from kvrag.errors import (
    EngineError,
    EngineVersionError,
    KVRagError,
    ParameterError,
    UnsupportedModelError,
)
from kvrag.ingest.index import Index
from kvrag.llms.vllm import engine as engines
from kvrag.llms.vllm import settings as versions
from kvrag.llms.vllm.engine import VLLMEngine
from kvrag.llms.vllm.langchain import KVRagVLLM
from kvrag.llms.vllm.options import (
    check_engine,
    engine_options,
    open_index,
    place_of,
    serve_command,
)
from kvrag.llms.vllm.plan import MAX_ASKED_TOKENS, LoadPlan, NoPlan, Planner, TokenFinder
from kvrag.llms.vllm.settings import PARAMS, ConnectorSettings, RequestParams
from kvrag.llms.vllm.transports import EngineRequest, HTTPServer, Piece
from kvrag.llms.vllm.weights import NotShareableError, share_weights
from kvrag.models.loading import model_fingerprint
from tests.support.models import make_model, make_tokenizer
from tests.vllm.conftest import TEXTS, make_prompt


@pytest.fixture
def finder(served: Index) -> TokenFinder:
    return TokenFinder(served)


@pytest.fixture
def planner(served: Index) -> Planner:
    return Planner(served, ConnectorSettings(str(served.path)))


def test_a_shared_index_is_served_and_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/bucket/index"
    monkeypatch.setenv("KVRAG_VIEWS", str(tmp_path / "one"))
    with Index.create(url, model="kvrag-tiny", embedding="hashing") as index:
        index.add([Document("first", TEXTS[0])])
    settings = ConnectorSettings(url)
    options = engine_options(settings)
    assert options["kv_transfer_config"]["kv_connector_extra_config"]["index"] == url
    monkeypatch.chdir(tmp_path)
    relative = ConnectorSettings(f"{url}?key_file=key")
    assert place_of(relative) == f"{url}?key_file={tmp_path}/key"
    monkeypatch.setattr(engines, "start_engine", lambda settings, _: settings.index)
    with shared_index(url) as opened:
        assert KVRagVLLM(index=opened)._connect(None) == url
    if importlib.util.find_spec("vllm") is not None:
        assert any(url in part for part in serve_command(settings, host="here", port=1))
    with open_index(settings) as opened:
        monkeypatch.setenv("KVRAG_VIEWS", str(tmp_path / "another machine"))
        with Index.open(url) as writer:
            writer.add([Document("second", TEXTS[1])])
        until = time.monotonic() + 60
        while opened.stats().num_documents < 2:
            assert time.monotonic() < until
            time.sleep(0.2)
        planner = Planner(opened, settings)
        plan = planner.plan(KVEngine(opened).prompt_ids(make_prompt(1)), None)
        assert isinstance(plan, LoadPlan), plan


# -- finding -------------------------------------------------------------------------------------


def test_chunks_are_found_where_the_text_engine_finds_them(
    finder: TokenFinder, oracle: KVEngine
) -> None:
    for prompt in (
        make_prompt(3, 1, 7),
        make_prompt(2, 2),
        TEXTS[4] + "\n" + TEXTS[0] + " Why?",
        f"[INST] <<{TEXTS[8]}>> [/INST] and more",
        "Nothing of the kind stands here.",
    ):
        wanted = PromptReader(oracle.index).lay_out(Request(prompt)).layout
        found = finder.find(oracle.prompt_ids(prompt))
        assert found.token_ids == wanted.token_ids
        assert found.spans == wanted.spans


# -- plans ---------------------------------------------------------------------------------------


def test_rows_end_with_the_last_chunk_or_with_what_is_asked(
    planner: Planner, oracle: KVEngine
) -> None:
    ids = oracle.prompt_ids(make_prompt(3, 1, question="Question: " + "who? " * 400))
    ends = {}
    for policy in ("none", "two_stage"):
        plan = planner.plan(ids, RequestParams(policy=policy).to_params())
        assert isinstance(plan, LoadPlan)
        ends[policy] = plan.num_tokens
        assert len(plan.layout.token_ids) == plan.num_tokens + 1
    last = plan.layout.spans[-1].prompt_end
    assert ends == {"none": last, "two_stage": last + MAX_ASKED_TOKENS - 1}


def test_where_nobody_gives_a_ratio_the_index_does(tmp_path: Path, oracle: KVEngine) -> None:
    asked = (RequestParams(), RequestParams(policy="query"), RequestParams(ratio=0.2))
    with Index.create(
        tmp_path, model=oracle.index.model, embedding="hashing", context="similar:48"
    ) as index:
        index.add([Document(f"text-{i}", text) for i, text in enumerate(TEXTS)])
        ids = oracle.prompt_ids(make_prompt(3, 1))
        found = []
        for more in ({}, {"ratio": 0.3}, {"policy": "boundary"}):
            planner = Planner(index, ConnectorSettings(str(tmp_path), **more))
            plans = [planner.plan(ids, params.to_params()) for params in asked]
            found.append([str(plan.policy) for plan in plans if isinstance(plan, LoadPlan)])
    query, own = "query(ratio=0.15)", "two_stage(ratio=0.2"
    assert [[policy.partition(",")[0] for policy in policies] for policies in found] == [
        ["two_stage(ratio=0.05", query, own],
        ["two_stage(ratio=0.3", query, own],
        ["boundary(tokens=16)", query, "boundary(ratio=0.2)"],
    ]


def test_every_plan_has_a_salt_of_its_own(planner: Planner, oracle: KVEngine) -> None:
    plans = [
        planner.plan(oracle.prompt_ids(make_prompt(*order)), params.to_params())
        for order in ((3, 1), (1, 3))
        for params in (RequestParams(policy="none"), RequestParams(policy="boundary"))
    ]
    again = planner.plan(
        oracle.prompt_ids(make_prompt(3, 1)), RequestParams(policy="none").to_params()
    )
    salts = [plan.salt for plan in plans if isinstance(plan, LoadPlan)]
    assert len(set(salts)) == 4
    assert again.salt == salts[0]


@pytest.mark.parametrize(
    "params",
    [
        {PARAMS: {"policy": "magic"}},
        {PARAMS: {"policy": "none", "ratio": 2.0}},
        {PARAMS: {"path": "/etc/passwd"}},
        {PARAMS: {"policy": "none:shift=2"}},
        {PARAMS: {"policy": 7}},
        {PARAMS: {"policy": "deviation", "ratio": "much"}},
        {PARAMS: {"policy": "deviation", "ratio": [0.5]}},
        {PARAMS: {"policy": "boundary", "boundary_tokens": {}}},
        {PARAMS: {"reuse": "yes"}},
        {PARAMS: "two_stage"},
        {PARAMS: {"artefact": "../../index"}},
        {PARAMS: {"policy": "auto"}},
    ],
)
def test_what_a_client_gets_wrong_is_computed_and_said(
    planner: Planner, oracle: KVEngine, params: dict[str, Any]
) -> None:
    plan = planner.plan(oracle.prompt_ids(make_prompt(3, 1)), params)
    assert plan.reason


def test_nothing_is_looked_for_where_that_is_off(served: Index, oracle: KVEngine) -> None:
    planner = Planner(served, ConnectorSettings(str(served.path), find_chunks=False))
    ids = oracle.prompt_ids(make_prompt(3, 1))
    assert planner.plan(ids, None) == NoPlan()
    assert isinstance(planner.plan(ids, RequestParams().to_params()), LoadPlan)


# -- answers -------------------------------------------------------------------------------------


class _Endless(HTTPServer):
    """A server that goes on for ever."""

    def stream(self, request: EngineRequest) -> Iterator[Piece]:
        assert request.is_streamed, "an answer without end is waited for"
        while True:
            yield Piece("a", 1)


def test_an_answer_over_http_ends_in_time(served: Index) -> None:
    engine = VLLMEngine(served, lambda: _Endless("http://127.0.0.1:1/v1"))
    assert engine.generate(make_prompt(3), timeout_seconds=0.01).finish_reason == "timeout"
    with pytest.raises(ParameterError, match="timeout_seconds"):
        engine.generate(make_prompt(3), timeout_seconds=0)


class _Short(HTTPServer):
    """A server that answers at once."""

    def stream(self, request: EngineRequest) -> Iterator[Piece]:
        yield Piece("a", 1, finish_reason="stop")


def test_a_batch_is_a_list_and_what_vllm_cannot_do_is_refused(served: Index) -> None:
    engine = VLLMEngine(served, lambda: _Short("http://127.0.0.1:1/v1"))
    for one in ("abc", Request("abc"), None):
        with pytest.raises(ParameterError, match="put the prompt into a list"):
            engine.generate_batch(one)  # type: ignore[arg-type]
    refused: list[dict[str, Any]] = [
        {"eviction": "corm"},
        {"ttft": 1.0},
        {"constraint": Constraint.regex("a")},
        {"logprobs": 0},
        {"stop_loops": True},
        {"explain": True},
    ]
    assert [one.text for one in engine.generate_batch(["abc", "x"])] == ["a", "a"]
    for options in refused:
        (name,) = options
        with pytest.raises(ParameterError, match=f"^{name}.* leave it out, or answer with KVEng"):
            engine.generate_batch(["abc", Request("abc", **options)])
    asked: list[Any] = ["abc", 5, *(Request("abc", **one) for one in refused)]
    first, *errors = engine.generate_batch(asked, return_exceptions=True)
    assert first.text == "a"
    assert [type(one) for one in errors] == [ParameterError] * (1 + len(refused))


def test_messages_and_sampling_reach_vllm_as_they_reach_the_engine(
    served: Index, oracle: KVEngine
) -> None:
    asked: list[EngineRequest] = []

    class Noting(_Short):
        def stream(self, request: EngineRequest) -> Iterator[Piece]:
            asked.append(request)
            yield from super().stream(request)

    engine = VLLMEngine(served, lambda: Noting("http://127.0.0.1:1/v1"))
    said = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": said},
        {"role": "user", "content": "Who?"},
    ]
    penalties: Any = {"frequency_penalty": 0.5, "presence_penalty": -0.25, "min_p": 0.125}
    engine.generate(messages, temperature=1.0, **penalties)
    system = {"role": "system", "content": "Be brief."}
    assert tuple(asked[0].token_ids) == oracle.prompt_ids([system, messages[1]])
    assert penalties.items() <= asked[0].sampling_values().items()


# -- versions and set-ups ------------------------------------------------------------------------


def test_only_tested_versions_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda: versions.TESTED_VERSIONS[0])
    assert versions.require_tested() == versions.TESTED_VERSIONS[0]
    monkeypatch.setattr(versions, "installed_version", lambda: "0.11.0")
    with pytest.raises(EngineVersionError, match=r"0\.11\.0 was not tested.*0\.32\.0"):
        versions.require_tested()
    assert versions.require_tested(any_version=True) == "0.11.0"
    monkeypatch.setattr(versions, "installed_version", lambda: None)
    with pytest.raises(EngineVersionError, match="not installed"):
        versions.require_tested(any_version=True)


def _engine(**changes: Any) -> tuple[Any, Any]:
    """Return an engine's configuration as far as it is looked at."""
    values = {
        "tensor_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "hf_text_config": LlamaConfig(num_key_value_heads=2, num_attention_heads=4),
        "dtype": torch.float32,
        "cache_dtype": "auto",
        "groups": 1,
        "kv_load_failure_policy": "recompute",
        **changes,
    }
    whole = SimpleNamespace(**values)
    config = SimpleNamespace(
        parallel_config=whole, model_config=whole, cache_config=whole, kv_transfer_config=whole
    )
    return config, SimpleNamespace(kv_cache_groups=[None] * values["groups"])


def test_a_set_up_that_stored_kv_does_not_fit_is_refused(served: Index) -> None:
    settings = ConnectorSettings(str(served.path))
    assert check_engine(*_engine(), settings).dtype == "float32"
    for changes, why in (
        ({"tensor_parallel_size": 4}, "tensor_parallel_size=4: the model has 2 key heads"),
        ({"hf_text_config": Phi3Config(), "tensor_parallel_size": 2}, "models of type phi3"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size=2"),
        ({"dtype": torch.bfloat16}, "dtype='float32'"),
        ({"cache_dtype": "fp8"}, "'fp8'"),
        ({"groups": 2}, "disable_hybrid_kv_cache_manager"),
        ({"kv_load_failure_policy": "fail"}, "recompute"),
    ):
        with pytest.raises((EngineError, UnsupportedModelError), match=why):
            check_engine(*_engine(**changes), settings)


def test_settings_travel_through_vllms_configuration(served: Index) -> None:
    settings = ConnectorSettings(str(served.path), policy="boundary", boundary_tokens=4)
    options = engine_options(settings)
    extra = options["kv_transfer_config"]["kv_connector_extra_config"]
    assert ConnectorSettings.from_extra_config(extra) == settings
    assert options["dtype"] == "float32"
    for wrong in ({}, {"index": "x", "pat": 1}, {"index": 3}, {"index": "x", "policy": "magic"}):
        with pytest.raises(ParameterError):
            ConnectorSettings.from_extra_config(wrong)


def test_the_command_that_serves(served: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda: versions.TESTED_VERSIONS[0])
    settings = ConnectorSettings(str(served.path))
    command = serve_command(settings, host="::1", port=99, more=["--api-key", "k"])
    assert command[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert command[-2:] == ["--api-key", "k"]
    assert "--port=99" in command
    monkeypatch.setattr(versions, "installed_version", lambda: "0.11.0")
    with pytest.raises(KVRagError, match="was not tested"):
        serve_command(settings, host="::1", port=99)


# -- views of an engine's weights ----------------------------------------------------------------


class _EngineModel(torch.nn.Module):
    """A model's weights as vLLM holds them: q, k, v in one matrix, gate and up in one, padding."""

    packed_modules_mapping = {  # noqa: RUF012  # as vLLM declares it
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        packed: dict[str, list[torch.Tensor]] = {}
        for name, weight in weights.items():
            for one, parts in self.packed_modules_mapping.items():
                for part in parts:
                    name = name.replace(f".{part}.", f".{one}.")
            packed.setdefault(name, []).append(weight)
        self.held = {name: torch.cat(parts) for name, parts in packed.items()}
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if name in self.held:
                self.held[name] = torch.cat([self.held[name], torch.zeros(64, 64)])

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:  # type: ignore[override]
        return iter(self.held.items())


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "llama-llama3", "mistral-sliding", "qwen2", "qwen3"])
def test_views_of_an_engines_weights_are_the_model(
    tmp_path: Any, family: str, is_tied: bool
) -> None:
    hf = make_model(family, tie_word_embeddings=is_tied)
    hf.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    engine = _EngineModel(dict(hf.named_parameters()))
    shared = share_weights(engine, str(tmp_path), torch.float32, torch.device("cpu"))
    assert shared.fingerprint == model_fingerprint(hf)
    with torch.no_grad():
        ids = torch.randint(3, 300, (1, 40), generator=torch.Generator().manual_seed(0))
        assert torch.equal(shared.hf(ids).logits, hf(ids).logits)
    addresses = {held.untyped_storage().data_ptr() for held in engine.held.values()}
    for parameter in shared.hf.parameters():
        assert parameter.untyped_storage().data_ptr() in addresses


def test_repacked_weights_are_noticed(tmp_path: Any) -> None:
    hf = make_model("llama")
    hf.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    for name, change, why in (
        ("model.layers.1.mlp.down_proj.weight", lambda held: held[:0], "repacked"),
        ("model.layers.1.self_attn.qkv_proj.weight", lambda held: held[:10], "repacked"),
        ("model.layers.1.mlp.down_proj.weight", lambda held: held.T, "repacked|expected"),
        ("model.norm.weight", lambda held: held.bfloat16(), "bfloat16"),
        ("model.norm.weight", lambda held: None, "has no"),
    ):
        engine = _EngineModel(dict(hf.named_parameters()))
        changed = change(engine.held.pop(name))
        if changed is not None:
            engine.held[name] = changed
        with pytest.raises(NotShareableError, match=why):
            share_weights(engine, str(tmp_path), torch.float32, torch.device("cpu"))
    # What has the right shape and other values is told by its hash.
    engine = _EngineModel(dict(hf.named_parameters()))
    engine.held["model.layers.1.self_attn.qkv_proj.weight"] *= 1.5
    shared = share_weights(engine, str(tmp_path), torch.float32, torch.device("cpu"))
    assert shared.fingerprint != model_fingerprint(hf)


def test_others_params_are_not_ours(planner: Planner, oracle: KVEngine) -> None:
    plan = planner.plan(oracle.prompt_ids(make_prompt(3, 1)), {"do_remote_prefill": True})
    assert isinstance(plan, LoadPlan)
