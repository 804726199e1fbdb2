"""The policy ``seam``: a few tokens on both sides of every seam between chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvrag.fusion.policies.base import PromptRows
from kvrag.fusion.policies.boundary import BoundaryPolicy


@dataclass(frozen=True)
class SeamPolicy(BoundaryPolicy):
    """Compute the first and the last tokens of each chunk again, in every layer.

    Text between chunks (blank lines, headings, the prompt's delimiters) is never stored, so it is
    computed in any case. A chunk's first tokens have lost the text before them, and its last
    tokens are the nearest context of the next chunk's first tokens.

    Parameters
    ----------
    tokens, ratio
        See `BoundaryPolicy`. Half of the tokens (plus one if the number is odd) are at the chunk's
        start, the others at its end.
    """

    name: ClassVar[str] = "seam"

    def candidates(self, prompt: PromptRows) -> torch.Tensor:
        tokens = self.tokens_of(prompt)
        tail = tokens // 2
        head = tokens - tail
        pieces = [torch.empty(0, dtype=torch.long)]
        for span in prompt.spans:
            head_end = min(span.prompt_end, span.prompt_start + head)
            tail_start = max(head_end, span.prompt_end - tail)
            pieces += [
                torch.arange(span.prompt_start, head_end),
                torch.arange(tail_start, span.prompt_end),
            ]
        return torch.cat(pieces)
