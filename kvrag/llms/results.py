"""What the adapters report about an answer, as plain JSON values."""

from __future__ import annotations

from typing import Any

from kvrag.engine.answer import Answer


def token_usage(answer: Answer) -> dict[str, int]:
    """Return token counts; cached tokens are the prompt tokens whose KV was reused."""
    usage = answer.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def answer_details(answer: Answer, model_name: str) -> dict[str, Any]:
    """Return the answer's model, finish reason, fusion report and sources.

    A source has a ``chunk_id``, ``source`` and ``ordinal``; its text is in the prompt already.
    """
    return {
        "model_name": model_name,
        "finish_reason": answer.finish_reason,
        "report": answer.report.to_dict(),
        "sources": [
            {"chunk_id": source.chunk_id, "source": source.source, "ordinal": source.ordinal}
            for source in answer.sources
        ],
    }
