"""What is to be loaded for one request: decided by the scheduler, done by the worker."""

from __future__ import annotations

import hashlib
import logging
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvrag.chunk import ChunkKey
from kvrag.errors import KVRagError, ParameterError
from kvrag.fusion.controller import Choice, LoadingController, calibrated
from kvrag.fusion.layout import Layout
from kvrag.ingest.index import Index
from kvrag.llms.vllm.artefacts import ArtefactStore
from kvrag.llms.vllm.finding import TokenFinder
from kvrag.llms.vllm.settings import ConnectorSettings, RequestParams

logger = logging.getLogger("kvrag")

MAX_ASKED_TOKENS = 512
"""Tokens behind the last chunk computed while fusing, for policies that look at the question.

What follows is the engine's, in its own batches.
"""


@dataclass(frozen=True)
class LoadPlan:
    """Rows of a prompt that come from kvrag: ``[0, num_tokens)``.

    Attributes
    ----------
    num_tokens
        Rows that are offered to the engine.
    salt
        Names these very rows: what the engine caches of them is found under it alone.
    layout, policy
        What is fused for them; None where they were fused before.
    artefact
        The KV that was fused before; None where it is fused now.
    """

    num_tokens: int
    salt: str
    layout: Layout | None = None
    policy: Choice | None = None
    artefact: ChunkKey | None = None


@dataclass(frozen=True)
class NoPlan:
    """Why a request is left to the engine; empty where there was nothing to look for."""

    reason: str = ""


class Planner:
    """Decides for every request what kvrag brings to it. Loads no weights.

    Parameters
    ----------
    index
        Whose chunks are looked for.
    settings
        The operator's.
    artefacts
        Where fused artefacts are.
    """

    def __init__(self, index: Index, settings: ConnectorSettings, artefacts: ArtefactStore) -> None:
        self._index = index
        self._settings = settings
        self._artefacts = artefacts
        self._finder = TokenFinder(index)

    def plan(self, token_ids: Sequence[int], params: Mapping[str, Any] | None) -> LoadPlan | NoPlan:
        """Return what is loaded for a prompt, or why nothing is.

        Raises nothing: whatever is wrong with a request, the index or a store, the engine computes
        the prompt.
        """
        try:
            return self._plan(token_ids, RequestParams.parse(params))
        except (
            Exception
        ) as error:  # a client's values come unchecked; all others would wait in vain
            what = str(error) if isinstance(error, KVRagError) else repr(error)
            logger.warning("a prompt of %d tokens is computed: %s", len(token_ids), what)
            return NoPlan(what)

    def _plan(self, token_ids: Sequence[int], request: RequestParams | None) -> LoadPlan | NoPlan:
        if request is None:
            if not self._settings.find_chunks:
                return NoPlan()
            request = RequestParams()
        if not request.reuse or len(token_ids) < 2:
            return NoPlan()
        if request.artefact is not None:
            key = self._artefacts.check(request.artefact, token_ids)
            # The last token is the engine's: it computes the first logits.
            num_tokens = min(request.artefact.num_tokens, len(token_ids) - 1)
            return LoadPlan(num_tokens, _salt(key.digest), artefact=key)
        policy = request.make_policy(self._settings)
        policy = calibrated(policy, lambda: self._index.calibration)
        layout = self._finder.find(token_ids)
        if not layout.spans:
            return NoPlan("; ".join(layout.misses))
        if len(token_ids) >= self._index.config.max_positions:
            raise ParameterError("it fills the context window")
        num_tokens = len(_cut(layout, policy, self._index.config.num_layers)) - 1
        layout = replace(layout, token_ids=layout.token_ids[: num_tokens + 1])
        return LoadPlan(num_tokens, _salt_of(layout, policy), layout, policy)


def _cut(layout: Layout, policy: Choice, num_layers: int) -> tuple[int, ...]:
    """Return the tokens that are fused: up to the last chunk's end, one more, and what is asked."""
    end = layout.spans[-1].prompt_end
    asks = isinstance(policy, LoadingController) or bool(policy.policy.question_layers(num_layers))
    return layout.token_ids[: end + (MAX_ASKED_TOKENS if asks else 1)]


def _salt_of(layout: Layout, policy: Choice) -> str:
    """Return what names the rows of a fused prompt."""
    spans = [
        (span.chunk_id, span.prompt_start, span.chunk_start, span.length, span.context_ids)
        for span in layout.spans
    ]
    ids = struct.pack(f"<{len(layout.token_ids)}q", *layout.token_ids)
    return _salt(hashlib.blake2b(f"{policy} {spans} ".encode() + ids, digest_size=20).hexdigest())


def _salt(digest: str) -> str:
    return f"kvrag-{digest}"
