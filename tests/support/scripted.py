"""A model that says what a script wants: the logits of the next token of the script are raised."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvrag.engine import open_answer
from kvrag.engine.sampling import Sampler
from kvrag.engine.text_stream import end_ids
from tests.support.rag import Rag

_RAISE = 1e4


def follow(monkeypatch: pytest.MonkeyPatch, rag: Rag, script: Callable[[str], str]) -> list[str]:
    """Let every answer be what `script` returns for the prompt; return the list of prompts.

    Constraints still decide which tokens may follow.
    """
    prompts: list[str] = []
    tokenizer = rag.index.tokenizer
    (end,) = end_ids(None, tokenizer)

    class Scripted(Sampler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._left: list[int] | None = None

        def next_token(self, logits: torch.Tensor, token_ids: torch.Tensor) -> int:
            if self._left is None:
                prompts.append(tokenizer.decode(token_ids))
                said = tokenizer(script(prompts[-1]), add_special_tokens=False)["input_ids"]
                self._left = [*said, end]
            raised = logits.clone()
            if self._left:
                raised[self._left.pop(0)] += _RAISE
            return super().next_token(raised, token_ids)

    monkeypatch.setattr(open_answer, "Sampler", Scripted)
    return prompts
