"""Calls in answers: every format, in whole answers and in pieces; forced ones."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrag.engine.constraint import Allowed, Constraint
from kvrag.errors import ParameterError
from kvrag.llms.tool_calls import Piece, ToolCallParser, shape
from kvrag.models.tools import HERMES, LLAMA, MISTRAL, MISTRAL_NAMED, ToolFormat
from tests.models.test_tools import SPECIAL, TOOL, tokenizer_with
from tests.support import tool_templates as templates
from tests.support.models import make_tokenizer

FIRST: tuple[str, dict[str, Any]] = ("search", {"query": "the </tool_call> of {Varn}"})
SECOND: tuple[str, dict[str, Any]] = ("clock-2", {})


def hermes(name: str, given: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': given})}\n</tool_call>"


def llama(name: str, given: dict[str, Any]) -> str:
    return json.dumps({"name": name, "parameters": given})


ANSWERS: list[tuple[ToolFormat, str, str, list[tuple[str, dict[str, Any]]]]] = [
    (HERMES, hermes(*FIRST), "", [FIRST]),
    (HERMES, f"I look.\n{hermes(*FIRST)}\n{hermes(*SECOND)}\n", "I look.", [FIRST, SECOND]),
    (HERMES, f"{hermes(*FIRST)}\nDone.", "Done.", [FIRST]),
    (HERMES, "<tool_call>" + json.dumps({"name": "a", "arguments": {}}), "", [("a", {})]),
    (HERMES, 'No <tool call>, < or {"name": 1}. ', 'No <tool call>, < or {"name": 1}. ', []),
    (HERMES, 'A <tool_call>\n{"name": broken', 'A\n <tool_call>\n{"name": broken', []),
    (HERMES, "<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
    (HERMES, "It ends in <tool_", "It ends in <tool_", []),
    (HERMES, "<tool_call>" + "[" * 3000, "<tool_call>" + "[" * 3000, []),
    (LLAMA, f"{llama(*FIRST)} and {llama(*SECOND)}", f"and {llama(*SECOND)}", [FIRST]),
    (LLAMA, llama(*FIRST), "", [FIRST]),
    (LLAMA, f"\n<|python_tag|>{llama(*FIRST)}; {llama(*SECOND)}", "", [FIRST, SECOND]),
    (LLAMA, f"Well: {llama(*FIRST)}", f"Well: {llama(*FIRST)}", []),
    (LLAMA, '{"age": 3}', '{"age": 3}', []),
    (LLAMA, "{1, 2} is a set", "{1, 2} is a set", []),
    (
        MISTRAL,
        "[TOOL_CALLS] "
        + json.dumps([{"name": name, "arguments": given} for name, given in (FIRST, SECOND)]),
        "",
        [FIRST, SECOND],
    ),
    (MISTRAL, "[TOOL_CALLS] []", "[TOOL_CALLS] []", []),
    (MISTRAL, "An [INST] and [1].", "An [INST] and [1].", []),
    (
        MISTRAL_NAMED,
        f"Yes.[TOOL_CALLS]search[ARGS]{json.dumps(FIRST[1])}[TOOL_CALLS]clock-2{{}}",
        "Yes.",
        [FIRST, SECOND],
    ),
]


def read(form: ToolFormat, pieces: list[str]) -> Piece:
    parser = ToolCallParser(form)
    found = Piece()
    for piece in pieces:
        found += parser.push(piece)
    return found + parser.finish()


@pytest.mark.parametrize(("form", "answer", "text", "calls"), ANSWERS)
@pytest.mark.parametrize("length", [1, 2, 3, 7, 1000])
def test_calls_are_found(
    form: ToolFormat, answer: str, text: str, calls: list[Any], length: int
) -> None:
    pieces = [answer[at : at + length] for at in range(0, len(answer), length)]
    found = read(form, pieces)
    assert [(one.name, one.arguments) for one in found.calls] == calls
    assert found.text.split() == text.split()
    if not calls:
        assert found.text == answer
    assert all(one.id.isalnum() and len(one.id) == 9 for one in found.calls)
    assert len({one.id for one in found.calls}) == len(calls)


def test_a_call_is_given_out_as_soon_as_it_is_complete() -> None:
    parser = ToolCallParser(HERMES)
    assert parser.push("I look. <tool_") == Piece("I look.")
    assert parser.push('call>\n{"name": "a", "arguments": {}}\n</tool_call') == Piece()
    assert [one.name for one in parser.push(">\n").calls] == ["a"]
    assert parser.finish() == Piece()


PARTS = ["<tool_call>", "</tool_call>", '{"name": "a", "arguments": {}}', "{", "}", " ", "\n", "x;"]


@given(st.lists(st.sampled_from(PARTS)), st.integers(1, 5), st.sampled_from([HERMES, LLAMA]))
def test_pieces_do_not_matter(parts: list[str], length: int, form: ToolFormat) -> None:
    answer = "".join(parts)
    whole = read(form, [answer])
    cut = read(form, [answer[at : at + length] for at in range(0, len(answer), length)])
    assert [(one.name, one.arguments) for one in cut.calls] == [
        (one.name, one.arguments) for one in whole.calls
    ]
    assert cut.text.split() == whole.text.split()


OTHER = {"type": "function", "function": {"name": "clock"}}
TEMPLATES = [
    templates.HERMES,
    templates.LLAMA,
    templates.MISTRAL,
    templates.MISTRAL_NAMED,
    templates.XML,
]


def accepts(tokenizer: Any, constraint: Constraint | None, ids: list[int]) -> bool:
    import torch

    allowed = Allowed(constraint, tokenizer, len(tokenizer), [1])
    for one in ids:
        if allowed.only(torch.zeros(len(tokenizer)))[one] != 0:
            return False
        allowed.follow(one)
    return bool(allowed.only(torch.zeros(len(tokenizer)))[1] == 0)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("special", [(), (*SPECIAL, "[TOOL_CALLS]", "[ARGS]")])
def test_a_forced_call_is_what_the_template_writes(template: str, special: tuple[str, ...]) -> None:
    from kvrag.models.tools import tool_format

    tokenizer = tokenizer_with(template, special)
    form = tool_format(tokenizer)
    call = json.dumps({"query": "Varn"})
    if form.separator:
        written = f"{form.begin}search{form.separator}{call}{form.end}"
    else:
        written = f'{form.begin}{{"name": "search", "{form.arguments}": {call}}}{form.end}'
    ids = tokenizer(written, add_special_tokens=False)["input_ids"]
    for choice in ("any", "required", True, "search", {"function": {"name": "search"}}):
        asked = shape(tokenizer, [TOOL, OTHER], choice)
        assert list(asked.tools) == [TOOL, OTHER]
        assert accepts(tokenizer, asked.constraint, ids)
    assert not accepts(tokenizer, shape(tokenizer, [TOOL, OTHER], "clock").constraint, ids)
    either = shape(tokenizer, [TOOL], "auto", {"type": "json_object"}).constraint
    assert accepts(tokenizer, either, ids)
    assert accepts(tokenizer, either, tokenizer("{}", add_special_tokens=False)["input_ids"])
    assert read(form, [written]).calls[0].arguments == {"query": "Varn"}


def test_a_free_choice_has_no_constraint() -> None:
    tokenizer = make_tokenizer()
    for choice in (None, "auto", False):
        assert shape(tokenizer, [TOOL], choice).constraint is None
        assert list(shape(tokenizer, [TOOL], choice).tools) == [TOOL]
    assert not shape(tokenizer, [TOOL], "none").tools


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (([], "any"), "without tools"),
        (([TOOL], "clock"), "expected auto, none, required or one of the tools search"),
        (([TOOL], {"type": "function"}), "one of the tools search"),
        (([{"name": "search"}], None), "expected a function such as"),
        (([TOOL], None, {"type": "regex", "regex": "a"}), "with tools, only a JSON schema"),
        (([TOOL], None, {"type": "xml"}), "response_format"),
    ],
)
def test_wrong_choices_are_refused(arguments: Any, said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        shape(make_tokenizer(), *arguments)
