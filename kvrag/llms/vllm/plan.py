"""Planning what to load for a request; the scheduler plans, the worker loads, and both tell so."""

from __future__ import annotations

import hashlib
import logging
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvrag.chunk import ChunkKey
from kvrag.errors import KVRagError, ParameterError
from kvrag.fusion.controller import Choice, LoadingController, calibrated
from kvrag.fusion.layout import Layout
from kvrag.fusion.report import FusionReport
from kvrag.ingest.index import Index
from kvrag.llms.vllm.artefacts import ArtefactStore
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
        The layout to fuse, and the policy; None if the rows were fused before.
    artefact
        The key of KV that was fused before; None if the rows are fused now.
    """

    num_tokens: int
    salt: str
    layout: Layout | None = None
    policy: Choice | None = None
    artefact: ChunkKey | None = None


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
    artefacts
        The store of fused artefacts.
    """

    def __init__(self, index: Index, settings: ConnectorSettings, artefacts: ArtefactStore) -> None:
        self._index = index
        self._settings = settings
        self._artefacts = artefacts
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
    return _salt(hashlib.blake2b(f"{policy} {spans} ".encode() + ids, digest_size=20).hexdigest())


def _salt(digest: str) -> str:
    return f"kvrag-{digest}"


@dataclass(frozen=True)
class Load:
    """Rows ``[start, end)`` of one request, and the blocks of the engine's cache for them."""

    request_id: str
    plan: LoadPlan
    block_ids: tuple[int, ...]
    start: int
    end: int


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The message from the scheduler to the worker.

    Attributes
    ----------
    loads
        Loads to begin in this step.
    is_idle
        Whether the engine computes nothing in this step.
    engine_id
        The engine that runs the step. vLLM keeps one connector per process: a second engine in the
        same process would get the first one's.
    """

    loads: list[Load]
    is_idle: bool
    engine_id: str


@dataclass
class StepOutcome(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The message from the worker to the scheduler: the results of loads that have ended.

    Attributes
    ----------
    reports
        For each loaded request, the fusion's report of each worker, by the worker's number; None
        for KV that was fused before.
    failures
        For each failed request, the reason; the engine computes its prompt.
    """

    reports: dict[str, dict[int, FusionReport | None]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Return both outcomes combined."""
        assert isinstance(other, StepOutcome)
        reports = {
            request_id: {**self.reports.get(request_id, {}), **other.reports.get(request_id, {})}
            for request_id in {**self.reports, **other.reports}
        }
        return StepOutcome(reports, {**self.failures, **other.failures})
