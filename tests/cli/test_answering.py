"""How the model is asked, and with which engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvrag.cli.answering import Settings, make_engine
from kvrag.errors import ParameterError
from kvrag.ingest.index import Index


@dataclass
class StubIndex:
    """What an engine's constructor looks at."""

    template: str | None = "{{ messages }}"
    tokenizer: Any = field(init=False)

    def __post_init__(self) -> None:
        self.tokenizer = SimpleNamespace(chat_template=self.template)


def settings(**values: Any) -> Settings:
    return Settings(**{"top_k": 1, "max_tokens": 1, "policy": "deviation", **values})


def test_patience_with_the_store_reaches_the_engine() -> None:
    with pytest.raises(ParameterError, match="store_patience -1: expected a number above 0"):
        make_engine(cast(Index, StubIndex()), settings(store_patience=-1))


def test_whether_reuse_has_to_be_faster_reaches_the_engine() -> None:
    with pytest.raises(ParameterError, match="never_slower 3: expected"):
        make_engine(cast(Index, StubIndex()), settings(never_slower=3))


@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens": 0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"seed": -1},
        {"policy": "nonsense"},
        {"ratio": float("nan")},
        {"policy": "boundary", "boundary_tokens": 0},
    ],
)
def test_values_are_checked_before_a_model_is_loaded(values: dict[str, Any]) -> None:
    with pytest.raises(ParameterError):
        make_engine(cast(Index, StubIndex()), settings(**values))
