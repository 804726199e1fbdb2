"""kvrag: index documents once as position-free KV; later questions get their first word sooner.

>>> import kvrag
>>> index = kvrag.Index.create("my-index", model="path/to/model")   # doctest: +SKIP
>>> index.add(["docs/"])                                            # doctest: +SKIP
>>> kvrag.KVEngine(index).generate("...")                           # doctest: +SKIP

`docs/structure.md` is the map of the code.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvrag.chunk import Chunk, Document
    from kvrag.engine.answer import Answer
    from kvrag.engine.constraint import Constraint
    from kvrag.engine.engine import KVEngine
    from kvrag.engine.metrics import serve_metrics
    from kvrag.engine.request import Request
    from kvrag.fusion.report import FusionReport
    from kvrag.ingest.index import Index
    from kvrag.ingest.limits import ParseLimits
    from kvrag.models.kv_model import KVModel

__version__ = "0.2.0"

# Resolved on first use, so that `import kvrag` and `kvrag --help` load no torch.
_PUBLIC = {
    "Answer": "kvrag.engine.answer",
    "Chunk": "kvrag.chunk",
    "Constraint": "kvrag.engine.constraint",
    "Document": "kvrag.chunk",
    "FusionReport": "kvrag.fusion.report",
    "Index": "kvrag.ingest.index",
    "KVEngine": "kvrag.engine.engine",
    "KVModel": "kvrag.models.kv_model",
    "ParseLimits": "kvrag.ingest.limits",
    "Request": "kvrag.engine.request",
    "serve_metrics": "kvrag.engine.metrics",
}

__all__ = [
    "Answer",
    "Chunk",
    "Constraint",
    "Document",
    "FusionReport",
    "Index",
    "KVEngine",
    "KVModel",
    "ParseLimits",
    "Request",
    "serve_metrics",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'kvrag' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
