"""Python functions as schemas."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Annotated

import pytest

from kvrag.errors import ParameterError, PMLError
from kvrag.pml.layout import lay_out_schema
from kvrag.pml.parser import parse_prompt, parse_schema
from kvrag.pml.program import Length, prompt, schema_of
from kvrag.pml.schema import Module, Parameter, Text, Union
from tests.support.models import make_tokenizer


@prompt
def visum(country: Annotated[str, Length(4)]):
    f"Ask for a visum of {country}."  # noqa: B021


@prompt
def trip(abroad: bool, month: int, days: Annotated[str, Length(6)]):
    f"A trip of {days}."  # noqa: B021
    if abroad:
        "Bring a passport."
        visum("x")
    elif month > 6:
        "Bring a map."
    else:
        "Stay."
        "Read."
    if month < 3:
        "It snows."
    match month:
        case 1 | 2:
            "Winter."
        case 7:
            "Summer."
        case _:
            "Rain."
    return "Plan " + "it."


def shown(nodes: tuple[object, ...]) -> list[object]:
    """Return nodes without places."""
    found: list[object] = []
    for node in nodes:
        if isinstance(node, Text):
            found.append(node.text)
        elif isinstance(node, Parameter):
            found.append((node.name, node.length))
        elif isinstance(node, Module):
            found.append({node.name: shown(node.children)})
        elif isinstance(node, Union):
            found.append(shown(node.members))
    return found


def test_a_program_is_compiled_whole() -> None:
    schema = schema_of(trip)
    first, _, choice, _, snow, _, season, _, plan, it = shown(schema.children)[2:]
    assert shown(schema.children)[:3] == ["A trip of ", ("days", 6), "."]
    assert first == "."
    visa = {"visum": ["Ask for a visum of ", "x", "."]}
    assert isinstance(choice, list)
    abroad, later, otherwise = choice
    assert abroad == {"abroad": ["Bring a passport.", "\n", visa]}
    assert list(later.values()) == [["Bring a map."]]
    assert otherwise == {"otherwise": ["Stay.", "\n", "Read."]}
    assert list(snow.values()) == [["It snows."]]
    # Conditions that differ in a sign alone have names that differ.
    assert later.keys() != snow.keys()
    assert season == [{"_1-or-2": ["Winter."]}, {"_7": ["Summer."]}, {"otherwise-2": ["Rain."]}]
    assert (plan, it) == ("Plan ", "it.")


def test_what_is_compiled_can_be_laid_out_and_imported() -> None:
    schema = schema_of(trip)
    layout = lay_out_schema(schema, make_tokenizer(), (0,))
    starts = {path: start for path, (start, _) in layout.extents.items()}
    assert starts["abroad",] == starts["otherwise",]
    found = parse_prompt(
        "<prompt schema='trip' days='two'><abroad><visum/></abroad></prompt>", schema
    )
    assert [one.path for one in found.body.all()] == [(), ("abroad",), ("abroad", "visum")]


def loaded(path: Path, source: str) -> ModuleType:
    path.write_text("from typing import Annotated\nfrom kvrag.pml.program import *\n" + source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


REFUSED = [
    ("    for x in y:\n        'a'", 5, "for cannot be compiled"),
    ("    while True:\n        'a'", 5, "while cannot"),
    ("    x = 'a'", 5, "assign cannot"),
    ("    'a'\n    1", 6, "constant 1"),
    ("    f'{n!r}'", 5, "a conversion or format"),
    ("    f'{n:>5}'", 5, "a conversion or format"),
    ("    f'{n}'", 5, "'n' has no length"),
    ("    f'{n + 1}'", 5, "n + 1"),
    ("    if print():\n        'a'", 5, "the condition print()"),
    ("    if (m := n):\n        'a'", 5, "the condition"),
    ("    print('a')", 5, "'print' is not a prompt function"),
    ("    a.b()", 5, "a.b() cannot"),
    ("    match n:\n        case [1]:\n            'a'", 6, "this pattern"),
    ("    match n:\n        case 1 if n:\n            'a'", 6, "a guard"),
    ("    return", 5, "return cannot"),
    ("    f'{p}'\n    f'{p}'", 6, "'p' appears twice"),
    ("    return 'a'\n    'b'", 5, "a return before the function's end"),
    ("    if n:\n        return 'a'\n    return 'b'", 6, "a return before the function's end"),
    (r"    'a\ud800'", 5, "half of a surrogate pair"),
    (r"    f'{p}\ud800'", 5, "half of a surrogate pair"),
    ("    f'{schema}'", 5, "name='schema' is not a valid name"),
]


@pytest.mark.parametrize(("body", "line", "words"), REFUSED)
def test_what_cannot_be_compiled_is_refused_with_its_line(
    tmp_path: Path, body: str, line: int, words: str
) -> None:
    path = tmp_path / "program.py"
    short = "Annotated[str, Length(2)]"
    source = f"@prompt\ndef f(n, p: {short}='', schema: {short}=''):\n{body}\n"
    with pytest.raises(PMLError) as raised:
        loaded(path, source)
    assert words in str(raised.value)
    assert str(raised.value).startswith(f"{path}:{line}:")


INNER = """
PLACE, DAYS = 'Varn', 3
Short = Annotated[str, Length(4)]

