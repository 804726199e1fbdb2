"""The chat-model suites that LangChain ships, against `ChatKVRag`."""

import json
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from kvrag.llms.langchain import ChatKVRag
from tests.support.rag import PASSAGES, Rag, save_model
from tests.support.scripted import follow


# LangChain's own loader of serialised objects, which the suite calls, warns that it is in beta.
@pytest.mark.filterwarnings("ignore:The function `load` is in beta")
class TestChatKVRagUnit(ChatModelUnitTests):
    @pytest.fixture(autouse=True)
    def _allow_loading(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # LangChain loads only the classes on its own list, unless the caller names others
        # (load(..., allowed_objects=[ChatKVRag])); the suite has no way to name one.
        load = sys.modules["langchain_core.load.load"]  # the package's attribute is the function
        listed = load._get_default_allowed_class_paths
        monkeypatch.setattr(
            load,
            "_get_default_allowed_class_paths",
            lambda mode: listed(mode) | {tuple(ChatKVRag.lc_id())},
        )

    # Nothing is opened at construction, so a folder that does not exist will do: it is the same
    # on every machine, which the stored serialisation snapshot needs.
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatKVRag

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"index": "an-index"}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        return {"KVRAG_INDEX": "an-index"}, {}, {"index": "an-index"}


def call(name: str, **given: Any) -> str:
    called = json.dumps({"name": name, "arguments": given}, ensure_ascii=False)
    return f"<tool_call>\n{called}\n</tool_call>"


JOKE = json.dumps({"setup": "Who naps?", "punchline": "The cat."})
# What a good model says: by words of the prompt, the first that it holds.
SCRIPT = {
    "<tool_response>\n": "It is sunny there.",
    "magic_function(3)": call("magic_function", input=3),
    "magic_function_no_args()": call("magic_function_no_args"),
    "Pirate greeting": call("greeting_generator", answer_style="pirate"),
    "Hello!\n": call("magic_function", input=1),
    "San Francisco": call("get_weather", location="San Francisco, CA"),
    "你好": call("unicode_customer", customer_name="你好啊集团", description="A company"),
    "こんにちは": call("unicode_customer", customer_name="こんにちは", description="A company"),
    "joke": JOKE,
}
OTHERWISE = "1, 2, 3, 4, 5: I count as far as I am asked to, and say good-bye then."


def script(prompt: str) -> str:
    return next((said for words, said in SCRIPT.items() if words in prompt), OTHERWISE)


# The suite asks for a benchmark fixture that it uses only where HTTP was recorded.
@pytest.mark.filterwarnings("ignore:Benchmark fixture was not used")
class TestChatKVRagIntegration(ChatModelIntegrationTests):
    @pytest.fixture(autouse=True)
    def _use_index(
        self, rag: Rag, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.rag = rag
        # Random weights call no tool; where a call or a form is forced, the script must fit it too.
        follow(monkeypatch, rag, script)
        # The same weights in a second place: the one model that may stand in for the index's.
        self.same_model = Path(tmp_path_factory.getbasetemp()) / "same-model"
        if not self.same_model.exists():
            save_model(self.same_model)

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatKVRag

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"index": str(self.rag.path), "max_tokens": 200}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str | None:
        return str(self.same_model)

    @property
    def supported_usage_metadata_details(self) -> Any:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        model = ChatKVRag(**self.chat_model_params)
        question = f"{PASSAGES['ledger']}\n\nWho keeps the ledger?"
        if not stream:
            return cast(AIMessage, model.invoke(question))
        chunks = list(model.stream(question))
        return cast(AIMessageChunk, sum(chunks[1:], chunks[0]))

    @property
    def enable_vcr_tests(self) -> bool:
        # There is no HTTP to record; the test then measures streaming itself.
        return True
