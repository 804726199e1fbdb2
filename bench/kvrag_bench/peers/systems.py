"""The tools that are compared: kvrag, Transformers, llama.cpp and kvboost (vLLM: `bench vllm`).

Each is set up as its documentation recommends for this work. A tool that is not installed is left
out.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedTokenizerBase

from kvrag.chunk import Document
from kvrag.engine.asking import Asking
from kvrag.engine.engine import KVEngine
from kvrag.errors import ParameterError
from kvrag.ingest.index import Index
from kvrag.models.kv_model import KVModel
from kvrag.models.loading import load_tokenizer
from kvrag.models.references import resolve_model
from kvrag.weights.named import named_model
from kvrag_bench.judge.questions import RenderedPrompt, render
from kvrag_bench.peers.workload import Prompt
from kvrag_bench.setting import fit_codec


@dataclass(frozen=True)
class PeerAnswer:
    """One answer.

    Attributes
    ----------
    text
        What was written.
    ttft_seconds
        From the call to the first token.
    seconds_per_token
        Of the tokens after the first; 0 if there is none.
    """

    text: str
    ttft_seconds: float
    seconds_per_token: float


class System(Protocol):
    """A tool that answers prompts."""

    settings: str
    """How it was set up, for the table."""

    def prepare(self, documents: Sequence[str]) -> None:
        """Read the documents in advance, if the tool can."""

    def answer(self, prompt: Prompt, max_tokens: int, *, reuse: bool) -> PeerAnswer:
        """Answer what a user says, greedily; without `reuse`, by full prefill."""


class Transformers:
    """Full prefill by Transformers, each time."""

    settings = "bfloat16, full prefill"

    def __init__(self, model: str) -> None:
        # Not a GGUF file's bits, which kvrag's kernels compute with.
        self._model = KVModel.load(model, compute="bfloat16")

    def prepare(self, documents: Sequence[str]) -> None:
        """Nothing to do."""

    def answer(self, prompt: Prompt, max_tokens: int, *, reuse: bool) -> PeerAnswer:  # noqa: ARG002
        """Answer by full prefill."""
        from kvrag.cli.answering import answer_plainly

        tokenizer = self._model.tokenizer
        found = answer_plainly(
            self._model, _rendered(prompt, tokenizer).token_ids(tokenizer), max_tokens
        )
        return _timed(found.text, found.ttft_seconds, found.total_seconds, found.completion_tokens)


class Kvrag:
    """kvrag over an index of all documents."""

    def __init__(self, model: str, policy: str, codec: str = "raw") -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvrag-peers-")
        self._index = Index.create(
            Path(self._folder.name) / "index", model=model, embedding="hashing", codec=codec
        )
        self._engine = KVEngine(self._index, policy=policy, session_bytes=0)
        self.settings = f"policy {policy}, codec {codec}, {self._index.config.chunk_context}"

    def prepare(self, documents: Sequence[str]) -> None:
        """Index the documents."""
        self._index.add(
            [Document(source=f"{number}", text=text) for number, text in enumerate(documents)]
        )
        fit_codec(self._index)
        self._index.on_demand.make_all()

    def answer(self, prompt: Prompt, max_tokens: int, *, reuse: bool) -> PeerAnswer:
        """Answer over stored KV."""
        rendered = _rendered(prompt, self._index.tokenizer)
        said: Any = rendered.text
        if not rendered.add_special_tokens:
            message = Asking().message(prompt.question, prompt.texts)
            said = [{"role": "user", "content": message}]
        found = self._engine.generate(said, max_tokens=max_tokens, reuse=reuse)
        return _timed(
            found.text, found.ttft_seconds, found.total_seconds, found.usage.completion_tokens
        )


class LlamaCpp:
    """llama.cpp with its prompt cache, which also moves chunks of 64 tokens and more."""

    settings = "Q4_1, prompt cache, cache-reuse 64"

    def __init__(self, model: str) -> None:
        import xllamacpp

        options = llama_cpp_options(model)
        options.n_ctx = 8192
        options.n_parallel = 1
        self._server = xllamacpp.Server(options)
        self._tokenizer = load_tokenizer(model)

    def prepare(self, documents: Sequence[str]) -> None:
        """Nothing to do: it caches prompts, not documents."""

    def answer(self, prompt: Prompt, max_tokens: int, *, reuse: bool) -> PeerAnswer:
        """Answer, or raise ParameterError with what the server said."""
        pieces: list[str] = []
        times: list[float] = []

        def take(chunk: Any) -> bool:
            times.append(time.perf_counter())
            for choice in chunk.get("choices", ()) if isinstance(chunk, dict) else ():
                pieces.append(choice.get("text") or "")
            return False

        started = time.perf_counter()
        self._server.handle_completions(
            {
                "prompt": _rendered(prompt, self._tokenizer).token_ids(self._tokenizer),
                "n_predict": max_tokens,
                "temperature": 0,
                "cache_prompt": reuse,
                "stream": True,
            },
            take,
        )
        if not times:
            raise ParameterError("llama.cpp answered nothing")
        total = time.perf_counter() - started
        return _timed("".join(pieces), times[0] - started, total, len(times) - 1)


def llama_cpp_options(model: str) -> Any:
    """Return how llama.cpp runs a model of one GGUF file; ParameterError if there is none."""
    import xllamacpp

    named = named_model(model)
    files = () if named is None else named.files()
    if len(files) != 1 and not model.endswith(".gguf"):
        raise ParameterError(f"llama.cpp needs one GGUF file, and {model} has {len(files)}")
    options = xllamacpp.CommonParams()
    options.model.path = str(files[0]) if files else model
    options.n_cache_reuse = 64
    options.verbosity = 0
    options.cpuparams.n_threads = torch.get_num_threads()
    options.cpuparams_batch.n_threads = torch.get_num_threads()
    return options


class KVBoost:
    """kvboost, which caches chunks of 128 tokens of documents that it was warmed with."""

    def __init__(self, model: str, strategy: str) -> None:
        import kvboost

        self._modes = kvboost.GenerationMode
        self._engine = kvboost.KVBoost.from_pretrained(
            str(resolve_model(model)),
            strict=False,
            max_cache_bytes=2 << 30,
            max_chunks=1024,
            recompute_strategy=kvboost.RecomputeStrategy(strategy),
        )
        self._tokenizer = load_tokenizer(model)
        self.settings = f"{strategy}, warmed with each document"

    def prepare(self, documents: Sequence[str]) -> None:
        """Warm the cache with each document."""
        for text in documents:
            self._engine.warm(text)

    def answer(self, prompt: Prompt, max_tokens: int, *, reuse: bool) -> PeerAnswer:
        """Answer in its chunk mode, or in its baseline mode."""
        mode = self._modes.CHUNK_KV_REUSE if reuse else self._modes.BASELINE
        text = _rendered(prompt, self._tokenizer).text
        found = self._engine.generate(text, max_new_tokens=max_tokens, mode=mode, do_sample=False)
        return _timed(
            found.output_text, found.ttft_ms / 1e3, found.total_ms / 1e3, found.generated_tokens
        )


@dataclass(frozen=True)
class Peer:
    """A tool by name: the package that it needs, and how it is made for a model."""

    package: str
    make: Callable[[str], System]

    @property
    def version(self) -> str:
        """The installed version, or "" if the package is missing."""
        if importlib.util.find_spec(self.package) is None:
            return ""
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return "unknown"


PEERS: dict[str, Peer] = {
    "transformers": Peer("transformers", Transformers),
    "kvrag none": Peer("kvrag", lambda model: Kvrag(model, "none")),
    "kvrag boundary": Peer("kvrag", lambda model: Kvrag(model, "boundary")),
    "kvrag two_stage": Peer("kvrag", lambda model: Kvrag(model, "two_stage")),
    "llama.cpp": Peer("xllamacpp", LlamaCpp),
    "kvboost selective": Peer("kvboost", lambda model: KVBoost(model, "selective")),
    "kvboost cacheblend": Peer("kvboost", lambda model: KVBoost(model, "cacheblend")),
}
"""All tools. The first one is what the others are compared with."""


def _rendered(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> RenderedPrompt:
    return render(prompt.question, prompt.texts, tokenizer, use_chat_template=True)


def _timed(text: str, ttft: float, total: float, num_tokens: int) -> PeerAnswer:
    return PeerAnswer(text, ttft, (total - ttft) / (num_tokens - 1) if num_tokens > 1 else 0.0)
