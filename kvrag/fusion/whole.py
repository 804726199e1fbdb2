"""Prompts of models that compute them as wholes, from the longest beginning that was kept."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from kvrag.errors import ParameterError
from kvrag.fusion.fuser import FusedPrompt
from kvrag.fusion.layout import Layout
from kvrag.fusion.report import FULL_PREFILL, FusionReport
from kvrag.fusion.slices import Clock, Slices
from kvrag.kvcache import FusedKV, KVSpec
from kvrag.models.kv_model import State, WholeModel
from kvrag.models.tokens import num_equal

_LEAST_TOKENS = 16
"""A beginning of fewer tokens is not kept: computing them costs as little as copying a state."""
_AT_ONCE = 512


@dataclass(frozen=True)
class WholePrompt(FusedPrompt):
    """A prompt computed as a whole: `kv` is empty, and `state` has what the model needs.

    `before` was kept for it: the state without the prompt's last token.
    """

    model: WholeModel = None  # type: ignore[assignment]  # always given
    state: State = None  # type: ignore[assignment]
    before: State | None = None

    def to_generate(self) -> dict[str, Any]:
        """Raise ParameterError: no cache of it can go back by one token, which that needs."""
        raise ParameterError(
            "a prompt computed as a whole cannot be given to Transformers' generate: answer it "
            "with KVEngine, or give generate the token ids"
        )


class _Kept(NamedTuple):
    """A state, its name, and the state that is not needed any more once this one is continued."""

    session: str | None
    state: State
    before: State | None


class Beginnings:
    """Keeps states after the beginnings of prompts, in bounded memory. Safe for several threads.

    Kept are a prompt without its last token, until its answer is continued, a prompt with its
    answer, what precedes its first chunk, and what two prompts began with alike when the second
    came. The least recently used are dropped first.

    Source: Pan et al., Marconi (arXiv 2411.19379) §4.1, which states of hybrid models to admit.

    Parameters
    ----------
    max_bytes
        Room for all of them; 0 keeps nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: list[_Kept] = []  # the most recent one last

    @property
    def size_bytes(self) -> int:
        """Bytes that are kept now."""
        with self._lock:
            return sum(one.state.size_bytes for one in self._kept)

    def has_room(self, state: State) -> bool:
        """Return whether a state fits at all; `keep` takes no other."""
        return state.size_bytes <= self.max_bytes

    def keep(self, session: str | None, state: State, before: State | None = None) -> None:
        """Keep a state, which nobody changes any more, under a name or none.

        `before` is dropped as soon as a prompt continues the state.
        """
        if not self.has_room(state):
            return
        with self._lock:
            self._kept = [
                one
                for one in self._kept
                if one.session != session or one.state.token_ids != state.token_ids
            ]
            self._kept.append(_Kept(session, state, before))
            size = sum(one.state.size_bytes for one in self._kept)
            while size > self.max_bytes:
                size -= self._kept.pop(0).state.size_bytes

    def find(self, session: str | None, token_ids: Sequence[int]) -> tuple[State | None, int]:
        """Return the longest kept beginning of a prompt, and with how many tokens another began.

        At least one token is left to compute. A state is kept for others, too: copy it.
        """
        with self._lock:
            best, alike = self._longest(session, token_ids)
            if best is None:
                return None, alike
            self._kept = [
                one for one in self._kept if one is not best and one.state is not best.before
            ]
            self._kept.append(best)
            return best.state, alike

    def num_kept(self, session: str | None, token_ids: Sequence[int]) -> int:
        """Return how many tokens `find` would save, and leave everything as it is."""
        with self._lock:
            best, _ = self._longest(session, token_ids)
        return 0 if best is None else len(best.state.token_ids)

    def _longest(self, session: str | None, token_ids: Sequence[int]) -> tuple[_Kept | None, int]:
        best, longest, alike, most = None, 0, 0, len(token_ids) - 1
        for one in self._kept:
            if one.session != session:
                continue
            same = min(num_equal(one.state.token_ids, token_ids), most)
            alike = max(alike, same)
            if longest < same == len(one.state.token_ids):
                best, longest = one, same
        return best, alike


def read_whole(
    model: WholeModel,
    layout: Layout,
    beginnings: Beginnings | None,
    session: str | None,
    clock: Clock,
    num_before: int = 0,
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
    num_before
        Number of tokens before the first chunk: later questions may have the same ones.
    """
    ids, state, alike = layout.token_ids, State(), 0
    stops = [len(ids)]
    if beginnings is not None:
        found, alike = beginnings.find(session, ids)
        if found is not None:
            state = found.copy()
        stops = sorted({alike, num_before, len(ids) - 1, len(ids)})
    num_kept, before = len(state.token_ids), None
    for stop in stops:
        while len(state.token_ids) < stop:
            begin = len(state.token_ids)
            logits = model.read(state, ids[begin : min(begin + _AT_ONCE, stop)])
            clock.lap("compute")
            yield False
            clock.resume()
        is_beginning = max(num_kept, _LEAST_TOKENS) < stop < len(ids)
        if beginnings is not None and is_beginning and beginnings.has_room(state):
            copied = state.copy()
            beginnings.keep(session, copied)
            if stop not in (alike, num_before):
                before = copied
    num_layers, fresh = model.chunk_spec.num_layers, len(ids) - num_kept
    reasons = dict.fromkeys(layout.fresh_reasons, fresh)
    report = FusionReport.of(
        *(layout, FULL_PREFILL),
        num_fresh=fresh,
        seconds=clock.seconds,
        rows_by_layer=(fresh,) * num_layers,
        num_kept=num_kept,
        misses=layout.misses,
        fresh_reasons=reasons,
        compute=model.compute,
    )
    nothing = FusedKV(KVSpec(0, 1, 1, logits.dtype), len(ids), 0)
    rows = torch.arange(num_kept, len(ids))
    layout = replace(layout, num_kept=num_kept, fresh_reasons=reasons)
    kept = (nothing, logits, report, rows, (), layout)
    return WholePrompt(*kept, model=model, state=state, before=before)
