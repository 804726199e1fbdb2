"""The KV of chosen rows of one sequence, with the caller's inputs, positions and mask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvrag.errors import UnsupportedModelError
from kvrag.kvcache import ChunkKV
from kvrag.models.adapter import without_adapters
from kvrag.models.caches import CaptureCache
from kvrag.models.families import Chunked, base_of, sliding_windows
from kvrag.models.kv_model import KVModel
from kvrag.models.writers import CACHE_ARGUMENT

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# A boolean mask in the shape that a model takes.


def model_masks(
    hf: PreTrainedModel, allowed: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
) -> Any:
    """Return the model's mask argument: one mask for all layers, or one for each layer type.

    Parameters
    ----------
    hf
        The model.
    allowed
        ``[B, q, k]`` bool: which rows see which, without the layers' windows.
    queries, keys
        ``[B, q]`` and ``[B, k]``: positions, for the layers' windows.
    """
    layer_windows = sliding_windows(hf)
    windows = set(layer_windows)
    found = {
        window: _as_model_wants(
            hf,
            allowed if window is None else allowed & (keys[:, None] > queries[:, :, None] - window),
        )
        for window in windows
    }
    if len(found) == 1:
        return found[layer_windows[0]]
    sliding = next(window for window in windows if window is not None)
    return {"full_attention": found[None], "sliding_attention": found[sliding]}


def _as_model_wants(hf: PreTrainedModel, allowed: torch.Tensor) -> torch.Tensor:
    if hf.config._attn_implementation != "eager":
        return allowed[:, None]
    additive = torch.zeros(allowed.shape, dtype=hf.dtype, device=allowed.device)
    return additive.masked_fill_(~allowed, torch.finfo(hf.dtype).min)[:, None]


@torch.no_grad()
def capture_rows(
    model: KVModel,
    embeds: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    allowed: torch.Tensor | None = None,
) -> tuple[ChunkKV, torch.Tensor]:
    """Run the model over one sequence and keep the position-free KV of some of its rows.

    Parameters
    ----------
    model
        The model.
    embeds
        ``[W, hidden]``: the first layer's inputs.
    positions
        ``[W]`` positions.
    rows
        ``[n]`` indices of the rows kept, at least one.
    allowed
        ``[W, W]`` bool: which rows see which; None means that each row sees all before it.

    Returns
    -------
    ChunkKV, tensor
        KV of the rows, on the CPU, and their normed last hidden states ``[n, hidden]``.

    Raises
    ------
    UnsupportedModelError
        When the model's layers attend in their own code, in chunks, or to latents.
    """
    if not model.has_batches or any(isinstance(one, Chunked) for one in model.windows):
        raise UnsupportedModelError(
            f"{model.name} takes neither positions nor masks of ours in a whole forward: store its "
            "chunks uncompressed"
        )
    base: Any = base_of(model.hf)
    spec = model.chunk_spec
    cache = CaptureCache(spec.num_layers)
    mask = None
    if allowed is not None:
        mask = model_masks(model.hf, allowed[None], positions[None], positions[None])
    with model.lock, without_adapters(model.hf):
        hidden = base(
            inputs_embeds=embeds[None],
            position_ids=positions[None],
            attention_mask=mask,
            **{CACHE_ARGUMENT: cache},
            use_cache=True,
        ).last_hidden_state[0]
    shape = (spec.num_layers, spec.num_kv_heads, len(rows), spec.head_dim)
    keys = torch.empty(shape, dtype=spec.dtype, device=model.device)
    values = torch.empty_like(keys)
    tables = model.tables(int(positions.max()) + 1)
    layers: list[Any] = cache.layers
    for layer_index, layer in enumerate(layers):
        tables[layer_index].strip(layer.keys[0][:, rows], positions[rows], keys[layer_index])
        values[layer_index] = layer.values[0][:, rows]
    return ChunkKV(keys.cpu(), values.cpu()), hidden[rows]


def embed_tokens(model: KVModel, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the first layer's inputs ``[..., hidden]``, as the model's own forward makes them."""
    # Through the module: some families scale what they look up.
    embeds: torch.Tensor = base_of(model.hf).get_input_embeddings()(token_ids)
    return embeds
