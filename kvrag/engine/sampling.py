"""Sampling the next token from logits: greedily, or as Transformers does, with a seed.

Its warpers are written down here, because importing them takes seconds.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future
from math import nextafter

import torch

from kvrag.engine.constraint import Allowed
from kvrag.engine.options import Sampling
from kvrag.errors import ModelLoadError


def _less_repeated(scores: torch.Tensor, token_ids: torch.Tensor, penalty: float) -> torch.Tensor:
    """Make tokens that were there before less likely (Keskar et al., CTRL, arXiv 1909.05858)."""
    found = scores[token_ids]
    return scores.scatter(0, token_ids, torch.where(found < 0, found * penalty, found / penalty))


def _likely(scores: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return shares of the likely tokens, and these; None: of all tokens, in their order.

    They are left as in Transformers: by temperature, then top-k, top-p, min-p. Only what is left is
    looked at further, because to sort a large vocabulary takes longer than to compute a token.
    """
    scores = scores / float(sampling.temperature)
    tokens = None
    if sampling.top_k:
        least = scores.topk(min(sampling.top_k, len(scores))).values[-1]
        tokens = (scores >= least).nonzero()[:, 0]
        scores = scores[tokens]
    shares = scores.softmax(-1)
    if sampling.top_p < 1.0:
        number, is_covered = 256, False
        while not is_covered:
            number = min(8 * number, len(shares))
            likely, places = shares.topk(number)
            is_left = likely.cumsum(-1) - likely < sampling.top_p
            is_covered = number == len(shares) or not is_left[-1]
        is_left[0] = True
        shares, places = likely[is_left], places[is_left]
        tokens = places if tokens is None else tokens[places]
    if sampling.min_p:
        shares = shares.masked_fill(shares < sampling.min_p * shares.max(), 0.0)
    return shares, tokens


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
        self._sampling = sampling
        self._counts: Counter[int] = Counter()  # of the answer's own tokens
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

        Raises
        ------
        ModelLoadError
            If the logits hold NaN, or only minus infinity.
        """
        scores = logits.float()
        if self._allowed is not None:
            # First, so that top-k and top-p choose among tokens that may follow.
            scores = self._allowed.only(scores)
        if self._sampling.repetition_penalty != 1.0:
            scores = _less_repeated(scores, token_ids, self._sampling.repetition_penalty)
        if self._counts:
            tokens, counts = torch.tensor([*self._counts.items()], device=scores.device).T
            given = counts * self._sampling.frequency_penalty + self._sampling.presence_penalty
            scores = scores.index_add(0, tokens, -given)
        if self._greedy:
            best, place = scores.max(-1)
            # NaN is the greatest, and no token; a GPU is waited for once.
            token = int(torch.where(best > -torch.inf, place, -1))
        else:
            token = self._draw(*_likely(scores, self._sampling))
        if token < 0:
            raise ModelLoadError(
                "the model's logits hold NaN, or only -inf, so that no token can be drawn: its "
                "weights are damaged, or its numbers leave the range of their type. Run 'kvrag "
                "models check'; float16 is left less easily as bfloat16 (--dtype)"
            )
        if self._allowed is not None:
            self._allowed.follow(token)
        if self._sampling.frequency_penalty or self._sampling.presence_penalty:
            self._counts[token] += 1
        return token

    def _draw(self, shares: torch.Tensor, tokens: torch.Tensor | None) -> int:
        """Draw a token by its share, by the inverse of the sums up to each; -1: there is none."""
        sums = shares.cumsum(-1, dtype=torch.float64)
        total = float(sums[-1])
        if not total > 0:
            return -1
        unit = torch.rand(1, generator=self._generator, device=shares.device, dtype=torch.float64)
        drawn = (unit * total).clamp(max=nextafter(total, 0.0))
        place = torch.searchsorted(sums, drawn, right=True)
        return int(place if tokens is None else tokens[place])


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
