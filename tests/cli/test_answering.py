"""How the model is asked, and with which engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvrag.chunk import Chunk
from kvrag.cli.answering import Settings, converses, make_engine, retrieve
from kvrag.errors import ParameterError
from kvrag.ingest.index import Index
from kvrag.models.plain import few_shot_prompt, plain_prompt
from kvrag.tune.questions import render


@dataclass
class StubIndex:
    """What `converses` and an engine's constructor look at."""

    template: str | None = "{{ messages }}"
    tokenizer: Any = field(init=False)

    def __post_init__(self) -> None:
        self.tokenizer = SimpleNamespace(chat_template=self.template)

    def search(self, question: str, top_k: int, reranker: None, filter: None) -> list[Any]:
        del question, top_k, filter
        return [SimpleNamespace(chunk=Chunk("id", "text", (1,), (0,), "a.txt", 0))]


def settings(**values: Any) -> Settings:
    return Settings(**{"top_k": 1, "max_tokens": 1, "policy": "deviation", **values})


def test_patience_with_the_store_reaches_the_engine() -> None:
    with pytest.raises(ParameterError, match="store_patience -1: expected a number above 0"):
        make_engine(cast(Index, StubIndex()), settings(store_patience=-1))


@pytest.mark.parametrize(
    ("index", "use_chat_template", "expected"),
    [
        (StubIndex(), True, True),
        (StubIndex(), False, False),
        (StubIndex(template=None), True, False),
    ],
)
def test_chat_template_or_plain_prompt(
    index: StubIndex, use_chat_template: bool, expected: bool
) -> None:
    asked = converses(cast(Index, index), settings(use_chat_template=use_chat_template))
    assert asked is expected


@pytest.mark.parametrize(
    ("template", "use_chat_template", "expected", "stop"),
    [
        (None, True, few_shot_prompt("Who?", ["text"]), ("\n",)),
        (None, False, plain_prompt("Who?", ["text"]), ("\nQuestion:",)),
        ("{{ messages }}", False, plain_prompt("Who?", ["text"]), ("\nQuestion:",)),
    ],
)
def test_a_base_model_is_shown_solved_examples(
    template: str | None, use_chat_template: bool, expected: str, stop: tuple[str, ...]
) -> None:
    index = cast(Index, StubIndex(template))
    found = retrieve(index, "Who?", settings(use_chat_template=use_chat_template))
    assert (found.prompt, found.stop) == (expected, stop)
    # What calibration and the referee measure is what users get.
    judged = render("Who?", ["text"], index.tokenizer, use_chat_template)
    assert judged.text == expected


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
