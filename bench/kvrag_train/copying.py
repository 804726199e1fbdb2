"""The first phase: copying of random tokens, from which induction heads form quickly."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch
from transformers import LlamaForCausalLM


def copying_batch(
    token_ids: Sequence[int], num_rows: int, length: int, rng: Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of a random sequence and its repetition, and the targets of the repetition.

    Parameters
    ----------
    token_ids
        Tokens to draw from: those of names, which answers copy.
    num_rows
        Number of rows.
    length
        Tokens of the sequence that is repeated.
    rng
        Source of randomness.

    Returns
    -------
    tuple of torch.Tensor
        Input ids and targets, int64, (rows, tokens); -100 where nothing is learned.
    """
    half = torch.tensor([rng.choices(token_ids, k=length) for _ in range(num_rows)])
    input_ids = torch.cat([half, half], dim=1)
    targets = input_ids.roll(-1, dims=1)
    targets[:, :length] = -100
    targets[:, -1] = -100
    return input_ids, targets


def copying_loss(
    model: LlamaForCausalLM, token_ids: Sequence[int], num_rows: int, rng: Random, own_rng: Random
) -> tuple[torch.Tensor, float]:
    """Return the loss and the share of right tokens on a fresh batch of copying.

    The length, 6 to 24 tokens, is drawn from `rng`, which workers share.
    """
    input_ids, targets = copying_batch(token_ids, num_rows, rng.randint(6, 24), own_rng)
    wanted = targets != -100
    hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[wanted])
    loss = torch.nn.functional.cross_entropy(logits, targets[wanted])
    return loss, float((logits.argmax(-1) == targets[wanted]).float().mean())