@prompt
def inner(city: Short, n=2, far: bool = False, by: Short = 'sea'):
    f'To {city} by {by}.'
    if far:
        'Far.'
    elif n > 2:
        'Long.'
    else:
        'Near.'
    match n:
        case 1 | 2:
            'Few.'
        case _:
            'Many.'
"""


def text_of(nodes: tuple[object, ...]) -> str:
    assert all(isinstance(node, Text) for node in nodes)
    return "".join(node.text for node in nodes if isinstance(node, Text))


CALLS = {
    "inner('Varn')": "To Varn by sea.\nNear.\nFew.",
    "inner(city='Varn')": "To Varn by sea.\nNear.\nFew.",
    "inner('Varn', 3)": "To Varn by sea.\nLong.\nMany.",
    "inner('Varn', n=3, far=False)": "To Varn by sea.\nLong.\nMany.",
    "inner('Varn', far=True, by='air')": "To Varn by air.\nFar.\nFew.",
    "inner(7, -1, 1, None)": "To 7 by None.\nFar.\nMany.",
    "inner(PLACE, DAYS)": "To Varn by sea.\nLong.\nMany.",
    "inner(PLACE + '!', DAYS - 1)": "To Varn! by sea.\nNear.\nFew.",
    "inner(f'{PLACE}, {DAYS}')": "To Varn, 3 by sea.\nNear.\nFew.",
    "inner(1.5, True)": "To 1.5 by sea.\nNear.\nFew.",
    "inner('')": "To  by sea.\nNear.\nFew.",
    "inner(' a ' ' b')": "To  a  b by sea.\nNear.\nFew.",
}


@pytest.mark.parametrize("call", CALLS)
def test_constants_of_a_call_are_text_and_decide_conditions(tmp_path: Path, call: str) -> None:
    for form in ("    {}", "    return {}", '    f"{{{}}}"', "    '' + {}"):
        source = f"{INNER}\n@prompt\ndef outer():\n{form.format(call)}\n"
        (module,) = schema_of(loaded(tmp_path / f"p{len(form)}.py", source).outer).children
        assert isinstance(module, Module)
        assert module.name == "inner"
        assert text_of(module.children) == CALLS[call]


def test_names_and_texts_are_the_same_in_any_process(tmp_path: Path) -> None:
    source = (
        "Short = Annotated[str, Length(2)]\n@prompt\ndef f(n, a: Short = 3, b: Short = None):\n"
        "    f'{a}{b}'\n    'Cafe\\u0301\\r\\nof\\rall' + ' it' + '\\n  now'\n"
        "    if n != 3:\n        return 'x'\n    else:\n        return 'y'\n"
    )
    schema = schema_of(loaded(tmp_path / "p.py", source).f)
    a, b, *texts = [one for one in shown(schema.children) if one != "\n"]
    assert [one.scaffold for one in schema.parameters(()).values()] == ["3", ""]
    assert (a, b) == (("a", 2), ("b", 2))
    assert texts == [
        *("Caf\u00e9\nof\nall", " it", "\n  now"),
        [{"n-3-51d334": ["x"]}, {"not-n-3-51d334": ["y"]}],
    ]


def test_parameters_that_are_passed_on_stay_parameters(tmp_path: Path) -> None:
    short = "Annotated[str, Length(9)]"
    source = (
        f"{INNER}\n@prompt\ndef outer(far, to: {short}='Rome', b: {short}='land'):\n"
        "    inner(to, far=far, by='air')\n    inner(city='Varn', by=b)\n"
        f"\n@prompt\ndef outest(far, b: {short} = 'ship'):\n    outer(far, b=b)\n"
    )
    found = loaded(tmp_path / "p.py", source)
    first, _, second = schema_of(found.outer).children
    city, *_ = [node for node in first.children if isinstance(node, Parameter)]
    # What stands there by default is what the caller would have passed.
    assert (city.name, city.length, city.scaffold) == ("city", 4, "Rome")
    assert shown(first.children)[2:] == [
        " by ",
        "air",
        ".",
        "\n",
        [{"far": ["Far."]}, {"not-far": ["Near."]}],
        "\n",
        "Few.",
    ]
    (by,) = [node for node in second.children if isinstance(node, Parameter)]
    assert (by.name, by.scaffold) == ("by", "land")
    assert second.name == "inner-2"
    (outer,) = schema_of(found.outest).children
    first, _, second = outer.children
    assert shown(first.children)[:4] == ["To ", "Rome", " by ", "air"]
    (by,) = [node for node in second.children if isinstance(node, Parameter)]
    assert by.scaffold == "ship"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("inner()", "missing a required argument: 'city'"),
        ("inner('a', 1, 2, 3, 4)", "too many positional arguments"),
        ("inner('a', city='b')", "multiple values for argument 'city'"),
        ("inner('a', nope=1)", "unexpected keyword argument 'nope'"),
        ("inner(*PLACE)", "which unpacks arguments"),
        ("inner(**PLACE)", "which unpacks arguments"),
        ("inner(inner('a'))", "inner('a') cannot be compiled"),
        ("inner(f'{p}!')", "combines a parameter with something else"),
        ("inner([1])", "the argument [1] is not a constant"),
        ("inner(b'x')", "is not a constant"),
        ("inner(nowhere)", "nowhere cannot be computed"),
        ("inner(1 / 0)", "1 / 0 cannot be computed"),
        ("inner('a', 'b')", "n > 2 cannot be computed"),
    ],
)
def test_calls_that_cannot_be_compiled_are_refused(tmp_path: Path, call: str, words: str) -> None:
    source = f"{INNER}\n@prompt\ndef outer(p: Annotated[str, Length(2)]):\n    {call}\n"
    with pytest.raises(PMLError) as raised:
        loaded(tmp_path / "p.py", source)
    assert words in str(raised.value)
    lines = source.splitlines()
    if "n > 2" not in words:
        assert call in lines[raised.value.line - 3]


def test_other_functions_and_lengths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="'shown' is not a prompt function"):
        schema_of(shown)
    for tokens in (0, 2.5, "5", True):
        with pytest.raises(ParameterError, match="expected 1 to"):
            Length(tokens)  # type: ignore[arg-type]
    for what in (len, 5, Length):
        with pytest.raises(ParameterError, match="is not a prompt function: expected a function"):
            prompt(what)  # type: ignore[type-var]
    with pytest.raises(PMLError, match=r"p\.py:4:1: a lambda"):
        loaded(tmp_path / "p.py", "f = [\n    prompt(lambda: 'a'),\n]\n")
    for name in ("union", "gr\u00f6\u00dfe"):
        with pytest.raises(PMLError, match=f"p.py:4:1: name='{name}' is not a valid name"):
            loaded(tmp_path / "p.py", f"@prompt\ndef {name}():\n    'a'\n")
    for annotation in ("Nope", "a b", "list.nope"):
        with pytest.raises(PMLError, match=r"p\.py:4:1: an annotation is not known"):
            loaded(tmp_path / "p.py", f"@prompt\ndef f(a: '{annotation}'):\n    'a'\n")
    with pytest.raises(PMLError, match=r"parameter \*rest"):
        loaded(tmp_path / "p.py", "@prompt\ndef f(*rest):\n    'a'\n")


def test_a_function_stays_what_it_was() -> None:
    assert trip(True, 1, "x") == "Plan it."
    assert parse_schema("<schema name='trip'/>").name == schema_of(trip).name
