"""Encoding chunks with any kind of compression."""

from __future__ import annotations

from collections.abc import Sequence

from kvrag.errors import ParameterError, UnsupportedModelError
from kvrag.fusion.compression.anchors import Anchors, encode_anchors, find_anchors
from kvrag.fusion.compression.dropping import drop_tokens
from kvrag.fusion.compression.spec import ANCHORS, KVZIP, Compression, key_options
from kvrag.kvcache import ChunkKV
from kvrag.models.kv_model import KVModel


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
