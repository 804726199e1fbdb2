"""KV that answered prompts leave for later prompts that begin alike, and which of it they may take.

A repair belongs to the prompt for which it was chosen: other text after a chunk would have had
other tokens of the chunk recomputed. So a later prompt takes repaired rows, and rows computed over
them, only if it begins with that whole prompt. It takes other rows as far as it begins alike. Thus
an edited prompt has the answer that it would have without any earlier one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from kvrag.fusion.controller import Choice
from kvrag.fusion.fuser import FusedPrompt
from kvrag.fusion.layout import Layout, ReusedSpan
from kvrag.fusion.repair import Repair
from kvrag.kvcache import FusedKV
from kvrag.models.tokens import num_equal


@dataclass(frozen=True)
class Turn:
    """What one prompt, and its answer, have put into a buffer.

    Attributes
    ----------
    begin
        The prompt's first row that no earlier turn has filled.
    end
        The prompt's number of tokens; the rows of its answer follow.
    settled
        The first row that depends on a repair chosen for this prompt; `end` if there is none.
    spans
        The spans from `begin` to `settled` that were taken from the store.
    """

    begin: int
    end: int
    settled: int
    spans: tuple[ReusedSpan, ...]

    def num_alike(self, spans: Sequence[ReusedSpan], num_equal: int) -> int:
        """Return how many rows a prompt may take that does not begin with this whole prompt.

        These are settled rows, taken from where the other prompt would take them.

        Parameters
        ----------
        spans
            The spans of the other prompt.
        num_equal
            With how many tokens of this prompt it begins.
        """
        limit = min(num_equal, self.settled)
        mine = (span for span in self.spans if span.prompt_start < limit)
        others = (span for span in spans if self.begin <= span.prompt_start < limit)
        for one, other in zip_longest(mine, others):
            if one != other or one.prompt_end > limit:
                return min(span.prompt_start for span in (one, other) if span is not None)
        return limit


@dataclass(frozen=True)
class Kept:
    """The KV of a prompt and its answer, after the answer.

    Attributes
    ----------
    kv
        The buffer; nobody else uses it.
    token_ids
        The tokens of its rows, from the first on.
    turns
        The prompts that have filled them, each the beginning of the next.
    num_exact
        Number of first rows without a repaired one among them.
    choice
        How the prompts were repaired.
    """

    kv: FusedKV
    token_ids: tuple[int, ...]
    turns: tuple[Turn, ...]
    num_exact: int
    choice: Choice

    @property
    def size_bytes(self) -> int:
        """Bytes of memory that the buffer takes, unused rows included."""
        return self.kv.storage.numel() * self.kv.storage.element_size()

    @property
    def cost(self) -> float:
        """What taking its rows costs, in rows that could be computed meanwhile."""
        return 0.0

    def overlap(self, layout: Layout, choice: Choice) -> Overlap:
        """Return what a prompt may take.

        Parameters
        ----------
        layout
            The prompt, with all its spans.
        choice
            How it is to be repaired. Repairs of another kind are not taken.
        """
        alike = num_equal(self.token_ids, layout.token_ids)
        if choice != self.choice:
            alike = min(alike, self.num_exact)
        whole, begin = self.turns, alike
        for number, turn in enumerate(self.turns):
            if alike < turn.end:
                alike = turn.num_alike(layout.spans, alike)
                whole, begin = self.turns[:number], min(alike, turn.begin)
                break
        # The last token has to be computed to give logits.
        num_rows = min(alike, len(layout.token_ids) - 1)
        return Overlap(self, num_rows, min(begin, num_rows), whole)


@dataclass(frozen=True)
class Overlap:
    """What a prompt may take of an earlier one's KV.

    Attributes
    ----------
    kept
        The earlier one.
    num_rows
        The number of rows, from the first on.
    begin
        How many of them belong to whole earlier turns.
    turns
        These turns.
    """

    kept: Kept
    num_rows: int
    begin: int
    turns: tuple[Turn, ...]

    @property
    def goes_on(self) -> bool:
        """Whether only the rows of the last answer, or a part of them, are left over."""
        return self.turns == self.kept.turns


def keep(
    fused: FusedPrompt, answer_ids: Sequence[int], choice: Choice, earlier: Overlap | None
) -> Kept:
    """Return what an answered prompt leaves.

    Parameters
    ----------
    fused
        The prompt. Its buffer must not be used otherwise any more.
    answer_ids
        The tokens of the answer whose rows have been written.
    choice
        How the prompt was repaired.
    earlier
        Where its first rows came from; None if it took none.
    """
    layout, num_kept = fused.layout, fused.layout.num_kept
    token_ids = (*layout.token_ids, *answer_ids)
    begin, num_exact = 0, len(token_ids)
    turns: tuple[Turn, ...] = ()
    if earlier is not None:
        begin, turns = earlier.begin, earlier.turns
        if earlier.kept.num_exact < num_kept:
            num_exact = earlier.kept.num_exact
    computed = set(fused.fresh.tolist())
    spans = [
        span
        for span in layout.spans
        if span.prompt_start >= begin and span.prompt_start not in computed
    ]
    end = len(layout.token_ids)
    repaired = (span.prompt_start for span in spans if not layout.is_exact(span))
    first = next((place for place in repaired if place >= num_kept), end)
    settled = end if _looks_back(choice) else first
    turn = Turn(begin, end, settled, tuple(span for span in spans if span.prompt_start < settled))
    if first < end:
        num_exact = min(num_exact, first)
    return Kept(fused.kv, token_ids, (*turns, turn), num_exact, choice)


def _looks_back(choice: Choice) -> bool:
    """Return whether a repair depends on nothing after the repaired span."""
    return isinstance(choice, Repair) and choice.policy.looks_back and not choice.shift
