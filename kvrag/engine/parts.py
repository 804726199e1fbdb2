"""What happened to each part of a prompt: reused, repaired or computed, and why."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch

from kvrag.engine.answer import Part
from kvrag.engine.prompt_reader import LaidOutPrompt
from kvrag.fusion.fuser import MADE, OUTPRICED, FusedPrompt

_EARLIER = "an earlier answer"
_NOT_LOADED = "found, but not loaded"
KEPT, EXACT, REUSED, REPAIRED, FRESH = "kept", "exact", "reused", "repaired", "fresh"


def prompt_parts(laid_out: LaidOutPrompt, fused: FusedPrompt) -> tuple[Part, ...]:
    """Return the parts of a prompt in order.

    There are none if its rows are not its tokens: with link tokens, or compressed chunks.

    Parameters
    ----------
    laid_out
        The prompt as it was read.
    fused
        The same prompt, fused.
    """
    layout = fused.layout
    if layout.links or layout.token_ids != laid_out.layout.token_ids:
        return ()
    num_tokens, num_layers = len(layout.token_ids), len(fused.report.rows_by_layer)
    states = [(FRESH, "")] * num_tokens
    for one in laid_out.fresh:
        states[one.start : one.end] = [(FRESH, one.reason)] * (one.end - one.start)
    # Only the first chunk can be exact without a stored record.
    made = (FRESH, MADE) if fused.report.num_made else None
    layers = [num_layers] * num_tokens
    states[: layout.num_kept] = [(KEPT, _EARLIER)] * layout.num_kept
    layers[: layout.num_kept] = [0] * layout.num_kept
    computed_anyway = set(fused.fresh.tolist())
    times = torch.bincount(torch.cat([*fused.picks, fused.fresh[:0]]), minlength=num_tokens)
    computed = times.tolist()
    for span in layout.spans:
        chunk = laid_out.chunks[span.chunk_id]
        why = f"{chunk.source}, chunk {chunk.ordinal}"
        plain = EXACT if layout.is_exact(span) else REUSED
        first = max(span.prompt_start, min(span.prompt_end, layout.num_kept))
        states[span.prompt_start : first] = [(KEPT, why)] * (first - span.prompt_start)
        rows = slice(first, span.prompt_end)
        if made is not None and plain == EXACT:
            states[rows] = [made] * (span.prompt_end - first)
            continue
        if first in computed_anyway:
            why = OUTPRICED if fused.report.num_outpriced else _NOT_LOADED
            states[rows] = [(FRESH, why)] * (span.prompt_end - first)
            continue
        layers[rows] = computed[rows]
        states[rows] = [
            (REPAIRED if 2 * number > num_layers else plain, why) for number in computed[rows]
        ]
    return tuple(_grouped(laid_out, states, layers))


def _grouped(
    laid_out: LaidOutPrompt, states: list[tuple[str, str]], layers: list[int]
) -> Iterator[Part]:
    text, offsets = laid_out.text, laid_out.offsets
    written = 0
    for (state, why), rows in groupby(range(len(states)), states.__getitem__):
        first, *_, last = (*rows,) * 2
        # Special tokens that the tokenizer adds have no text; bytes of one character share theirs.
        end = max(written, offsets[last][1]) if offsets else written
        end = len(text) if last == len(states) - 1 else end
        yield Part(first, last + 1, state, why, text[written:end], tuple(layers[first : last + 1]))
        written = end
