"""The connector's half in vLLM's scheduler: what is offered for which request."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrag.fusion.report import FusionReport
from kvrag.ingest.index import Index
from kvrag.llms.vllm.artefacts import ArtefactStore
from kvrag.llms.vllm.plan import LoadPlan, NoPlan, Planner
from kvrag.llms.vllm.settings import PARAMS, ConnectorSettings
from kvrag.llms.vllm.transfer import Load, StepOutcome

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request


@dataclass
class _Known:
    """A request under way: its plan, as long as it stands, and what came of it."""

    request: Request
    plan: LoadPlan | None
    reason: str = ""
    report: FusionReport | None = None
    num_loaded: int = 0


class SchedulerSide:
    """Plans requests, offers their rows, and says in the response what was done.

    Parameters
    ----------
    settings
        The operator's.
    """

    def __init__(self, settings: ConnectorSettings) -> None:
        self._index = Index.open(Path(settings.index), store=settings.store)
        self._artefacts = ArtefactStore(self._index, settings.artefacts)
        self._planner = Planner(self._index, settings, self._artefacts)
        self._known: dict[str, _Known] = {}
        self._loads: list[Load] = []

    def close(self) -> None:
        """Close index and artefacts."""
        self._artefacts.close()
        self._index.close()

    def on_new_request(self, request: Request) -> None:
        """Plan a request before the engine looks into its own cache for it."""
        token_ids = request.prompt_token_ids
        if (
            token_ids is None
            or request.sampling_params is None
            or request.skip_reading_prefix_cache  # it wants every prompt token computed
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
        """Return how many rows are offered beyond those that the engine has cached itself."""
        known = self._known.get(request.request_id)
        if known is None or known.plan is None:
            return 0
        # At least one token has to be computed, or there are no logits.
        num_tokens: int = request.num_tokens
        return max(0, min(known.plan.num_tokens, num_tokens - 1) - num_computed)

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external: int) -> None:
        """Note where the rows of a request are to be written."""
        known = self._known.get(request.request_id)
        if num_external == 0 or known is None or known.plan is None:
            return
        end = min(known.plan.num_tokens, request.num_tokens - 1)
        block_ids = tuple(blocks.get_block_ids()[0])
        self._loads.append(Load(request.request_id, known.plan, block_ids, end - num_external, end))
        known.num_loaded = num_external

    def take_loads(self) -> list[Load]:
        """Return what the worker begins in this step."""
        loads, self._loads = self._loads, []
        return loads

    def note(self, outcome: StepOutcome) -> None:
        """Take what the worker says of loads that have ended."""
        for request_id, report in outcome.reports.items():
            if (known := self._known.get(request_id)) is not None:
                known.report = report
                if report is not None and _misses_more(report, known.plan):
                    # Computed in place of a chunk that was gone: not what the salt stands for.
                    _add_salt(known.request, request_id)
        for request_id, reason in outcome.failures.items():
            if (known := self._known.get(request_id)) is not None:
                # Offered once more, it would fail once more: the engine computes it, and what
                # it computes is not what the salt stands for.
                known.plan, known.reason, known.num_loaded = None, reason, 0
                _add_salt(known.request, request_id)

    def finished(self, request: Request) -> dict[str, Any] | None:
        """Forget a request; return what its response says of it, or None."""
        known = self._known.pop(request.request_id, None)
        if known is None:
            return None
        report = known.report
        return {
            PARAMS: {
                "num_loaded": known.num_loaded,
                "report": None if report is None else _whole(report, request).to_dict(),
                "computed_because": known.reason,
            }
        }


def _misses_more(report: FusionReport, plan: LoadPlan | None) -> bool:
    """Return whether fusing went without something that was planned."""
    planned = plan.layout.misses if plan is not None and plan.layout is not None else {}
    return sum(report.misses.values()) > sum(planned.values())


def _whole(report: FusionReport, request: Request) -> FusionReport:
    """Return the report of a whole prompt: what was not fused was computed by the engine."""
    num_more = request.num_prompt_tokens - report.num_tokens
    return replace(
        report,
        num_tokens=request.num_prompt_tokens,
        num_fresh=report.num_fresh + num_more,
        rows_by_layer=tuple(rows + num_more for rows in report.rows_by_layer),
    )


def _add_salt(request: Request, salt: str) -> None:
    """Have everything that the engine caches of a request found under this salt alone.

    vLLM names cached blocks by their tokens, so that fused blocks would be handed to ordinary
    requests of the same text. It hashes a request's own salt into the first block's name, hence
    into all; names that were made already are made again.
    """
    request.cache_salt = salt if request.cache_salt is None else f"{request.cache_salt}|{salt}"
    request.block_hashes.clear()
    request.update_block_hashes()
