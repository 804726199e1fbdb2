"""From logits to the next token: greedy, or Transformers' own warpers and a seeded draw."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvrag import arguments
from kvrag.errors import ParameterError

# Colder than this, logits divided by the temperature leave float32.
_COLDEST = 1e-4


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes
    ----------
    temperature
        0 takes the likeliest token; above 0 divides the logits before drawing.
    top_p
        Draw among the likeliest tokens that hold this share of the probability, 0 < p <= 1.
    top_k
        Draw among the k likeliest tokens; 0 draws among all.
    repetition_penalty
        Above 1 makes tokens already in the prompt or answer less likely; 1 changes nothing.
    seed
        Makes a draw repeatable; None takes a new one each time.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        temperature = arguments.number(self.temperature, "temperature", 0.0)
        if 0.0 < temperature < _COLDEST:
            raise ParameterError(
                f"temperature {temperature}: expected 0 (the likeliest token) or at least "
                f"{_COLDEST}"
            )
        checked = {
            "temperature": temperature,
            "top_p": arguments.number(self.top_p, "top_p", most=1.0, above=0.0),
            "top_k": arguments.whole(self.top_k, "top_k", 0, 2**31 - 1),
            "repetition_penalty": arguments.number(
                self.repetition_penalty, "repetition_penalty", above=0.0
            ),
        }
        if self.seed is not None:
            checked["seed"] = arguments.whole(self.seed, "seed", 0, 2**63 - 1)
        for name, value in checked.items():
            object.__setattr__(self, name, value)  # plain numbers, whatever library they came from


class Sampler:
    """Draws the tokens of one answer.

    Parameters
    ----------
    sampling
        How.
    device
        Where the logits are.
    """

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self._greedy = sampling.temperature == 0.0
        self._processors = LogitsProcessorList()
        if sampling.repetition_penalty != 1.0:
            self._processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        if not self._greedy:
            # Transformers' own order: temperature, then top-k, then top-p.
            self._processors.append(TemperatureLogitsWarper(float(sampling.temperature)))
            if sampling.top_k:
                self._processors.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1.0:
                self._processors.append(TopPLogitsWarper(sampling.top_p))
        # A generator of its own: draws of other requests, and torch's global state, stay apart.
        self._generator = torch.Generator(device)
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def next_token(self, logits: torch.Tensor, token_ids: torch.Tensor) -> int:
        """Return a token id.

        Parameters
        ----------
        logits
            ``[vocabulary]``.
        token_ids
            ``[n]`` all tokens so far, prompt included.
        """
        scores = self._processors(token_ids[None], logits.float()[None])[0]  # type: ignore[arg-type]
        if self._greedy:
            return int(scores.argmax())
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))
