"""What the page knows of its server: the index, ways to answer, and questions to begin with."""

from __future__ import annotations

from typing import Any

import kvrag
from kvrag.engine.engine import KVEngine
from kvrag.engine.request import Request
from kvrag.fusion.controller import takes_ratio
from kvrag.fusion.policies import DEFAULT_POLICY
from kvrag.fusion.policies.none import NonePolicy
from kvrag.fusion.policies.registry import POLICIES
from kvrag.fusion.repair import Repair
from kvrag.ingest.index import Index
from kvrag.server import responses as r

# Shares of the stored tokens to compute again, between the default and full prefill.
_SHARES = (0.15, 0.3, 0.5)
# A template and a question of usual length.
_OWN_TOKENS = 40
_MOST_EXAMPLES = 4
_LONGEST_EXAMPLE = 60
# Chunks that are looked at for their headings.
_NUM_SAMPLES = 48


def about(engine: KVEngine, model: str, rag: str, top_k: int, **allowed: bool) -> r.About:
    """Describe an index and the defaults of answers; `allowed` as in `About`."""
    index, defaults = engine.index, engine.defaults
    num_documents, num_chunks, num_tokens = index.catalog.documents.counts()
    return r.About(
        version=kvrag.__version__,
        index=index.name,
        model=model,
        rag=rag,
        is_chat=bool(getattr(index.tokenizer, "chat_template", None)),
        num_documents=num_documents,
        num_chunks=num_chunks,
        num_tokens=num_tokens,
        top_k=top_k,
        max_tokens=defaults.max_tokens or 0,
        policy=str(defaults.policy),
        policies=[*POLICIES],
        efforts=_efforts(engine, top_k * num_tokens // max(1, num_chunks)),
        examples=_examples(index),
        **allowed,
    )


def _efforts(engine: KVEngine, num_stored: int) -> list[r.Effort]:
    """Return ways to answer, the fastest first, the last in full, for this many stored tokens."""
    usual = engine.defaults.recompute.choice()
    ways: list[dict[str, Any]] = [{}]
    if engine.index.compression is None:
        is_none = isinstance(usual, Repair) and isinstance(usual.policy, NonePolicy)
        least = getattr(getattr(usual, "policy", usual), "ratio", None) or 0.0
        spec = engine.defaults.policy
        takes_share = isinstance(spec, str) and takes_ratio(spec)
        policy = {} if takes_share else {"policy": DEFAULT_POLICY}
        ways += [policy | {"ratio": one} for one in _SHARES if one > least]
        if not is_none:
            ways.insert(0, {"policy": NonePolicy.name})
    full = engine.expected_seconds(Request(""), 0, num_stored + _OWN_TOKENS)
    return [
        *(_effort(engine, way, num_stored) for way in ways),
        r.Effort(options={"reuse": False}, seconds=full),
    ]


def _effort(engine: KVEngine, way: dict[str, Any], num_stored: int) -> r.Effort:
    seconds = engine.expected_seconds(Request("", **way), num_stored, _OWN_TOKENS)
    return r.Effort(options=way, seconds=seconds)


def _examples(index: Index) -> list[str]:
    """Return headings of chunks from all over the index, one of a document."""
    found: dict[str, str] = {}
    for chunk in index.catalog.sample(_NUM_SAMPLES):
        heading = str(chunk.metadata.get("heading") or "")
        if any(map(str.isalpha, heading)) and len(heading) <= _LONGEST_EXAMPLE:
            found[chunk.source] = heading  # later ones say more than the title
    headings = list(dict.fromkeys(found.values()))
    every = max(1, len(headings) // _MOST_EXAMPLES)
    return headings[::every][:_MOST_EXAMPLES]
