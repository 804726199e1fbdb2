"""A chunk's compressed KV, whichever way it is compressed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvrag.errors import UnsupportedModelError
from kvrag.fusion.compression.anchors import Anchors, encode_anchors, find_anchors
from kvrag.fusion.compression.dropping import drop_tokens
from kvrag.fusion.compression.kvzip import keep_rebuilding, room_to_repeat
from kvrag.fusion.compression.spec import ANCHORS, KVZIP, Compression, key_options
from kvrag.kvcache import ChunkKV
from kvrag.models.kv_model import KVModel


def room_behind(compression: Compression, tokenizer: Any, num_tokens: int) -> int:
    """Return the positions that compressing a chunk of so many tokens takes behind it.

    Those of one token are the fewest that a chunk can be compressed in.
    """
    return room_to_repeat(tokenizer, num_tokens) if compression.kind == KVZIP else 0


class Compressor:
    """Encodes chunks of one model as fewer rows than they have tokens.

    Parameters
    ----------
    model
        The model.
    compression
        How.
    anchors
        Of ``anchors``; None takes those that lie in the model's folder.

    Raises
    ------
    UnsupportedModelError
        When the model's KV holds for the positions alone that it was computed at.
    AnchorsError
        When anchors are wanted and there are none, or they are of another model or other rates.
    """

    def __init__(
        self, model: KVModel, compression: Compression, anchors: Anchors | None = None
    ) -> None:
        if model.is_position_bound:
            raise UnsupportedModelError(
                f"{model.name} learned its positions, so rows of a chunk cannot move together; "
                "store its chunks uncompressed"
            )
        self._model = model
        self.compression = compression
        self._anchors: Anchors | None = None
        if compression.kind == ANCHORS:
            self._anchors = anchors or find_anchors(model)
            self._anchors.check(model, compression)

    @property
    def key_options(self) -> dict[str, str]:
        """What a chunk's key has to name: KV of one compression is never taken for another's."""
        return key_options(self.compression, self.anchors_digest)

    @property
    def anchors_digest(self) -> str:
        """Digest of the anchors, or "" where there are none."""
        return "" if self._anchors is None else self._anchors.digest

    def encode(self, prefix_ids: Sequence[int], token_ids: Sequence[int]) -> ChunkKV:
        """Return the position-free KV of the rows that stand for a chunk."""
        if self._anchors is None:
            keep = keep_rebuilding if self.compression.kind == KVZIP else drop_tokens
            return keep(self._model, prefix_ids, token_ids, self.compression)
        return encode_anchors(self._model, prefix_ids, token_ids, self.compression, self._anchors)
