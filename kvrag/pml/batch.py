"""Answers several prompts of one schema together, with one copy of its modules in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath

import torch

from kvrag.codec.base import EncodedChunk
from kvrag.engine.options import Sampling
from kvrag.engine.sampling import Sampler
from kvrag.engine.text_stream import TextStream, end_ids
from kvrag.errors import ParameterError, PromptTooLongError
from kvrag.fusion.shared import SharedPrompts, SharedReport
from kvrag.pml.engine import PMLEngine
from kvrag.pml.prompt import Prompt


@dataclass(frozen=True)
class BatchAnswers:
    """The answers of a batch, in the order of its prompts, and its reports."""

    texts: tuple[str, ...]
    report: SharedReport


def generate_batch(
    pml: PMLEngine,
    prompts: Sequence[str | FilePath | Prompt],
    *,
    max_tokens: int = 256,
    temperature: float = 0.0,
    seed: int | None = None,
) -> BatchAnswers:
    """Answer several prompts at once. Modules that they share are in memory once.

    Parameters
    ----------
    pml
        An engine to which the prompts' schema was added.
    prompts
        At least one prompt, all of one schema. Their modules are used as they were encoded: rows
        that several prompts share cannot be recomputed for one of them.
    max_tokens
        The most tokens of each answer.
    temperature, seed
        As in `KVEngine.generate`. Every prompt samples with the same seed.

    Raises
    ------
    PMLError, ParameterError
        As `PMLEngine.place` does; also if the prompts have several schemas.
    PromptTooLongError
        If one of them leaves no position to answer in.
    """
    if isinstance(prompts, str | FilePath):
        raise ParameterError("a batch must be a list of prompts: put the prompt into a list")
    if not prompts or max_tokens < 1:
        raise ParameterError(
            f"a batch of {len(prompts)} prompts, max_tokens {max_tokens}: expected 1 or more each"
        )
    eviction = pml.engine.defaults.eviction_policy
    if eviction is not None:
        raise ParameterError(
            f"eviction {eviction}: rows that several prompts share cannot be forgotten "
            "for one of them; use an engine without eviction, or answer the prompts one by one"
        )
    names = sorted({pml.schema_of(one) for one in prompts})
    if len(names) > 1:
        raise ParameterError(f"prompts of the schemas {', '.join(names)}: a batch has one schema")
    model = pml.engine.index.model
    placed = [pml.place(one) for one in prompts]
    layouts = [one.layout for one in placed]
    end = max(layout.end_position for layout in layouts)
    if end >= model.max_positions:
        raise PromptTooLongError(
            f"a prompt has {end} positions, but {model.name} holds {model.max_positions} with at "
            "least one to answer in; import fewer modules"
        )
    room = min(max_tokens, model.max_positions - end)
    # A record is named by its stretch and by what it was encoded after. A single prompt's opener
    # would choose that prompt's scaffolds instead.
    passages = {
        (span.chunk_id, span.context_ids): one.open_kv
        for one in placed
        for span in one.layout.spans
    }

    def open_kv(chunk_id: str, context_ids: tuple[int, ...]) -> EncodedChunk | None:
        return passages[chunk_id, context_ids](chunk_id, context_ids)

    shared = SharedPrompts(model, layouts, open_kv, room)
    ends = end_ids(model.decoder.generation_config, model.tokenizer)
    sampling = Sampling(temperature=temperature, seed=seed)
    samplers = [Sampler(sampling, shared.logits.device) for _ in layouts]
    said = [torch.tensor(layout.token_ids, device=shared.logits.device) for layout in layouts]
    streams = [TextStream(model.tokenizer) for _ in layouts]
    logits = dict(enumerate(shared.logits))
    for num_generated in range(1, room + 1):
        new: dict[int, int] = {}
        for owner, of_owner in logits.items():
            token = samplers[owner].next_token(of_owner, said[owner])
            if token in ends:
                continue
            streams[owner].push(token)
            said[owner] = torch.cat([said[owner], said[owner].new_tensor([token])])
            new[owner] = token
        if not new or num_generated == room:
            break
        logits = shared.step(new)
    for stream in streams:
        stream.finish()
    return BatchAnswers(tuple(stream.text for stream in streams), shared.report)
