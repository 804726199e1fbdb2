"""`kvrag serve`: vLLM's OpenAI-compatible server, whose engine has a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest

from kvrag.engine.engine import KVEngine
from kvrag.errors import EngineError
from kvrag.ingest.index import Index
from kvrag.llms.vllm.langchain import KVRagVLLM
from tests.support.servers import free_port
from tests.vllm.conftest import ENVIRONMENT, make_prompt
from tests.vllm.reference import NUM_TOKENS, TOLERANCE, expected
from tests.vllm.test_adapters import whole_characters

_START_SECONDS = 300
MAX_TOKENS = 8


@pytest.fixture(scope="module")
def url(vllm: Any, served: Index, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    log = tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-m", "kvrag", "serve", "--engine", "vllm"]
    command += ["--index", served.path, "--policy", "none"]
    command += ["--port", str(port), "--max-model-len", "2048", "--block-size", "32"]
    command += ["--enforce-eager", "--max-num-seqs", "8", "--max-logprobs", "20"]
    environment = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_for(f"{address}/health", server, log)
        yield f"{address}/v1"
        assert server.poll() is None, log.read_text()[-3000:]
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until:
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            urlopen(url, timeout=5).close()
        except (URLError, OSError):
            time.sleep(0.5)
        else:
            return
    pytest.fail(f"no answer from {url}: {log.read_text()[-3000:]}")


def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    data = json.dumps(body).encode()
    with urlopen(
        Request(url + path, data, {"Content-Type": "application/json"}), timeout=60
    ) as response:
        values: dict[str, Any] = json.loads(response.read())
    return values


@pytest.fixture
def llm(url: str, served: Index) -> KVRagVLLM:
    return KVRagVLLM(index=served, base_url=url, max_tokens=MAX_TOKENS, policy="boundary")


def test_a_client_that_knows_nothing_of_kvrag(url: str, served: Index, oracle: KVEngine) -> None:
    prompt = make_prompt(3, 1)
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "logprobs": 20}
    model = json.loads(urlopen(f"{url}/models").read())["data"][0]["id"]
    answer = post(url, "/completions", {"model": model, "ignore_eos": True, **body})
    assert answer["kv_transfer_params"]["kvrag"]["report"]["num_chunks"] == 2
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    wanted = expected(oracle, prompt, "none")
    assert answer["choices"][0]["text"] == whole_characters(
        served.tokenizer.decode(wanted.tokens, skip_special_tokens=True)
    )
    found = answer["choices"][0]["logprobs"]["token_logprobs"]
    for step, token in enumerate(wanted.tokens):
        assert abs(found[step] - wanted.logprobs[step, token].item()) <= TOLERANCE


def test_the_langchain_model_over_it(llm: KVRagVLLM, oracle: KVEngine) -> None:
    prompt = make_prompt(4, 7)
    wanted = oracle.generate(prompt, policy="boundary", max_tokens=MAX_TOKENS)
    generation = llm.generate([prompt]).generations[0][0]
    assert generation.text == whole_characters(wanted.text)
    report = wanted.report.to_dict()
    for name in ("policy", "num_tokens", "num_reused", "num_recomputed", "num_fresh"):
        assert generation.generation_info["report"][name] == report[name], name


def test_a_stream(llm: KVRagVLLM, oracle: KVEngine) -> None:
    prompt = make_prompt(4, 7, 2)
    chunks = list(llm._stream(prompt))
    wanted = oracle.generate(prompt, policy="boundary", max_tokens=MAX_TOKENS)
    assert "".join(chunk.text for chunk in chunks) == whole_characters(wanted.text)
    report = chunks[-1].generation_info["report"]
    assert report["num_tokens"] == wanted.report.num_tokens
    assert report["num_reused"] > 0


def test_what_is_wrong_with_a_request_leaves_the_server_up(llm: KVRagVLLM, url: str) -> None:
    model = llm.engine().transport.model
    for params in ({"kvrag": {"policy": "magic"}}, {"kvrag": 7}, {"kvrag": {"artefact": "/etc"}}):
        body = {"model": model, "prompt": make_prompt(3), "max_tokens": 1}
        answer = post(url, "/completions", {**body, "kv_transfer_params": params})
        assert answer["kv_transfer_params"]["kvrag"]["computed_because"]
    with pytest.raises(HTTPError):
        post(url, "/completions", {"model": "another", "prompt": "x", "max_tokens": 1})
    with pytest.raises(EngineError, match="refuses the request"):
        llm.engine("another").generate(make_prompt(3))
    assert llm.invoke(make_prompt(3))
