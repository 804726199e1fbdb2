"""Constrained answers: the form is kept, by greedy and by sampled answers of a random model."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import torch

from kvrag.engine import constraint as module
from kvrag.engine.constraint import Allowed, Constraint
from kvrag.engine.engine import KVEngine
from kvrag.engine.request import Request
from kvrag.errors import ParameterError
from tests.support.models import make_tokenizer
from tests.support.rag import PASSAGES, Rag, rag

__all__ = ["rag"]

PROMPT = f"{PASSAGES['ledger']}\n\nWho keeps the ledger?"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ines", "Tomas"]},
        "age": {"type": "integer", "minimum": 1, "maximum": 120},
        "place": {"$ref": "#/$defs/place"},
    },
    "required": ["name", "age", "place"],
    "$defs": {"place": {"type": "object", "properties": {"open": {"type": "boolean"}}}},
}


@pytest.mark.parametrize("sampling", [{}, {"temperature": 2.0, "top_k": 3, "seed": 7}])
def test_json_of_a_schema(rag: Rag, sampling: dict[str, Any]) -> None:
    answer = KVEngine(rag.index).generate(
        PROMPT, constraint=Constraint.json_schema(SCHEMA), max_tokens=200, **sampling
    )
    found = json.loads(answer.text)
    assert list(found) == ["name", "age", "place"]
    assert found["name"] in ("Ines", "Tomas")
    assert 1 <= found["age"] <= 120
    assert set(found["place"]) <= {"open"}
    assert answer.finish_reason == "stop"
    # Reuse has not become another thing.
    assert answer.usage.cached_tokens > 0


def test_a_regular_expression(rag: Rag) -> None:
    engine = KVEngine(rag.index)
    for seed in range(5):
        answer = engine.generate(
            PROMPT,
            constraint=Constraint.regex("(yes|no)( [0-9]{2}){3}"),
            max_tokens=60,
            temperature=1.5,
            seed=seed,
        )
        assert re.fullmatch("(yes|no)( [0-9]{2}){3}", answer.text)
        assert answer.finish_reason == "stop"


def test_a_grammar_and_a_stream(rag: Rag) -> None:
    grammar = 'start: "a" (item ",")* item\nitem: "b" | "c"\n'
    pieces = list(
        KVEngine(rag.index).stream(PROMPT, constraint=Constraint.lark(grammar), max_tokens=9)
    )
    text = "".join(piece.text for piece in pieces)
    assert re.match(r"a[bc]?(,[bc])*,?", text)
    assert pieces[-1].answer is not None
    assert pieces[-1].answer.text == text


def test_an_answer_that_can_go_on_ends_when_the_model_wants(
    rag: Rag, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support.scripted import follow

    prompts = follow(monkeypatch, rag, lambda prompt: "12")
    answer = KVEngine(rag.index).generate(PROMPT, constraint=Constraint.regex("[0-9]+"))
    assert (answer.text, answer.finish_reason) == ("12", "stop")
    assert prompts == ["<bos>" + PROMPT]


def test_a_model_cannot_leave_the_form(rag: Rag, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.scripted import follow

    follow(monkeypatch, rag, lambda prompt: "I would rather write a poem.")
    answer = KVEngine(rag.index).generate(PROMPT, constraint=Constraint.regex("[0-9]{4}"))
    assert re.fullmatch("[0-9]{4}", answer.text)


def test_control_tokens_are_no_text() -> None:
    tokenizer = make_tokenizer()
    allowed = Allowed(Constraint.regex(".*"), tokenizer, len(tokenizer), [1])
    scores = allowed.only(torch.zeros(len(tokenizer)))
    assert scores[1] == 0  # the end
    assert torch.isneginf(scores[[0, 2]]).all()
    assert (scores[3:] == 0).sum() > 200


def test_every_declared_end_is_allowed_and_only_when_complete() -> None:
    tokenizer = make_tokenizer()
    allowed = Allowed(Constraint.regex("ab"), tokenizer, len(tokenizer) + 64, [1, 2])
    zeros = torch.zeros(len(tokenizer) + 64)
    a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
    assert np.flatnonzero(allowed.only(zeros) == 0).tolist() == [a]
    allowed.follow(a)
    allowed.follow(b)
    assert allowed.is_complete
    assert np.flatnonzero(allowed.only(zeros) == 0).tolist() == [1, 2]


def test_keys_are_the_schemas_unless_it_allows_others() -> None:
    closed = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for schema, is_open in ((closed, False), ({**closed, "additionalProperties": True}, True)):
        assert _accepts(schema, '{"b": 1}') is is_open
    both = {"allOf": [closed, {"type": "object", "properties": {"b": {"type": "integer"}}}]}
    assert _accepts(both, '{"a": 1, "b": 2}')
    assert _accepts({"const": {"type": "object", "properties": {}}}, '{"type": "object", ')


def _accepts(schema: dict[str, Any], text: str) -> bool:
    tokenizer = make_tokenizer()
    allowed = Allowed(Constraint.json_schema(schema), tokenizer, len(tokenizer), [1])
    for one in tokenizer(text, add_special_tokens=False)["input_ids"]:
        if allowed.only(torch.zeros(len(tokenizer)))[one] != 0:
            return False
        allowed.follow(one)
    return True


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Constraint.regex("(a"), "regex '\\(a': .*unclosed group"),
        (lambda: Constraint.regex("(?=a)b"), "look-around"),
        (lambda: Constraint.json_schema({"type": "objekt"}), "objekt"),
        (lambda: Constraint.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (lambda: Constraint.json_schema({"a": {1, 2}}), "expected JSON values"),  # type: ignore[dict-item]
        (lambda: Constraint.lark("start: missing"), "missing"),
        (lambda: Constraint("xml", "a"), "expected json_schema, regex or lark"),  # type: ignore[arg-type]
        (lambda: Constraint.of({"type": "json_schema"}), "response_format"),
        (lambda: Constraint.of("json"), "response_format"),
        (lambda: Constraint.of({"type": ["text"]}), "response_format"),
        (lambda: Request("a", constraint="b"), "expected a Constraint"),  # type: ignore[arg-type]
        (lambda: Request("a", tools=[{}]), "expected a function"),
        (lambda: Request("a", tools=[{"function": {"name": "b"}}]), "pass messages"),
    ],
)
def test_wrong_constraints_are_refused(make: Any, said: str) -> None:
    with pytest.raises(ParameterError, match=f"(?s){said}"):
        make()


def test_a_schema_that_is_too_deep() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(ParameterError, match="json_schema"):
        Constraint.json_schema(schema)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, Constraint.json_schema({"type": "object"})),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "null"}}},
            Constraint.json_schema({"type": "null"}),
        ),
        ({"type": "regex", "regex": "a+"}, Constraint.regex("a+")),
        ({"type": "lark", "lark": 'start: "a"'}, Constraint.lark('start: "a"')),
        (Constraint.regex("a"), Constraint.regex("a")),
    ],
)
def test_response_formats(asked: Any, expected: Constraint | None) -> None:
    assert Constraint.of(asked) == expected


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    real = builtins.__import__

    def without(name: str, *rest: Any, **others: Any) -> Any:
        if name == "llguidance":
            raise ImportError(name)
        return real(name, *rest, **others)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ParameterError, match=r"pip install 'kvrag\[structured\]'"):
        module.Constraint.regex("a")
