"""Planning what to load for a request. The scheduler plans, the worker loads."""

from __future__ import annotations

import hashlib
import logging
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvrag.errors import KVRagError, ParameterError
from kvrag.fusion.controller import Choice, LoadingController, calibrated
from kvrag.fusion.layout import Layout
from kvrag.ingest.index import Index
from kvrag.llms.vllm.finding import TokenFinder
from kvrag.llms.vllm.settings import ConnectorSettings, RequestParams

logger = logging.getLogger("kvrag")

MAX_ASKED_TOKENS = 512
"""Tokens after the last chunk that fusing computes, for policies that observe the question.

The engine computes the rest of the prompt in its own batches.
"""


@dataclass(frozen=True)
class LoadPlan:
    """The rows of a prompt that come from kvrag: ``[0, num_tokens)``.

    Attributes
    ----------
    num_tokens
        Number of rows offered to the engine.
    salt
        Identifies exactly these rows; the engine finds cached blocks of them only under this salt.
    layout, policy
        The layout to fuse, and the policy.
    """

    num_tokens: int
    salt: str
    layout: Layout
    policy: Choice


@dataclass(frozen=True)
class NoPlan:
    """Why the engine computes a request; empty if there was nothing to look for."""

    reason: str = ""


class Planner:
    """Decides for every request what kvrag loads for it. Loads no weights.

    Parameters
    ----------
    index
        The index whose chunks to look for.
    settings
        The operator's settings.
    """

    def __init__(self, index: Index, settings: ConnectorSettings) -> None:
        self._index = index
        self._settings = settings
        self._finder = TokenFinder(index)

    def plan(self, token_ids: Sequence[int], params: Mapping[str, Any] | None) -> LoadPlan | NoPlan:
        """Return what to load for a prompt, or why nothing is loaded.

        It raises nothing: if anything is wrong with a request, the index or a store, the engine
        computes the prompt.
        """
        try:
            return self._plan(token_ids, RequestParams.parse(params))
        except (
            Exception
        ) as error:  # a client's values are unchecked, and must not stop other requests
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
        policy = request.make_policy(self._settings, self._index.config.default_ratio)
        policy = calibrated(policy, lambda: self._index.calibration)
        layout = self._finder.find(token_ids)
        if not layout.spans:
            return NoPlan("; ".join(layout.misses))
        if len(token_ids) >= self._index.config.max_positions:
            raise ParameterError("the prompt fills the context window")
        num_tokens = len(_cut(layout, policy, self._index.config.num_layers)) - 1
        layout = replace(layout, token_ids=layout.token_ids[: num_tokens + 1])
        return LoadPlan(num_tokens, _salt_of(layout, policy), layout, policy)


def _cut(layout: Layout, policy: Choice, num_layers: int) -> tuple[int, ...]:
    """Return the tokens to fuse: up to the last chunk's end, and one more or the question."""
    end = layout.spans[-1].prompt_end
    asks = isinstance(policy, LoadingController) or bool(policy.policy.question_layers(num_layers))
    return layout.token_ids[: end + (MAX_ASKED_TOKENS if asks else 1)]


def _salt_of(layout: Layout, policy: Choice) -> str:
    """Return the salt that identifies the rows of a fused prompt."""
    spans = [
        (span.chunk_id, span.prompt_start, span.chunk_start, span.length, span.context_ids)
        for span in layout.spans
    ]
    ids = struct.pack(f"<{len(layout.token_ids)}q", *layout.token_ids)
    digest = hashlib.blake2b(f"{policy} {spans} ".encode() + ids, digest_size=20).hexdigest()
    return f"kvrag-{digest}"
