"""Messages between the two sides of the connector, one per step and direction."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvrag.fusion.report import FusionReport
from kvrag.llms.vllm.plan import LoadPlan


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
        For each loaded request, the fusion's report of each worker, by the worker's number.
    failures
        For each failed request, the reason; the engine computes its prompt.
    """

    reports: dict[str, dict[int, FusionReport]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Return both outcomes combined."""
        assert isinstance(other, StepOutcome)
        reports = {
            request_id: {**self.reports.get(request_id, {}), **other.reports.get(request_id, {})}
            for request_id in {**self.reports, **other.reports}
        }
        return StepOutcome(reports, {**self.failures, **other.failures})
