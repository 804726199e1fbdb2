"""What the adapters report about an answer, as plain JSON values."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from kvrag.engine.answer import Answer
from kvrag.fusion.report import FusionReport


def token_usage(answer: Answer) -> dict[str, int]:
    """Return token counts; cached tokens are the prompt tokens whose KV was reused."""
    usage = answer.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def short_name(model: str) -> str:
    """Return a model's name without the folder that it was loaded from; hub names stay whole."""
    return PurePath(model).name if PurePath(model).is_absolute() else model


def answer_details(answer: Answer, model_name: str) -> dict[str, Any]:
    """Return the answer's model, finish reason, times, savings, fusion report and sources.

    ``saved_tokens`` are prompt tokens whose KV was reused. ``saved_seconds_estimate`` is what
    computing them would have taken at the speed of the rows that were computed: too much where
    those were few. A source has ``chunk_id``, ``source``, ``ordinal``, ``text`` and ``metadata``.
    """
    return {
        "model_name": model_name,
        "finish_reason": answer.finish_reason,
        "ttft_seconds": answer.ttft_seconds,
        "total_seconds": answer.total_seconds,
        "saved_tokens": answer.usage.cached_tokens,
        "saved_seconds_estimate": _saved_seconds(answer.report),
        "report": answer.report.to_dict(),
        "sources": [
            {
                "chunk_id": source.chunk_id,
                "source": source.source,
                "ordinal": source.ordinal,
                "text": source.text,
                "metadata": dict(source.metadata),
            }
            for source in answer.sources
        ],
    }


def _saved_seconds(report: FusionReport) -> float:
    """Return the estimated time of a full prefill beyond what fusing took; 0 if it is less."""
    share = report.work_share
    if not report.num_cached or not share:
        return 0.0
    return max(0.0, report.seconds.get("compute", 0.0) / share - sum(report.seconds.values()))
