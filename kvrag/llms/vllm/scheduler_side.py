"""The connector's half in vLLM's scheduler: decides what to offer for each request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvrag.fusion.report import FusionReport
from kvrag.llms.vllm.options import open_index
from kvrag.llms.vllm.plan import LoadPlan, NoPlan, Planner
from kvrag.llms.vllm.settings import PARAMS, ConnectorSettings
from kvrag.llms.vllm.transfer import Load, StepOutcome

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request


@dataclass
class _Known:
    """A running request: its plan, while that is valid, and the result of loading."""

    request: Request
    plan: LoadPlan | None
    reason: str = ""
    reports: dict[int, FusionReport] = field(default_factory=dict)
    num_loaded: int = 0
    has_own_salt: bool = False

    def take_own_salt(self) -> None:
        """Let no other request find the rows: they are not those of the plan's salt."""
        if not self.has_own_salt:
            self.has_own_salt = True
            _add_salt(self.request, self.request.request_id)


class SchedulerSide:
    """Plans requests, offers their rows, and reports in the response what was done.

    Parameters
    ----------
    settings
        The operator's settings.
    """

    def __init__(self, settings: ConnectorSettings) -> None:
        self._index = open_index(settings)
        self._planner = Planner(self._index, settings)
        self._known: dict[str, _Known] = {}
        self._loads: list[Load] = []

    def close(self) -> None:
        """Close the index."""
        self._index.close()

    def on_new_request(self, request: Request) -> None:
        """Plan a request before the engine looks it up in its own cache."""
        token_ids = request.prompt_token_ids
        if (
            token_ids is None
            or request.sampling_params is None
            or request.skip_reading_prefix_cache  # every prompt token must be computed
            or request.prompt_embeds is not None
            or request.lora_request is not None  # other weights than those of the stored KV
            or request.mm_features
        ):
            return
        plan = self._planner.plan(token_ids, request.kv_transfer_params)
        if isinstance(plan, NoPlan):
            if plan.reason:
                self._known[request.request_id] = _Known(request, None, plan.reason)
            return
        self._known[request.request_id] = _Known(request, plan)
        _add_salt(request, plan.salt)

    def num_matched(self, request: Request, num_computed: int) -> int:
        """Return how many rows to offer beyond those that the engine has cached itself."""
        known = self._known.get(request.request_id)
        if known is None or known.plan is None:
            return 0
        # At least one token has to be computed, for the logits.
        num_tokens: int = request.num_tokens
        return max(0, min(known.plan.num_tokens, num_tokens - 1) - num_computed)

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external: int) -> None:
        """Note where to write the rows of a request."""
        known = self._known.get(request.request_id)
        if num_external == 0 or known is None or known.plan is None:
            return
        end = min(known.plan.num_tokens, request.num_tokens - 1)
        block_ids = tuple(blocks.get_block_ids()[0])
        self._loads.append(Load(request.request_id, known.plan, block_ids, end - num_external, end))
        known.num_loaded = num_external

    def take_loads(self) -> list[Load]:
        """Return the loads that the worker begins in this step."""
        loads, self._loads = self._loads, []
        return loads

    def note(self, outcome: StepOutcome) -> None:
        """Take the worker's results of the loads that have ended."""
        for request_id, reports in outcome.reports.items():
            if (known := self._known.get(request_id)) is not None:
                known.reports.update(reports)
                if any(_misses_more(report, known.plan) for report in reports.values()):
                    # A lost chunk was computed instead.
                    known.take_own_salt()
        for request_id, reason in outcome.failures.items():
            if (known := self._known.get(request_id)) is not None:
                # Offered again, the rows would fail again. So the engine computes the prompt.
                known.plan, known.reason, known.num_loaded = None, reason, 0
                known.take_own_salt()

    def finished(self, request: Request) -> dict[str, Any] | None:
        """Forget a request; return kvrag's part of the response, or None."""
        known = self._known.pop(request.request_id, None)
        if known is None:
            return None
        reports = [one for _, one in sorted(known.reports.items())]
        said: dict[str, Any] = {
            "num_loaded": known.num_loaded,
            "report": _whole(reports, request).to_dict() if reports else None,
            "computed_because": known.reason,
        }
        if len(reports) > 1:
            said["bytes_by_worker"] = [report.bytes_loaded for report in reports]
        return {PARAMS: said}


def _misses_more(report: FusionReport, plan: LoadPlan | None) -> bool:
    """Return whether fusing had more misses than planned."""
    planned = {} if plan is None else plan.layout.misses
    return sum(report.misses.values()) > sum(planned.values())


def _whole(reports: Sequence[FusionReport], request: Request) -> FusionReport:
    """Return the report for a whole prompt, including the tokens that the engine computed.

    It is the last pipeline stage's, with the bytes of all workers.
    """
    report = max(reports, key=lambda one: len(one.rows_by_layer))
    num_more = request.num_prompt_tokens - report.num_tokens
    return replace(
        report,
        num_tokens=request.num_prompt_tokens,
        num_fresh=report.num_fresh + num_more,
        rows_by_layer=tuple(rows + num_more for rows in report.rows_by_layer),
        bytes_loaded=sum(one.bytes_loaded for one in reports),
    )


def _add_salt(request: Request, salt: str) -> None:
    """Make the engine find a request's cached blocks only under this salt.

    vLLM names cached blocks by their tokens, so it would give fused blocks to ordinary requests
    with the same text. It hashes a request's salt into the first block's name, and so into all
    names. Names that already exist are made again.
    """
    request.cache_salt = salt if request.cache_salt is None else f"{request.cache_salt}|{salt}"
    request.block_hashes.clear()
    request.update_block_hashes()
