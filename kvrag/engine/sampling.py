"""Sampling the next token from logits: greedily, or with Transformers' warpers and a seed."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future

import torch
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvrag.engine.constraint import Allowed
from kvrag.engine.options import Sampling


class _CountedPenalty(LogitsProcessor):
    """Frequency and presence penalties of one answer, by its own tokens alone."""

    def __init__(self, frequency: float, presence: float) -> None:
        self._frequency, self._presence = frequency, presence
        self._counts: Counter[int] = Counter()

    def note(self, token: int) -> None:
        self._counts[token] += 1

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        if not self._counts:
            return scores
        tokens = torch.tensor(list(self._counts), device=scores.device)
        counts = torch.tensor(list(self._counts.values()), device=scores.device)
        penalised = scores.clone()
        penalised[..., tokens] -= counts * self._frequency + self._presence
        return penalised


class Sampler:
    """Samples the tokens of one answer.

    Parameters
    ----------
    sampling
        How to sample.
    device
        The device of the logits.
    allowed
        Which tokens may follow, if the answer has a constraint.
    """

    def __init__(
        self, sampling: Sampling, device: torch.device, allowed: Allowed | None = None
    ) -> None:
        self._allowed = allowed
        self._greedy = sampling.temperature == 0.0
        self._processors = LogitsProcessorList()
        if sampling.repetition_penalty != 1.0:
            self._processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        self._counted: _CountedPenalty | None = None
        if sampling.frequency_penalty or sampling.presence_penalty:
            self._counted = _CountedPenalty(sampling.frequency_penalty, sampling.presence_penalty)
            self._processors.append(self._counted)
        if not self._greedy:
            # The same order as in Transformers: temperature, then top-k, top-p, min-p.
            self._processors.append(TemperatureLogitsWarper(float(sampling.temperature)))
            if sampling.top_k:
                self._processors.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1.0:
                self._processors.append(TopPLogitsWarper(sampling.top_p))
            if sampling.min_p:
                self._processors.append(MinPLogitsWarper(sampling.min_p))
        # A separate generator, independent of other requests and of torch's global state.
        self._generator = torch.Generator(device)
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    @property
    def is_complete(self) -> bool:
        """Whether the answer's constraint lets nothing follow."""
        return self._allowed is not None and self._allowed.is_complete

    @property
    def coming(self) -> Future[bytes] | None:
        """What the next token waits for, if anything."""
        return None if self._allowed is None else self._allowed.coming

    def next_token(self, logits: torch.Tensor, token_ids: torch.Tensor) -> int:
        """Return the id of the next token.

        Parameters
        ----------
        logits
            ``[vocabulary]``.
        token_ids
            ``[n]``: all tokens so far, including the prompt's.
        """
        scores = logits.float()
        if self._allowed is not None:
            # First, so that top-k and top-p choose among tokens that may follow.
            scores = self._allowed.only(scores)
        scores = self._processors(token_ids[None], scores[None])[0]  # type: ignore[arg-type]
        if self._greedy:
            token = int(scores.argmax())
        else:
            token = int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))
        if self._allowed is not None:
            self._allowed.follow(token)
        if self._counted is not None:
            self._counted.note(token)
        return token


def log_probabilities(
    logits: torch.Tensor, token: int, most: int
) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Return a token's natural log probability, and the most likely tokens with theirs.

    Parameters
    ----------
    logits
        ``[vocabulary]``, as the model has computed them.
    token
        The token that was drawn.
    most
        How many of the most likely tokens to return, best first.
    """
    logs = logits.float().log_softmax(-1)
    values, ids = logs.topk(min(most, len(logs)))
    return float(logs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True))
