"""What the two sides of the connector tell each other, step by step."""

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
    """Rows ``[start, end)`` of one request, and the blocks of the engine's cache that take them."""

    request_id: str
    plan: LoadPlan
    block_ids: tuple[int, ...]
    start: int
    end: int


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler to the worker.

    Attributes
    ----------
    loads
        To be begun in this step.
    is_idle
        Whether the engine computes nothing in this step.
    engine_id
        Whose step it is. vLLM keeps one connector a process: a second engine in one process would
        be handed the first one's.
    """

    loads: list[Load]
    is_idle: bool
    engine_id: str


@dataclass
class StepOutcome(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From the worker to the scheduler: of the requests whose loading has ended, how it went.

    Attributes
    ----------
    reports
        What fusing did; None for what was fused before.
    failures
        Why nothing was loaded: these are computed.
    """

    reports: dict[str, FusionReport | None] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Return both in one."""
        assert isinstance(other, StepOutcome)
        return StepOutcome({**self.reports, **other.reports}, {**self.failures, **other.failures})
