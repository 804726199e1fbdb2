"""Constrained answers: the form is kept, by greedy and by sampled answers of a random model."""

import asyncio
import json
import re
import sys
import threading
from types import SimpleNamespace
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
from tests.support.properties import few
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


def test_an_answer_that_can_go_on_ends_when_the_model_wants(
    rag: Rag, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support.scripted import follow

    prompts = follow(monkeypatch, rag, lambda prompt: "12")
    answer = KVEngine(rag.index).generate(PROMPT, constraint=Constraint.regex("[0-9]+"))
    assert (answer.text, answer.finish_reason) == ("12", "stop")
    assert prompts == ["<bos>" + PROMPT]


def test_every_declared_end_is_allowed_and_only_when_complete() -> None:
    tokenizer = make_tokenizer()
    allowed = Allowed(Constraint.regex("ab"), tokenizer, len(tokenizer) + 64, [1, 2])
    zeros = torch.zeros(len(tokenizer) + 64)
    free = Allowed(Constraint.regex(".*"), tokenizer, len(tokenizer) + 64, [1]).only(zeros)
    # The end, and no other control token.
    assert (free[1], free[0], free[2]) == (0, -torch.inf, -torch.inf)
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
        (lambda: Constraint.json_schema({"$ref": "#"}), ": no text has this form$"),
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


def _chain(length: int) -> dict[str, Any]:
    """Return a schema whose objects refer to each other, each to the next."""
    objects: dict[str, Any] = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}}
        for i in range(length)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**objects, f"d{length}": {"type": "string"}}}


def _rules(length: int) -> str:
    rules = (f'r{i}: "a" r{i + 1}\n' for i in range(length))
    return f'start: r0\n{"".join(rules)}r{length}: "b"\n'


def _nested(depth: int) -> str:
    return '{"type": "array", "items": ' * depth + "true" + "}" * depth


@pytest.mark.parametrize(
    ("kind", "text"),
    few(6, [
        ("json_schema", json.dumps(_chain(2000))),
        ("json_schema", _nested(5000)),
        ("lark", _rules(2700)),
        ("regex", "(a{1000}){1000}"),
        ("regex", "(" * 10_000 + "a" + ")" * 10_000),
        ("json_schema", json.dumps({"type": "integer", "multipleOf": 999_983})),
        ("json_schema", json.dumps({"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in
                                              range(5000)}, "$ref": "#/$defs/d0"})),
        ("json_schema", json.dumps({"allOf": [{"pattern": f"a{i}"} for i in range(50)]})),
        ("json_schema", json.dumps({"type": "object", "properties": {f"k{i}": {} for i in
                                                                     range(5000)}})),
        ("json_schema", json.dumps({"enum": ["a" * 300_000]})),
        ("json_schema", _nested(400)),
        ("lark", _rules(900)),
    ]),
    ids=lambda given: str(given)[:40],
)  # fmt: skip
def test_grammars_that_ended_the_process_or_took_hours(kind: Any, text: str) -> None:
    with pytest.raises(ParameterError) as caught:
        Constraint(kind, text)
    assert len(str(caught.value)) < 1500
    assert Constraint.regex(f"again{len(text)}").text  # by a new process, if the last one ended


@pytest.mark.parametrize(
    "constraint",
    [
        lambda: Constraint.json_schema(_chain(60)),
        lambda: Constraint.lark(_rules(250)),
        lambda: Constraint.json_schema({"anyOf": [{"const": f"a{i}"} for i in range(2000)]}),
        lambda: Constraint.regex("(" * 240 + "a" + ")" * 240),
    ],
)
def test_what_is_accepted_needs_a_fraction_of_a_threads_stack(constraint: Any) -> None:
    said: list[bool] = []
    tokenizer, made = make_tokenizer(), constraint()

    def read() -> None:
        allowed = Allowed(made, tokenizer, len(tokenizer), [1])
        said.append(bool((allowed.only(torch.zeros(len(tokenizer))) == 0).any()))

    former = threading.stack_size(2 << 20)
    try:
        thread = threading.Thread(target=read)
        thread.start()
    finally:
        threading.stack_size(former)
    thread.join()
    assert said == [True]


def test_special_tokens_are_the_models_matter() -> None:
    tokenizer = make_tokenizer()
    for name, is_known in (("<pad>", True), ("<|nobodys|>", False), ("<[262143]>", False)):
        constraint = Constraint.lark(f'start: {name} "a"')
        if is_known:
            Allowed(constraint, tokenizer, len(tokenizer), [1])
            continue
        with pytest.raises(ParameterError, match=r"special token|too large"):
            Allowed(constraint, tokenizer, len(tokenizer), [1])


def test_other_answers_do_not_wait_for_what_may_follow(
    rag: Rag, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_look = threading.Event()

    matcher = module._library().LLMatcher

    class Slow:
        grammar_from_regex = matcher.grammar_from_regex

        def __init__(self, *given: Any, **named: Any) -> None:
            self._matcher = matcher(*given, **named)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._matcher, name)

        def compute_logit_bias(self) -> Any:
            assert may_look.wait(60)
            return self._matcher.compute_logit_bias()

    limits = module._library().LLParserLimits
    library = SimpleNamespace(LLMatcher=Slow, LLParserLimits=limits)
    monkeypatch.setattr(module, "_library", lambda: library)
    engine = KVEngine(rag.index, max_tokens=8)
    form = {"constraint": Constraint.regex("[0-9]{4}"), "max_tokens": 20}

    async def both() -> tuple[Any, Any]:
        slow = asyncio.create_task(engine.agenerate(PROMPT, **form))
        other = await engine.agenerate(PROMPT)
        assert not slow.done()
        may_look.set()
        return await slow, other

    answer, other = asyncio.run(both())
    assert other.usage.completion_tokens > 1
    assert re.fullmatch("[0-9]{4}", answer.text)

    may_look.clear()
    monkeypatch.setattr(module, "MASK_SECONDS", 0.1)
    with pytest.raises(ParameterError, match=r"takes over 0\.1 s; simplify it"):
        engine.generate(PROMPT, constraint=Constraint.regex("[0-9]{4}"))
    may_look.set()
    assert engine.generate(PROMPT).text == other.text


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, Constraint.json_schema({"type": "object"})),
        ({"type": "json_schema", "json_schema": {"schema": True}}, Constraint.json_schema(True)),
        ({"type": "regex", "regex": "a+"}, Constraint.regex("a+")),
        ({"type": "lark", "lark": 'start: "a"'}, Constraint.lark('start: "a"')),
        (Constraint.regex("a"), Constraint.regex("a")),
    ],
)
def test_response_formats(asked: Any, expected: Constraint | None) -> None:
    assert Constraint.of(asked) == expected


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ParameterError, match=r"pip install 'kvrag\[structured\]'"):
        module.Constraint.regex("a")
