"""An option is written once: a field that is added to the table is at every door."""

import subprocess
import sys

import pytest

from kvrag.engine.options import Sampling
from kvrag.optiontable import options_of

# It puts a line more into the table's source before anything else imports the module.
_ADD = """
import importlib.util, sys
from importlib.machinery import SourceFileLoader

NAME = "kvrag.engine.options"
MORE = '    mood: float = option(0.5, "How cheerful.", least=0, most=3, served_most=2)\\n'

class Loader(SourceFileLoader):
    def get_code(self, name):
        source = self.get_source(name)
        before = "    seed: int | None = option("
        assert source.count(before) == 1
        return compile(source.replace(before, MORE + before), self.path, "exec")

spec = importlib.util.find_spec(NAME)
spec = importlib.util.spec_from_file_location(NAME, spec.origin, loader=Loader(NAME, spec.origin))
module = importlib.util.module_from_spec(spec)
sys.modules[NAME] = module
spec.loader.exec_module(module)
"""
_DOORS = """
from kvrag.engine.request import Request
assert Request("x").mood == 0.5
assert Request("x", mood=1).sampling.mood == 1.0
assert "How cheerful." in Request.__doc__

from kvrag.llms.langchain import ChatKVRag
assert ChatKVRag(index="x", mood=2).mood == 2.0
assert ChatKVRag(index="x").call_values({"mood": 1})["mood"] == 1.0
from kvrag.llms.llamaindex import KVRagLLM
assert KVRagLLM(index="x").mood == 0.5

from kvrag.llms.vllm.transports import EngineRequest
assert EngineRequest((), {}, 1, Request("x", mood=2).sampling).sampling_values()["mood"] == 2.0

from kvrag.llms.tool_calls import Shape
from kvrag.server.answering import request_options
from kvrag.server.requests import ChatRequest
body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "mood": 1.5}
asked = ChatRequest.model_validate(body)
assert request_options(asked, Shape(), "")["mood"] == 1.5

from kvrag.errors import ParameterError
for refused in (
    lambda: Request("x", mood=4),
    lambda: ChatKVRag(index="x", mood=4),
    lambda: ChatRequest.model_validate({**body, "mood": 2.5}),
):
    try:
        refused()
    except (ParameterError, ValueError) as error:
        assert "mood" in str(error)
    else:
        raise AssertionError("out of range, and taken")
"""


def run(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_line_in_the_table_is_an_option_at_every_door() -> None:
    pytest.importorskip("langchain_core")
    pytest.importorskip("llama_index.core")
    pytest.importorskip("fastapi")
    run(_ADD + _DOORS)


def test_a_server_asks_for_no_more_than_the_engine_takes() -> None:
    for _, rule in options_of(Sampling):
        assert rule.served_most is None or rule.most is None or rule.served_most <= rule.most
