"""Encoding chunks with any kind of compression."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvrag.errors import ParameterError, UnsupportedModelError
from kvrag.fusion.compression.anchors import Anchors, encode_anchors, find_anchors
from kvrag.fusion.compression.spec import ANCHORS, KVZIP, Compression, key_options
from kvrag.kvcache import ChunkKV
from kvrag.models.capture import capture_rows, embed_tokens
from kvrag.models.families import project_logits
from kvrag.models.kv_model import KVModel
from kvrag.models.rows import ROW_BLOCK

# Token dropping: stores only the KV of the most informative tokens.
#
# Source: self-information of Selective Context (Li et al., arXiv 2310.06201, §3), the criterion
# that the LLMLingua family and KVLink (arXiv 2502.16002) §2.4 prune prompts by: a token that the
# text before it makes likely carries little information. KVLink uses the trained classifier of
# LLMLingua-2; here the model itself gives the probabilities, so no other model is needed.
#
# Deviation: tokens are chosen one by one, not by phrases, and their KV are those of the whole
# chunk: each kept token has seen the dropped ones before it. (docs/results/compression.md compares
# this with encoding the kept text alone.)


def drop_tokens(
    model: KVModel,
    prefix_ids: Sequence[int],
    token_ids: Sequence[int],
    compression: Compression,
) -> ChunkKV:
    """Return the position-free KV of a chunk's most informative tokens, in order.

    Parameters
    ----------
    model
        The model.
    prefix_ids
        Token ids before the chunk, whose KV is not kept.
    token_ids
        The chunk's T >= 1 token ids.
    compression
        Sets how many rows to keep.
    """
    kv, information = encode_informed(model, prefix_ids, token_ids)
    kept = most_informative(information, compression.num_rows(len(token_ids)))
    return ChunkKV(kv.keys[:, :, kept].contiguous(), kv.values[:, :, kept].contiguous())


def encode_informed(
    model: KVModel, prefix_ids: Sequence[int], token_ids: Sequence[int]
) -> tuple[ChunkKV, torch.Tensor]:
    """Return a chunk's KV, and the self-information of its tokens in nats, ``[T]`` float32.

    The first token's is infinite if no token precedes it, since nothing predicts it.
    """
    ids = torch.tensor([*prefix_ids, *token_ids], device=model.device)
    first = max(0, len(prefix_ids) - 1)
    rows = torch.arange(first, len(ids), device=model.device)
    positions = torch.arange(len(ids), device=model.device)
    with torch.no_grad():
        kv, hidden = capture_rows(model, embed_tokens(model, ids), positions, rows)
        behind = ids[first + 1 :]
        found = []
        # In blocks: a whole chunk's logits over a large vocabulary need more memory than its KV.
        for begin in range(0, len(behind), ROW_BLOCK):
            block = slice(begin, begin + ROW_BLOCK)
            logits = project_logits(model.hf, hidden[:-1][block]).float()
            targets = behind[block, None]
            found.append(-logits.log_softmax(-1).gather(1, targets)[:, 0])
    information = torch.cat([*found, torch.empty(0, device=model.device)]).cpu()
    if not prefix_ids:
        return kv, torch.cat([torch.tensor([torch.inf]), information])
    return ChunkKV(kv.keys[:, :, 1:].contiguous(), kv.values[:, :, 1:].contiguous()), information


def most_informative(information: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ascending indices of the `count` most informative tokens; ties take the first."""
    return information.sort(descending=True, stable=True).indices[:count].sort().values


class Compressor:
    """Encodes chunks of one model as fewer rows than they have tokens.

    Parameters
    ----------
    model
        The model.
    compression
        The kind and rate of compression.
    anchors
        The anchors for kind ``anchors``; None uses those in the model's folder.

    Raises
    ------
    ParameterError
        If chunks are no longer compressed so.
    UnsupportedModelError
        If the model's KV is valid only at the positions where it was computed.
    AnchorsError
        If anchors are needed but missing, or belong to another model or other rates.
    """

    def __init__(
        self, model: KVModel, compression: Compression, anchors: Anchors | None = None
    ) -> None:
        if compression.kind == KVZIP:
            raise ParameterError(
                f"compression {compression} is gone: on real models, codec transform:4 takes fewer "
                "bytes and loses less. Make a new index with --codec transform:4; an index that "
                "has this compression still answers"
            )
        if model.is_position_bound:
            raise UnsupportedModelError(
                f"{model.name} learned its positions, so a chunk's rows cannot move; store its "
                "chunks uncompressed"
            )
        self._model = model
        self.compression = compression
        self._anchors: Anchors | None = None
        if compression.kind == ANCHORS:
            self._anchors = anchors or find_anchors(model)
            self._anchors.check(model, compression)

    @property
    def key_options(self) -> dict[str, str]:
        """Options for a chunk's key, so that each compression's KV has its own key."""
        return key_options(self.compression, self.anchors_digest)

    @property
    def anchors_digest(self) -> str:
        """Digest of the anchors, or "" if there are none."""
        return "" if self._anchors is None else self._anchors.digest

    def encode(self, prefix_ids: Sequence[int], token_ids: Sequence[int]) -> ChunkKV:
        """Return the position-free KV of a chunk's compressed rows."""
        if self._anchors is None:
            return drop_tokens(self._model, prefix_ids, token_ids, self.compression)
        return encode_anchors(self._model, prefix_ids, token_ids, self.compression, self._anchors)
