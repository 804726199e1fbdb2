"""Loading on several ranks: a record that one of them loses is lost on all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvrag.errors import EngineError
from kvrag.fusion.layout import ReusedSpan
from kvrag.fusion.loader import (
    MISS_ABSENT,
    MISS_DAMAGED,
    MISS_PROFILE,
    MISS_SLOW,
    MISS_UNREADABLE,
    LostError,
    OpenKV,
    SpanLoader,
)
from kvrag.kvcache import FusedKV
from kvrag.models.ranks import Ranks
from kvrag.positions.rotary import RotaryTable

# What ranks say of a record is the number of the reason, from 1 on; 0 if they have it.
_REASONS = (None, MISS_PROFILE, MISS_UNREADABLE, MISS_ABSENT, MISS_DAMAGED, MISS_SLOW)


class AgreedLoader(SpanLoader):
    """Loads a rank's heads of a prompt's spans; all ranks raise the same `LostError`.

    Without that, the ranks would compute different rows. The ranks agree once a layer.

    Parameters
    ----------
    ranks
        The ranks that fuse the prompt.
    open_kv, num_threads
        See `SpanLoader`.
    """

    def __init__(self, ranks: Ranks, open_kv: OpenKV, num_threads: int) -> None:
        super().__init__(open_kv, None, num_threads)
        self._ranks = ranks

    def open(self, spans: Sequence[ReusedSpan]) -> None:
        """See `SpanLoader.open`. Raise EngineError if another rank fails in another way."""
        with self._agreeing(spans):
            super().open(spans)

    def load_layer(self, layer_index: int, fused: FusedKV, table: RotaryTable) -> None:
        """See `SpanLoader.load_layer`. Raise EngineError if another rank fails in another way."""
        with self._agreeing(self._spans):
            super().load_layer(layer_index, fused, table)

    @contextmanager
    def _agreeing(self, spans: Sequence[ReusedSpan]) -> Iterator[None]:
        record_ids = list(dict.fromkeys(span.record_id for span in spans))
        codes = [0] * len(record_ids)
        failure: BaseException | None = None
        try:
            yield
        except LostError as error:
            for number, record_id in enumerate(record_ids):
                if record_id in error.lost:
                    codes[number] = 1 + _REASONS.index(error.lost[record_id])
        except BaseException as error:
            failure = error
        *agreed, has_failed = self._ranks.most([*codes, int(failure is not None)])
        if failure is not None:
            raise failure
        if has_failed:
            self.end()
            raise EngineError("another of the engine's processes could not load the prompt's KV")
        told = zip(record_ids, agreed, strict=True)
        lost = {record_id: _REASONS[code - 1] for record_id, code in told if code}
        if lost:
            self.end()
            raise LostError(lost)
