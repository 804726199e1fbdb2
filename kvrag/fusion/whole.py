"""Prompts of models that compute them as wholes, from the longest beginning that was kept."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from kvrag.errors import ParameterError
from kvrag.fusion.fuser import FusedPrompt
from kvrag.fusion.layout import Layout
from kvrag.fusion.report import FULL_PREFILL, FusionReport
from kvrag.fusion.slices import Clock, Slices
from kvrag.kvcache import FusedKV, KVSpec
from kvrag.models.tokens import num_equal

if TYPE_CHECKING:
    from kvrag.models.whole import State, WholeModel

_LEAST_TOKENS = 16
"""A beginning of fewer tokens is not kept: computing them costs as little as copying a state."""
_AT_ONCE = 512


@dataclass(frozen=True)
class WholePrompt(FusedPrompt):
    """A prompt computed as a whole: `kv` is empty, and `state` has what the model needs."""

    model: WholeModel = None  # type: ignore[assignment]  # always given
    state: State = None  # type: ignore[assignment]

    def to_generate(self) -> dict[str, Any]:
        """Raise ParameterError: no cache of it can go back by one token, which that needs."""
        raise ParameterError(
            "a prompt computed as a whole cannot be given to Transformers' generate: answer it "
            "with KVEngine, or give generate the token ids"
        )


class Beginnings:
    """Keeps states after the beginnings of prompts, in bounded memory. Safe for several threads.

    Kept are a prompt without its last token, a prompt with its answer, and what two prompts began
    with alike when the second came: the text before the documents, for example. The least recently
    used are dropped first.

    Source: Pan et al., Marconi (arXiv 2411.19379) §4.1, which states of hybrid models to admit.

    Parameters
    ----------
    max_bytes
        Room for all of them; 0 keeps nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: list[tuple[str | None, State]] = []  # the most recent one last

    @property
    def size_bytes(self) -> int:
        """Bytes that are kept now."""
        with self._lock:
            return sum(state.size_bytes for _, state in self._kept)

    def keep(self, session: str | None, state: State) -> None:
        """Keep a state, which nobody changes any more, under a name or none."""
        with self._lock:
            self._kept = [
                one
                for one in self._kept
                if one[0] != session or one[1].token_ids != state.token_ids
            ]
            self._kept.append((session, state))
            size = sum(one.size_bytes for _, one in self._kept)
            while size > self.max_bytes:
                size -= self._kept.pop(0)[1].size_bytes

    def find(self, session: str | None, token_ids: Sequence[int]) -> tuple[State | None, int]:
        """Return the longest kept beginning of a prompt, and with how many tokens another began.

        At least one token is left to compute. A state is kept for others, too: copy it.
        """
        best, alike, most = None, 0, len(token_ids) - 1
        with self._lock:
            for place, (name, state) in enumerate(self._kept):
                if name != session:
                    continue
                same = min(num_equal(state.token_ids, token_ids), most)
                alike = max(alike, same)
                longest = 0 if best is None else len(self._kept[best][1].token_ids)
                if longest < same == len(state.token_ids):
                    best = place
            if best is None:
                return None, alike
            self._kept.append(self._kept.pop(best))
            return self._kept[-1][1], alike


def read_whole(
    model: WholeModel,
    layout: Layout,
    beginnings: Beginnings | None,
    session: str | None,
    clock: Clock,
) -> Slices[WholePrompt]:
    """Compute a prompt, in slices, after the longest beginning that was kept.

    Parameters
    ----------
    model
        The model.
    layout
        The prompt, without spans.
    beginnings
        What was kept, and where more is kept; None takes and keeps nothing.
    session
        The name under which it was kept.
    clock
        Measures the time.
    """
    from kvrag.models.whole import State

    ids, state, stops = layout.token_ids, State(), [len(layout.token_ids)]
    if beginnings is not None:
        found, alike = beginnings.find(session, ids)
        if found is not None:
            state = found.copy()
        stops = sorted({alike, len(ids) - 1, len(ids)})
    num_kept = len(state.token_ids)
    for stop in stops:
        while len(state.token_ids) < stop:
            begin = len(state.token_ids)
            logits = model.read(state, ids[begin : min(begin + _AT_ONCE, stop)])
            clock.lap("compute")
            yield False
            clock.resume()
        if beginnings is not None and max(num_kept, _LEAST_TOKENS) < stop < len(ids):
            beginnings.keep(session, state.copy())
    num_layers, fresh = model.chunk_spec.num_layers, len(ids) - num_kept
    reasons = dict.fromkeys(layout.fresh_reasons, fresh)
    report = FusionReport(
        policy=FULL_PREFILL,
        num_tokens=len(ids),
        num_exact=0,
        num_reused=0,
        num_recomputed=0,
        num_fresh=fresh,
        num_chunks=0,
        bytes_loaded=0,
        seconds=clock.seconds,
        rows_by_layer=(fresh,) * num_layers,
        num_kept=num_kept,
        misses=layout.misses,
        num_neutralised=layout.num_neutralised,
        num_control=layout.num_control,
        num_folded=layout.num_folded,
        fresh_reasons=reasons,
        compute=model.compute,
    )
    nothing = FusedKV(KVSpec(0, 1, 1, logits.dtype), len(ids), 0)
    rows = torch.arange(num_kept, len(ids))
    layout = replace(layout, num_kept=num_kept, fresh_reasons=reasons)
    return WholePrompt(nothing, logits, report, rows, (), layout, model=model, state=state)
