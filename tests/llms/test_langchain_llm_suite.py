from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseLLM

from kvrag.llms.langchain import KVRagLLM
from tests.llms.llm_suite import LLMStandardTests
from tests.support.rag import Rag


class TestKVRagLLM(LLMStandardTests):
    @pytest.fixture(autouse=True)
    def _use_index(self, rag: Rag) -> None:
        self.rag = rag

    @property
    def llm_class(self) -> type[BaseLLM]:
        return KVRagLLM

    @property
    def llm_params(self) -> dict[str, Any]:
        return {"index": str(self.rag.path)}
